"""``clustertune plan`` as it is called: what a person can do wrong ends in one clear screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clustertune.cli import options as command
from clustertune.errors import UserError
from clustertune.plan.machine import Link
from clustertune.plan.predict import make_plan
from clustertune.resolve.resolve import resolve
from tests.plan.world import LLAMA_70B, LORA_SECTION, machine, write_cluster, write_recipe
from tests.recipe.conftest import check_form


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """8 billion parameters on one node."""
    return write_recipe(tmp_path / "some-recipe", train={"max_steps": 100})


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two nodes of 8 H100."""
    return write_cluster(tmp_path / "hgx.yaml")


def call(*arguments: object) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # so that the command keeps its name where it is the only one
    app.command("plan")(command.plan)
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The document of a plan."""
    done = call(*arguments, "--json")
    assert done.exit_code == code, done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(*arguments: object) -> str:
    """All problems of a call that must be refused, each in readable form."""
    done = call(*arguments)
    assert isinstance(done.exception, UserError), (done.exception, done.output)
    check_form(done.exception)
    return str(done.exception)


def test_recipes_and_clusters_by_path(recipe: Path, cluster: Path) -> None:
    """A run that is not in the repository can be described and planned, with overrides."""
    found = answer(recipe, "--cluster", cluster)
    assert found["fits"] and found["parameters"] == 8_030_261_248 and found["steps"] == 100
    two = answer(recipe, "slurm.nodes=2", "--cluster", cluster)
    assert two["gpu_hours"] == pytest.approx(two["hours"] * 16)
    assert two["tokens_per_s"] > found["tokens_per_s"]


def test_clusters_that_cannot_be_planned_on(recipe: Path, tmp_path: Path) -> None:
    """One node needs no network, two without one are refused; what a cluster file says wrong, tests/cluster has."""
    alone = write_cluster(tmp_path / "alone.yaml", nodes=1, network={"kind": "none", "gbit": None, "ports": None})
    assert answer(recipe, "--cluster", alone)["fits"]
    none = write_cluster(tmp_path / "none.yaml", gpus=0, gpu=None, interconnect=None)
    assert "none.yaml" in (text := refused(recipe, "--cluster", none)) and "a plan is for training on GPUs" in text
    assert "no-such-cluster" in refused(recipe, "--cluster", "no-such-cluster")
    unknown = machine(inter=Link(0.0, 0.0, "nominal", "no bandwidth between nodes is stated", 0.0))
    with pytest.raises(UserError, match="says nothing of a network between nodes"):
        make_plan(resolve(recipe, ["slurm.nodes=2"]), unknown)
    assert make_plan(resolve(recipe), unknown).step.seconds > 0


def test_what_does_not_fit_ends_with_what_would(tmp_path: Path, cluster: Path) -> None:
    """Exit code 2, the smallest change first; each with overrides that make it fit, or that the cluster is too small."""
    recipe = write_recipe(tmp_path / "large", lora=LORA_SECTION, model=LLAMA_70B, train={"max_length": 6144, "max_steps": 9,
                          "per_device_train_batch_size": 4}, activation_checkpointing={"ratio": 0})  # fmt: skip
    body = answer(recipe, "--cluster", cluster, code=2)
    assert not body["fits"] and "does not fit" in body["bottleneck"] and body["remedies"]
    assert body["remedies"][0]["change"].startswith("recompute")
    for remedy in body["remedies"]:
        if remedy["overrides"] is not None:
            again = answer(recipe, *remedy["overrides"], "--cluster", cluster)
            assert again["fits"] and again["step_s"] == pytest.approx(remedy["step_s"])
    done = call(recipe, "--cluster", cluster)
    assert done.exit_code == 2 and "It would fit with one of these" in done.output


def write_run(folder: Path, recipe: Path, seconds: list[float]) -> Path:
    folder.mkdir()
    resolved = resolve(recipe)
    (folder / "run.json").write_text(json.dumps({"recipe": resolved.as_dict(), "fingerprint": resolved.fingerprint()}))
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0, "attempt": 1}]
    lines += [{"event": "step", "step": n, "attempt": 1, "seconds": s} for n, s in enumerate(seconds, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_calibration_from_a_run_folder(tmp_path: Path, recipe: Path, cluster: Path) -> None:
    """20 steps suffice, whose first two do not count; the next plan is what was measured, and says that it is calibrated."""
    before = answer(recipe, "--cluster", cluster)["step_s"]
    slow = 1.2 * before
    done = answer("--calibrate", write_run(tmp_path / "run", recipe, [9 * slow, 5 * slow] + [slow] * 18), "--cluster", cluster)
    assert set(done["constants"]) == {"compute_scale"} and "inter_scale" in done["not_identified"]
    (tmp_path / "hgx.calibration.json").unlink()
    shown = call("--calibrate", tmp_path / "run", "--cluster", cluster).output
    assert "compute scale: 1." in shown and "left as they were: intra scale, inter scale" in shown
    (calibrated,) = done["runs"]
    assert (calibrated["measured_s"], calibrated["before_s"]) == pytest.approx((slow, before))
    after = answer(recipe, "--cluster", cluster)
    assert after["calibrated"] == ["compute_scale"]
    assert after["step_s"] == pytest.approx(slow, rel=0.05) == pytest.approx(calibrated["after_s"], rel=0.05)


def test_the_commands_of_the_documents() -> None:
    """Each ends with 0 and says what docs/plan.md and README.md promise."""
    own = ["llama405b-oasst2", "--cluster", "rno-rtxpro6000"]
    for words, *promised in (
        (own, "fits", "The network between nodes"), ([*own, "--why", "memory"], "parameters x 2 B / 16 ranks"),
        (["--compare", *own, "tiny-oasst2"], "tiny-oasst2"),
    ):  # fmt: skip
        done = call(*words)
        assert done.exit_code == 0 and all(text in done.output for text in promised), done.output


def test_a_calibration_of_another_cluster_is_refused(tmp_path: Path, recipe: Path, cluster: Path) -> None:
    """Whoever copies a cluster file with all that lies beside it would plan with another machine's factors."""
    answer("--calibrate", write_run(tmp_path / "run", recipe, [5.0] * 20), "--cluster", cluster)
    other = write_cluster(tmp_path / "other.yaml")
    (tmp_path / "hgx.calibration.json").rename(tmp_path / "other.calibration.json")
    assert "hgx, while the plan is for other" in refused(recipe, "--cluster", other)
