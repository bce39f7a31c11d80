"""What is measured in which order, and what has no time, by a clock that only moves when something is measured; real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from clustertune.host.system import MIB
from clustertune.launch.node import free_port
from clustertune.nccl_check import link_measure
from clustertune.nccl_check import link_rank as measure
from clustertune.nccl_check.link_measure import (
    CheckRecords,
    CollectiveCase,
    Setup,
    bus_factor,
    run_node,
    schedule,
    steering,
    tournament,
)
from clustertune.nccl_check.link_rules import COLLECTIVES
from tests.command import REPO
from tests.nccl_check.documents import setup


def play(
    wanted: Setup, gb_s: Callable[[CollectiveCase], float], *, seconds: float = 60.0, latency: float = 1e-4, room: int = 1 << 40
) -> tuple[list[CollectiveCase], list[tuple[str, str, int, str]], float]:
    """The cases of a round on links of a rate; what was left out; and the time that it took."""
    now = [0.0]
    left_out: list[tuple[str, str, int, str]] = []
    report = lambda **entry: left_out.append(tuple(entry.values()))  # noqa: E731
    cases, run = [], schedule(wanted, lambda: now[0], seconds, room, report)
    try:
        case = next(run)
        while True:
            cases.append(case)
            each = latency + case.bytes / gb_s(case) / 1e9
            now[0] += each * (case.iterations + case.warmup + 1)
            case = run.send(each)
    except StopIteration:
        return cases, left_out, now[0]


def even(rate: float) -> Callable[[CollectiveCase], float]:
    return lambda _case: rate


def test_everything_is_measured_where_there_is_time() -> None:
    """Every size of every collective in every scope, once, and in full where its time can be known; the smallest first."""
    wanted = setup(2, 2, largest=32 * MIB)
    cases, left_out, _ = play(wanted, even(10.0))
    sizes = [64 << 10, MIB, 16 * MIB, 32 * MIB]
    measured = [(c.scope, c.collective, c.bytes) for c in cases if c.scope != "pair"]
    assert sorted(measured) == sorted((s, c, b) for s in ("world", "intra", "inter") for c in COLLECTIVES for b in sizes)
    assert all(c.iterations == 20 for c in cases if c.bytes > 64 << 10)
    assert {(c.collective, c.back) for c in cases if c.scope == "pair"} == {("p2p", False), ("p2p", True)}, (
        "the world is the pair"
    )
    assert left_out == []
    assert [c.bytes for c in cases if (c.scope, c.collective) == ("world", "all_gather")] == sizes


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 1.0, 50.0])
def test_time_is_kept_on_any_link(rate: float) -> None:
    """The limit of a prolog is a promise: a slow link gets fewer iterations and sizes, never more time."""
    cases, left_out, took = play(setup(3, 1, largest=64 * MIB), even(rate), seconds=30.0)
    # The first try of a size cannot know the link yet.
    assert took <= 30.0 + 5 * MIB / rate / 1e9
    for case in cases:
        assert case.iterations >= 3 <= link_measure.LEAST_ITERATIONS
    reported = {(scope, name, size) for scope, name, size, _ in left_out}
    measured = {(c.scope, c.collective, c.bytes) for c in cases}
    wanted = {("world", c, size) for c in COLLECTIVES for size in (64 << 10, MIB, 16 * MIB, 64 * MIB)}
    assert wanted <= reported | measured, "what was not measured is reported"
    assert not reported or all(reason for *_, reason in left_out)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 300.0])
@pytest.mark.parametrize("rate", [0.000125, 0.0025, 0.0375, 0.125, 1.0])
def test_slow_is_not_hung(rate: float, seconds: float) -> None:
    """1 Mbit/s to 8 Gbit/s: all iterations together are over before the time after which one of them counts as hung."""
    wanted = setup(3, 1, largest=64 * MIB, case_seconds=max(10.0, seconds / 4))
    cases, _, _ = play(wanted, even(rate), seconds=seconds)
    assert len({(*case.track, case.bytes) for case in cases}) >= len(COLLECTIVES)
    for case in cases:
        each = 1e-4 + case.bytes / rate / 1e9
        assert each * (case.iterations + case.warmup + 1) < wanted.case_seconds / 2 + each, case


def test_a_slow_scope_does_not_starve_the_others() -> None:
    """Two nodes on 10 Mbit/s: the links inside the nodes are measured with all sizes all the same."""
    wanted = setup(2, 2, largest=16 * MIB)
    cases, left_out, _ = play(wanted, lambda case: 10.0 if case.scope == "intra" else 0.00125, seconds=60.0)
    assert {c.bytes for c in cases if c.scope == "intra" and c.iterations == 20} >= {16 * MIB, MIB}
    assert any(scope == "world" for scope, *_ in left_out)


def test_the_groups_of_a_turn_are_made_once() -> None:
    """torch names them by their ranks: made again they would find the addresses of the ones before in the store."""
    cases, _, _ = play(setup(4, 2, largest=32 * MIB), even(10.0), seconds=600.0)
    turns = [case.turn for case in cases if case.scope == "pair"]
    assert turns == sorted(turns) and set(turns) == {0, 1, 2}


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 17])
def test_a_tournament_has_every_pair_once(players: int) -> None:
    """In as few turns as there can be, and no node twice in one."""
    turns = tournament(players)
    assert sorted(pair for turn in turns for pair in turn) == list(combinations(range(players), 2))
    for turn in turns:
        assert len({player for pair in turn for player in pair}) == 2 * len(turn)
    assert len(turns) == players - 1 + players % 2


def test_bus_factors() -> None:
    """Those of nccl-tests' doc/PERFORMANCE.md."""
    assert [bus_factor(name, 8) for name in COLLECTIVES] == [0.875, 0.875, 1.75, 1.0, 1.0]
    assert (bus_factor("all_reduce", 2), bus_factor("all_gather", 2)) == (1.0, 0.5)


