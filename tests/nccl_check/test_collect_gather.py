"""From what ranks and nodes left behind to the document, also where they left it in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.host.system import MIB
from clustertune.nccl_check import link_measure
from clustertune.nccl_check.link_measure import CheckRecords, CollectiveCase
from tests.nccl_check.documents import Files, setup


def measured(files: Files, name: str = "results") -> list[dict[str, Any]]:
    return CheckRecords(files.folder, files.setup).document()[name]


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    """A rank that only hands its data over is done before anything has arrived."""
    files = Files(tmp_path, setup(2))
    files.whole(1, CollectiveCase("world", "all_gather", MIB, 20), {0: 0.001, 1: 0.004})
    (entry,) = measured(files)
    assert entry["algbw_gb_s"] == pytest.approx(MIB / 0.004 / 1e9, rel=1e-5)
    assert entry["busbw_gb_s"] == pytest.approx(entry["algbw_gb_s"] / 2, rel=1e-5)
    assert (entry["ranks"], entry["iterations"], entry["correct"]) == (2, 20, True)


def test_both_ways_of_a_pair(tmp_path: Path) -> None:
    """The sending node stands first, and all ranks of a node count together."""
    files = Files(tmp_path, setup(2, 2))
    files.whole(1, CollectiveCase("pair", "p2p", MIB, 20), dict.fromkeys(range(4), 0.001))
    files.whole(2, CollectiveCase("pair", "p2p", MIB, 20, back=True), dict.fromkeys(range(4), 0.002))
    found = measured(files, "per_pair")
    assert [(e["nodes"], e["median_s"]) for e in found] == [(["n1", "n2"], 0.001), (["n2", "n1"], 0.002)]
    assert found[0]["busbw_gb_s"] == pytest.approx(MIB / 0.001 / 1e9, rel=1e-5)


def test_a_wrong_value_on_one_rank_is_wrong(tmp_path: Path) -> None:
    """One is enough to ruin a model."""
    files = Files(tmp_path, setup(2))
    files.begin(1, CollectiveCase("world", "all_reduce", MIB, 20), [0, 1])
    files.done(1, 0, 0.1)
    files.done(1, 1, 0.1, correct=False)
    (entry,) = measured(files)
    assert entry["correct"] is False


def test_the_silent_rank_is_named(tmp_path: Path) -> None:
    """Those that wait say that they waited; the stopped one says nothing. What was measured before is kept."""
    files = Files(tmp_path, setup(3))
    files.whole(1, CollectiveCase("world", "all_gather", MIB, 20), dict.fromkeys(range(3), 0.1))
    files.begin(2, CollectiveCase("world", "all_reduce", MIB, 20), [0, 1, 2])
    for rank in (0, 2):
        files.say(rank, "hung", step=2, seconds=10.02)
    for node, codes in enumerate(([3], [None], [3])):
        files.node(node, codes)
    part = CheckRecords(tmp_path, files.setup)
    hung, problems = part.faults()
    assert problems == [] and [(e["collective"], e["bytes"], e["hosts"], e["ranks"], e["seconds"]) for e in hung] == [
        ("all_reduce", MIB, ["n2"], [0, 1, 2], 10.02)
    ]
    assert len(part.measurements()["results"]) == 1


LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.3]:4711"
ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("said", "codes", "guilty", "message"),
    [
        ({0: LOST, 1: LOST}, [4, 4, -9], "n3", LOST),  # killed: its peers only see that the connection closed
        ({0: "RuntimeError: Connection reset by peer", 1: ECC, 2: LOST}, [0, 0, 0], "n2", ECC),  # its own fault is believed
        ({1: ECC}, [None, 4, None], "n2", ECC),  # NCCL's other ranks wait in their kernels and are killed without a word
    ],
)
def test_the_rank_at_fault_is_named(
    tmp_path: Path, said: dict[int, str], codes: list[int | None], guilty: str, message: str
) -> None:
    """Not the ranks that waited for it."""
    files = Files(tmp_path, setup(3))
    files.begin(1, CollectiveCase("world", "broadcast", MIB, 20), [0, 1, 2])
    for rank, text in said.items():
        files.say(rank, "failed", step=1, message=text)
    for node, code in enumerate(codes):
        files.node(node, [code])
    (entry,), _ = CheckRecords(tmp_path, files.setup).faults()
    assert (entry["hosts"], entry["message"]) == ([guilty], message)


def test_the_end_of_the_time_is_no_hang(tmp_path: Path) -> None:
    """Nobody gave up and nobody died: the launcher ended it. That is left out, not a fault of a link."""
    files = Files(tmp_path, setup(2))
    files.begin(1, CollectiveCase("world", "broadcast", MIB, 20), [0, 1])
    files.node(0, [None])
    files.node(1, [None])
    part = CheckRecords(tmp_path, files.setup)
    assert part.faults() == ([], [])
    assert part.document()["left_out"] == [
        {"scope": "world", "collective": "broadcast", "bytes": MIB, "reason": "cut off in the middle"}
    ]


@pytest.mark.parametrize("came", [True, False])
def test_a_node_that_met_nobody(tmp_path: Path, came: bool) -> None:
    """All gave up. It never got to the first node, or never came at all: it is the one that is named."""
    files = Files(tmp_path, setup(3), bare=True)
    for rank in range(3):
        if rank != 1 or came:
            files.say(rank, "start", rank=rank, pid=1)
            files.node(rank)
            for event in ["hung"] if rank == 1 else ["met", "hung"]:
                files.say(rank, event, **({"step": 0, "seconds": 20.0} if event == "hung" else {}))
    part = CheckRecords(tmp_path, files.setup)
    (entry,), problems = part.faults()
    assert (entry["collective"], entry["bytes"], entry["hosts"]) == ("init", 0, ["n2"])
    lost = {"node": "n2", "message": "left no record: it was lost, or does not see the folder"}
    assert problems == ([] if came else [lost])


@pytest.mark.parametrize("torn", ['{"event":"done","step":2,"med', "\x00\x00\x00", "[]\n", '"x"\n', "{}\n", "\xff\xfe"])
def test_a_torn_line_loses_itself_only(tmp_path: Path, torn: str) -> None:
    """A killed rank's last line, or a block of zeros after a power loss."""
    files = Files(tmp_path, setup(2))
    files.whole(1, CollectiveCase("world", "p2p", MIB, 20), {0: 0.1, 1: 0.1})
    with (tmp_path / link_measure.RECORDS.format(rank=1)).open("a") as out:
        out.write(torn)
    assert len(measured(files)) == 1


def test_a_long_log_is_judged_at_both_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a rank failed stands at the end of its log, after megabytes of calls; a line that is cut is not a line."""
    files = Files(tmp_path, setup(2))
    monkeypatch.setattr(link_measure, "LARGEST_LOG", 4096)
    lines = [f"n1:1:2 [0] NCCL INFO line {number:04d} of many\n" for number in range(1000)]
    for rank, many in enumerate((lines, lines[:10])):
        path = tmp_path / link_measure.LOGS.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(many))
    long, short = CheckRecords(tmp_path, files.setup).logs()
    assert short == "".join(lines[:10])
    shortened = [line + "\n" for line in long.splitlines() if line]
    assert shortened[0] == lines[0] and shortened[-1] == lines[-1] and len(long) <= 4097
    assert set(shortened) < set(lines) and len(shortened) > 80
