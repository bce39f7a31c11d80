"""What is installed: releases with known faults that a recipe meets (``releases.yaml``), and what differs from the pins."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from clustertune.check.rule import RECIPE, UNKNOWN, WARN, Check, Rules, Seen, rule_of
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.host.system import GIB
from clustertune.recipe.eval_tasks import PUNKT, needed
from clustertune.recipe.parameters import weight_bytes

RULES = Rules(RECIPE, __file__)
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt, ">=": operator.ge}
FAULTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("releases.yaml").read_text(encoding="utf-8"))


def holds(version: str, ranges: str) -> bool:
    """Whether a version lies in ``>=1.2,<1.4``; False for what is not a version.

    Local parts (``+cpu``, ``+cu130``) do not count. A release candidate of 1.4 lies below 1.4, which ``SpecifierSet`` denies
    (PEP 440): it has the faults of the releases before it.
    """
    try:
        found = Version(Version(version).public)
    except InvalidVersion:
        return False
    parts = [re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*", part) for part in ranges.split(",")]
    return all(part is not None and COMPARE[part[1]](found, Version(part[2])) for part in parts)


def _init(context: RecipeContext, key: str, default: str) -> str:
    return str((context.args["model_init_kwargs"] or {}).get(key, default))


def _loads_all(c: RecipeContext) -> bool:
    """Whether all ranks of a node together hold more than the node, if each makes the whole model."""
    need = (weight_bytes(c.resolved.architecture) or 0) * c.recipe.slurm.gpus_per_node
    return c.is_real and c.resolved.distribution.efficient_loading and need > c.cluster.compute.memory_gb * GIB


CONDITIONS: dict[str, Callable[[RecipeContext], bool]] = {
    "real": lambda c: c.is_real,
    "offline": lambda c: c.offline,
    "lora": lambda c: c.resolved.lora is not None,
    "full": lambda c: c.resolved.lora is None,
    "fsdp2": lambda c: c.resolved.distribution.kind == "FSDP2",
    "full_state_dict": lambda c: c.resolved.distribution.state_dict == "FULL_STATE_DICT",
    "mixed": lambda c: c.resolved.distribution.mixed_precision != "no",
    "half": lambda c: _init(c, "dtype", "") in ("bfloat16", "float16"),
    "loads_all": _loads_all,
    "packed_by_mask": lambda c: bool(c.args["packing"]) and "flash" not in _init(c, "attn_implementation", "sdpa"),
    "accumulates": lambda c: int(c.args["gradient_accumulation_steps"]) > 1,
    "gpus": lambda c: c.cluster.compute.gpus > 0 and c.resolved.world_size > 1,
    "arm": lambda c: c.arch == "aarch64",
    "punkt": lambda c: bool(needed(c.recipe.eval.tasks, PUNKT)),
}
"""What ``when`` of a row may name."""


def _made(name: str, row: Mapping[str, Any]) -> Check:
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if row["package"] == "nccl" else (row["package"],)

    def look(context: RecipeContext) -> Iterator[Seen]:
        for package in packages:
            version = context.version(package) or ""
            status = next((status for ranges, status in row["versions"].items() if holds(version, ranges)), "")
            if status and all(CONDITIONS[word](context) for word in row.get("when", "").split()):
                yield Seen(status, f"{package} {version}: {row['found']}", where=context.versions_of)

    title = f"{row['package']} {' or '.join(row['versions'])}"
    return Check(rule_of(name, {**row, "title": title}), look, RECIPE)


@RULES("stack-unseen")
def stack_unseen(context: RecipeContext) -> Iterator[Seen]:
    """Whether the ranks' packages can be seen from here."""
    if not context.versions:
        yield Seen(UNKNOWN, f"the versions are those of {context.versions_of}", where=context.resolved.name)


RULES += [_made(name, row) for name, row in FAULTS.items()]


@RULES("versions-differ")
def versions_differ(context: RecipeContext) -> Iterator[Seen]:
    """Installed versions against containers/versions.env."""
    # The reference image has an older stack, whole: it is held against its own pins.
    differ = min((_differences(context, pins) for pins in (context.pins, context.reference_pins) if pins), key=len, default=[])
    if differ:
        yield Seen(WARN, ", ".join(differ), where=context.versions_of)


def _differences(context: RecipeContext, pins: Mapping[str, str]) -> list[str]:
    seen = {name: context.version(name) for name in pins}
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    others = {name: version for name, version in seen.items() if version and version.partition("+")[0] != pins[name]}
    return [f"{name} {version} (pinned {pins[name]})" for name, version in sorted(others.items())]
