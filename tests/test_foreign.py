"""Foreign files and names: pipes, devices, empty lines and patterns without end, and what steers a terminal."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest

from clustertune import console, secrets
from clustertune.cli.app import main
from clustertune.data.rows import MAX_EMPTY_LINES
from clustertune.errors import UserError
from clustertune.launch import agent
from clustertune.manifest import read_json
from clustertune.tensorfile import read_header
from tests.data.conftest import run as run  # noqa: PLC0414 - the fixture


def test_a_pipe_or_a_device_is_no_input(run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", Path("/dev/zero")):
        with pytest.raises(UserError, match="pipe"):
            run(path=path, format="messages")
    (tmp_path / "config.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="plain file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="plain file"):
        read_header(tmp_path / "model.safetensors")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="MiB"):
        read_json(tmp_path / "large.json")


def test_a_gzip_of_nothing_but_line_ends_is_refused(run) -> None:
    rows = b'{"text": "a"}\n' + b"\n" * (MAX_EMPTY_LINES // 2)
    assert len(run(gzip.compress(rows * 3), ".jsonl.gz", format="text").conversations) == 3
    with pytest.raises(UserError, match="empty lines"):
        run(gzip.compress(rows + b" \n" * (MAX_EMPTY_LINES + 1)), ".jsonl.gz", format="text")


def test_nothing_printed_steers_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    monkeypatch.setattr(console.stderr, "_file", out)
    name = "run\x1b]0;x\x07\x1b[2J\u202etxt"
    table = Table("run")
    table.add_row(name)
    for shown in (name, Text(name), table):
        console.stderr.print(shown, markup=False)
    console.say(name)
    assert not {"\x1b", "\x07", "\u202e"} & set(out.getvalue())
    console.say("recipe.yaml:100: [bold] is no list")
    assert "recipe.yaml:100: [bold] is" in out.getvalue(), "a line's number is no emoji, and brackets are no markup"
    assert out.getvalue().count("run") == 5  # the column and its row, which is as wide as what can be seen of the name


def test_programs_beside_a_run_get_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in secrets.SECRET:
        monkeypatch.setenv(name, "x")
    seen: list[dict[str, str]] = []

    class Child:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            seen.append(env)

        def terminate(self) -> None: ...
        def wait(self, _seconds: float) -> None: ...
        def kill(self) -> None: ...

    monkeypatch.setattr(agent.subprocess, "Popen", Child)
    with agent.measured(tmp_path):
        assert len(seen) == 2, "what measures, and what keeps the live page"
        assert all("PATH" in env and not set(secrets.SECRET) & env.keys() for env in seen)


@pytest.mark.parametrize(("umask", "expected"), [(0, 0o002), (0o077, 0o077), (0o022, 0o022)])
def test_not_every_user_may_write_to_what_a_command_makes(
    umask: int, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(umask)
    try:
        monkeypatch.setattr("sys.argv", ["clustertune", "--version"])
        assert main() == 0
        assert os.umask(0o077) == expected
    finally:
        os.umask(before)
