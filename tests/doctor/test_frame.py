"""The registry of rules, what a report makes of findings, how facts come over srun, and the page of the documents."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.check import report as reports
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, Rule, finding
from clustertune.config.cluster import load_cluster
from clustertune.doctor import preflight, recipe_findings, wire
from clustertune.doctor.recipe_findings import all_rules
from clustertune.errors import UserError
from clustertune.host.facts import from_dict
from tests.doctor.machine_cases import GOOD, machine

REPO = Path(__file__).resolve().parents[2]
A = Rule("rule-a", "a", "why a", "https://example.org/a")
B = Rule("rule-b", "b", "why b", "https://example.org/b")


def test_every_rule_is_named_once_and_says_why() -> None:
    """People suppress rules by their ids, and follow their links."""
    rules = all_rules()
    assert len(rules) > 140
    assert [name for name, count in Counter(rule.id for rule in rules).items() if count > 1] == []
    for rule in rules:
        assert re.fullmatch(r"[a-z][a-z0-9.]*(-[a-z0-9.]+)*", rule.id), rule.id
        assert rule.title and rule.why and not rule.why.endswith("."), rule.id
        assert re.fullmatch(r"https://[^\s|]+", rule.link), rule.id


def test_the_page_of_the_documents_is_current() -> None:
    """It is written from the rules: clustertune doctor --list --out docs/doctor.md."""
    assert (REPO / "docs" / "doctor.md").read_text(encoding="utf-8") == recipe_findings.render()


def test_a_rule_that_raises_is_told_and_the_others_go_on() -> None:
    """Facts that nobody foresaw must not cost a job its other rules."""

    def broken(_: Any) -> Iterator[Finding]:
        yield finding(A, PASS, "first")
        raise KeyError("x")

    def whole(_: Any) -> Iterator[Finding]:
        yield finding(B, WARN, "second", "fix")

    found = list(reports.run([broken, whole], None, "node1"))
    assert [(item.rule, item.status) for item in found] == [("rule-a", PASS), ("rule-broken", UNKNOWN), ("rule-b", WARN)]
    assert "KeyError: 'x'" in found[1].found and found[1].where == "node1"


def test_what_could_not_be_read_is_told() -> None:
    """A reader that failed is no silence."""
    found = reports.machine_findings(machine({"unread": ["driver: no answer in time"]}))
    assert [item.found for item in found if item.rule == "rule-broken"] == ["driver: no answer in time"]


def test_ignored_rules_do_not_count() -> None:
    """They are reported in one line, and spoil no verdict."""
    both = [finding(A, FAIL, "bad", "fix"), finding(B, WARN, "odd", "look")]
    report = reports.Report(both, ("rule-a",))
    assert [item.rule for item in report.faults] == ["rule-b"]
    assert report.summary() == "1 warning, 0 passed; ignored: rule-a"
    assert reports.Report(both).summary() == "1 failed, 1 warning, 0 passed"
    assert not any("rule-a" in line for line in report.lines())


def test_alike_findings_of_several_nodes_are_one() -> None:
    """A rack of nodes with one fault gives one paragraph, worst first."""
    many = [finding(A, WARN, "odd", "look", where=f"node{n:02}") for n in range(12)]
    lines = reports.Report([*many, finding(B, FAIL, "bad", "fix", where="node03")]).lines()
    assert lines[0] == "FAIL    rule-b: node03: bad" and lines[4].startswith("WARN    rule-a: node00, node01")
    assert lines[4].endswith("node07 and 4 more: odd") and len(lines) == 8
    assert lines[5:] == ["        why: why a", "        fix: look", "        see: https://example.org/a"]


def test_what_a_machine_says_cannot_steer_the_terminal() -> None:
    """Names of devices and files stand in findings."""
    lines = reports.Report([finding(A, WARN, "name \x1b[2J\x07\x9b31m", "look")]).lines()
    assert not set("".join(lines)) & set("\x1b\x07\x9b")


# --- the wire ----------------------------------------------------------------------------------------------------------


def test_facts_come_through_in_short_lines_in_any_order() -> None:
    """srun takes 1024 bytes for one message, mixes the lines of nodes, and others write between them."""
    one, two = from_dict(GOOD), from_dict({**GOOD, "hostname": "gpu02", "xids": [f"line {n}" for n in range(500)]})
    lines = [*wire.encode(one), *wire.encode(two), "srun: warning: something", ""]
    assert all(len(line) < 900 for line in lines) and len(lines) > 8
    random.Random(0).shuffle(lines)
    facts, faults, others = wire.decode(f"{line}\n" for line in lines)
    assert {name: found.as_dict() for name, found in facts.items()} == {"gpu01": one.as_dict(), "gpu02": two.as_dict()}
    assert faults == {} and others == ["srun: warning: something"]


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "not facts", "huge"])
def test_damaged_facts_are_a_fault_of_the_node(damage: str) -> None:
    """Never an exception, never half of the facts."""
    lines = wire.encode(from_dict(GOOD))
    if damage == "lost":
        lines.pop(1)
    elif damage == "cut":
        lines[0] = lines[0][:-7]
    elif damage == "changed":
        lines[0] = lines[0].replace(lines[0].split()[3], "00000000")
    else:
        import base64

        text = json.dumps([1]).encode() if damage == "not facts" else b" " * (wire.MAX_BYTES + 10)
        packed = base64.b64encode(zlib.compress(text)).decode()
        lines = [f"clustertune-facts gpu01 1/1 {zlib.crc32(text):08x} {packed}"]
    facts, faults, _ = wire.decode(lines)
    assert facts == {} and set(faults) == {"gpu01"}


# --- the cluster file --------------------------------------------------------------------------------------------------


def test_a_cluster_file_may_leave_rules_out(tmp_path: Path) -> None:
    """Only rules that there are; a misspelt one is reported with the right one."""
    text = (REPO / "ops" / "clusters" / "rno-rtxpro6000.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("name: rno-rtxpro6000", "name: mine") + "\ndoctor: {ignore: [mtu, gpu-persistence]}\n")
    assert preflight.ignored(load_cluster(str(path))) == ("mtu", "gpu-persistence")
    path.write_text(path.read_text().replace("[mtu, gpu-persistence]", "[gpu-presistence, mtu, nonsense]"))
    with pytest.raises(UserError) as caught:
        preflight.ignored(load_cluster(str(path)))
    assert [problem.message.split()[-1] for problem in caught.value.problems] == ["'gpu-presistence'", "'nonsense'"]
    assert {problem.key for problem in caught.value.problems} == {"doctor.ignore"}
    assert "gpu-persistence" in str(caught.value.problems[0].fix) and str(path) in str(caught.value.problems[0].file)


def test_one_fact_is_told_once() -> None:
    """What a rule of the recipe has found of a file or folder, the machine's rules do not tell again."""

    def one(rule: str, found: str, where: str = "") -> Finding:
        return Finding(rule, WARN, where, found, "fix", "why", "https://example.org")

    modes = [one("secret-mode", f"/x/{name} has mode 0644") for name in (".env", ".netrc")]
    machine = [*modes, one("hub-cache", "nfs")]
    recipe = [one("env-file", "others can read it", "/x/.env"), one("weights-on-network", "nfs4")]
    assert reports.deduplicate(machine, recipe) == [modes[1], *recipe]
    assert reports.deduplicate(machine, []) == machine
