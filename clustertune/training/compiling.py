"""torch.compile on a rank: corrects what accelerate would set, and reports what was compiled once that is settled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from clustertune.recipe import accelerate_file as acc
from clustertune.resolve.distribution import Distribution

DYNAMIC = "ACCELERATE_DYNAMO_USE_DYNAMIC"
LIMIT = "recompile limit exceeded"
"""In torch's name of what stops it from compiling a function once more (torch/_dynamo/convert_frame.py:2009)."""


def set_environment(distribution: Distribution) -> list[str]:
    """Let torch find out which lengths differ, unless the recipe says so; before the Trainer is made. Returns notes.

    ``accelerate launch`` says "no dynamic shapes" where the file says nothing (utils/launch.py:192, utils/dataclasses.py:1107).
    Every packed length is then compiled again, eight times, and from the ninth on the layers run uncompiled, without a message.
    """
    dynamic = distribution.dynamic_shapes_said
    if dynamic or not distribution.compiled or os.environ.get(DYNAMIC, "").lower() not in ("false", "0"):
        return []
    del os.environ[DYNAMIC]
    return [f"{acc.DYNAMIC} is left to torch: a length that differs is compiled once more, and then for all lengths"]


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done in this process so far."""

    graphs: int = 0
    """Pieces of the forward pass that were compiled."""
    again: int = 0
    """How many of these because something differed from the first time."""
    seconds: float = 0.0
    breaks: Mapping[str, int] = field(default_factory=dict)
    """Places where a graph ended and Python continued, by reason."""
    given_up: bool = False
    """A function was compiled too often: with what is new to it, it runs uncompiled from now on."""

    def __str__(self) -> str:
        text = f"compiled: {self.graphs} graphs in {self.seconds:.1f} s, {self.again} of them once more for other shapes"
        if self.breaks:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(self.breaks.items()))
            text += f"; {sum(self.breaks.values())} graph breaks ({reasons})"
        if self.given_up:
            text += "; torch's limit of recompilations is reached, and new shapes run uncompiled: "
            text += f"accelerate.{acc.DYNAMIC}=true, or packing to one length, avoids it"
        return text


def read() -> Compiled:
    """The counters of this process."""
    from torch._dynamo import utils

    found = utils.counters
    metrics = list(utils._compilation_metrics)
    breaks: dict[str, int] = {}
    for reason, count in found["graph_break"].items():
        line = str(reason).strip().splitlines()[0][:120] if str(reason).strip() else "no reason given"
        breaks[line] = breaks.get(line, 0) + int(count)
    return Compiled(
        graphs=int(found["stats"].get("unique_graphs", 0)),
        again=sum(1 for one in metrics if one.recompile_reason and not one.fail_type),
        seconds=sum(one.duration_us or 0 for one in metrics) / 1e6,
        breaks=breaks,
        given_up=any(LIMIT in str(reason) for reason in found["unimplemented"]),
    )
