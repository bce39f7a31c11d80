"""What a rank says of itself: its start-up's clock, signs of life, another group than planned; kernels, what was compiled."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.training import build
from clustertune.training.session import Session, Watch
from clustertune.training.startup import Startup


def timed() -> tuple[Any, Startup]:
    clock = SimpleNamespace(now=0.0)
    return clock, Startup(age=lambda: 5.0, clock=lambda: clock.now)


def watch(startup: Startup, rank: int = 0, *, compiled: bool = False) -> tuple[Watch, list[dict[str, Any]], list[str]]:
    """The callback of a session that has only what it asks for; the events written, and what is said."""
    written: list[dict[str, Any]] = []
    messages: list[str] = []
    session: Any = object.__new__(Session)
    session.startup, session.prove, session.console = startup, lambda: None, None
    session.attempt = SimpleNamespace(out=SimpleNamespace(write=messages.append))
    session.group = SimpleNamespace(rank=rank, gather=lambda value: [value, (8, 9)])
    session.log = None if rank else SimpleNamespace(write=lambda name, **values: written.append({"event": name, **values}))
    session.resolved = SimpleNamespace(distribution=SimpleNamespace(compiled=compiled))
    session.trainer = SimpleNamespace(end_step=lambda: False, save_due=False)
    return Watch(session), written, messages


ARGS = SimpleNamespace(eval_on_start=True, eval_strategy="no")


def state_of(step: int) -> Any:
    return SimpleNamespace(global_step=step, max_steps=9, epoch=0.5, compute_steps=lambda *_: None)


def test_the_first_step_ends_it_and_tells_it_once() -> None:
    """The evaluation ahead of it has its own part; later steps say nothing, on ranks other than 0 nobody does."""
    for rank in (0, 1):
        clock, startup = timed()
        startup.read_bytes, startup.loading = 7, "slices"
        first, written, messages = watch(startup, rank)
        first.on_train_begin(ARGS, state_of(0), None)
        for step in (1, 2, 3):
            clock.now += 4 - step
            first.on_step_begin(ARGS, state_of(step), None)
            clock.now += 10
            first.on_step_end(ARGS, state_of(step), SimpleNamespace())
        assert startup.done
        if rank:
            assert written == messages == []
            continue
        assert [(e["part"], e["seconds"]) for e in written] == [
            ("imports", 5.0), ("evaluation", 3.0), ("first step", 10.0), ("other", 0.0), ("total", 18.0)
        ]  # fmt: skip
        assert written[-1]["read_bytes"] == [7, 8] and written[-1]["host_bytes"][1] == 9 and written[-1]["loading"] == "slices"
        assert messages == ["start-up 18.0 s: imports 5.0, evaluation 3.0, first step 10.0\n"]


def plan(nodes: int, ranks_per_node: int) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(f"n{i}", f"n{i}") for i in range(nodes)), ranks_per_node=ranks_per_node)


LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}


@pytest.mark.parametrize(
    ("wanted", "missing", "named"),
    [
        (LIGER, {"liger_kernel"}, "liger-kernel"),
        (FLASH, {"flash_attn", "kernels"}, "flash-attn or kernels"),
        (FLASH, {"flash_attn"}, None),
        ({}, {"liger_kernel", "flash_attn", "kernels"}, None),
    ],
)
def test_a_kernel_that_is_not_installed_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], missing: set[str], named: str | None
) -> None:
    """An error with the key, not an ImportError after the weights were loaded; a machine without GPUs needs none of them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    build.check_packages(wanted, cuda=False)
    with pytest.raises(UserError, match=named) if named else nullcontext():
        build.check_packages(wanted, cuda=True)
