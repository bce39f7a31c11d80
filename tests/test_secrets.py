"""Tokens: a strict reader that repeats no value, and planted ones that nothing a run leaves may hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune import secrets
from clustertune.errors import UserError
from clustertune.testbed.inside import descendants
from tests.command import NO_NETWORK, REPO

CANARY = "c4nary0123456789abcdef0123456789abcdef01"


def write(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / ".env"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that only its owner may write in."""
    tmp_path.chmod(0o755)
    return tmp_path


def test_what_is_read(closed: Path) -> None:
    """Values are taken as they stand: nothing is expanded, executed or cut at a sign."""
    text = (
        "# tokens\n\nHF_TOKEN=hf_Ab-1.2+3/4=\nWANDB_API_KEY='a b$(id)`id`#c'\n  # more\n"
        'WANDB_ENTITY="my team"\nEDITOR=vi\nhttps_proxy=http://proxy:3128\n'
    )
    notes: list[str] = []
    assert secrets.read_env(write(closed, text), notes.append) == {
        "HF_TOKEN": "hf_Ab-1.2+3/4=",
        "WANDB_API_KEY": "a b$(id)`id`#c",
        "WANDB_ENTITY": "my team",
        "https_proxy": "http://proxy:3128",
    }
    assert len(notes) == 1 and "does not use these keys: EDITOR" in notes[0]
    assert secrets.read_env(closed / "absent") == {} and REPO / ".env" == secrets.DEFAULT
    (closed / ".env").chmod(0o400)
    assert "HF_TOKEN" in secrets.read_env(closed / ".env", notes.append)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"export HF_TOKEN={CANARY}", "bad name"),
        (CANARY, "is not an assignment"),
        (f"{CANARY}=", "bad name"),
        (f"HF_TOKEN ={CANARY}", "bad name"),
        (f"HF_TOKEN={CANARY} # mine", "HF_TOKEN has several words"),
        (f"HF_TOKEN='{CANARY}", "quotes do not close"),
        (f"HF_TOKEN='{CANARY}' x", "HF_TOKEN has several words"),
        (f"HF_TOKEN={CANARY}\x1b", "cannot be printed"),
        ("HF_TOKEN=", "HF_TOKEN has no value"),
        ("HF_TOKEN=''", "HF_TOKEN has no value"),
        (f"HF_TOKEN={CANARY}\nHF_TOKEN={CANARY}", "HF_TOKEN is set for the second time"),
        (f"WANDB_ENTITY=x\r\nHF_TOKEN={CANARY}\r", "cannot be printed"),
        (b"\xff" + CANARY.encode(), "is not UTF-8"),
        ("\N{ZERO WIDTH NO-BREAK SPACE}HF_TOKEN=" + CANARY, "bad name"),
        ("x" * 70_000, "larger than 64 KiB"),
    ],
)
def test_what_is_refused_by_line_and_never_by_value(closed: Path, line: str | bytes, message: str) -> None:
    """A line that does not parse may itself be a token, pasted without its name."""
    data = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(UserError, match=message) as caught:
        secrets.read_env(write(closed, b"# one\n" + data + b"\n"))
    assert CANARY not in str(caught.value) and CANARY not in str(caught.value.as_dict())
    assert "larger" in message or f".env:{3 if 'second' in message else 2}" in str(caught.value)


def test_everything_wrong_is_told_at_once(closed: Path) -> None:
    with pytest.raises(UserError) as caught:
        secrets.read_env(write(closed, "a b\nHF_TOKEN=x y\nexport A=b\n"))
    assert [problem.file for problem in caught.value.problems] == [f"{closed}/.env:{line}" for line in (1, 2, 3)]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700])
def test_a_file_that_others_may_read_is_refused(closed: Path, mode: int) -> None:
    with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod 600"):
        secrets.read_env(write(closed, f"HF_TOKEN={CANARY}\n", mode))


