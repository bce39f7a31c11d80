"""Why weights are missing: one reason in the place of hundreds of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from clustertune.errors import Problem
from clustertune.tensorfile import Tensor

SAME_COPY = "take config.json and weights from the same copy of the model"


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None: to none."""
    match = re.search(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.", name)
    return int(match[1]) if match else None


def by_cause(
    problems: Iterable[Problem], lacking: set[str], extra: Mapping[str, Tensor], held: Iterable[str], layers: int | None
) -> list[Problem]:
    """The same, where one reason explains the tensors that are missing: one problem that names it in their place.

    ``lacking``: parameters that no file holds; ``extra``: by their names in the files, tensors that the model has no place for;
    ``held``: parameters that the files hold; ``layers``: what the configuration says.
    """
    problems = list(problems)
    reason = _other_names(lacking, extra) or _fewer_layers(lacking, list(held), extra, layers)
    if reason is None:
        return problems
    lost = [problem for problem in problems if problem.key in lacking]
    where = next((problem.file for problem in lost if problem.file), None)
    rest = [problem for problem in problems if problem not in lost]
    return [replace(reason, file=reason.file or where), *rest]


def _other_names(lacking: set[str], extra: Mapping[str, Tensor]) -> Problem | None:
    """Tensors that the files hold under another prefix: those of a model around this one, or of one that was saved wrapped."""
    ends: dict[str, str] = {}
    for name in extra:
        parts = name.split(".")
        for at in range(len(parts)):
            ends.setdefault(".".join(parts[at:]), name)
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in lacking:
        parts = name.split(".")
        for at in range(len(parts) - 1):  # the longest common end
            end = ".".join(parts[at:])
            if (other := ends.get(end)) is not None:
                pairs.setdefault((other.removesuffix(end), name.removesuffix(end)), []).append(name)
                break
    best = max(pairs, key=lambda pair: len(pairs[pair]), default=None)
    if best is None or 2 * len(pairs[best]) < len(lacking):
        return None
    theirs, ours = best
    one = min(pairs[best])
    text = f"{len(lacking)} weights would be random: the files call {one} {theirs}{one.removeprefix(ours)}"
    fix = "save the model again by save_pretrained of its own class, or take the config.json of these weights"
    if "language_model" in theirs or "text_model" in theirs:
        text += ", which are the weights of a model around this one, with pictures or sound"
        fix = "clustertune text-model FOLDER OUT, of the folder with that model's own config.json, and train on OUT"
    return Problem(text, file=str(next(iter(extra.values())).file.parent), fix=fix)


def _fewer_layers(lacking: set[str], held: list[str], extra: Mapping[str, Tensor], layers: int | None) -> Problem | None:
    """Layers that the configuration has beyond those of the files."""
    numbers = {number for name in (*held, *extra) if (number := layer_of(name)) is not None}
    first = max(numbers, default=-1) + 1
    beyond = {name for name in lacking if (number := layer_of(name)) is not None and number >= first}
    if not numbers or not beyond or beyond != lacking:
        return None
    said = layers or max(number for name in beyond if (number := layer_of(name)) is not None) + 1
    text = f"{said} layers, and the files hold {first}: the other {said - first}, from {min(beyond)} on, would be random"
    return Problem(text, key="num_hidden_layers", fix=f"fetch the files that are missing, or {SAME_COPY}")
