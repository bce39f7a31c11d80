"""Submission: what sbatch gets, what it must never get, what is left behind when it refuses; the status of a run's jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clustertune.cli import jobs as command
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import shape, slurm, stage_jobs
from clustertune.report import job_status
from clustertune.resolve.resolve import resolve
from clustertune.rundir import STAGES, RunDir
from clustertune.testbed.cluster import TemporaryCluster as Temporary
from tests.launch.machines import OURS, machine
from tests.slurm import slurm as slurm_cluster

__all__ = ["slurm_cluster"]

SMALL = shape.JobShape(1, 0, 1, 1, 1, 5, "gpu")
STAND_IN = '#!/bin/bash\n#SBATCH --nodes=2\nprintf "%s\\n" "$@"\n[[ $* != *fail* ]]\n'


def jobs_for(run: Path, stages: Sequence[str] = STAGES, words: Sequence[str] = ("/r/x",)) -> list[stage_jobs.StageJob]:
    shapes = dict.fromkeys(STAGES, SMALL)
    return stage_jobs.make_jobs("x", stages, shapes, run, arguments=words, flags=["--tiny"], signal_seconds=90)


def job_record(job: str, name: str, state: str, command: str, nodes: str = "") -> str:
    """What ``scontrol show job`` prints, in the form of Slurm 22.05.8, shortened."""
    return (
        f"JobId={job} JobName={name}\n   UserId=me(7) GroupId=me(7) MCS_label=N/A\n   Priority=1 Nice=0\n"
        f"   JobState={state} Reason=None Dependency=(null)\n   Requeue=1 Restarts=2 RunTime=1-01:00:05\n"
        f"   NodeList={nodes}\n   Command={command}\n"
    )


class Recorder:
    """An sbatch and a scancel that remember."""

    def __init__(self, at: int | None = None, error: BaseException | None = None, cancel_fails: bool = False) -> None:
        self.sent: list[list[str]] = []
        self.cancelled: list[str] = []
        self.at, self.error, self.cancel_fails = at, error, cancel_fails

    def send(self, options: Sequence[str], script: str, arguments: Sequence[str]) -> str:
        if len(self.sent) == self.at and self.error is not None:
            raise self.error
        self.sent.append([*options, script, *arguments])
        return str(100 + len(self.sent))

    def run(self, words: Sequence[str]) -> str:
        assert words[0] == "scancel"
        if self.cancel_fails:
            raise slurm.Unreachable(Problem("away"), ExitCode.AGAIN)
        self.cancelled += words[1:]
        return ""


# --- scripts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *((name, []) for name in ("x --wrap=id", "x\n#SBATCH --export=ALL", "", "-x", "x'y", "x" * 200, "x/y", "x\u00e9")),
        *(
            ("x", [option])
            for option in ("--array=0-3 --export=ALL", "--array=0\n#SBATCH --x", "--comment='a b'", "-x", "--a=$(id)")
        ),
    ],
)
def test_no_name_and_no_further_option_becomes_another(name: str, extra: list[str]) -> None:
    """A header line is split at blanks: a name with one, or what a sweep adds, would bring an option of its own."""
    with pytest.raises(UserError):
        stage_jobs.render(name, SMALL, 60, extra=extra)
    assert "#SBATCH --array=0-3%2\n" in stage_jobs.render("x", SMALL, 60, extra=["--array=0-3%2"])


def test_the_command_line(tmp_path: Path) -> None:
    """Paths stand where no shell and no header splits them; a percent sign in one is not a pattern of sbatch's."""
    run = tmp_path / "a b %j 'q"
    job = jobs_for(run, ["train"], ["/r/x y", 'data.input=$(id) `id`; "q"'])[0]
    words = job.command("7")
    assert f"--output={tmp_path}/a b %%j 'q/logs/%x-%j.log" in words
    assert words.index("--dependency=afterok:7") < words.index(str(run / "jobs" / "train.sbatch"))
    at = words.index(str(job.path))
    assert words[at + 1 :] == [
        "/r/x y", "data.input=$(id) `id`; \"q\"", "--tiny", "--run-dir", str(run), "--from", "train", "--to", "train",
    ]  # fmt: skip
    assert {"--export=NIL", "--kill-on-invalid-dep=yes", "--parsable"} <= set(words[:at])
    with pytest.raises(UserError, match="backslash"):
        jobs_for(tmp_path / "a\\b", ["train"])


