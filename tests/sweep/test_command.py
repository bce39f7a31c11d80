"""``clustertune sweep``: here, as a job array, and refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from clustertune import sweep as sweeps
from clustertune.check.sbatch import lint
from clustertune.cli import jobs as command
from clustertune.cli.app import run_command
from clustertune.errors import ExitCode, UserError
from clustertune.launch import stage_jobs
from clustertune.rundir import RunDir
from clustertune.sweep import Point, read_sweep
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO
from tests.launch.machines import machine

WORDS = ["train.learning_rate=1e-3,5e-3", "lora.r=8,16"]


class Call:
    """The command in this process: exit code, and stdout as JSON."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        self.err = ""

    def __call__(self, *arguments: str | Path, code: int = 0) -> Any:
        app = typer.Typer()
        app.callback()(lambda: None)
        app.command("sweep")(command.sweep)
        self.monkeypatch.setattr(sys, "argv", ["clustertune", "sweep", *map(str, arguments), "--json"])
        ended = run_command(app)
        out, self.err = self.capfd.readouterr()
        assert ended == code, self.err
        return json.loads(out)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    return Call(monkeypatch, capfd)


STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
run = pathlib.Path(words[words.index("--run-dir") + 1])
if "lora.r=16" in words and "train.learning_rate=0.001" in words and not (run.parent / "fixed").exists():
    print("error: planted: this point fails")
    sys.exit(1)
(run / "stages").mkdir(parents=True)
(run / "run.json").write_text("{}")
loss = 1.0 if "train.learning_rate=0.005" in words else 2.0
(run / "metrics.jsonl").write_text(json.dumps({"event": "eval", "step": 1, "attempt": 1, "eval_loss": loss}) + "\\n")
(run / "stages" / "train.json").write_text(json.dumps({"status": "done"}))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """A ``clustertune run`` of milliseconds, of which one point fails; the points that were run."""
    ran: list[Point] = []
    real = sweeps.run_command

    def stub(sweep: Any, point: Point) -> list[str]:
        ran.append(point)
        words = real(sweep, point)
        assert words[1:4] == ["-m", "clustertune", "run"]
        return [words[0], "-c", STAND_IN, *words[4:]]

    monkeypatch.setattr(sweeps, "run_command", stub)
    return ran


def test_here_a_failure_is_isolated_and_the_same_command_goes_on(call: Call, stand_in: list[Point]) -> None:
    """The other points run, the failed one has its reason, and only it is run again."""
    first = call("tiny-oasst2", *WORDS, "--here", code=1)
    assert [p.index for p in stand_in] == [0, 1, 2, 3]
    assert [(p["index"], p["status"]) for p in first["points"]] == [(2, "done"), (3, "done"), (0, "done"), (1, "failed")]
    assert first["points"][-1]["reason"] == "planted: this point fails"
    stand_in.clear()
    (Path(first["sweep_dir"]) / "points" / "fixed").touch()
    second = call("tiny-oasst2", *WORDS, "--here")
    assert [p.index for p in stand_in] == [1] and second["counts"]["done"] == 4
    assert call("--results", first["sweep_dir"])["points"] == second["points"]


def test_a_dry_run_makes_nothing(call: Call, tmp_path: Path) -> None:
    """It prints the points and what would be run: an IFEval score needs the evaluation, a loss does not."""
    words = ["tiny-oasst2", *WORDS, "--here", "--dry-run"]
    shown = call(*words)
    assert len(shown["points"]) == len(shown["here"]) == 4 and shown["job"] is None
    assert shown["here"][0][-2:] == ["--to", "train"]
    assert call(*words, "--metric", "prompt_level_strict_acc")["here"][0][-2:] == ["--to", "eval"]
    assert not (tmp_path / "runs").exists()


