"""What ``watch``, ``runs``, the live page and the metrics file say about a run: by the commands, on recorded folders."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.evaluate.run import progress
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.manifest import read_object
from clustertune.monitor import live
from clustertune.monitor.openmetrics import openmetrics
from clustertune.monitor.sampler import TelemetryWriter
from clustertune.monitor.status import Alert, Watcher
from clustertune.monitor.status_page import draw, text
from clustertune.report import cost
from clustertune.report.metrics import TELEMETRY, TelemetryRow, read_metrics
from clustertune.rundir import RunDir
from tests.command import run
from tests.monitor import simulated

KEYS = [
    "state",
    "step",
    "steps",
    "tokens_per_s",
    "mfu",
    "planned_step_s",
    "step_s",
    "eta_s",
    "evaluation",
    "usd",
    "kwh",
    "nodes",
    "alerts",
]
COLUMNS = ["run", "recipe", "state", "step", "steps", "begun", "score_name", "score", "gpu_hours", "usd", "kwh"]
SAMPLE = re.compile(r'(clustertune_[a-z0-9_]+)\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\} -?[0-9.e+-]+')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "llama8b-lima" / "abc"


def change(run_dir: Path, **values: Any) -> None:
    document = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**document, **values}))


def rename(run_dir: Path, name: str) -> None:
    """Give a run's recipe another name."""
    change(run_dir, recipe={**json.loads((run_dir / "run.json").read_text())["recipe"], "name": name})


def test_watch_says_where_a_run_is(folder: Path) -> None:
    """Half an attempt lost and repeated, sixteen H100 for 200 steps of one second: figures by hand."""
    now = time.time()
    simulated.make(folder, now, slow=11, lost=5)
    found = run("watch", folder, "--once", "--json").json
    assert list(found) == KEYS
    assert (found["state"], found["step"], found["steps"], found["planned_step_s"]) == ("training", 200, 1000, 0.95)
    assert found["eta_s"] == pytest.approx(800, rel=0.01) and found["step_s"] == pytest.approx(1.03, abs=0.05)
    assert found["usd"] == pytest.approx(((230 - 120) + 110) / 3600 * 16 * 2.90, rel=0.05)
    assert found["kwh"] == pytest.approx(15 * 700 * 300 / 3.6e6, rel=0.01), "the GPU that left the bus tells nothing"
    assert [node["name"] for node in found["nodes"]] == ["node0", "node1"]
    assert [node["stragglers"] for node in found["nodes"]] == [[], [11]]
    assert found["nodes"][1]["gpus"][0] == {"utilisation": 88, "memory_gib": 61.4, "power_w": 690, "temperature_c": 61}
    assert set(found["nodes"][0]["gpus"][5].values()) == {None}
    alerts = {alert["kind"]: alert["text"] for alert in found["alerts"]}
    assert set(alerts) == {"straggler", "gpu"} and "node0: GPU 5: GPU is lost" in alerts["gpu"]
    assert "rank 11 on node1" in alerts["straggler"] and "1410 MHz (median 1980), too warm" in alerts["straggler"]
    assert "rank 11" in run("watch", folder, "--once").err


def test_a_restart_on_fewer_and_other_nodes_shows_those(folder: Path) -> None:
    """Before its first step: ranks and machines of the attempt before are gone, though their figures are still there."""
    now = time.time()
    run_dir = simulated.make(folder, now, slow=11, lost=5)
    (run_dir.attempt(2) / "outcome.json").write_text(json.dumps({"code": 75, "time": now}))
    run_dir.attempt(3).mkdir()
    AttemptPlan(3, (Node("b", "b"),), 8, launcher="slurm", begun=now).write(run_dir.attempt(3))
    found = Watcher(folder).look(now)
    assert (found.state, found.alerts, [(n.name, n.row) for n in found.nodes]) == ("training", (), [("b", None)])
    row = TelemetryRow(now, 3, {"load": 1.0})
    TelemetryWriter(folder / TELEMETRY, "b", {"host": "b", "node": 0}).add(row)
    (node,) = Watcher(folder).look(now).nodes
    assert node.row is not None and node.row.node["load"] == 1.0


def test_runs_lists_runs_with_what_they_took(folder: Path) -> None:
    simulated.make(folder, time.time(), restart=False)
    simulated.make(folder.parent / "other", time.time() - 7200)
    (folder.parent / "broken").mkdir()
    (folder.parent / "broken" / "run.json").write_text("{")
    done = run("runs", folder.parents[1], "--json")
    assert [list(one) for one in done.json] == [COLUMNS, COLUMNS] and "broken" in done.err
    by_run = {Path(one["run"]).name: one for one in done.json}
    assert by_run["abc"]["state"] == "training" and by_run["abc"]["gpu_hours"] == pytest.approx(16 * 230 / 3600, rel=0.05)
    assert by_run["other"]["state"] == "lost", "no sign of life for two hours, and no outcome"


