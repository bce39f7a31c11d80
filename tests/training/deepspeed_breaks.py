"""What is broken in each rank of a DeepSpeed training before it begins; named by :func:`tests.training.forked._rank`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def infinite_loss() -> None:
    """A loss that is not finite with gradients that are, and a file with the steps taken: adding changes no gradient."""
    from clustertune.training import trainer

    compute, refuse = trainer.Trainer.compute_loss, trainer.Trainer._raise_non_finite

    def bad(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        return loss + float("inf") if last and self.model.training and self.state.global_step == 1 else loss

    def raise_with_loss(self: Any, *args: Any, **kwargs: Any) -> None:
        Path(self.args.output_dir, f"steps-{os.environ['RANK']}").write_text(str(self.engine.global_steps))
        refuse(self, *args, **kwargs)

    trainer.Trainer.compute_loss = bad
    trainer.Trainer._raise_non_finite = raise_with_loss  # type: ignore[method-assign]


def infinite_loss_without_guard() -> None:
    """The same with nobody asked before DeepSpeed steps."""
    from clustertune.training import deepspeed

    infinite_loss()
    deepspeed.guard = lambda *_: None


def killed_in_a_save() -> None:
    """Rank 1 is killed while it writes its part of the second checkpoint."""

    from clustertune.training import deepspeed

    save = deepspeed.save_file

    def killed(state_dict: Any, path: str, optimizer: Any) -> None:
        save(state_dict, path, optimizer)
        if "global_step2" in path and "zero_pp_rank_1" in path and path.endswith("optim_states.pt"):
            with Path(path).open("r+b") as out:
                out.truncate(100)
            os.kill(os.getpid(), 9)

    deepspeed.save_file = killed


def changed_before_it_is_loaded() -> None:
    """Rank 1's part of the newest checkpoint changes after rank 0 has looked at all of them."""

    from clustertune.training import deepspeed

    load = deepspeed.load_file

    def late(path: str) -> Any:
        if "zero_pp_rank_1" in path and path.endswith("optim_states.pt"):
            with Path(path).open("r+b") as out:
                out.seek(-3000, 2)
                byte = out.read(1)
                out.seek(-1, 1)
                out.write(bytes([byte[0] ^ 1]))
        return load(path)

    deepspeed.load_file = late


def another_stage() -> None:
    """Somebody changes the stage behind the recipe's back: accelerate's own variable for files without a stage does that."""
    from clustertune.training import deepspeed

    check = deepspeed.check

    def lied(engine: Any, resolved: Any) -> Any:
        engine.zero_optimization_stage = lambda: 1
        return check(engine, resolved)

    deepspeed.check = lied


def not_followed() -> None:
    """A checkpoint with optimizer state on NVMe is loaded as DeepSpeed loads it."""

    from clustertune.training import deepspeed

    deepspeed.follow = lambda engine: None


def whole_models() -> None:
    """Rank 0 maps the files and sends, as transformers does without this project."""
    from clustertune.training import loading

    loading.why_not_parts = lambda model: "taken away"
    loading.send_nothing_empty = lambda: lambda: None


def torn_on_one_rank() -> None:
    """Rank 1's copy of the files is not whole."""
    from clustertune.errors import Problem, UserError
    from clustertune.training import loading

    def torn(*_: Any) -> Any:
        raise UserError(Problem("is torn here"))

    if os.environ["RANK"] == "1":
        loading.survey = torn


def unfollowed_on_one_rank() -> None:
    """Rank 1 has another transformers."""
    from clustertune.training import loading

    def unfollowed(*_: Any) -> Any:
        raise loading.Unfollowed("not followed here")

    if os.environ["RANK"] == "1":
        loading.find = unfollowed
