"""Slurm's commands: what they answer is read for what it is, and what goes wrong is said in words."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from clustertune.errors import UserError
from clustertune.launch import slurm
from clustertune.recipe.sections import parse_minutes

SHOWN = """\
JobId=1 JobName=x-train
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=PENDING Reason=Dependency Dependency=afterok:7
   Requeue=1 Restarts=2 RunTime=1-02:03:04 TimeLimit=00:10:00
   NodeList=
   NumNodes=2-2 ReqB:S:C:T=0:0:*:*
   Command=/a b/train.sbatch /r/x JobState=COMPLETED a=[1, 2]
   WorkDir=/a b
   StdOut=/a b/l.log
   Power=

"""
"""Recorded on Slurm 22.05.8, shortened; the arguments of the script try to pass for another state."""


def script(error: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.exit({error!r})"]


def answers(text: str) -> slurm.Run:
    return lambda words: text


def refuses(error: UserError) -> slurm.Run:
    def run(words: Sequence[str]) -> str:
        raise error

    return run


def test_fields_of_a_job() -> None:
    """Values hold blanks, and a user's arguments hold what looks like fields: the controller's own come first."""
    found = slurm.show_job("1", answers(SHOWN)) or {}
    assert found["JobState"] == "PENDING"
    assert found["Command"].startswith("/a b/train.sbatch /r/x")
    assert found["WorkDir"] == "/a b"
    assert found["NodeList"] == ""
    assert found["ReqB:S:C:T"] == "0:0:*:*"
    assert slurm.show_job("1", answers("")) is None


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7],b-[01-02]", ["node1", "node2", "node3", "node7", "b-01", "b-02"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a.b-c,d_e", ["a.b-c", "d_e"]),
        ("a[1-2]-x", ["a1-x", "a2-x"]),
        *((text, None) for text in ("", "a[", "a]", "a[1-]", "a[3-1]", "a[1-99999999999]", "a,,b", "a[x]", "[[1]]")),
    ],
)
def test_node_lists(expression: str, names: list[str] | None) -> None:
    """A wrong order or width names another machine as the rendezvous; better no node (None) than a wrong one."""
    if names is None:
        with pytest.raises(UserError, match="not a list of nodes"):
            slurm.expand_hosts(expression)
        return
    assert slurm.expand_hosts(expression) == names
    assert slurm.hostnames(expression, refuses(slurm.Unreachable("away"))) == names
    assert slurm.hostnames(expression, answers("x\ny\n")) == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30", 30), ("5:30", 5.5), ("48:00:00", 2880), ("2-12", 3600), ("1-2:30", 1590), ("1-00:00:30", 1440.5),
        ("UNLIMITED", None), ("", None), ("1:2:3:4", None), ("INVALID", None),
    ],
)  # fmt: skip
def test_times(text: str, minutes: float | None) -> None:
    """``5:30`` is minutes and seconds, ``5:30:00`` hours: mixed up, a job of two days asks for 48 minutes."""
    assert parse_minutes(text) == minutes
