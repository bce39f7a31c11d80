"""Each rule on a script that has the mistake and on one, nearly the same, that has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clustertune.check.rule import SCRIPT, checks
from clustertune.doctor.sbatch import lint

GOOD = """#!/usr/bin/env bash
#SBATCH --job-name=tune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""
"""A header and a rendezvous without fault: the cases below add to it."""

CASES_FILE = Path(__file__).with_name("cases.txt")


def script(text: str) -> str:
    """A case's script: its header put in, and a made-up key, which no file of the tree may hold."""
    first, _, rest = text.partition("\n")
    if first.startswith("GOOD"):
        header = GOOD
        for old, new in re.findall(r"\|(.*?)\|(.*?)\|", first):
            assert header.count(old) == 1
            header = header.replace(old, new)
        text = header + rest
    return text.replace("hf_KEY", "hf_" + "Qx7" * 10)


def read_cases() -> list[tuple[str, str, str]]:
    """Rule, script with the mistake, script without."""
    blocks = re.split(r"^=== ", CASES_FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = []
    for block in blocks:
        rule, _, body = block.partition("\n")
        bad, good = body.split("---\n")
        found.append((rule, script(bad), script(good)))
    return found


CASES = read_cases()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where sbatch would be called: it has a folder for logs."""
    (tmp_path / "logs" / "run").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("rule", "bad", "good"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_a_rule_finds_its_mistake_and_nothing_else(rule: str, bad: str, good: str, checkout: Path) -> None:
    """At its line, with a remedy and a link; and a script without it gives no finding of any rule."""
    line = next(number for number, row in enumerate(bad.split("\n"), 1) if "<here>" in row)
    found = lint(bad, "job.sbatch", checkout)
    assert [(f.rule, int(f.where)) for f in found if f.rule == rule] == [(rule, line)]
    assert all(f.found and f.fix and f.link.startswith("https://") for f in found)
    assert [(f.rule, int(f.where), f.found) for f in lint(good, "job.sbatch", checkout)] == []


def test_every_rule_has_a_case() -> None:
    """A rule without one may never find anything, or everything."""
    assert {case[0] for case in CASES} | {"crlf", "bom"} == {one.rule.id for one in checks(SCRIPT)}


def test_line_ends_and_marks_of_windows(checkout: Path) -> None:
    """They are found, and hide nothing else in the file."""
    found = lint("\ufeff" + GOOD.replace("\n", "\r\n"), "job.sbatch", checkout)
    assert [(f.rule, int(f.where)) for f in found] == [("bom", 1), ("crlf", 1)]
    assert lint(GOOD, "job.sbatch", checkout) == []


def test_a_key_is_never_repeated(checkout: Path) -> None:
    """A finding is printed into logs and tickets."""
    key = "hf_" + "Zk9" * 10
    script = GOOD + f"export HF_TOKEN={key}\nsrun a --hub_token={key}\necho {key}\n#SBATCH --comment={key}\n"
    found = lint(script, "job.sbatch", checkout)
    assert {int(f.where) for f in found if f.rule == "secret-in-file"} == {11, 12, 13, 14}
    assert key not in "".join(f.found + f.fix for f in found)
