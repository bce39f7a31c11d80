"""The collectives themselves: real ranks here, and a check of their results that notices one wrong element."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clustertune.nccl_check import rank as measure
from clustertune.nccl_check import result as gather
from clustertune.nccl_check.node import NodeCheck, probe_pairs
from clustertune.nccl_check.setup import CollectiveCase, Setup
from tests.command import REPO
from tests.nccl_check.documents import setup

KIB = 1 << 10
OF_TRAINING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring"}


def run_here(folder: Path, wanted: Setup) -> gather.Round:
    """All ranks of a round as one machine, in a process of its own as under srun."""
    wanted.write(folder)
    words = [sys.executable, "-m", "clustertune.nccl_check.node", "--folder", str(folder), "--node", "0"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in folder.glob("*.out"))
    return gather.read_round(folder, wanted)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> gather.Round:
    """Three ranks, whose number divides no size."""
    wanted = setup(1, 3, largest=64 * KIB, smallest=KIB, factor=16, iterations=3, warmup=1, seconds=60.0, facts=False)
    return run_here(tmp_path_factory.mktemp("swept"), replace(wanted, addresses=("127.0.0.1",), environment=OF_TRAINING))


def test_every_collective_is_measured_and_right(swept: gather.Round) -> None:
    """gloo's own results pass the check that NCCL's have to pass."""
    found = gather.measurements([swept])["results"]
    assert {entry["collective"] for entry in found} == {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "p2p"}
    assert all(entry["correct"] for entry in found)
    for entry in found:
        assert entry["median_s"] > 0
        assert entry["algbw_gb_s"] == pytest.approx(entry["bytes"] / entry["median_s"] / 1e9, rel=1e-4)
        part = 3 * 4 if entry["collective"] in ("all_gather", "reduce_scatter") else 4
        assert entry["bytes"] % part == 0
    assert gather.faults([swept]) == ([], [])
    assert gather.software(swept) == [
        {"node": "n1", "torch": torch.__version__, "nccl": None, "cuda": None, "python": gather_python(), "ranks": [0, 1, 2]}
    ]


def test_a_wrong_result_is_told() -> None:
    """Whatever the time that it took."""
    case = CollectiveCase("world", "all_reduce", KIB, iterations=2)
    for right in (True, False):
        operation = measure.Operation(run=lambda: None, fill=lambda: None, check=lambda right=right: right)
        assert measure.measure(case, operation, torch.device("cpu"), agree=float).correct is right


def test_communicators_are_made_before_anything_is_measured(swept: gather.Round) -> None:
    """Of 512 ranks they take as long as a measurement may before it counts as hung."""
    assert set(swept.connected) == {"intra"} and swept.connected["intra"] > 0
    for rank in range(3):
        events = [event["event"] for event in gather.read_events(swept.folder / f"rank-{rank}.jsonl")]
        assert events.index("connected") < events.index("up") < events.index("begin")
        assert events.count("connected") == 1


def gather_python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def test_ranks_get_the_environment_of_training(swept: gather.Round) -> None:
    """A link is fast or slow with these variables, not with those of the shell."""
    assert gather.steering(swept).items() >= OF_TRAINING.items()


def test_what_looks_like_a_secret_stays_out() -> None:
    """The document is kept, shown and pasted into issues."""
    from clustertune.nccl_check.node import steering

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


def test_sizes_are_those_of_nccl_tests() -> None:
    """The whole buffer of an all-gather; what each rank has of an all-reduce; all that a node sends of a pair."""
    assert measure.bytes_of(CollectiveCase("world", "all_gather", 1000), 3, 1) == 996
    assert measure.bytes_of(CollectiveCase("world", "all_reduce", 1000), 3, 1) == 1000
    assert measure.bytes_of(CollectiveCase("pair", "p2p", 1000), 4, 2) == 1000
    assert measure.bytes_of(CollectiveCase("world", "reduce_scatter", 4), 64, 8) == 256, "one element for each at least"


def test_median_and_spread() -> None:
    """One outlier moves neither as it would move a mean."""
    middle, spread = measure.summary([1.0] * 10 + [1.1] * 9 + [50.0])
    assert middle == pytest.approx(1.05)
    assert 0.05 < spread < 0.2


def test_what_is_slower_than_thought_gets_fewer_iterations() -> None:
    """A machine that is busy, or caches that are too small: the time of a case is kept, and nothing is called hung."""
    slow = {(0.1, 2.45): (2, 20), (0.1, 1.25): (0, 10), (1.0, 2.4): (0, 3), (100.0, 2.4): (0, 3)}
    for (each, seconds), made in {**dict.fromkeys([(0.1, 10.0), (0.1, 0.0), (0.0, 1.0)], (4, 20)), **slow}.items():
        assert measure.fitted(CollectiveCase("world", "all_gather", KIB, 20, 5, seconds=seconds), each) == made


def test_ranks_agree_on_how_often() -> None:
    """By the slowest of them: one that made more iterations would wait for ever."""
    made = []
    operation = measure.Operation(lambda: made.append("run"), lambda: None, lambda: True)
    proposed: list[float] = []

    def agree(value: float) -> float:
        proposed.append(value)
        return 1.0

    alive: list[int] = []
    case = CollectiveCase("world", "all_gather", KIB, 20, 5, seconds=7.5)
    timing = measure.measure(case, operation, torch.device("cpu"), agree, lambda: alive.append(len(made)))
    assert timing.iterations == 5
    assert len(made) == 1 + 1 + 5
    assert len(proposed) == 2 and proposed[0] < 1.0
    assert alive[-1] == len(made) and len(alive) >= 7, "each iteration that ends is a sign of life"


# --- the node's program ------------------------------------------------------------------------------------------------


def other_torch(folder: Path, text: str) -> None:
    """A torch of one line."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(f"{text}\n")


