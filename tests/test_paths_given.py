"""Every option that writes a path leaves alone what its command did not write; and a run folder is its user's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clustertune import chain
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from tests.command import run

RECORDED = Path(__file__).parent / "report" / "recorded"
COMMANDS = {
    "report": ["report", "RUN", "--out"],
    "compare": ["compare", "RUN", "RUN2", "--out"],
    "watch": ["watch", "RUN", "--once", "--openmetrics"],
    "sky": ["sky", "llama1b-oasst2", "--gpu", "H100", "--out"],
    "doctor": ["doctor", "check", "--list", "--out"],
}
"""Those that write a file; ``report`` also writes the same name with .json."""
FOLDERS = {
    "prepare": ["prepare", "tiny-oasst2", "--input", str(Path("recipes/tiny-oasst2/conversations.jsonl").absolute()), "--out"],
    "stage": ["stage", "tiny-oasst2", "--to"],
    "new": ["new", "--model", "Qwen/Qwen2.5-7B-Instruct", "--out"],
    "sweep": ["sweep", "tiny-oasst2", "train.learning_rate=1e-4,2e-4", "--sweep-dir"],
    "run": ["run", "tiny-oasst2", "--run-dir"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, below a folder whose group cannot write."""
    for name in ("RUN", "RUN2"):
        shutil.copytree(RECORDED, tmp_path / name)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_another_command_is_left_alone(command: str, folder: Path) -> None:
    words = [str(folder / word) if word.startswith("RUN") else word for word in COMMANDS[command]]
    (folder / "notes.html").write_text("mine")
    (folder / "link.html").symlink_to(folder / "notes.html")
    before, pictures = contents(folder), command in ("report", "compare")  # matplotlib
    for name in ("RUN/run.json", "link.html", *(["RUN/run.html"] if command == "report" else [])):
        done = run(*words, folder / name, stack=pictures)
        assert done.code != 0 and "error" in done.err, (name, done.err)
        assert contents(folder) == before, name
    for _ in range(2):  # its own it replaces
        done = run(*words, folder / "own.html", stack=pictures)
        assert done.code == 0 and (folder / "own.html").stat().st_size, done.err


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_of_something_else_is_left_alone(command: str, folder: Path) -> None:
    (folder / "other").mkdir(mode=0o755)
    (folder / "other" / "notes.txt").write_text("mine")
    before = contents(folder)
    done = run(*FOLDERS[command], folder / "other", cwd=folder)
    assert done.code != 0 and contents(folder) == before, done.err


@pytest.mark.parametrize("part", ["", "telemetry", "metrics.jsonl"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_run_folder_that_others_can_write_to_is_refused(part: str, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    if part == "telemetry":
        (path / part).mkdir()
    elif part:
        (path / part).write_text("")
    resolved = resolve("tiny-oasst2")
    (path / "run.json").write_text(json.dumps({"fingerprint": resolved.fingerprint(), "recipe": resolved.as_dict()}))
    chain.check_folder(resolved, path)
    (path / part).chmod(mode)
    with pytest.raises(UserError, match="others can write") as refused:
        chain.check_folder(resolved, path)
    assert str(path / part).rstrip("/") in str(refused.value) and (path / part).stat().st_mode & 0o777 == mode