# --- the collectives themselves: real ranks here ------------------------------------------------------------------------

KIB = 1 << 10
OF_TRAINING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring"}


def run_here(folder: Path, wanted: Setup) -> CheckRecords:
    """All ranks of a round as one machine, in a process of its own as under srun."""
    wanted.write(folder)
    words = [sys.executable, "-m", "clustertune.nccl_check.link_measure", "--folder", str(folder), "--node", "0"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in folder.glob("*.out"))
    return CheckRecords(folder, wanted)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> CheckRecords:
    """Three ranks, whose number divides no size."""
    wanted = setup(1, 3, largest=64 * KIB, seconds=60.0)
    return run_here(
        tmp_path_factory.mktemp("swept"), replace(wanted, address="127.0.0.1", port=free_port(20_000), environment=OF_TRAINING)
    )


def test_every_collective_is_measured_and_right(swept: CheckRecords) -> None:
    """gloo's own results pass the check that NCCL's have to pass."""
    found = swept.measurements()["results"]
    assert {entry["collective"] for entry in found} == {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "p2p"}
    assert all(entry["correct"] for entry in found)
    for entry in found:
        assert entry["median_s"] > 0
        assert entry["algbw_gb_s"] == pytest.approx(entry["bytes"] / entry["median_s"] / 1e9, rel=1e-4)
        part = 3 * 4 if entry["collective"] in ("all_gather", "reduce_scatter") else 4
        assert entry["bytes"] % part == 0
    assert swept.faults() == ([], [])


def test_a_wrong_result_is_told() -> None:
    """Whatever the time that it took."""
    case = CollectiveCase("world", "all_reduce", KIB, iterations=2)
    for right in (True, False):
        operation = measure.Operation(run=lambda: None, fill=lambda: None, check=lambda right=right: right)
        assert measure.measure(case, operation, torch.device("cpu"), lambda: None, lambda: None)["correct"] is right


def test_what_looks_like_a_secret_stays_out() -> None:
    """The document is kept, shown and pasted into issues."""
    given = {"NCCL_ALGO": "Ring", "HF_TOKEN": "x", "NCCL_X": "http://me:secret@host", "NCCL_Y": "a\nb", "PATH": "/bin"}
    assert steering(given) == {"NCCL_ALGO": "Ring"}


# --- the check of results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [0, 1, 250, 251, 4999, (0, 1), (100, 101), (0, 250), (256, 512)])
def test_one_wrong_element_is_noticed(spoilt: int | tuple[int, int]) -> None:
    """Anywhere, and by the smallest possible amount; and a block that arrived at another block's place."""
    buffers = measure.Buffers.make(5000 * 4, torch.device("cpu"))
    buffers.fill(buffers.first, 3)
    assert buffers.holds(buffers.first, 3)
    if isinstance(spoilt, int):
        buffers.first[spoilt] += 1
    else:
        buffers.first[list(spoilt)] = buffers.first[list(reversed(spoilt))]
    assert not buffers.holds(buffers.first, 3)


