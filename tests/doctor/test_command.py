"""``clustertune doctor`` as a person calls it: this machine, a recipe, the list of rules, a job, and what is wrong to ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.cli import app
from clustertune.doctor.recipe_findings import all_rules
from clustertune.host.facts import HostFacts, from_dict
from tests.command import REPO, run
from tests.doctor.machine_cases import GOOD, patched


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> HostFacts:
    """Facts of a good node instead of this machine's; tests change them."""
    facts = from_dict(patched(GOOD, {"place": "here", "environment": {"HOME": "/users/alice"}}))

    def collect(place: str | None, *_: object, **__: object) -> HostFacts:
        facts.place = place or facts.place
        return facts

    monkeypatch.setattr("clustertune.host.collect.collect", collect)
    return facts


def call(*words: str) -> int:
    """The command in this process. Returns its exit code."""
    try:
        return int(app(["doctor", *words], standalone_mode=False) or 0)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_this_machine() -> None:
    """For real: whatever it is, it is reported, and the exit code says the worst of it."""
    done = run("doctor")
    assert done.code in (0, 1, 2) and "passed" in done.out.splitlines()[-1] and done.err == ""
    document = run("doctor", "--json").json
    worst = {0: "pass", 1: "warn", 2: "fail"}[done.code]
    assert document["verdict"] == worst and document["recipe"] is None and len(document["findings"]) > 20


def test_a_recipe_on_a_cluster() -> None:
    """This machine is not one of the cluster's: only the recipe is judged, and a sentence says so. --here judges both."""
    done = run("doctor", "recipes/llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--json")
    found = {item["rule"]: item for item in done.json["findings"]}
    assert done.json["cluster"] == "rno-rtxpro6000" and done.code in (1, 2)
    assert "saves-seldom" in found and "kernel" not in found and done.json["place"] is None
    assert "not in rno-rtxpro6000" in run("doctor", "--cluster", "rno-rtxpro6000").out
    assert run("doctor", "--cluster", "rno-rtxpro6000").code == 0
    found = {item["rule"] for item in run("doctor", "--cluster", "rno-rtxpro6000", "--here", "--json").json["findings"]}
    assert "kernel" in found and not {"interface", "mount-missing", "node-names", "gpu-count"} & found


def test_the_rules_are_listed(tmp_path: Path) -> None:
    """As lines, as JSON, and as the page of the documents."""
    rules = [rule.id for rule in all_rules()]
    assert [line.split()[0] for line in run("doctor", "--list").out.splitlines()] == rules
    assert [rule["id"] for rule in run("doctor", "--list", "--json").json["rules"]] == rules
    page = tmp_path / "page.md"
    assert run("doctor", "--list", "--out", page).code == 0 and page.read_text().count("\n| `") == len(rules)
    assert run("doctor", "--list", "--out", "/nonexistent/page.md").code == 2


def test_the_job_of_the_reference_cluster() -> None:
    """Script and command, without a Slurm: whole nodes, all of them."""
    done = run("doctor", "--cluster", "rno-rtxpro6000", "--submit", "--dry-run")
    assert done.code == 0 and "#SBATCH --nodes=" in done.out and "#SBATCH --job-name=doctor\n" in done.out
    body = (REPO / "ops/doctor/doctor.sbatch").read_text().partition("set -euo pipefail")[2]
    assert body in done.out
    assert done.out.splitlines()[-1].endswith("doctor.sbatch --cluster rno-rtxpro6000 --seconds=30")


def test_faults_and_what_is_ignored(seen: HostFacts, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes of the worst that counts; worst first; --all shows what is well."""
    assert call() == 0 and capsys.readouterr().out.count("\n") == 1
    seen.nofile, seen.gpus[0].mig = 1024, True
    assert call() == 2
    output = capsys.readouterr().out
    assert output.startswith("FAIL    gpu-mig: gpu01: ") and output.index("gpu-mig") < output.index("open-files")
    assert call("--ignore", "gpu-mig") == 1 and "ignored: gpu-mig" in capsys.readouterr().out
    assert call("check", "--ignore", "gpu-mig", "--ignore", "open-files") == 0
    assert call("--all") == 2 and "PASS    kernel: gpu01" in capsys.readouterr().out


def test_what_the_cluster_file_says(seen: HostFacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine of the file is held against it, and the file's rules are left out."""
    path = tmp_path / "lab.yaml"
    text = """name: lab
nodes:
  - {name: head, address: 10.0.0.1, roles: [login, slurmctld]}
  - {name: gpu01, address: 10.0.0.11, roles: [compute]}
compute: {gpus: 8, gpu: h100-sxm, interconnect: nvlink4, cores: 96, threads: 192, memory_gb: 2000}
network: {interface: bond7, kind: infiniband, gbit: 400}
slurm: {partition: gpu}
"""
    path.write_text(text)
    assert call("--cluster", str(path), "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [item["rule"] for item in document["findings"] if item["status"] == "warn"] == ["interface"]
    path.write_text(text + "doctor: {ignore: [interface]}\n")
    assert call("--cluster", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["ignored"] == ["interface"]
    seen.hostname, seen.gpus, seen.nvidia_devices = "elsewhere", [], 0
    assert call("--cluster", str(path)) == 0, "a machine that is not one of the cluster's"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ignore", "gpu-migg"], "there is no rule 'gpu-migg'"),
        (["--place", "moon"], "'moon' is not a place"),
        (["--nodes", "2"], "is read only with --submit"),
        (["--time", "5"], "is read only with --submit"),
        (["--submit", "--here"], "a job looks at its own nodes"),
        (["--submit", "--cluster", "local"], "has no Slurm"),
        (["--dry-run"], "--dry-run needs --submit"),
        (["--run-dir", "runs/x"], "a recipe is missing"),
        (["--cluster", "nonsense"], "there is no cluster 'nonsense'"),
        (["--seconds", "0"], "--seconds"),
        (["--what"], "--what"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(words: list[str], message: str) -> None:
    """Words and what to do instead, exit code 2."""
    done = run("doctor", *words)
    assert done.code == 2 and message in done.err and done.out == ""


def test_a_recipe_that_is_refused_is_a_finding(seen: HostFacts, capsys: pytest.CaptureFixture[str]) -> None:
    """What resolve refuses stands in the report, beside what is wrong with the machine."""
    assert call("no-such-recipe") == 2
    assert "FAIL    recipe-refused: " in capsys.readouterr().out
    assert call("recipes/tiny-oasst2", "train.nonsense=1") == 2
    assert "recipe-refused" in capsys.readouterr().out


def test_help_names_both() -> None:
    """The lint stays where it was."""
    done = run("doctor", "--help")
    assert done.code == 0 and "sbatch" in done.out and "check" in done.out
    assert run("doctor", "check", "--help").code == 0 and run("doctor", "sbatch", "--help").code == 0
