"""Kernels and torch.compile on a rank: what is there, what a machine without GPUs leaves out, what was compiled is reported."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import utils

from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.training import build, kernels
from tests.training.test_startup import ARGS, state_of, timed, watch

LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}


def test_a_cpu_leaves_kernels_out_and_says_so() -> None:
    """Liger is Triton, offloading needs pinned memory: both would end the ranks; a GPU takes them as they are."""
    offload = {"activation_offloading": True, "activation_checkpointing_kwargs": {"offload": True, "every_n_layers": 2}}
    wanted = {**LIGER, **FLASH, **offload, "tf32": True, "bf16": True}
    found = build.fit_to_device(wanted, cuda=False)
    assert not (LIGER.keys() | {"activation_offloading", "tf32"}) & found.values.keys() and len(found.notes) == 5
    assert found.values["activation_checkpointing_kwargs"] == {"every_n_layers": 2}
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
