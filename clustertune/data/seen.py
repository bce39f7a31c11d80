"""What the chat template makes of a data set beside its tokens: arguments of the rows, thoughts, control tokens in texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertune.data import rendering
from clustertune.data.prepare import KIND as DATASET
from clustertune.data.prepare import SPLITS
from clustertune.data.tokenizer import within_limits
from clustertune.manifest import read_manifest
from clustertune.recipe.native_rules import TEMPLATE_ARGUMENTS

COUNTED = ("thoughts", "left_out", "unlabelled", "control")
"""What was counted of a conversation: answers with a thought; thoughts that are in no turn rendered; answers of earlier turns
that carry no label because their thought is left out; control tokens in texts."""


def counted(counts: npt.NDArray[Any]) -> dict[str, int]:
    """How much there is of something, in how many conversations, and the number of the first."""
    places = np.flatnonzero(counts)
    first = int(places[0]) if len(places) else -1
    return {"count": int(counts.sum(dtype=np.int64)), "conversations": len(places), "first": first}


def look(dataset: Path, seen: Mapping[str, Any], tokenizer: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What all rows give the chat template alike, and what a person should know of thoughts and control tokens in the data.

    ``seen``: by split and name of :data:`COUNTED`, what :func:`counted` gives; ``given``: the recipe's arguments.
    """
    meta = read_manifest(dataset, DATASET).meta
    arguments, other = rendering.agreed(meta.get("row_arguments", {}), meta.get("rendered", 0))
    warnings = [
        f"chat_template_kwargs of the rows differ: {text}; evaluation, chat and serve "
        + (f"take train.{TEMPLATE_ARGUMENTS}" if text.partition(" ")[0] in given else "take the template's default")
        + f", unless eval.{TEMPLATE_ARGUMENTS} says it"
        for text in other
    ]
    if meta.get("prompts") and "chat_template_kwargs" in meta.get("columns", ()):
        warnings.append(f"chat_template_kwargs of prompts are not read: TRL gives all of them train.{TEMPLATE_ARGUMENTS}")
    if tokenizer.chat_template:
        thoughts, rows = (sum(part["thoughts"][name] for part in seen.values()) for name in ("count", "conversations"))
        named = {**given, **dict.fromkeys(meta.get("row_arguments", {})), **arguments}
        every, own = not meta.get("without_thought"), bool(meta.get("prompts"))
        look = partial(rendering.unset_switch, tokenizer, named, rows if thoughts else 0, every=every, own=own)
        if (found := within_limits(look)) is not None:
            warnings.append(found[1])
    for name, text in _SAID.items():
        count, held, first = _in_all(dataset, seen, name)
        if count:
            warnings.append(text.format(count=f"{count:,}", rows=f"{held:,}", first=first))
    return arguments, warnings


_SAID = {
    "left_out": "the chat template leaves out the thoughts of {count} answers, in {rows} conversations: the model learns to "
    "answer without one; the first is {first}",
    "unlabelled": "{count} answers of earlier turns carry no label, in {rows} conversations: the chat template leaves out "
    "their thoughts once another turn follows, and they would teach to answer without one; the first is {first}; with a "
    "row for each answer all are learnt",
    "control": "{count} control tokens stand in the texts of {rows} conversations, and count like those that the chat template "
    "writes: as turns, or as the end of one; the first is {first}; change these texts, or leave the rows out",
}
"""By what is counted."""


def _in_all(dataset: Path, seen: Mapping[str, Any], name: str) -> tuple[int, int, str]:
    """How much both splits have of something, in how many conversations, and where the first of them comes from."""
    count, held = (sum(part[name][kind] for part in seen.values()) for kind in ("count", "conversations"))
    split = next((split for split in SPLITS if seen[split][name]["first"] >= 0), None)
    if split is None:
        return count, held, ""
    number = seen[split][name]["first"] // (2 if read_manifest(dataset, DATASET).meta.get("pairs") else 1)
    with (dataset / f"{split}.jsonl").open("rb") as lines:
        source = json.loads(next(islice(lines, number, None)))["source"]
    return count, held, str(source["tree"])
