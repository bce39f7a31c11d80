"""The check as a Slurm job, its script and itself on a real Slurm; and the short check before a training job."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.check.rule import EXIT, FAIL, PASS, UNKNOWN, WARN, Rule, finding
from clustertune.check.sbatch import lint
from clustertune.cli import nccl_check
from clustertune.errors import ExitCode, UserError
from clustertune.launch.allocation import Allocation
from clustertune.nccl_check import link_check as check
from clustertune.nccl_check.link_measure import CheckOptions, CheckRecords
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO, events, run
from tests.folders import program
from tests.launch.machines import CLUSTER_FILES, machine
from tests.nccl_check.command_line import command_line, job
from tests.nccl_check.documents import Files, setup
from tests.slurm_job import Job


def test_the_command_prints_what_it_would_submit() -> None:
    """Without Slurm, and without leaving anything behind; what it is on each cluster stands in the goldens."""
    before = set((REPO / "runs").glob("nccl-check/*"))
    done = run("nccl-check", "--submit", "--cluster", CLUSTER_FILES[0], "--nodes", "2", "--dry-run", "--json")
    assert done.code == 0 and "#SBATCH --nodes=2\n" in done.json["script"] and done.json["command"][0] == "sbatch"
    assert set((REPO / "runs").glob("nccl-check/*")) == before


def test_the_scripts_have_no_known_mistake() -> None:
    """By the project's own lint of batch scripts."""
    for text in (job(CLUSTER_FILES[0]).script, check.SCRIPT.read_text()):
        assert lint(text, "job.sbatch", REPO) == []