def test_a_collective_that_did_nothing_is_noticed() -> None:
    """The buffer must not hold the answer from the measurement before."""
    buffers = measure.Buffers.make(1024, torch.device("cpu"))
    made = measure.make_operation(CollectiveCase("world", "all_gather", 1024), buffers, None, [0, 1], 0, 1)
    for rank in (0, 1):
        buffers.fill(buffers.second[128 * rank : 128 * (rank + 1)], rank + 1)
    assert made.check(), "this is the answer"
    made.fill()
    assert not made.check()


def test_every_iteration_is_a_sign_of_life() -> None:
    """A slow link must not be taken for a dead one."""
    made: list[str] = []
    operation = measure.Operation(lambda: made.append("run"), lambda: None, lambda: True)
    alive: list[int] = []
    case = CollectiveCase("world", "all_gather", KIB, 20, 5)
    timing = measure.measure(case, operation, torch.device("cpu"), lambda: None, lambda: alive.append(len(made)))
    assert timing["correct"] and len(made) == 1 + 5 + 20
    assert set(alive) >= set(range(1, 27)), "every finished iteration is reported"


# --- the node's program ------------------------------------------------------------------------------------------------


def other_torch(folder: Path, text: str) -> None:
    """A torch of one line."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(f"{text}\n")


def test_ranks_that_cannot_start_are_told(tmp_path: Path) -> None:
    """A stack without torch, or a library that does not load: the words are in the document."""
    other_torch(tmp_path, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    wanted = setup(1, 2, environment={"PYTHONPATH": str(tmp_path)})
    folder = tmp_path / "round"
    wanted.write(folder)
    assert run_node(folder, wanted, 0) == 1
    (entry,), _ = CheckRecords(folder, wanted).faults()
    assert "libcudart.so.13: cannot open shared object file" in entry["message"]


def test_an_interface_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    """gloo and NCCL need a minute for it, and other words."""
    wanted = setup(1, 2, interface="bond7")
    wanted.write(tmp_path)
    began = time.monotonic()
    assert run_node(tmp_path, wanted, 0) == 1
    assert time.monotonic() - began < wanted.start_seconds
    _, problems = CheckRecords(tmp_path, wanted).faults()
    assert "no interface bond7" in problems[0]["message"]


@pytest.mark.jobs
def test_the_probe_of_two_is_right() -> None:
    """The same program that two GPUs run, on gloo."""
    program = "import json, os\nfrom clustertune.nccl_check.link_measure import probe_pairs\n"
    program += "print(json.dumps(probe_pairs(2, 'gloo', os.environ, 60.0, pairwise=False)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=120, check=True)
    (entry,) = json.loads(done.stdout)
    assert (entry["gpus"], entry["status"], entry["message"]) == ([0, 1], "ok", "")


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four GPUs pairs go side by side; after a hang no further pair is tried, and no process is left."""

    def hang(*_: object) -> dict[str, str]:
        (tmp_path / f"pid-{os.getpid()}").touch()
        time.sleep(600)
        return {}

    monkeypatch.setattr(link_measure, "try_pair", hang)
    found = link_measure.probe_pairs(4, "gloo", {}, 60.0, pairwise=True, seconds=3.0)
    assert [entry["status"] for entry in found] == ["hung"] * 2 + ["skipped"] * 4
    assert sorted(tuple(entry["gpus"]) for entry in found) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(("words", "end"), [("the sum is wrong", None), ("was ended by signal 6", signal.SIGABRT)])
def test_a_probe_that_fails_is_told_at_once(words: str, end: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other of the two would wait for it until the time limit."""

    def fail(_store: Path, _gpu: int, rank: int, *_: object) -> dict[str, str]:
        if rank == 1:
            time.sleep(600)
        if end is not None:
            os.kill(os.getpid(), end)
        return {"fault": words}

    monkeypatch.setattr(link_measure, "try_pair", fail)
    (entry,) = link_measure.probe_pairs(2, "gloo", {}, 60.0, pairwise=False, seconds=300.0)
    assert (entry["status"], entry["message"]) == ("failed", words)


def test_a_setup_of_another_program_is_refused(tmp_path: Path) -> None:
    """With words, exit 2, and no traceback."""
    (tmp_path / "setup.json").write_text(json.dumps({"hosts": 3}))
    words = [sys.executable, "-m", "clustertune.nccl_check.link_measure", "--folder", str(tmp_path), "--node", "0"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "contains no setup of a check" in done.stderr
    assert "Traceback" not in done.stderr