@pytest.mark.parametrize(
    ("outcome", "state", "kinds"),
    [
        ({"code": 0}, "trained", set()),
        ({"code": 75, "problems": [{"message": "rank 1 hangs: no sign of life for 300 s"}]}, "interrupted", {"stalled"}),
        ({"code": 93, "problems": [{"message": "not finite at step 3"}]}, "stopped", {"not_finite"}),
        ({"code": 93, "problems": [{"message": "no progress: 20 steps taught nothing"}]}, "stopped", {"no_gradient"}),
        ({"code": 1}, "failed", set()),
    ],
)
def test_how_an_attempt_ended(folder: Path, outcome: dict[str, Any], state: str, kinds: set[str]) -> None:
    now = time.time()
    run_dir = simulated.make(folder, now, restart=False)
    (run_dir.attempt(1) / "outcome.json").write_text(json.dumps({**outcome, "time": now}))
    found = Watcher(folder).look(now)
    assert found.state == state and found.eta_s is None and {alert.kind for alert in found.alerts} == kinds


def test_an_evaluation_shows_who_answers_and_how_far_it_is(folder: Path) -> None:
    """By what the evaluation itself writes, until it has been silent for too long."""
    file, now = RunDir(folder).evaluating, time.time()
    simulated.make(folder, now)
    with progress(str(folder / "merged"), 8, file) as report:
        report(0, 5)
        report(5, 5)
        report(0, 3)  # another kind of request
        assert read_object(file)["total"] == 8
    file.write_text(json.dumps({"model": str(folder / "merged"), "done": 6, "total": 8, "eta_s": 120.0, "time": now}))
    found = Watcher(folder).look(now)
    assert found.state == "evaluating" and found.evaluation is not None
    assert (found.evaluation.model, found.evaluation.done) == ("tuned", 6)
    assert "6 of 8" in text(found) and "tuned model" in draw(found, now)
    file.write_text(json.dumps({"model": "/models/base", "done": 6, "total": 8, "eta_s": None, "time": now - 1}))
    assert Watcher(folder).look(now).as_dict()["evaluation"]["model"] == "base"
    assert Watcher(folder).look(now + 3600).evaluation is None
    file.write_text("{}")
    assert Watcher(folder).look(now).evaluation is None


def test_a_full_disk_and_a_silent_run_are_alerts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    simulated.make(folder, now)
    assert Watcher(folder).look(now).alerts == ()
    quiet = Watcher(folder).look(now + 100).alerts
    assert [alert.kind for alert in quiet] == ["stalled"] and "100 s" in quiet[0].text
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"event": "checkpoint", "step": 150, "bytes": 50_000 << 30, "status": "saved"}) + "\n")
    assert [alert.kind for alert in Watcher(folder).look(now).alerts] == ["disk"]


@pytest.mark.parametrize(
    ("event", "last", "kinds"),
    [
        ({"kind": "no_gradient"}, {"grad_norm": 0.0}, ["no_gradient"]), ({"kind": "no_gradient"}, {"grad_norm": 0.5}, []),
        ({"kind": "no_gradient"}, {"grad_norm": 1e-6, "same_reward": 1.0}, ["no_gradient"]),
        ({}, {"grad_norm": 0.5}, ["reward"]),
    ],
)  # fmt: skip
def test_an_alarm_of_the_training_is_an_alert_while_it_holds(
    folder: Path, event: dict[str, Any], last: dict[str, Any], kinds: list[str]
) -> None:
    now = time.time()
    simulated.make(folder, now, restart=False)
    step = {"event": "step", "step": 201, "attempt": 1, "time": now, "loss": 0.0, "seconds": 1.0, **last}
    alarm = {"event": "alarm", "step": 201, "attempt": 1, "time": now, "message": "all rewards are equal", **event}
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(f"{json.dumps(alarm)}\n{json.dumps(step)}\n")
    found = Watcher(folder).look(now).alerts
    assert [alert.kind for alert in found] == kinds and all("all rewards are equal" in alert.text for alert in found)


def test_a_watcher_reads_on_and_agrees_with_a_new_one(folder: Path) -> None:
    now = time.time()
    simulated.make(folder, now)
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"")
    watcher = Watcher(folder)
    for at in range(0, len(text), 7001):
        with (folder / "metrics.jsonl").open("ab") as out:
            out.write(text[at : at + 7001])
        watcher.look(now)
    found = [(status.as_dict(), status.metrics, status.cost) for status in (watcher.look(now), Watcher(folder).look(now))]
    assert found[0] == found[1]
    assert watcher.look(now).metrics == read_metrics(folder / "metrics.jsonl")


