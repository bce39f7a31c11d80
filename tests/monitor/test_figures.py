"""Figures of steps from what every rank measured, worked out by hand; one slowed rank of two is named."""

from __future__ import annotations

import pytest

from clustertune.resolve.resolve import resolve
from clustertune.training.figures import COLUMNS, RECENT, Figures


def figures(device: str | None = None) -> Figures:
    return Figures(resolve("llama8b-lima", [], tiny=False), device)


def ranks(*rows: dict[str, float]) -> list[list[float]]:
    usual = dict.fromkeys(COLUMNS, 0.0)
    usual |= {"data": 0.1, "forward_backward": 1.0, "optimizer": 0.1, "layers": 0.4, "computed": 1000.0, "real": 900.0}
    return [[{**usual, **row}[name] for name in COLUMNS] for row in rows]


def test_padding_imbalance_and_parts_by_hand() -> None:
    found = figures()
    for _ in range(2):
        found.add(ranks({"real": 600.0}, {"real": 1000.0, "data": 0.3}))
    taken = found.take(4.0)
    assert taken["padding"] == pytest.approx(1 - 1600 / 2000) and taken["imbalance"] == pytest.approx(1000 / 800)
    assert taken["data_seconds"] == 0.1 and taken["forward_backward_seconds"] == 1.0 and "mfu" not in taken
    assert found.take(1.0) == {}, "each step counts once"


def test_mfu_is_the_planner_s_count_over_the_peak() -> None:
    """The same work for a token as a benchmark counts, 989.4 TFLOP/s of each H100."""
    from clustertune.plan.predict import work_of

    resolved = resolve("llama8b-lima", [])
    work, found = work_of(resolved), figures("NVIDIA H100 80GB HBM3")
    assert work is not None
    world = resolved.world_size
    found.add(ranks(*[{}] * world))
    taken = found.take(0.5)
    assert taken["mfu"] == pytest.approx(work.model * 900 / 0.5 / 989.4e12, abs=1e-4)
    assert taken["hfu"] == pytest.approx(work.hardware * 1000 / 0.5 / 989.4e12, abs=1e-4) and taken["hfu"] > taken["mfu"]


@pytest.mark.parametrize("slow", [{"layers": 0.8, "forward_backward": 2.0}, {"data": 1.2}, {"optimizer": 1.0}])
def test_a_slow_rank_is_named_whatever_it_is_slow_at(slow: dict[str, float]) -> None:
    """Behind it all ranks leave the pass together: the times from end to end are the same."""
    found = figures()
    for _ in range(RECENT):
        pass_ = slow.get("forward_backward", 1.0) + slow.get("data", 0.1) - 0.1
        found.add(ranks({"forward_backward": pass_}, {"forward_backward": pass_}, {"forward_backward": 1.0, **slow}))
    assert list(found.stragglers()) == ["2"] and found.stragglers()["2"] > 1.5