# --- which stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finished", "first", "last", "todo"),
    [
        ((), None, "report", STAGES),
        (("prepare",), None, "report", STAGES[1:]),
        (STAGES[:2], None, "export", ("export",)),
        (STAGES, None, "report", ()),
        (STAGES, "eval", "report", ("eval",)),
        (("prepare", "train", "merge"), None, "report", STAGES[2:]),
        ((), "export", "report", None),
        (STAGES, "eval", "train", None),
    ],
)
def test_what_is_left(finished: tuple[str, ...], first: str | None, last: str, todo: tuple[str, ...] | None) -> None:
    """What is finished is not computed again, what rests on something newer is; None: stages that cannot be are refused."""
    with contextlib.nullcontext() if todo is not None else pytest.raises(UserError):
        assert tuple(stage_jobs.left_to_do(finished, first, last)) == todo


# --- submission --------------------------------------------------------------------------------------------------------


def test_jobs_depend_on_each_other_and_are_written_down(tmp_path: Path) -> None:
    """Each after the success of the one before; ids, scripts and times are kept for status."""
    recorder = Recorder()
    entries = stage_jobs.submit_all(tmp_path, jobs_for(tmp_path), recorder.send, recorder.run)
    assert [entry["id"] for entry in entries] == ["101", "102", "103", "104", "105", "106"]
    depends = [next((w for w in words if w.startswith("--dependency")), None) for words in recorder.sent]
    assert depends == [None, *(f"--dependency=afterok:{n}" for n in range(101, 106))]
    assert stage_jobs.read_jobs(tmp_path)["jobs"] == entries
    assert (tmp_path / "logs").is_dir()
    assert [Path(entry["script"]).name for entry in entries] == [f"{stage}.sbatch" for stage in STAGES]


@pytest.mark.parametrize(
    ("at", "error", "cancel_fails", "says"),
    [
        (3, UserError("sbatch: no such partition"), False, "nothing of this submission is left"),
        (2, UserError("sbatch: no such partition"), True, "scancel 101 102"),  # somebody has to
        (1, KeyboardInterrupt(), False, None),  # Ctrl-C between two jobs
    ],
)
def test_a_submission_that_breaks_off_is_taken_back(
    tmp_path: Path, at: int, error: BaseException, cancel_fails: bool, says: str | None
) -> None:
    """Half a chain would run, and its other half be missing."""
    recorder, ids = Recorder(at, error, cancel_fails), [str(101 + number) for number in range(at)]
    with pytest.raises(type(error), match=says):
        stage_jobs.submit_all(tmp_path, jobs_for(tmp_path), recorder.send, recorder.run)
    assert recorder.cancelled == ([] if cancel_fails else ids)
    assert [entry["id"] for entry in stage_jobs.read_jobs(tmp_path)["jobs"]] == (ids if cancel_fails else [])


def test_live_jobs_are_found_and_strangers_are_not(tmp_path: Path) -> None:
    """A new controller counts from 1 again: somebody else's job of the same number is none of ours."""
    recorder = Recorder()
    stage_jobs.submit_all(tmp_path, jobs_for(tmp_path, ["prepare", "train"]), recorder.send, recorder.run)

    def shown(state: str, folder: Path) -> slurm.Run:
        def run(words: Sequence[str]) -> str:
            stage = "prepare" if words[-1] == "101" else "train"
            return job_record(words[-1], f"x-{stage}", state, f"{folder}/jobs/{stage}.sbatch /r/x")

        return run

    assert stage_jobs.live_jobs(tmp_path, shown("RUNNING", tmp_path)) == ["101", "102"]
    assert stage_jobs.live_jobs(tmp_path, shown("REQUEUED", tmp_path)) == ["101", "102"]
    assert stage_jobs.live_jobs(tmp_path, shown("TIMEOUT", tmp_path)) == []
    assert stage_jobs.live_jobs(tmp_path, shown("RUNNING", tmp_path / "other")) == []


# --- where the run lies -------------------------------------------------------------------------------------------------


