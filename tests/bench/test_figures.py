"""From what ranks measured to the figures: arithmetic that can be done by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from clustertune.bench import result
from clustertune.errors import UserError


def rank(seconds: list[float], tokens: int = 100, computed: int = 125, **more: Any) -> dict[str, Any]:
    steps = [{"step": n, "seconds": s, "tokens": tokens, "computed": computed, "labelled": 50} for n, s in enumerate(seconds)]
    return {"steps": steps, "peak": {"rss": 2**30}, "to_first_step_s": 9.0, "warmup": [{"seconds": 7.0}], **more}


def test_the_slowest_rank_is_the_step_and_all_ranks_tokens_count() -> None:
    """A step ends when its last rank has ended: a mean over ranks would flatter it."""
    found = result.measured([[rank([1.0, 2.0]), rank([3.0, 1.0])]], wanted=2, share=1.0, shown="x")
    assert found["step_s"]["min"] == 2.0 and found["step_s"]["max"] == 3.0 and found["step_s"]["n"] == 2
    assert found["tokens_per_s_per_gpu"]["mean"] == pytest.approx(400 / 5.0 / 2)
    assert found["computed_tokens_per_s_per_gpu"] == pytest.approx(500 / 5.0 / 2)
    assert found["labelled_tokens_per_s_per_gpu"] == pytest.approx(200 / 5.0 / 2)
    assert found["padding_share"] == pytest.approx(0.2) and found["tokens_per_step"] == 200
    assert found["start_s"] == 9.0 and found["warmup_s"] == [7.0]


def test_tensor_parallel_ranks_read_the_same_tokens() -> None:
    """Two ranks of one group must not count a sequence twice."""
    alone = result.measured([[rank([1.0]), rank([1.0])]], wanted=1, share=1.0, shown="x")
    paired = result.measured([[rank([1.0]), rank([1.0])]], wanted=1, share=0.5, shown="x")
    assert paired["tokens_per_step"] * 2 == alone["tokens_per_step"]


def test_the_spread_is_that_of_all_rounds() -> None:
    """Two rounds that differ show it: the median of medians would hide a machine that slowed down."""
    found = result.measured([[rank([1.0, 1.0])], [rank([3.0, 3.0])]], wanted=2, share=1.0, shown="x")
    assert found["round_median_s"] == [1.0, 3.0] and found["step_s"]["median"] == 2.0
    assert found["step_s"]["stdev"] == pytest.approx(1.1547, rel=1e-4) and found["rounds"] == 2


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda r: r["steps"].pop(), "timed 1 steps, 2"),
        (lambda r: r.update(steps=None), "timed 0 steps, 2"),
        (lambda r: r["steps"][0].update(seconds=0.0), "without seconds or tokens"),
        (lambda r: r["steps"][0].update(seconds=float("nan")), "without seconds or tokens"),
        (lambda r: r["steps"][1].pop("computed"), "without seconds or tokens"),
        (lambda r: r["steps"][1].update(seconds=True), "without seconds or tokens"),
    ],
)
def test_a_rank_without_whole_figures_is_refused(spoil: Any, word: str) -> None:
    """A peer's file is other people's: what is missing in it must not become a rate."""
    broken = copy.deepcopy(rank([1.0, 1.0]))
    spoil(broken)
    with pytest.raises(UserError) as caught:
        result.measured([[rank([1.0, 1.0]), broken]], wanted=2, share=1.0, shown="place")
    assert word in str(caught.value.problems[0]) and "rank 1" in str(caught.value.problems[0])


def test_peaks_are_the_largest_and_the_sum_of_a_round() -> None:
    """Host memory is shared: what all ranks hold together decides whether a node is large enough."""
    one = rank([1.0], peak={"rss": 2 * 2**30, "allocated": 5 * 2**30, "reserved": 6 * 2**30})
    other = rank([1.0], peak={"rss": 3 * 2**30, "allocated": 4 * 2**30, "reserved": 7 * 2**30})
    found = result.peaks([[one, other], [one, one]])
    assert found == {"allocated_gib": 5.0, "reserved_gib": 7.0, "rss_gib": 3.0, "rss_all_ranks_gib": 5.0}


def test_ratios_are_ours_over_theirs() -> None:
    """Above 1 is faster, below 1 is less memory: the page says so."""
    ours = result.measured([[rank([1.0])]], wanted=1, share=1.0, shown="x")
    theirs = result.measured([[rank([2.0], computed=200, peak={"rss": 2**31})]], wanted=1, share=1.0, shown="x")
    found = result.ratio(ours, theirs)
    assert found == {"tokens_per_s": 2.0, "computed_tokens_per_s": 1.25, "step_s": 0.5, "peak_memory": 0.5}


def test_the_profile_is_that_of_the_median_round() -> None:
    """One round in which a neighbour was loud must not stand for all."""
    rounds = [[rank([1.0], profile={"exposed_share": share})] for share in (0.9, 0.1, 0.2)]
    assert result.profile(rounds) == {"exposed_share": 0.2}
    assert result.profile([[rank([1.0], profile=None)]]) is None


@pytest.mark.parametrize(("n", "low", "high"), [(5, None, None), (6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_the_interval_of_a_median(n: int, low: int | None, high: int | None) -> None:
    """The order statistics of published tables (95 %, two-sided), and none where no two of them reach it."""
    found = result.median_interval([float(value) for value in range(n, 0, -1)])
    assert (found["low"], found["high"], found["n"]) == (low, high, n) and found["median"] == (n + 1) / 2


def test_pairs_are_of_the_same_step() -> None:
    """A machine that slows down in the middle slows both of a pair: their ratio stays, that of the means does not."""
    ours = [[rank([1.0, 10.0]), rank([1.1, 9.0])]]
    theirs = [[rank([1.0, 10.0]), rank([0.5, 10.0])]]
    found = result.paired(ours, theirs, interleaved=True)
    assert found["wall"]["median"] == pytest.approx((1.1 + 1.0) / 2) and found["cpu"] is None and found["interleaved"]
    for one in (ours, theirs):
        for record in one[0]:
            record["steps"] = [{**row, "cpu_seconds": row["seconds"] * (2 if one is ours else 1)} for row in record["steps"]]
    assert result.paired(ours, theirs, interleaved=True)["cpu"]["median"] == pytest.approx((4.2 / 1.5 + 38 / 20) / 2)
