"""How much of the communication nothing hides, from spans that can be drawn on paper, and from torch's own profiler."""

from __future__ import annotations

import pytest

from clustertune.training import measure
from clustertune.training.measure import OperationTime


@pytest.mark.parametrize(
    ("talk", "work", "exposed"),
    [
        ([(0, 4)], [(4, 8)], 4),
        ([(0, 4)], [(0, 8)], 0),
        ([(0, 4), (2, 6)], [(1, 3)], 4),
        ([(0, 2), (4, 6)], [(1, 5)], 2),
        ([], [(0, 5)], 0),
        ([(0, 5)], [], 5),
        ([(0, 10)], [(1, 2), (3, 4), (3, 4), (9, 12)], 7),
    ],
)
def test_what_is_not_hidden(talk: list[tuple[float, float]], work: list[tuple[float, float]], exposed: float) -> None:
    """Overlapping spans count once, and only time without any computing is exposed."""
    spans = [OperationTime("n", *pair, True) for pair in talk] + [OperationTime("c", *pair, False) for pair in work]
    found = measure.summarise(spans, 1, gpu=True)
    assert found["exposed_s"] == pytest.approx(exposed / 1e6)
    assert found["communication_s"] == pytest.approx(measure.length(measure.merged(talk)) / 1e6)


def test_figures_are_per_step_and_the_longest_come_first() -> None:
    """Two profiled steps must not look like one that is twice as slow."""
    spans = [OperationTime("gemm", 0, 6, False), OperationTime("gemm", 6, 12, False), OperationTime("ncclKernel", 12, 16, True)]
    found = measure.summarise(spans, 2, gpu=True)
    assert found["seconds"] == pytest.approx(8e-6) and found["exposed_share"] == pytest.approx(0.25)
    assert found["top"][0] == {"name": "gemm", "seconds": pytest.approx(6e-6), "calls": 1.0}


def test_nothing_seen_is_no_share() -> None:
    """An empty profile is no proof of hidden communication."""
    found = measure.summarise([], 1, gpu=False)
    assert found["exposed_share"] is None and found["top"] == []


def test_torch_is_seen_on_a_cpu() -> None:
    """Names and forms of the profiler's events are torch's: a change there must not become a share of zero."""
    import torch

    running = measure.start_profiler()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64)).sum().item()
    found = measure.stop_profiler(running, 1)
    assert any(row["name"] == "aten::mm" for row in found["top"]) and 0 < found["busy_share"] <= 1
    assert found["method"] == (measure.METHOD_GPU if torch.cuda.is_available() else measure.METHOD_CPU)
