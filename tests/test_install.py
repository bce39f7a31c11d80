"""The package as users install it: a light base, the rest by extras, and every file that commands read inside."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from clustertune import tree as product_tree
from tests import tree
from tests.test_pins import PINS, normal, read_pins
from tests.tree import REPO

BASE = {"jinja2", "packaging", "psutil", "pydantic", "pyyaml", "rich", "typer"}
"""What plan, show, doctor, submit and the lint of job scripts need."""
FOLDERS = ("recipes/", "ops/", "launch/", "eval/", "containers/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy: building leaves files beside the sources."""
    root = tmp_path_factory.mktemp("wheel")
    for name in tree.files():
        if name.startswith((*FOLDERS, "clustertune/")) or "/" not in name:
            target = root / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((REPO / name).read_bytes())
            target.chmod((REPO / name).stat().st_mode)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(root), str(root / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (found,) = root.glob("clustertune-*.whl")
    return found


def required(wheel: Path) -> dict[str, dict[str, str]]:
    """By extra ("" is the base), package -> version as the wheel asks for them."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)==([^;\s]+)(?:; extra == [\"'](\w+)[\"'])?", line)
        assert match, line
        found.setdefault(match[3] or "", {})[normal(match[1])] = match[2]
    return found


def test_what_a_wheel_asks_for_is_what_versions_env_says(wheel: Path) -> None:
    found, stack = required(wheel), read_pins(tree.texts()["containers/versions.env"], "PY")
    assert set(found[""]) == BASE
    assert found[""] | found["all"] == stack and found["all"] == found["train"] | found["eval"]
    assert found["all"] | found[""] | found["dev"] == PINS
    assert "torch" in found["train"] and "trl" in found["train"] and "lm-eval" not in found["train"]
    assert "lm-eval" in found["eval"] and "torch" in found["eval"] and "trl" not in found["eval"]


def test_a_wheel_carries_every_file_that_commands_read(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        there = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    wanted = [name for name in tree.files() if name.startswith(FOLDERS)]
    assert len(wanted) > 80 and [name for name in wanted if f"clustertune/shipped/{name}" not in there] == []
    data = [name for name in tree.files() if name.startswith("clustertune/")]
    assert [name for name in data if name not in there] == []
    assert there["clustertune/shipped/launch/inside.sh"] & 0o111, "the node starts it as a program"
    assert any(name.endswith("licenses/LICENSE") for name in there) and any(name.endswith("licenses/NOTICE") for name in there)


ORIGINS = {
    "": "clustertune[train]",
    '{"url": "file:///data/a%20b/clustertune", "dir_info": {}}': "/data/a b/clustertune[train]",
    '{"url": "https://example.org/clustertune-0.1.0-py3-none-any.whl", "archive_info": {}}':
        "clustertune[train] @ https://example.org/clustertune-0.1.0-py3-none-any.whl",
    '{"url": "file:///srv/x.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}':
        "clustertune[train] @ git+file:///srv/x.git@12ab",
}  # fmt: skip
"""What installers write about the package's origin (PEP 610), and what pip is given to add an extra."""


@pytest.mark.parametrize("origin", ORIGINS, ids=range(len(ORIGINS)))
def test_an_extra_comes_from_where_the_package_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    """On a public index the name may be another's."""
    (tmp_path / "clustertune-0.1.0.dist-info").mkdir()
    (tmp_path / "clustertune-0.1.0.dist-info" / "METADATA").write_text("Name: clustertune\nVersion: 0.1.0\n")
    if origin:
        (tmp_path / "clustertune-0.1.0.dist-info" / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(product_tree, "IS_INSTALLED", True)
    assert shlex.split(product_tree.how_to_install("train")) == ["pip", "install", ORIGINS[origin]]


COMMANDS = [
    ["--help"], ["--version"], ["doctor", "--list"], ["doctor", "sbatch", "job.sbatch"], ["show-cluster", "rno-rtxpro6000"],
    ["show", "tiny-oasst2"], ["show", "llama405b-oasst2", "--json"],
    ["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000"],
    ["submit", "llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--dry-run", "--verbose"],
    ["submit", "tiny-oasst2", "--tiny", "--cluster", "local", "--dry-run"],
]  # fmt: skip
"""What the base runs from any folder, with the exit code 0."""


@pytest.mark.jobs
def test_the_base_alone_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, with nothing but what the wheel asks for."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True, capture_output=True, timeout=600)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1:00:00\ntrue\n")
    clean = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**clean, "HOME": str(tmp_path)}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python.with_name("clustertune"), *words]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False, timeout=300)

    for words in COMMANDS:
        done = call(*words)
        assert done.returncode == 0, (words, done.stderr)
    (empty / "ops" / "clusters").mkdir(parents=True)
    (empty / "ops" / "clusters" / "mine.yaml").write_text(
        (REPO / "ops" / "clusters" / "dgx-h100.yaml").read_text().replace("name: dgx-h100\n", "name: mine\n", 1)
    )
    (empty / "ops" / "prices.yaml").write_text(
        "date: 2026-11-01\ncurrency: CHF\ngpus:\n  h100-sxm: {on_demand: 1, source: our contract}\n"
    )
    mine = call("plan", "llama8b-lima", "--cluster", "mine")
    assert mine.returncode == 0 and "CHF" in mine.stdout + mine.stderr
    wrong = call("plan", "llama8b-lima", "--cluster", "other")
    assert str(empty / "ops" / "clusters") in wrong.stderr and "mine" in wrong.stderr
    shutil.rmtree(empty / "ops")
    scored = call("eval", ".")
    assert scored.returncode == 2 and "Traceback" not in scored.stderr and f"'{wheel}[eval]'" in scored.stderr
    assert call("run", "tiny-oasst2", "--tiny").returncode == 2 and [path.name for path in empty.iterdir()] == ["job.sbatch"]
