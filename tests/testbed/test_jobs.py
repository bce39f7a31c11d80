"""Job records are read from what scontrol prints, whatever a user has typed into a name, a command or a comment."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.launch.slurm import parse_jobs
from clustertune.testbed.rehearsal import AddedLines, describe

RECORD = """\
JobId=3 ArrayJobId=2 ArrayTaskId=1 JobName={name}
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901757 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=node[1-2]
   Command=/tmp/a b=c/JobState=X.sh recipe UserId=9
   WorkDir=/tmp/a b
   Comment=one JobState=FAILED
   JobState=FAILED
   StdErr=/tmp/x y.log
   StdOut=/tmp/x y.log
   Power=


"""
"""As slurm 22.05.8 prints it, shortened."""


@pytest.mark.parametrize(
    "name",
    ["train", "a b", "x UserId=y JobState=FAILED", "a\n   JobState=FAILED Restarts=0", "x\n\nJobId=77 JobName=q", "=", " "],
)
def test_free_text_is_not_taken_for_a_key(name: str) -> None:
    """A job's name may hold anything, line breaks too (seen with 22.05.8). Where there are no jobs scontrol prints a line."""
    first, second = parse_jobs(RECORD.format(name=name) + RECORD.format(name="other"))
    assert first.pop("JobName") == name and second.pop("JobName") == "other" and first == second
    assert first.items() >= {"JobId": "3", "ArrayTaskId": "1", "UserId": "root(0)", "JobState": "RUNNING"}.items()
    assert first.items() >= {"Restarts": "2", "NodeList": "node[1-2]", "WorkDir": "/tmp/a b", "StdOut": "/tmp/x y.log"}.items()
    assert first["Command"] == "/tmp/a b=c/JobState=X.sh recipe UserId=9"
    assert parse_jobs("No jobs in the system\n") == [] == parse_jobs("")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"JobState": "PENDING", "Reason": "None"}, "PENDING"),
        ({"JobState": "PENDING", "Reason": "Resources"}, "PENDING, Resources"),
        ({"JobState": "RUNNING", "NodeList": "node[1-2]", "Restarts": "2"}, "RUNNING, on node[1-2], restarted 2 x"),
        ({"JobState": "FAILED", "ExitCode": "3:0"}, "FAILED, exit code 3:0"),
        ({"JobState": "COMPLETED", "ExitCode": "0:0", "Restarts": "0"}, "COMPLETED"),
    ],
)
def test_a_state_in_words(record: dict[str, str], words: str) -> None:
    """Slurm's own words, of which its manual speaks."""
    assert describe(record) == words


def test_the_lines_that_are_added(tmp_path: Path) -> None:
    """Half a line waits for its rest, a file that begins again is read from its begin, an absent one is empty."""
    path = tmp_path / "log"
    tail = AddedLines(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\r\nthree \xff")
    assert list(tail.lines()) == ["two"]
    assert list(tail.lines(rest=True)) == ["three \N{REPLACEMENT CHARACTER}"]
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == ["new"]
    assert list(AddedLines(path, 4).lines()) == []