@pytest.mark.parametrize(
    ("nodes", "time", "seconds", "words"),
    [
        (9, None, 300, "9 nodes"), (None, "3", 300, "too short"), (None, "soon", 300, "not a time"),
        (None, None, 90_000, "at most"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted(nodes: int | None, time: str | None, seconds: float, words: str) -> None:
    """Before the queue, each with its option; a cluster without Slurm can still be measured here."""
    cluster = machine(slurm={"partition": "gpu", "gres": None, "max_time": "12:00:00"})
    with pytest.raises(UserError, match=words) as error:
        check.job_shape(cluster, nodes, time, seconds)
    assert "--" in str(error.value)
    with pytest.raises(UserError, match="no Slurm"):
        check.job_shape(machine(slurm=None), nodes, time, seconds)


def test_the_job_gets_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another check than the one that was asked for would be worse than none."""
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text("")
    cluster = machine().model_copy(update={"source": "b.yaml"})
    words = command_line(cluster="b.yaml", seconds=77.0, largest="8M", collectives="p2p", save=True)
    found = nccl_check.arguments(words, cluster)
    assert found[:2] == ["--cluster", str(tmp_path / "b.yaml")]
    assert " ".join(found[2:]) == "--seconds 77 --max 8M --collectives p2p --save"


def cluster_file(folder: Path, extra: str = "") -> Path:
    """The temporary Slurm as a file; its GPUs are names only."""
    path = folder / "thrown.yaml"
    path.write_text(
        "name: thrown\nnodes:\n"
        "  - {name: node1, address: node1, roles: [compute]}\n  - {name: node2, address: node2, roles: [compute]}\n"
        "  - {name: ctl, address: ctl, roles: [slurmctld, login]}\n"
        "compute: {gpus: 0, interconnect: none, cores: 1, threads: 2, memory_gb: 8}\n"
        f"network: {{interface: eth0, kind: ethernet, gbit: 1}}\nslurm: {{partition: gpu}}\n{extra}"
    )
    return path


@pytest.mark.jobs
@pytest.mark.timeout(900)
def test_on_two_nodes_of_a_real_slurm(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """``--submit`` as a user calls it: ranks by srun on both nodes, the verdict and the result on the first."""
    file, out = cluster_file(tmp_path), tmp_path / "out"
    slurm.limit("200mbit")
    try:
        given = {"--cluster": str(file), "--seconds": "40", "--max": "4M", "--out": str(out)}
        words = ["nccl-check", "--submit", "--json", "--wait", *(word for pair in given.items() for word in pair)]
        done = slurm.run([sys.executable, "-m", "clustertune", *words], cwd=REPO, check=False, timeout=800)
    finally:
        slurm.limit(None)
    log = "".join(path.read_text() for path in out.glob("nccl-check-*.log"))
    document = json.loads((out / "result.json").read_text())
    assert document["hosts"] == ["node1", "node2"], log
    status = document["verdict"]["status"]
    assert done.returncode == EXIT[status] and json.loads(done.stdout)["verdict"]["status"] == status
    assert {facts["place"] for facts in document["facts"]} == {"step"}
    assert document["verdict"]["status"] in ("pass", "warn", "fail")
    one_way = [e for e in document["per_pair"] if e["collective"] == "p2p" and e["bytes"] >= 1 << 20]
    assert one_way
    for entry in one_way:
        assert entry["busbw_gb_s"] == pytest.approx(0.95 * 0.025, rel=0.2)
    assert "busbw" in log
    assert (tmp_path / "thrown.nccl-check.json").exists()


# --- the short check before a job: within its time, told, and never the reason why a job dies that would have trained ---

RULE = Rule("a-rule", "something", "it hurts", "https://example.org")
FAILED = finding(RULE, FAIL, "eth0 is down", "plug it in", where="n2")


def verdict(status: str) -> check.LinkVerdict:
    return check.LinkVerdict(status, "the headline", Path("x/result.json"), 3.0, (FAILED,) if status == FAIL else ())


def options(seconds: float, **changes: Any) -> CheckOptions:
    return check.options_for(seconds, "gloo", "a test", 2, 2, 1, **changes)


def test_only_a_failure_stops_and_only_where_it_is_to() -> None:
    """Exit 93 is what no launcher starts again."""
    for status in (PASS, WARN, UNKNOWN, FAIL):
        check.decide(verdict(status), "warn")
    for status in (PASS, WARN, UNKNOWN):
        check.decide(verdict(status), "stop")
    with pytest.raises(UserError) as error:
        check.decide(verdict(FAIL), "stop")
    assert error.value.code is ExitCode.STOP
    assert "n2: eth0 is down" in str(error.value) and "plug it in" in str(error.value)


def test_it_measures_and_judges_within_its_time(tmp_path: Path) -> None:
    """On one machine by the code that srun starts on nodes, in a folder of its own where one start was made before by hand."""
    (tmp_path / "1-0").mkdir()
    target = check.local_target("here", machine(nodes=1, gpus=0, threads=2))
    began = time.monotonic()
    short = replace(options(60.0), largest=check.MIB, collectives=("all_gather",))
    found = check.before_job(target, short, tmp_path / "1-0")
    assert time.monotonic() - began < 60 + 20
    assert found.status == UNKNOWN and "NCCL was not touched" in found.headline, found
    assert found.file == tmp_path / "1-0-2" / "result.json"


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], check.LinkVerdict]:
    """The check before a job of two nodes, whose ``srun`` is a line of shell."""

    def called(answer: str) -> check.LinkVerdict:
        program(tmp_path / "srun", answer)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        target = check.job_target(Allocation("7", 0, ("n1", "n2"), 0, 2, 1, None), machine(gpus=0), os.environ)
        return check.before_job(target, options(10.0), tmp_path / "run")

    return called


@pytest.mark.parametrize(
    "answer",
    ["echo 'srun: error: no such partition' >&2; exit 1", "kill -9 $$", pytest.param("exec sleep 600", marks=pytest.mark.jobs)],
)
def test_an_srun_that_breaks_is_bounded(before: Callable[[str], check.LinkVerdict], answer: str) -> None:
    """srun that fails, hangs or dies: over within the limit, told, and nothing that stops a job: no link was looked at."""
    began = time.monotonic()
    found = before(answer)
    assert time.monotonic() - began < 10 + 12
    assert found.status == UNKNOWN and "could not be measured: no rank began on n1, n2" in found.headline, found
    assert found.file is not None
    document = json.loads(found.file.read_text())
    assert document["hung"] == [] == document["results"]
    messages = " ".join(entry["message"] for entry in document["problems"])
    assert ("no such partition" in messages) is ("partition" in answer)
    check.decide(found, "stop")


def test_what_the_nodes_lack_stops_a_job_whatever_else_broke(
    before: Callable[[str], check.LinkVerdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that was seen is a fault, also where the ranks then did not start."""
    monkeypatch.setattr(check, "judge_log", lambda *_: [FAILED])
    found = before("exit 1")
    assert found.status == FAIL
    with pytest.raises(UserError):
        check.decide(found, "stop")


def test_a_check_that_breaks_itself_is_unknown(tmp_path: Path) -> None:
    """A file where its folder must be, or a fault in a rule: told, not raised, and no reason to stop."""
    (tmp_path / "file").write_text("")
    target = check.local_target("here", machine(nodes=1, gpus=0, threads=2))
    found = check.before_job(target, options(10.0), tmp_path / "file" / "x")
    assert found.status == UNKNOWN
    assert "could not be made" in found.headline
    check.decide(found, "stop")


@pytest.mark.parametrize(
    ("started", "early", "start_seconds", "word"),
    [
        ((0, 1), (0, 1), 30.0, ""), ((0, 1), (0,), 30.0, ""), ((0,), (0,), 30.0, "no rank began on n2"),
        ((), (), 30.0, "no rank began on n1, n2"), ((0, 1), (), 30.0, "were over before"), ((0, 1), (0, 1), 5.0, "too short"),
    ],
)  # fmt: skip
def test_only_ranks_that_all_waited_show_that_a_link_is_dead(
    tmp_path: Path, started: tuple[int, ...], early: tuple[int, ...], start_seconds: float, word: str
) -> None:
    """Of a rank that never began, or began when the others had given up, nothing follows for the network."""
    wanted = setup(2, start_seconds=start_seconds)
    files = Files(tmp_path, wanted, bare=True)
    for rank in started:
        files.say(rank, "start", rank=rank, pid=1)
    for rank in early:
        files.say(rank, "hung", step=0, seconds=start_seconds)
    found = CheckRecords(tmp_path, wanted).inconclusive
    assert found.count(word) == 1 if word else found == "", found
    if not word:
        return
    files.node(1, [], problems=["there is no interface eth0"])
    assert CheckRecords(tmp_path, wanted).inconclusive == "", "the node says what is wrong with it"


# --- in a job ----------------------------------------------------------------------------------------------------------


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("on_fail", ["stop", "warn"])
def test_a_job_on_a_failed_check(slurm: TemporaryCluster, tmp_path: Path, on_fail: str) -> None:
    """A link at a hundredth of the speed in the cluster file. ``stop``: the job ends with 93 before any rank trains, and is not
    started again. ``warn``: it prints a warning and trains, and the report shows the warning."""
    file = cluster_file(tmp_path, f"nccl_check: {{seconds: 60, on_fail: {on_fail}}}\n")
    file.write_text(file.read_text().replace("gbit: 1}", "gbit: 10}"))
    words = ["recipes/tiny-oasst2", "--tiny", "--to", "train", "--cluster", str(file)]
    made = Job(slurm, tmp_path / "r", words=[*words, "train.max_steps=2", "train.eval_on_start=false", "train.max_length=64"])
    made.options = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=8G", "--time=01:00:00"]
    slurm.limit("100mbit")
    try:
        found = made.submit().end()
    finally:
        slurm.limit(None)
    (event,) = events(made.run, "nccl")
    assert event["status"] == "fail" and any(fault.startswith("inter-speed") for fault in event["faults"])
    assert Path(event["file"]).is_file()
    if on_fail == "stop":
        assert (found["ExitCode"], found["Restarts"], made.steps()) == ("93:0", "0", []), made.text
        return
    assert (found["ExitCode"], made.steps()) == ("0:0", [1, 2]) and "nccl-check, " in made.text, made.text
    slurm.run([sys.executable, "-m", "clustertune", "report", str(made.run)])
    assert "Links between ranks" in (made.run / "report.html").read_text()
