"""What is broken in each rank of a DeepSpeed training before it begins; named by :func:`tests.training.forked._rank`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from tests.damage import failing, flip
from tests.training.forked import around, bad_loss, on_rank

BREAKS = f"{__name__}:"


def infinite_loss() -> None:
    """A loss that is not finite with gradients that are, and a file with the steps taken: adding changes no gradient."""
    from clustertune.training.trainer import Trainer

    def tell(self: Any, *_: Any) -> None:
        Path(self.args.output_dir, f"steps-{os.environ['RANK']}").write_text(str(self.engine.global_steps))

    bad_loss(lambda loss: loss + float("inf"))
    around(Trainer, "_raise_non_finite", tell)


def killed_in_a_save() -> None:
    """Rank 1 is killed while it writes its part of the second checkpoint."""
    from clustertune.training import deepspeed_engine

    def cut(_: Any, path: str, *rest: Any) -> None:
        if "global_step2" in path and "zero_pp_rank_1" in path and path.endswith("optim_states.pt"):
            with Path(path).open("r+b") as out:
                out.truncate(100)
            os.kill(os.getpid(), 9)

    around(deepspeed_engine, "save_file", after=cut)


def changed_before_it_is_loaded() -> None:
    """Rank 1's part of the newest checkpoint changes after rank 0 has looked at all of them."""
    from clustertune.training import deepspeed_engine

    def change(path: str) -> None:
        if "zero_pp_rank_1" in path and path.endswith("optim_states.pt"):
            flip(Path(path), -3000)

    around(deepspeed_engine, "load_file", change)


def another_stage() -> None:
    """Somebody changes the stage behind the recipe's back: accelerate's own variable for files without a stage does that."""
    from clustertune.training import deepspeed_engine

    around(deepspeed_engine, "check", lambda engine, *_: setattr(engine, "zero_optimization_stage", lambda: 1))


def whole_models() -> None:
    """Rank 0 maps the files and sends, as transformers does without this project."""
    from clustertune.training import loading

    loading.why_not_parts = lambda model: "taken away"
    loading.send_nothing_empty = nullcontext


def torn_on_one_rank() -> None:
    """Rank 1's copy of the files is not whole."""
    from clustertune.training import loading

    around(loading, "survey", on_rank(1, failing(UserError(Problem("is torn here")))))


def unfollowed_on_one_rank() -> None:
    """Rank 1 has another transformers."""
    from clustertune.training import loading

    around(loading, "find", on_rank(1, failing(loading.Unfollowed("not followed here"))))
