"""The files beside a recipe with what the command line lays over them: the accelerate configuration and DeepSpeed's JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config.load import COMMAND_LINE
from clustertune.config.yamlfile import Document, KeyPath, leaves, parse_json, read_text
from clustertune.errors import Problem, UserError

ACCELERATE, DEEPSPEED = "accelerate.yaml", "deepspeed.json"
"""Names in a run folder of the files that a run's ranks read in place of the recipe's."""
SHARD_SIZE = "parallelism_config_dp_shard_size"


@dataclass(frozen=True)
class Overlaid(Document):
    """A file with overrides over it: what they gave stands on the command line, the rest in the file."""

    given: tuple[KeyPath, ...] = ()

    def place(self, path: KeyPath) -> str:
        """``command line`` for what it gave and for a section of which it gave a part."""
        if any(leaf[: len(path)] == path or path[: len(leaf)] == leaf for leaf in self.given):
            return COMMAND_LINE
        return super().place(path)


def lay_over(document: Document, overrides: Document | None) -> Document:
    """The file's values with the overrides over them; null takes a key out."""
    if overrides is None or not overrides.data:
        return document
    data = copy.deepcopy(document.data)
    _merge(data, overrides.data)
    return Overlaid(document.file, data, document.lines, tuple(tuple(path.split(".")) for path in flat(overrides)))


def _merge(values: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if value is None:
            values.pop(key, None)
        elif isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = copy.deepcopy(value)


def top(overrides: Document | None) -> frozenset[str]:
    """The sections of a file of which the command line gives something."""
    return frozenset(overrides.data) if overrides else frozenset()


def flat(overrides: Document | None) -> dict[str, Any]:
    """The overrides by their dotted key path."""
    return {".".join(path): value for path, value in leaves(overrides.data) if path} if overrides else {}


def read_deepspeed(
    accelerate: Mapping[str, Any], folder: Path, shown: str, overrides: Document | None
) -> tuple[Document | None, list[Problem]]:
    """DeepSpeed's configuration where the accelerate file names one, the overrides over it; and what is wrong with it."""
    given = flat(overrides)
    name = acc.section(accelerate, "deepspeed_config").get("deepspeed_config_file")
    if accelerate.get("distributed_type") != "DEEPSPEED" or name is None:
        key = next(iter(given), None)
        if key is None:
            return None, []
        fix = "accelerate.deepspeed_config.deepspeed_config_file=FILE names one"
        return None, [Problem("no DeepSpeed file is in use", file=COMMAND_LINE, key=f"deepspeed.{key}", fix=fix)]
    if not isinstance(name, str) or "/" in name or "\0" in name or not (folder / name).is_file():
        return None, []  # acc.find_problems says so
    try:
        body = _parse(folder / name, f"{shown}/{name}")
    except UserError as error:
        return None, error.problems
    return lay_over(Document(f"{shown}/{name}", body), overrides), []


def _parse(path: Path, shown: str) -> dict[str, Any]:
    """A DeepSpeed configuration. Raises UserError where it is none."""
    body = parse_json(read_text(path, shown), shown)
    if not isinstance(body, dict) or not isinstance(body.get("zero_optimization", {}), dict):
        fix = 'write {"zero_optimization": {"stage": 3}}'
        raise UserError(Problem("must hold DeepSpeed's sections", file=shown, fix=fix))
    return body


def written(accelerate: Mapping[str, Any], folder: Path, deepspeed: Path | None) -> dict[str, Any]:
    """The accelerate configuration as ranks in any working folder read it: DeepSpeed's file by its absolute path.

    ``deepspeed`` is a file that takes the place of the recipe's own.
    """
    body = copy.deepcopy(dict(accelerate))
    config = acc.section(body, "deepspeed_config")
    if isinstance(name := config.get("deepspeed_config_file"), str):
        config["deepspeed_config_file"] = str(deepspeed or folder / name)
    return body