def test_only_a_regular_file_of_one_s_own_where_others_may_not_write(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would block, a link may point to what somebody else can change."""
    path = write(closed, f"HF_TOKEN={CANARY}\n")
    (closed / "link").symlink_to(path)
    os.mkfifo(closed / "pipe", 0o600)
    for name, message in (("link", "is a link"), ("pipe", "not a regular file"), (".", "not a regular file")):
        with pytest.raises(UserError, match=message):
            secrets.read_env(closed / name)
    for mode, private, taken in ((0o777, False, False), (0o775, False, False), (0o775, True, True), (0o1777, True, True)):
        monkeypatch.setattr(secrets, "is_private_group", lambda group, private=private: private)
        closed.chmod(mode)
        with contextlib.nullcontext() if taken else pytest.raises(UserError, match="others may write in its folder"):
            assert secrets.read_env(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to user"):
        secrets.read_env(path)


def test_the_environment_goes_first_and_is_cleared(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(closed, f"HF_TOKEN={CANARY}\nWANDB_API_KEY=two\nWANDB_ENTITY=team\n")
    monkeypatch.setattr(os, "environ", {"HF_TOKEN": "given"})
    monkeypatch.setattr(secrets, "DEFAULT", path)
    secrets.apply_env()
    assert os.environ == {"HF_TOKEN": "given", "WANDB_API_KEY": "two", "WANDB_ENTITY": "team"}
    assert secrets.drop() == {"HF_TOKEN": "given", "WANDB_API_KEY": "two"} and os.environ == {"WANDB_ENTITY": "team"}


@given(value=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=40))
def test_any_printable_value_passes_in_quotes_as_it_is(value: str) -> None:
    quote = '"' if "'" in value else "'"
    if quote in value or (quote == '"' and set(value) & set("$`\\")) or not value.isprintable():
        return
    values, _, problems = secrets.parse(f"HF_TOKEN={quote}{value}{quote}\n".encode(), "x")
    assert problems == [] and values == {"HF_TOKEN": value}


@given(data=st.binary(max_size=120))
def test_nothing_that_may_stand_in_a_file_ends_otherwise(data: bytes) -> None:
    values, unknown, problems = secrets.parse(data, "x")
    assert set(values) <= set(secrets.KNOWN) and all(values.values())
    assert all(name.isascii() for name in unknown) and all(
        problem.file.startswith("x:") for problem in problems if problem.file
    )


def held_by(pid: int) -> bytes:
    """Arguments and first environment of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("before", [None, "own"])
def test_a_token_that_is_lent_is_taken_back(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """Also where what it was lent to fails; a value that was there before is there again."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if before:
        monkeypatch.setenv("HF_TOKEN", before)
    with pytest.raises(OSError, match="no answer"), secrets.lent({"HF_TOKEN": "lent"}):
        assert os.environ.get("HF_TOKEN") == "lent"
        raise OSError("no answer")
    assert os.environ.get("HF_TOKEN") == before


@pytest.mark.jobs
@pytest.mark.timeout(600)
def test_planted_tokens_are_in_nothing_that_a_run_leaves(tmp_path: Path) -> None:
    """Files of the run, of the home folder, W&B's own, and what every process of it shows in /proc. There is no network."""
    tree, home, run_dir = tmp_path / "tree", tmp_path / "home", tmp_path / "run"
    for name in ("clustertune", "recipes", "containers", "eval"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.sif"))
    shutil.copy(REPO / "pyproject.toml", tree)
    home.mkdir()
    (home / ".netrc").write_text("machine example.org login a password b\n")
    tokens = {"HF_TOKEN": f"hf_{CANARY}", "WANDB_API_KEY": CANARY[::-1]}
    tree.chmod(0o755)
    write(tree, "".join(f"{key}={value}\n" for key, value in tokens.items()))
    settings = ["train.max_steps=3", "train.max_length=64", "train.save_steps=2", "train.eval_steps=3"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "HF_"))}
    words = ["run", "recipes/tiny-oasst2", "--run-dir", str(run_dir), "--to", "export", *settings]
    seen, ranks = b"", set[int]()
    with subprocess.Popen(
        [*NO_NETWORK, sys.executable, "-m", "clustertune", *words],
        cwd=tree,
        env={**environment, "PYTHONPATH": str(tree), "HOME": str(home), "NETRC": str(home / ".netrc")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        while child.poll() is None:
            for pid in [child.pid, *descendants(child.pid)]:
                held = held_by(pid)
                seen += held
                ranks |= {pid} if b"--attempt" in held else set()
            time.sleep(0.2)
        output = child.communicate(timeout=60)[0]
    assert child.returncode == 0, output
    assert len(ranks) >= 2 and b"wandb-core" in seen, "the processes were not looked at"
    assert "W&B is offline" in output and list(run_dir.glob("wandb/offline-run-*"))
    assert (home / ".netrc").read_text() == "machine example.org login a password b\n"
    files = [path for folder in (run_dir, home, tree) for path in folder.rglob("*") if path.is_file() and path.name != ".env"]
    assert len(files) > 100
    for token in tokens.values():
        assert token.encode() not in seen and token not in output
        assert [path for path in files if token.encode() in path.read_bytes()] == []
