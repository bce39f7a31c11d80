"""The doctor as a person calls it, on a bare machine too; what a report makes of findings; how facts come over srun."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.check import rule
from clustertune.check.ignored import ignored
from clustertune.check.rule import PASS, UNKNOWN, WARN, Finding, Rule, checks, finding
from clustertune.cli.app import app
from clustertune.cluster.load import load_cluster
from clustertune.doctor import recipe_rules
from clustertune.host import collect
from clustertune.host.facts import HostFacts, from_dict
from tests.command import REPO, run
from tests.doctor.machine_cases import GOOD, patched
from tests.refusal import problems


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
    assert document["verdict"] == worst and document["recipe"] is None and len(document["findings"]) > 12


def test_a_recipe_on_a_cluster() -> None:
    """This machine is not one of the cluster's: only the recipe is judged, and a sentence says so. --here judges both."""
    done = run("doctor", "recipes/llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--json")
    found = {item["rule"]: item for item in done.json["findings"]}
    assert done.json["cluster"] == "rno-rtxpro6000" and done.code in (1, 2)
    assert "checkpoint-interval-too-long" in found and "clock" not in found and done.json["place"] is None
    skipped = run("doctor", "--cluster", "rno-rtxpro6000")
    assert "not in rno-rtxpro6000" in skipped.out and skipped.code == 0
    found = {item["rule"] for item in run("doctor", "--cluster", "rno-rtxpro6000", "--here", "--json").json["findings"]}
    assert "clock" in found and not {"interface", "mount-missing", "node-names", "gpu-count"} & found


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
    assert call("--all") == 2 and "PASS    clock: gpu01" in capsys.readouterr().out


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


# --- one machine's facts -----------------------------------------------------------------------------------------------


# --- reports, the wire and the page ------------------------------------------------------------------------------------

A = Rule("rule-a", "a", "why a", "https://example.org/a")
B = Rule("rule-b", "b", "why b", "https://example.org/b")


def test_the_page_of_the_documents_is_current() -> None:
    """It is written from the rules: clustertune doctor --list --out docs/doctor.md."""
    assert (REPO / "docs" / "doctor.md").read_text(encoding="utf-8") == recipe_rules.render()


def test_a_rule_that_raises_is_told_and_the_others_go_on() -> None:
    """Facts that nobody foresaw must not cost a job its other rules."""

    def broken(_: Any) -> Iterator[Finding]:
        yield finding(A, PASS, "first")
        raise KeyError("x")

    def whole(_: Any) -> Iterator[Finding]:
        yield finding(B, WARN, "second", "fix")

    found = list(rule.run([broken, whole], None, "node1"))
    assert [(item.rule, item.status) for item in found] == [("rule-a", PASS), ("rule-broken", UNKNOWN), ("rule-b", WARN)]
    assert "KeyError: 'x'" in found[1].found and found[1].where == "node1"


# --- the wire ----------------------------------------------------------------------------------------------------------


def test_damaged_facts_are_a_fault_of_the_node() -> None:
    """Never an exception, never half of the facts: lines that are lost, cut or changed, what are no facts, and what is huge."""
    first, *rest = lines = collect.encode(from_dict(GOOD))
    damaged = [[first, *rest[1:]], [first[:-7], *rest], [first.replace(first.split()[3][:9], first.split()[3][1:10]), *rest]]
    for text in (b"[1]", b" " * (collect.MAX_BYTES + 10)):
        packed = base64.b64encode(zlib.compress(text)).decode()
        damaged.append([f"clustertune-facts gpu01 1/1 {packed}"])
    for found in damaged:
        facts, faults, _ = collect.decode(found)
        assert facts == {} and set(faults) == {"gpu01"} and found != lines


# --- the cluster file --------------------------------------------------------------------------------------------------


def test_a_cluster_file_may_leave_rules_out(tmp_path: Path) -> None:
    """Any rule of any command, and only rules that there are; a misspelt one is reported with the right one."""
    text = (REPO / "ops" / "clusters" / "rno-rtxpro6000.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    every = [one.rule.id for one in checks()]
    for names in (every[:90], every[90:]):
        path.write_text(text.replace("name: rno-rtxpro6000", "name: mine") + f"\ndoctor: {{ignore: [{', '.join(names)}]}}\n")
        assert ignored(load_cluster(str(path))) == tuple(names)
    path.write_text(re.sub(r"ignore: .*", "ignore: [gpu-presistence, mtu, nonsense]}", path.read_text()))
    first, second = problems(ignored, load_cluster(str(path)))
    assert "'gpu-presistence'" in first.message and "'nonsense'" in second.message
    assert (first.key, second.key) == ("doctor.ignore",) * 2 and "gpu-persistence" in first.fix and str(path) in first.file
