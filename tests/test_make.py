"""The Makefile: its list of targets, and that no value a user gives is ever run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tree import REPO

MAKEFILE = (REPO / "Makefile").read_text()
TAKEN = sorted(set(re.findall(r"\$\((?:value |call plain,)(\w+)\)", MAKEFILE)))
"""The variables that users give to targets."""
HOSTILE = (
    "$(shell touch PWNED)", "a\n$(shell touch PWNED)", "'; touch PWNED; '", "`touch PWNED`", "$$(touch PWNED)",
    "a'$(shell touch PWNED)'", "x\ntouch PWNED", "a b", "a#b", "-x", "$(info $(shell touch PWNED))", "é", '"',
)  # fmt: skip


def make(*arguments: str, makefile: Path = REPO / "Makefile", **env: str) -> subprocess.CompletedProcess[str]:
    """``make -n``: nothing of a target is run, what the Makefile expands is."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "-f", str(makefile), *arguments],
        cwd=REPO, env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_alone_it_lists_every_target() -> None:
    done = make()
    targets = re.findall(r"^([a-z][a-z-]*):.*## ", MAKEFILE, re.MULTILINE)
    assert done.returncode == 0 and re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE) == targets
    assert {"demo", "test", "eval-ifeval", "help"} <= set(targets)
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("name", "value"), [*(("RECIPE", value) for value in HOSTILE), *((name, HOSTILE[0]) for name in TAKEN)]
)
def test_a_hostile_value_is_refused_and_not_run(name: str, value: str, tmp_path: Path) -> None:
    """As an argument and from the environment; every value that a target takes is guarded."""
    value = value.replace("PWNED", str(tmp_path / "pwned"))
    for done in (make("-n", "help", f"{name}={value}"), make("-n", "help", **{name: value})):
        assert done.returncode == 2 and f"{name} must be a plain path" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_values_reach_the_command_as_one_argument() -> None:
    done = make("-n", "-o", "setup", "-o", ".venv/ready", "eval-ifeval", "MODEL=/m/x=1%@:+", "IFEVAL_DATA=d.jsonl")
    assert done.returncode == 0 and done.stdout == ".venv/bin/clustertune eval '/m/x=1%@:+' --data 'd.jsonl'\n"


def test_what_a_user_leaves_out_has_its_default() -> None:
    """Also where the variable is in the environment, empty."""
    for env in ({}, {"RECIPE": "", "TORCH_BUILD": "", "CPU_INDEX": ""}):
        assert make("-n", "-o", "setup", "run", **env).stdout == ".venv/bin/clustertune run 'recipes/tiny-oasst2'\n"
        said = make("-n", "-W", "setup.py", "setup", **env).stdout
        assert "torch for cpu " in said or "torch for cuda " in said
    done = make("-n", "-p", "help").stdout
    assert "\nCPU_INDEX = https://" in done
