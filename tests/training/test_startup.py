"""What a rank says of itself: its start-up's clock, signs of life, another group than planned; kernels, what was compiled."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from clustertune.errors import ExitCode, UserError
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.process import process_age
from clustertune.resolve.resolve import resolve
from clustertune.training import build, kernels
from clustertune.training import heartbeat as room
from clustertune.training.collectives import check_world
from clustertune.training.heartbeat import Heartbeat
from clustertune.training.session import Session, Watch
from clustertune.training.startup import Startup
from tests.damage import refused


def timed() -> tuple[Any, Startup]:
    clock = SimpleNamespace(now=0.0)
    return clock, Startup(age=lambda: 5.0, clock=lambda: clock.now)


def test_a_part_inside_a_part_counts_once() -> None:
    """The reading lies inside the sharding: counted in both, the sum would be more than the time that passed."""
    clock, startup = timed()
    with contextlib.suppress(OSError), startup.part("sharding"):
        clock.now += 1
        with startup.part("reading"):
            clock.now += 10
        clock.now += 2
        raise OSError  # one that fails is closed, too
    clock.now += 4
    startup.finish()
    clock.now += 100
    assert startup.seconds == {"imports": 5.0, "sharding": 3.0, "reading": 10.0, "other": 4.0}
    assert startup.total == 22.0
    assert startup.summary() == "start-up 22.0 s: imports 5.0, reading 10.0, sharding 3.0, other 4.0"


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


def test_the_age_of_a_process_is_the_kernel_s() -> None:
    """A process whose name holds blanks and brackets, and one that has just begun."""
    program = "import time; time.sleep(0.3)\nfrom clustertune.process import process_age\nprint(process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert 0.25 < float(done.stdout) < time.monotonic() - began + 0.1
    assert process_age() > 0


def test_phases_are_written_at_once_and_repetitions_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro step of a tiny model takes a millisecond; on NFS every write is a message. No line leaves a rest of another."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heartbeat = Heartbeat(path := tmp_path / "rank-0.heartbeat")
    size = 0
    for later, phase, step, line in [
        (0.0, "start", None, "1 start 0"),
        (0.0, "train", 1, "2 train 1"),
        (0.0, "train", 2, "2 train 1"),
        (room.EVERY_SECONDS, "train", None, "3 train 2"),
        (0.0, "resume", 999_999_999, "4 resume 999999999"),
        (0.0, "end", 1, "5 end 1"),
    ]:
        clock[0] += later
        heartbeat(phase, *([] if step is None else [step]))
        text = path.read_text()
        assert text.endswith("\n") and text.count("\n") == 1 and text.split() == line.split()
        assert len(text) == (size := size or len(text)) and heartbeat.step == (step or heartbeat.step)


def test_no_place_to_write_is_no_reason_to_stop(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "beat", Path("/dev/full"), None):
        heartbeat = Heartbeat(path)
        heartbeat("start")
        heartbeat("train", 3)
        assert heartbeat.step == 3


def plan(nodes: int, ranks_per_node: int) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(f"n{i}", f"n{i}") for i in range(nodes)), ranks_per_node=ranks_per_node)


TWO_NODES = [("0", "2"), ("1", "2"), ("0", "2"), ("1", "2")]


@pytest.mark.parametrize(
    ("places", "planned", "message"),
    [
        (TWO_NODES, plan(2, 2), None),
        ([(None, None)] * 4, plan(2, 2), None),
        (TWO_NODES, None, None),
        (TWO_NODES, replace(plan(4, 1), node_per_rank=True), None),
        ([("0", "1")], plan(2, 2), "sees a world of 1, the run is for 4: the ranks did not find each other"),
        ([("0", "2"), ("1", "2")], None, "sees a world of 2, the run is for 4"),
        ([("0", "4"), ("1", "4"), ("2", "4"), ("3", "4")], plan(2, 2), "run on 1 nodes, the plan names 2"),
        ([("0", "3"), ("1", "3"), ("2", "3"), ("0", "1")], plan(2, 2), "1 ranks on one node, the plan says 2 on each"),
        (TWO_NODES, plan(4, 2), "the plan of this attempt is for 8 ranks, the run for 4"),
    ],
)
def test_another_world_than_the_planned_one_is_refused(places: Any, planned: AttemptPlan | None, message: str | None) -> None:
    group: Any = SimpleNamespace(gather=lambda _: places, world_size=len(places), rank=0)
    if message is None:
        check_world(group, 4, planned)
        return
    with refused(message, ExitCode.FAILED):
        check_world(group, 4, planned)


LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}


def test_a_cpu_leaves_kernels_out_and_says_so() -> None:
    """Liger is Triton, offloading needs pinned memory: both would end the ranks; a GPU takes them as they are."""
    wanted = {**LIGER, **FLASH, "activation_offloading": True, "tf32": True, "bf16": True}
    found = build.fit_to_device(wanted, cuda=False)
    assert not (LIGER.keys() | {"activation_offloading", "tf32"}) & found.values.keys() and len(found.notes) == 4
    assert found.values["use_cpu"] is found.values["bf16"] is True
    assert found.values["model_init_kwargs"]["attn_implementation"] == "sdpa"
    on_gpu = build.fit_to_device(wanted, cuda=True)
    assert wanted.items() <= on_gpu.values.items() and on_gpu.notes == []
    assert on_gpu.values["logging_nan_inf_filter"] is False


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


INDUCTOR = {"dynamo_backend": "INDUCTOR"}


@pytest.mark.parametrize(
    ("train", "dynamo", "value", "left"),
    [
        ({}, INDUCTOR, "False", True),
        ({"torch_compile": True}, {}, "False", True),
        ({}, INDUCTOR | {"dynamo_use_dynamic": False}, "False", False),
        ({}, INDUCTOR | {"use_dynamic": True}, "True", False),
        ({}, INDUCTOR, "True", False),
        ({}, {}, "False", False),
    ],
)
def test_lengths_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], dynamo: dict[str, Any], value: str, left: bool
) -> None:
    """accelerate's default is no dynamic shapes, said in its file or not; what the recipe says stays."""
    monkeypatch.setenv(kernels.DYNAMIC, value)
    resolved = replace(resolve("tiny-oasst2"), train_args=train, accelerate={"dynamo_config": dynamo})
    notes = kernels.set_environment(resolved.distribution)
    assert bool(notes) == left and (kernels.DYNAMIC not in os.environ) == left


