"""From what ranks measured to the figures, hours and price, and to the page: arithmetic that can be done by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from clustertune.bench import page, preparation, result
from clustertune.bench.peer import start_of
from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.plan.predict import Work, work_of
from clustertune.resolve.resolve import resolve
from clustertune.training.bench_schedule import BenchSchedule
from tests.bench.documents import document


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


MEASURED: dict[str, Any] = {
    "ranks": 16,
    "step_s": {"median": 10.0, "n": 4},
    "tokens_per_s_per_gpu": {"mean": 1000.0},
    "computed_tokens_per_s_per_gpu": 1250.0,
    "peak": {"allocated_gib": 40.0},
    "communication": {"exposed_share": 0.5},
    "start_s": 100.0,
}
ENDS = {"evaluation_s": 60.0, "checkpoint_s": 30.0}


def test_utilisation_by_hand() -> None:
    """1,000 tokens/s at 100 GFLOP each are 100 TFLOP/s: 10.1 % of an H100; padding and recomputation count in HFU alone."""
    found = result.utilisation(Work(1e11, 1.2e11), MEASURED, "NVIDIA H100 80GB HBM3")
    assert found["mfu"] == pytest.approx(100 / 989.4) and found["hfu"] == pytest.approx(1.2 * 125 / 989.4)
    assert found["gpu"] == "h100-sxm"


@pytest.mark.parametrize(
    ("work", "device", "word"),
    [
        (Work(1.0, 1.0), None, "no GPU"),
        (Work(1.0, 1.0), "NVIDIA Toaster", "not in ops/hardware.yaml"),
        (None, "NVIDIA H100 80GB HBM3", "count"),
    ],
)
def test_no_peak_is_no_utilisation(work: Work | None, device: str | None, word: str) -> None:
    """A utilisation against a guessed peak would be a made-up figure."""
    found = result.utilisation(work, MEASURED, device)
    assert found["mfu"] is None and word in found["why"]


def test_the_work_of_a_token_is_the_planners() -> None:
    """LoRA on a frozen base: 4 FLOPs per weight and token, and more with recomputation."""
    work = work_of(resolve("llama405b-oasst2", []))
    assert work is not None and 1.6e12 < work.model < 1.75e12 and work.hardware > work.model * 1.3


def test_hours_are_steps_ends_and_start() -> None:
    """The reference: 36 steps, 18 evaluations and one at the start, 2 checkpoints."""
    whole = resolve("llama405b-oasst2", ["train.eval_on_start=true"])
    found = result.whole(whole, MEASURED, ENDS, None, None, "rtx-pro-6000-blackwell-server")
    assert (found["steps"], found["evaluations"], found["checkpoints"]) == (36, 19, 2)
    assert found["hours"] == pytest.approx((100 + 360 + 19 * 60 + 2 * 30) / 3600)
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"])
    assert found["cost"] is None or found["cost"]["currency"]


@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        (["train.max_steps=7"], 1000, 7),
        (["train.num_train_epochs=2"], 65, 6),
        ([], 64, 2),
        (["expect.steps=null", "data.expect=null"], None, None),
    ],
)
def test_how_many_steps_there_are(overrides: list[str], rows: int | None, steps: int | None) -> None:
    """What was read counts more than what was expected, and what is not known is not made up."""
    found, why = result.whole_steps(resolve("llama405b-oasst2", overrides), rows, None)
    assert found == steps and why


def test_beside_the_plan() -> None:
    """Measured over planned: above 1 the step takes longer than was said."""
    asked = preparation.BenchRequest("llama405b-oasst2", Path("runs/bench/x"), BenchSchedule(1, 2, 1), elsewhere=True)
    made = preparation.make(asked)
    plan, why = result.predict(made.whole, load_cluster("rno-rtxpro6000"), made.lengths)
    assert plan is not None and why is None
    found = result.beside_plan(plan, None, MEASURED, {"mfu": 0.1, "hfu": 0.2}, 3.0)
    row = found["rows"]["step_s"]
    assert row["ratio"] == pytest.approx(10.0 / plan.step.seconds) and row["plan"] == plan.step.seconds
    assert found["rows"]["hours"]["measured"] == 3.0
    assert result.beside_plan(None, "no GPU", MEASURED, {}, None) == {"unknown": "no GPU"}


def test_a_page_holds_what_was_measured_and_on_what() -> None:
    """Hardware, versions, commit, image, recipe and command stand on the page: a figure without them is none."""
    text = page.render(document(), "x.recipe.json")
    for part in (
        "NVIDIA H100 80GB HBM3, 1 node, 2 ranks", "- commit: 000000000000", "torch main+cu129", "train.sif, sha256 ab12",
        "[x.recipe.json](x.recipe.json)", "`clustertune bench 'a b'`", "FSDP 2 (dp_shard 2)", "| MFU | 40.4 % |",
        "| peak memory of tensors, GPU | 60 GiB |", "Not hidden: 10.0 % of a step", "`nccl/AllGather`",
        "| step_s | 0.4 | 0.5 | 1.25 |", "100 steps (100 steps) take 0.5 h", "Price: 3 USD on demand (a list, 2026-04-29)",
        "| tokens/s per rank | 8,000 | 4,000 | 2 |", "- a note", "| one checkpoint | 2 s, 1.5 GB |",
    ):  # fmt: skip
        assert part in text, part
    assert "absent" not in text and "overrides" not in text
    assert "- overrides: `train.packing=false 'a=b c'`" in page.render(
        document(overrides=["train.packing=false", "a=b c"]), "x.recipe.json"
    )


def test_what_is_not_known_is_said() -> None:
    """No plan, no peer, no hours, no profile: words, and no empty table."""
    body = document(peer=None, plan={"unknown": "no GPU here"}, projection={"hours": None, "why": "no step count"})
    body |= {"image": None, "commit": None}
    body["ours"]["communication"] = None
    text = page.render(body, "x.json")
    for part in ("No plan: no GPU here", "TRL: no result. TRL: out of memory", "Not known: no step count."):
        assert part in text
    assert "## Communication" not in text and "- commit: unknown" in text and "None" not in text


@pytest.mark.parametrize("word", ["", "TRL", "nothing.py", "tests", "README.md"])
def test_a_peer_that_is_none_is_refused(word: str) -> None:
    """It would be found out only behind the first round."""
    with pytest.raises(UserError):
        start_of(word)


def test_figures_in_words() -> None:
    """A table with 17 digits is not read."""
    assert [page.number(v) for v in (None, True, 0.12345, 12.345, 12345.6)] == ["-", "-", "0.123", "12.3", "12,346"]
    assert page.percent(None) == "-" and page.percent(0.1234) == "12.3 %" and page.gib(None) == "-"