def test_the_page_shows_it_all_and_asks_nothing_of_a_network(folder: Path) -> None:
    now = time.time()
    simulated.make(folder, now, slow=11, overrides=("budget.usd=100",))
    html = draw(Watcher(folder).look(now), now)
    ended = "attempt 1 ended with exit code 75"
    for word in ("planned", "Loss", "Throughput", "Gradient norm", "slow: rank 11", "61.4", ended, "of 100 usd"):
        assert word in html, word
    assert "<script" not in html and "src=" not in html and 'content="5"' in html
    assert html.count('class="mark save"') == 4 and "<title>(1!)" in html
    change(folder, distributed={"gpu0": "<script>alert(1)</script>"})
    rename(folder, "<b>x")
    assert "<b>x" not in draw(Watcher(folder).look(now), now)
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "run.json").write_text("{}")
    live.refresh(folder)
    assert "No step has been logged yet" in (folder / "live.html").read_text()


def test_the_metrics_file_is_openmetrics(folder: Path) -> None:
    """A family is described once and stands together, labels are escaped, EOF ends it (promtool accepts it, too)."""
    simulated.make(folder, time.time())
    rename(folder, 'a"b\\c\nd')
    lines = openmetrics(Watcher(folder).look()).splitlines()
    assert lines[-1] == "# EOF" and all(line.startswith("# ") or SAMPLE.fullmatch(line) for line in lines)
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    order = [match[1] for line in lines if (match := SAMPLE.fullmatch(line))]
    assert list(dict.fromkeys(order)) == families and sorted(order, key=families.index) == order
    labels = 'recipe="a\\"b\\\\c\\nd",run="abc"'
    assert f"clustertune_step{{{labels}}} 200" in lines
    assert order.count("clustertune_gpu_power_w") == 16
    assert f'clustertune_gpu_power_w{{{labels},node="node1",gpu="7"}} 662' in lines


def test_an_alert_is_recorded_once_and_again_only_once_it_was_over(tmp_path: Path) -> None:
    disk = Alert("disk", "1 GiB is free")
    alerts = live.Alerts(tmp_path)
    for now in ((disk,), (disk,), (), (disk,)):
        alerts.take(now)
    log = tmp_path / "telemetry" / "alerts.jsonl"
    assert [json.loads(line)["kind"] for line in log.read_text().splitlines()] == ["disk", "disk"]


# --- the budget ----------------------------------------------------------------------------------------------------------


def test_a_budget_counts_every_attempt_and_warns_before_it_ends(folder: Path) -> None:
    """Attempts of 110 s and 110 s on 16 GPUs: 0.98 GPU-hours, 2.84 dollars at 2.90."""
    now = time.time()
    simulated.make(folder, now, overrides=("budget.gpu_hours=1.1", "budget.usd=5"))
    found = Watcher(folder).look(now)
    assert found.budget_used == pytest.approx(220 / 3600 * 16 / 1.1, rel=0.05), "the smaller of two limits"
    assert [alert.kind for alert in found.alerts] == ["budget"]
    left = cost.deadline(RunDir(folder), found.budget, 2) - now
    assert left == pytest.approx((1.1 - 220 / 3600 * 16) * 3600 / 16, abs=12)
    cost.check(RunDir(folder), found.budget)
    spent = found.budget.model_copy(update={"gpu_hours": 0.9})
    with pytest.raises(UserError, match="used up") as caught:
        cost.check(RunDir(folder), spent)
    assert caught.value.code == 93


@pytest.mark.jobs
def test_a_training_saves_and_ends_with_93_when_its_budget_is_used_up(tmp_path: Path) -> None:
    """And resumes from there once it has more: the same command with another budget."""
    words = ["run", "recipes/tiny-oasst2", "--to", "train", "--run-dir", tmp_path / "run", "--ranks", "2"]
    words += ["train.max_steps=2000", "train.eval_strategy=no", "train.eval_on_start=false", "train.report_to=none"]
    done = run(*words, "budget.gpu_hours=0.03")
    assert done.code == 93 and "budget" in done.err
    (attempt,) = read_metrics(tmp_path / "run" / "metrics.jsonl").attempts
    assert attempt.exit_code == 75 and attempt.last_step, "the rank stopped as asked, at a saved step"
    assert (tmp_path / "run" / "checkpoints" / f"step-{attempt.last_step:06d}" / "MANIFEST.json").exists()
    again = run(*words, "budget.gpu_hours=0.03")
    assert again.code == 93 and not (tmp_path / "run" / "attempts" / "0002").exists(), "refused before anything starts"
    more = run(*words, f"train.max_steps={attempt.last_step}", "budget.gpu_hours=9")
    assert more.code == 2, "another number of steps is another run"
    assert "live.html" in [path.name for path in (tmp_path / "run").iterdir()]