def compile_lengths(lengths: range, *, dynamic: bool | None) -> kernels.Compiled:
    """A function with a break in it, compiled for some lengths one after the other."""
    torch._dynamo.reset()
    utils.counters.clear()
    utils._compilation_metrics.clear()

    def double(rows: Any) -> Any:
        rows = rows * 2
        torch._dynamo.graph_break()
        return rows + 1

    compiled = torch.compile(double, backend="eager", dynamic=dynamic)
    for length in lengths:
        compiled(torch.ones(length))
    return kernels.read()


def test_what_was_compiled_is_told() -> None:
    """Breaks with their reason, and whether torch has given up: it says that in a log that nobody reads."""
    once = compile_lengths(range(4, 5), dynamic=None)
    assert (once.graphs, once.again, sum(once.breaks.values()), once.given_up) == (2, 0, 1, False)
    assert "graph_break" in str(once) and "compiled: 2 graphs" in str(once)
    many = compile_lengths(range(4, 20), dynamic=None)
    assert (many.graphs, many.again, many.given_up) == (4, 2, False), "the second length is compiled for all that follow"
    each = compile_lengths(range(4, 20), dynamic=False)
    assert each.given_up and each.graphs == 16 and "dynamo_use_dynamic" in str(each)


def test_it_is_told_once_and_after_each_change() -> None:
    """A line in every step would hide the one that matters."""
    _, startup = timed()
    startup.finish()
    told, lines, messages = watch(startup, compiled=True)
    for step, lengths in enumerate((range(4, 5), range(4, 5), range(4, 6))):
        compile_lengths(lengths, dynamic=None)
        told.on_step_end(ARGS, state_of(step), SimpleNamespace())
    assert len(messages) == 2 and [line["step"] for line in lines] == [0, 2]
    assert lines[1]["graphs"] == 4 and lines[1]["again"] == 2 and lines[1]["event"] == "compile"
