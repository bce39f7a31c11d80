"""torch.compile on a rank: corrects what accelerate would set."""

from __future__ import annotations

import os

from clustertune.recipe import accelerate_file as acc
from clustertune.resolve.resolved import Distribution

DYNAMIC = "ACCELERATE_DYNAMO_USE_DYNAMIC"


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