def test_the_job_array_of_the_reference_cluster(call: Call) -> None:
    """One script for all points, of the training's shape, so many at once; the own lint has nothing to say about it."""
    name = "rno-rtxpro6000"
    shown = call("llama405b-oasst2", *WORDS, "--cluster", name, "--max-parallel", "2", "--dry-run")
    script, words = shown["job"]["script"], shown["job"]["command"]
    assert "#SBATCH --array=0-3%2\n" in script and "#SBATCH --nodes=2\n" in script
    assert script.endswith(stage_jobs.split_script(stage_jobs.SCRIPT.read_text())[1])
    after = words[words.index(shown["job"]["file"]) + 1 :]
    sweep_dir = str(Path(shown["sweep_dir"]).absolute())
    assert after[1:9] == ["--sweep", sweep_dir, "--from", "prepare", "--to", "train", "--cluster", name]
    assert set(after[9::2]) == {"--env"} and any(word.startswith("HF_HOME=") for word in after[10::2])
    assert lint(script, "sweep.sbatch") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a recipe is missing"),
        (["tiny-oasst2", *WORDS, "--here", "--to", "bake"], "'bake' is not one of"),
        (["tiny-oasst2", *WORDS, "--metric", "vibes"], "there is no metric 'vibes'"),
        (["tiny-oasst2", *WORDS, "--here", "--max-parallel", "2"], "--max-parallel: has no meaning with --here"),
        (["tiny-oasst2", "train.learning_rate=1e-3,9", "lora.r=0,8", "--here"], "lora.r: 0: must be at least 1"),
        (["llama405b-oasst2", *WORDS, "--here"], "needs 16 GPUs"),
        (["tiny-oasst2", "data.input=absent.jsonl,conversations.jsonl", "--here"], "data.input: no such file or folder"),
        (["--results", "nowhere"], "no such folder"),
        (["--results", "."], "is not a sweep"),
        (["tiny-oasst2", *WORDS, "--cluster", "local", "--dry-run"], "has no Slurm"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2, in words, and nothing is made."""
    monkeypatch.setenv("PATH", str(tmp_path))
    call(*arguments, code=2)
    assert message in call.err
    assert list(tmp_path.iterdir()) == []


# --- the array ---------------------------------------------------------------------------------------------------------


RECORD = """\
JobId=4{0} ArrayJobId=41 ArrayTaskId={0} JobName=tiny-oasst2-sweep
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901757 Nice=0 Account=(null)
   JobState={1} Reason=None
   Command={2} words

"""
"""As 22.05 prints it, shortened."""


def test_a_sweep_with_queued_tasks_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks on one point would fight over its run folder. After a failure what is left goes alone."""
    options = {"tiny": False, "last": "train", "path": tmp_path / "s"}
    made, resolved = sweeps.plan_here("tiny-oasst2", WORDS, options)
    job = sweeps.make_job(made, resolved, machine(2, 8))
    sent: list[list[str]] = []
    monkeypatch.setattr(sweeps.stage_jobs.slurm, "submit", lambda options, script, words: sent.append([script]) or "41")
    assert sweeps.send(made, resolved, machine(2, 8), job) == "41"
    recorded = [RunDir(point.run_dir).description() for point in made.points]  # what the tasks run, whatever is edited since
    pinned = [RunDir(point.run_dir).pinned(one) for point, one in zip(made.points, resolved, strict=True)]
    assert [found.resolved for found in recorded] == pinned and all(found.cluster == machine(2, 8) for found in recorded)
    states = {"0": "COMPLETED", "1": "RUNNING"}

    def scontrol(words: list[str]) -> str:
        return "".join(RECORD.format(task, state, job.path) for task, state in states.items())

    assert sweeps.stage_jobs.live_jobs(made.path, scontrol) == ["41"]
    states["1"] = "FAILED"
    assert sweeps.stage_jobs.live_jobs(made.path, scontrol) == []
    monkeypatch.setattr(sweeps.stage_jobs, "live_jobs", lambda path: ["41"])
    with pytest.raises(UserError, match="tasks of this sweep are in the queue: 41") as caught:
        sweeps.send(made, resolved, machine(2, 8), job)
    assert caught.value.code is ExitCode.AGAIN and len(sent) == 1
    RunDir(made.points[1].run_dir).finish_stage("train", 1.0)
    assert "#SBATCH --array=0,2-3\n" in sweeps.make_job(made, resolved, machine(2, 8)).script


@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_a_sweep_on_a_real_slurm(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """One job array, one task at a time, each point a run of its own; a point that fails leaves the others alone."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    settings = [f"data.input={bad},{REPO / 'recipes/tiny-oasst2/conversations.jsonl'}", "train.learning_rate=1e-3,5e-3"]
    settings += ["train.max_steps=2", "train.eval_steps=2", "train.max_length=64"]
    sweep_dir = tmp_path / "sweep"
    words = ["sweep", "tiny-oasst2", *settings, "--tiny", "--cluster", "local", "--max-parallel", "1"]
    words += ["--sweep-dir", str(sweep_dir)]
    submitted = slurm.run([sys.executable, "-m", "clustertune", *words, "--json"], cwd=REPO, check=False)
    assert submitted.returncode == 0, submitted.stderr
    number = json.loads(submitted.stdout)["job"]
    shown = slurm.run(["scontrol", "show", "job", number]).stdout
    assert "ArrayTaskThrottle=1" in shown
    again = slurm.run([sys.executable, "-m", "clustertune", *words], cwd=REPO, check=False)
    assert again.returncode == ExitCode.AGAIN and "are in the queue" in again.stderr
    for task in range(4):
        slurm.wait(f"{number}_{task}", timeout=900)
    states = re.findall(r"ArrayTaskId=(\d+).*?JobState=(\w+)", slurm.run(["scontrol", "show", "job", number]).stdout, re.DOTALL)
    assert dict(states) == {"0": "FAILED", "1": "FAILED", "2": "COMPLETED", "3": "COMPLETED"}, logs(sweep_dir)
    found = slurm.run([sys.executable, "-m", "clustertune", "sweep", "--results", str(sweep_dir), "--json"], cwd=REPO)
    body = json.loads(found.stdout)
    assert body["counts"] == {"done": 2, "unfinished": 0, "waiting": 0, "failed": 2}
    losses = [point["metrics"]["eval_loss"] for point in body["points"][:2]]
    assert losses == sorted(losses) and losses[0] != losses[1]
    assert all("bad.jsonl" in point["reason"] for point in body["points"][2:])
    assert len({RunDir(p.run_dir).read()["fingerprint"] for p in read_sweep(sweep_dir).points}) == 4
    assert "Traceback" not in logs(sweep_dir)


def logs(sweep_dir: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted((sweep_dir / "logs").glob("*.log")))