def test_ranks_that_cannot_start_are_told(tmp_path: Path) -> None:
    """A stack without torch, or a library that does not load: the words are in the document."""
    other_torch(tmp_path, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    wanted = setup(1, 2, facts=False, environment={"PYTHONPATH": str(tmp_path)})
    folder = tmp_path / "round"
    wanted.write(folder)
    assert NodeCheck(folder, wanted, 0).run() == 1
    (entry,), _ = gather.faults([gather.read_round(folder, wanted)])
    assert "libcudart.so.13: cannot open shared object file" in entry["message"]


def test_an_interface_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    """gloo and NCCL need a minute for it, and other words."""
    wanted = setup(1, 2, facts=False, interface="bond7")
    wanted.write(tmp_path)
    began = time.monotonic()
    assert NodeCheck(tmp_path, wanted, 0).run() == 1
    assert time.monotonic() - began < wanted.start_seconds
    _, problems = gather.faults([gather.read_round(tmp_path, wanted)])
    assert "no interface bond7" in problems[0]["message"]


@pytest.mark.jobs
def test_the_probe_of_two_is_right() -> None:
    """The same program that two GPUs run, on gloo."""
    (entry,) = probe_pairs(2, "gloo", os.environ, 60.0, pairwise=False)
    assert (entry["gpus"], entry["status"], entry["message"]) == ([0, 1], "ok", "")


def test_a_probe_that_hangs_is_ended(tmp_path: Path) -> None:
    """Of four GPUs pairs go side by side; after a hang no further pair is tried, and no process is left."""
    touch = f"pathlib.Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()"
    other_torch(tmp_path, f"import os, pathlib, time; {touch}; time.sleep(600)")
    found = probe_pairs(4, "gloo", {**os.environ, "PYTHONPATH": str(tmp_path)}, 60.0, pairwise=True, seconds=3.0)
    assert [entry["status"] for entry in found] == ["hung"] * 2 + ["skipped"] * 4
    assert sorted(tuple(entry["gpus"]) for entry in found) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_probe_that_fails_says_how(tmp_path: Path) -> None:
    """The last line of what it said."""
    other_torch(tmp_path, "raise RuntimeError('CUDA error: peer access is not supported')")
    (entry,) = probe_pairs(2, "gloo", {**os.environ, "PYTHONPATH": str(tmp_path)}, 60.0, pairwise=False)
    assert entry["status"] == "failed"
    assert "peer access is not supported" in entry["message"]


def test_a_setup_of_another_program_is_refused(tmp_path: Path) -> None:
    """With words, exit 2, and no traceback."""
    (tmp_path / "setup.json").write_text(json.dumps({"hosts": 3}))
    words = [sys.executable, "-m", "clustertune.nccl_check.node", "--folder", str(tmp_path), "--node", "0"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "contains no setup of a check" in done.stderr
    assert "Traceback" not in done.stderr