# --- the command -------------------------------------------------------------------------------------------------------


def call(*arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("submit")(command.submit)
    return CliRunner().invoke(app, list(arguments))


def test_dry_run_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a laptop, for the cluster that it is not; nothing is made."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run = tmp_path / "run"
    done = call("tiny-oasst2", "--tiny", "--cluster", "local", "--dry-run", "--json", "--run-dir", str(run))
    assert done.exception is None, done.exception
    body = json.loads(done.stdout)
    assert [job["stage"] for job in body["jobs"]] == list(STAGES)
    assert body["node_command"][0] == "srun"
    assert all(setting["reason"] for setting in body["environment"])
    assert not run.exists()


def test_every_problem_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first alone: each round costs the wait for the next."""
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = "rno-rtxpro6000"
    done = call("llama405b-oasst2", "slurm.nodes=1", "slurm.time=00:10:00", "--cluster", cluster, "--run-dir", str(tmp_path))
    assert isinstance(done.exception, UserError)
    for words in ("slurm.nodes=2 is the least", "at least 52 minutes", "sbatch is not on PATH"):
        assert words in str(done.exception)


def test_an_open_env_file_is_refused_before_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would refuse it hours later; its content is in no message."""
    (tmp_path / ".env").write_text("HF_TOKEN=hf_canary\n")
    (tmp_path / ".env").chmod(0o644)
    monkeypatch.setattr("clustertune.tree.ROOT", tmp_path)
    done = call("tiny-oasst2", "--tiny", "--cluster", "rno-rtxpro6000", "--run-dir", str(tmp_path / "run"))
    assert isinstance(done.exception, UserError) and str(tmp_path / ".env") in str(done.exception)
    assert "canary" not in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "recipe is missing"),
        (("tiny-oasst2", "--cluster", "nowhere", "--dry-run"), "nowhere"),
        (("tiny-oasst2", "--from", "eval", "--dry-run", "--run-dir", "no-run"), "not finished"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    """Words, not tracebacks."""
    done = call(*arguments)
    assert isinstance(done.exception, UserError) and words in str(done.exception)


# --- on a real Slurm ---------------------------------------------------------------------------------------------------


def cluster_call(cluster: Temporary) -> slurm.Run:
    """Slurm's commands on the login node of a temporary cluster."""

    def run(words: Sequence[str]) -> str:
        done = cluster.run(list(words), check=False)
        if done.returncode:
            raise UserError(Problem(f"{words[0]}: {done.stderr}"))
        return str(done.stdout)

    return run


def sender(cluster: Temporary) -> stage_jobs.Send:
    def send(options: Sequence[str], script: str, arguments: Sequence[str]) -> str:
        return cluster_call(cluster)(["sbatch", "--parsable", *options, script, *arguments]).strip()

    return send


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that prints its arguments, and fails where one says so."""
    (tmp_path / "run.sbatch").write_text(STAND_IN)
    monkeypatch.setattr(stage_jobs, "SCRIPT", tmp_path / "run.sbatch")


@pytest.mark.jobs
@pytest.mark.usefixtures("stand_in")
def test_a_chain_with_names_chosen_to_hurt(slurm_cluster: Temporary, tmp_path: Path) -> None:
    """Every argument reaches the script as it was given, logs lie where they should, and each job follows the one before."""
    run = tmp_path / "a b %j %% 'q' $x ;&"
    words = ["/r/$(id) `id` 'q'", 'data.input="a, b"; echo #', "a=\u00e9\n b"]
    jobs = jobs_for(run, ["prepare", "train"], words)
    entries = stage_jobs.submit_all(run, jobs, sender(slurm_cluster), cluster_call(slurm_cluster))
    assert len(stage_jobs.live_jobs(run, cluster_call(slurm_cluster))) >= 1
    for entry, job in zip(entries, jobs, strict=True):
        assert slurm_cluster.wait(entry["id"])["JobState"] == "COMPLETED"
        log = run / "logs" / f"x-{job.stage}-{entry['id']}.log"
        assert log.read_text() == "\n".join(job.arguments) + "\n"
    assert stage_jobs.live_jobs(run, cluster_call(slurm_cluster)) == []


@pytest.mark.usefixtures("stand_in")
def test_what_follows_a_failure_is_cancelled(slurm_cluster: Temporary, tmp_path: Path) -> None:
    """Without --kill-on-invalid-dep it would wait in the queue for ever."""
    jobs = jobs_for(tmp_path / "run", ["prepare", "train"], ["fail"])
    entries = stage_jobs.submit_all(tmp_path / "run", jobs, sender(slurm_cluster), cluster_call(slurm_cluster))
    assert [slurm_cluster.wait(entry["id"])["JobState"] for entry in entries] == ["FAILED", "CANCELLED"]


def test_slurm_takes_every_header(slurm_cluster: Temporary, tmp_path: Path) -> None:
    """``sbatch --test-only`` of each shape that a stage of a recipe has on a cluster like this one."""
    cluster, script = machine(2, 1, memory_gb=1000), tmp_path / "x.sbatch"
    for wanted in {found for name in OURS for found in shape.stage_shapes(resolve(name, tiny=True), cluster).values()}:
        script.write_text(stage_jobs.render("x", wanted, 60))
        done = slurm_cluster.run(["sbatch", "--test-only", str(script)], check=False)
        assert done.returncode == 0, done.stderr


# --- the status of a run's jobs ----------------------------------------------------------------------------------------


def submitted(folder: Path) -> RunDir:
    """A run whose prepare, train and export were submitted as 101, 102 and 103."""
    recorder = Recorder()
    stage_jobs.submit_all(folder, jobs_for(folder, ["prepare", "train", "export"]), recorder.send, recorder.run)
    return RunDir(folder)


def controller(run: RunDir, states: Mapping[str, str]) -> slurm.Run:
    """A controller that knows the jobs of ``states``."""
    stages = {"101": "prepare", "102": "train", "103": "export"}

    def ask(words: Sequence[str]) -> str:
        job = words[-1]
        if job not in states:
            raise UserError(Problem("scontrol: slurm_load_jobs error: Invalid job id specified"))
        nodes = "n[1-2]" if states[job] == "RUNNING" else ""
        return job_record(job, f"x-{stages[job]}", states[job], f"{run.path}/jobs/{stages[job]}.sbatch /r/x", nodes)

    return ask


def away(words: Sequence[str]) -> str:
    raise slurm.Unreachable(Problem("scontrol: Unable to contact slurm controller"), ExitCode.AGAIN)


def by_stage(found: job_status.StagesStatus) -> dict[str, str]:
    return {row.stage: row.state for row in found.rows}


def test_a_record_is_not_the_controllers_word(tmp_path: Path) -> None:
    """A stage that was asked for again and failed is not done; without a controller, said once, the record is all there is."""
    run = submitted(tmp_path)
    run.finish_stage("prepare", 7.0)
    assert by_stage(job_status.read_status(run, controller(run, {"101": "FAILED"})))["prepare"] == "FAILED"
    found = job_status.read_status(run, away)
    assert (by_stage(found)["prepare"], by_stage(found)["train"]) == ("done", job_status.UNKNOWN)
    assert found.note is not None and not found.live


def test_on_a_real_slurm(slurm_cluster: Temporary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the queue to the end, and what a cancelled job looks like."""
    stand_in = tmp_path / "run.sbatch"
    stand_in.write_text("#!/bin/bash\nsleep 600\n")
    monkeypatch.setattr(stage_jobs, "SCRIPT", stand_in)
    run, ask = RunDir(tmp_path / "a b"), cluster_call(slurm_cluster)
    entries = stage_jobs.submit_all(run.path, jobs_for(run.path, ["prepare", "train"]), sender(slurm_cluster), ask)
    slurm_cluster.wait(entries[0]["id"], "RUNNING")
    found = job_status.read_status(run, ask)
    assert by_stage(found)["prepare"] == "RUNNING"
    assert (found.rows[1].state, found.rows[1].reason, found.rows[1].seconds) == ("PENDING", "Dependency", None)
    assert found.rows[0].nodes
    slurm.cancel([entry["id"] for entry in entries], ask)
    for entry in entries:
        slurm_cluster.wait(entry["id"], "CANCELLED")
    assert not job_status.read_status(run, ask).live
