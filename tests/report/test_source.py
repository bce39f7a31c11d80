"""``metrics.json`` where ranks share sequences, and what says how many nodes trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.report import comparison, source
from clustertune.report.metrics import Metrics
from clustertune.report.steps import StepRecord, Steps
from clustertune.resolve.resolve import resolve


@pytest.mark.parametrize(
    ("recipe", "ranks", "groups", "tokens"),
    [
        ("llama70b-tp-fsdp2", 64, 8, 32 * 4096),
        ("llama8b-longcontext-32k", 8, 2, 8 * 32768),
        ("llama70b-megatron", 64, 2, 128 * 4096),
        ("llama405b-megatron", 256, 2, 128 * 32768),
        ("llama405b-oasst2", 16, 16, 32 * 2048),
    ],
)
def test_a_groups_sequences_count_once(recipe: str, ranks: int, groups: int, tokens: int, tmp_path: Path) -> None:
    """Tensor, context and pipeline parallel ranks work on the same tokens: all together do one batch a step."""
    resolved = resolve(recipe)
    assert (resolved.world_size, resolved.data_parallel_size) == (ranks, groups)
    run = {"recipe": resolved.as_dict()}
    steps = [StepRecord(n, 1, seconds=2.0) for n in range(1, 6)]
    found = source.describe(run, Metrics(steps=Steps(steps)))
    assert found is not None and found["approx_tokens_per_rank"] == 5 * tokens / ranks
    assert found[source.STEADY] * ranks == pytest.approx(tokens / 2.0)
    (tmp_path / "run.json").write_text(json.dumps(run))
    events = [{"event": "step", "attempt": 1, "step": s.step, "seconds": s.seconds} for s in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert comparison.read(tmp_path).values["steady_tokens_per_s"] == pytest.approx(tokens / 2.0)


def test_nodes_are_those_that_trained(tmp_path: Path) -> None:
    """Of a submitted chain the report's job comes last, on one node, and leaves its allocation in run.json."""
    run = {"allocation": {"nodes": ["n1"]}}
    assert source.nodes_of(tmp_path, run) == 1 and source.nodes_of(tmp_path, {}) is None
    for number, names in ((2, "a"), (10, "ab"), (11, "")):
        folder = tmp_path / "attempts" / f"{number:04d}"
        folder.mkdir(parents=True)
        AttemptPlan(number, tuple(Node(name, name) for name in names), 1).write(folder) if names else None
    (folder / "plan.json").write_text("{")
    assert source.nodes_of(tmp_path, run) == 2
