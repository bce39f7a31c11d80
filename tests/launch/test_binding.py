"""Ranks on the cores of their GPU: torch's own binding, where the ranks take all GPUs and numactl is there."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.distributed.launcher import api

from clustertune.launch import elastic


@pytest.mark.parametrize(
    ("gpus", "ranks", "numactl", "bound"), [(2, 2, True, True), (4, 2, True, False), (0, 2, True, False), (2, 2, False, False)]
)
def test_torch_binds_ranks_that_take_all_gpus(
    gpus: int, ranks: int, numactl: bool, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot be bound trains unbound: slower, and not wrong."""
    monkeypatch.setattr(elastic.run, "main", lambda: None)
    monkeypatch.setattr(api, "get_default_numa_options", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/numactl" if numactl else None)
    elastic.main()
    found = api.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks).numa_options
    assert (found is not None) is bound
    assert found is None or (found.affinity_mode == "node" and found.should_fall_back_if_binding_fails)
