"""The command line as machines and people meet it: words, exit codes, one JSON document, nothing made by a refusal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import __version__, console, manifest
from clustertune.cli import app as cli
from clustertune.cli.stages import eval_folder
from clustertune.errors import ExitCode, Problem, UserError
from tests.command import REPO
from tests.slurm import wait_for

TINY = REPO / "recipes" / "tiny-oasst2"
LONG = "x" * 300
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process, in an empty folder. Returns code, stdout and stderr."""
    working = tmp_path / "here"
    working.mkdir()
    monkeypatch.chdir(working)

    def start(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertune", *map(str, arguments)])
        capsys.readouterr()
        code = cli.main()
        out, err = capsys.readouterr()
        return code, out, err

    return start


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


REFUSED = [
    (), ("bogus",), ("run",), ("run", TINY, "--bogus"), ("run", TINY, "--ranks", "0"), ("run", TINY, "--ranks", "x"),
    ("run", TINY, "--from", "merge", "--to", "train"), ("run", TINY, "--from", "bogus"), ("run", TINY, "--run-dir", ""),
    ("run", TINY, "--run-dir", "/dev/null"), ("run", TINY, "--run-dir", "/dev/null/x"), ("run", TINY, "--run-dir", LONG),
    ("run", TINY, "data.input=/nowhere"), ("run", TINY, f"data.input={LONG}"), ("run", TINY, "train"),
    ("run", TINY, "bogus.key=1"), ("show", LONG), ("show", "\udcff"), ("show", "a\nb"), ("show", TINY, "train.é=1"),
    ("prepare", TINY, "--out", ""), ("prepare", TINY, "--out", "/dev/null/x"), ("prepare", TINY, "--out", LONG),
    ("prepare", TINY, "--out", "-x"), ("prepare", TINY, "--input", "~nobody-here/x"), ("prepare", TINY, "--input", LONG),
    ("prepare", TINY, "data.input=~nobody-here/x"), ("prepare", TINY, f"data.input={LONG}"),
    ("prepare", TINY, "--out", "a\nb"), ("prepare", TINY, "--out", "\udcff"),
    *((command, path) for command in ("export", "eval", "report") for path in ("nowhere", "/dev/null", "/etc", "", LONG)),
    ("merge", "nowhere", "nowhere", "out"), ("merge", "/dev/null", "/etc", "out"), ("merge", "/etc", "/etc", ""),
    ("merge", "/etc", "/etc", "out", "--shard-size", "-1GB"), ("train", "--run-dir", "nowhere", "--attempt", "1"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_said_and_nothing_is_made(call: Call, arguments: tuple[object, ...]) -> None:
    code, out, err = call(*arguments)
    assert code == 2 and out == "" and "Traceback" not in err and 0 < len(err.splitlines()) <= 50
    code, out, _ = call(*arguments, "--json")
    if arguments[:1] not in ((), ("train",)):
        assert code == 2 and strict(out)["exit_code"] == 2 and strict(out)["problems"]
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "override", ["train.eval_steps={a: 1}", "train.max_length=x", "train.global_batch_size=0", "data.format=csv", "expect.x=1"]
)
def test_tiny_hides_no_mistake(call: Call, override: str, tmp_path: Path) -> None:
    """--tiny replaces these values; the recipe is wrong all the same."""
    key, _, value = override.partition("=")
    section, name = key.split(".")
    shutil.copytree(REPO / "recipes", tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "tiny-oasst2" / "recipe.yaml"
    body = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**body, section: {**body.get(section, {}), name: yaml.safe_load(value)}}))
    code, _, err = call("show", recipe.parent, "--tiny")
    assert code == 2 and key in err


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_error(UserError(Problem("bad \x1b[2J" + "y" * 5000, file="a\nerror: b\u202e", fix="x\x07")))
    console.say("new \x1b]0;title\x07 [bold]é[/bold]")
    shown = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\u202e"} & set(shown) and "a\\nerror: b\\u202e" in shown and "[bold]é[/bold]" in shown
    assert max(map(len, shown.splitlines())) < 700


def test_of_many_problems_some_are_shown_and_the_rest_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_error(UserError([Problem(f"bad {number}") for number in range(3 * console.MAX_PROBLEMS)]))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= console.MAX_PROBLEMS + 1 and "more" in lines[-1]


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit_json({"a": float("nan"), "b": [float("inf"), (1.5,)], "c": "é\udcff"})
    out = capsys.readouterr().out
    assert out.isascii() and strict(out) == {"a": None, "b": [None, [1.5]], "c": "é\udcff"}


def test_messages_and_documents_leave_secrets_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A token or a password that a person put in the wrong place; what is none stays."""
    token, address = "hf_" + "a1" * 17, "https://user:hunter2secret@hub.example/x"
    error = UserError(Problem(f"no recipe {address}", file=token, key=token, fix=f"not {address}"))
    console.show_error(error)
    console.say(f"{token} and {address}")
    console.emit_json({"problems": error.as_dict(), "list": [token]})
    out, err = capsys.readouterr()
    for shown in (out, err):
        assert "a1a1" not in shown and "hunter2" not in shown and "hub.example" in shown
    assert strict(out)["list"] == ["(a token, not shown)"]
    for text in ("git@host:path", "http://host/a:b@c", "hf_short", "a/b@main", "user@host"):
        assert console.escape(text) == text


def test_prepare_in_the_agreed_shape(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("prepare", TINY, "--out", tmp_path / "data", "--json")
    found = strict(out)
    made = ["tokens", "sequences", "labelled_share", "tokens_per_s"]
    assert code == 0 and list(found) == ["dir", "train", "eval", "rejected", "unused", *made]
    assert {"conversations", "messages", "tokens", "sequences"} <= set(found["train"])
    for key in ("tokens", "sequences"):
        assert found[key] == found["train"][key] + found["eval"][key] > 0
    lines = [json.loads(line) for name in ("train", "eval") for line in (tmp_path / "data" / f"{name}.jsonl").open()]
    assert len(lines) == found["train"]["conversations"] + found["eval"]["conversations"]
    assert all(set(line) == {"messages", "source"} and line["source"]["tree"] for line in lines)


def test_another_format_over_a_recipe_that_names_a_language(call: Call, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"instruction": f"q{i}", "input": "", "output": f"a{i}"} for i in range(30)]))
    code, out, err = call("prepare", TINY, "--input", rows, "data.format=alpaca", "--out", tmp_path / "one", "--json")
    assert code == 0 and "data.language is for oasst-tree" in err, err
    first = strict(out)
    code, out, _ = call("prepare", TINY, f"data.input={rows}", "data.format=alpaca", "--out", tmp_path / "two", "--json")
    assert code == 0 and strict(out)["train"] == first["train"]
    code, _, err = call("show", TINY, "data.format=alpaca", "data.language=en")
    assert code == 2 and "alpaca rows carry no language" in err


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "unnamed", "step-000003", "other"])
def test_verify_what_is_no_checkpoint(call: Call, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "unnamed":
        (path / "file").write_text("x")
    if kind == "other":
        manifest.seal(path, "adapter", {})
    code, out, err = call("checkpoint", "verify", path, "--json")
    assert code == 2 and strict(out)["whole"] is False and len(strict(out)["problems"]) == 1
    assert str(path) in err and "Traceback" not in err


def test_verify_a_run(call: Call, tmp_path: Path) -> None:
    run, (old, new, unfinished) = tmp_path / "run", (tmp_path / "run/checkpoints" / f"step-00000{step}" for step in (2, 4, 6))
    for path in (old, new, unfinished):
        path.mkdir(parents=True)
        (path / "state").write_bytes(b"0123")
        if path != unfinished:
            manifest.seal(path, "checkpoint", {"step": int(path.name[-1])})
    code, out, err = call("checkpoint", "verify", run, "--json")
    assert code == 0 and strict(out) == {"checkpoint": str(new), "whole": True, "problems": []}
    assert "step-000006 has no manifest" in err
    (new / "state").write_bytes(b"0133")
    code, out, err = call("checkpoint", "verify", run, "--json")
    assert code == 2 and strict(out)["whole"] is False and strict(out)["checkpoint"] == str(old)
    (problem,) = strict(out)["problems"]
    assert problem.startswith(f"{new}/state: content differs from the manifest's SHA-256: ")
    assert call("checkpoint", "verify", old, "--json")[0] == 0


def test_the_folder_of_an_evaluation(tmp_path: Path) -> None:
    def folder(model: str, data: str | None = None, **settings: int) -> Path:
        return eval_folder(Path("runs/eval"), tmp_path / model, Path(data) if data else None, settings)

    assert folder("a/merged") == folder("a/../a/merged") and folder("a/merged").name.startswith("a-merged-")
    assert folder("x/a/merged").name[:9] == folder("y/a/merged").name[:9] and folder("x/a/merged") != folder("y/a/merged")
    assert len({folder("m"), folder("m", "d"), folder("m", "e"), folder("m", limit=1), folder("m", limit=2)}) == 5
    odd = folder("$(id);/" + "y" * 250).name
    assert len(odd) < 100 and not set(odd) & set("$();/ ")


def test_eval_without_out_finds_its_result_again(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def pretend(model: Path, out: Path, **_: Any) -> dict[str, Any]:
        seen.append(out)
        return {"scores": {"x": float("nan")}}

    monkeypatch.setattr("clustertune.evaluate.run.evaluate", pretend)
    for parent in ("one", "two"):
        (tmp_path / parent / "merged").mkdir(parents=True)
    for parent in ("one", "two", "one"):
        code, out, _ = call("eval", tmp_path / parent / "merged", "--json")
        assert code == 0 and strict(out) == {"scores": {"x": None}, "dir": str(seen[-1])}
    assert seen[0] == seen[2] != seen[1] and seen[0].parent == Path("runs/eval")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(28, "No space left on device", "/x"), 73, "free space"),
        (OSError(30, "Read-only file system", "/x"), 73, "give another path"),
        (PermissionError(13, "Permission denied", "/x"), 73, "who may read"),
        (OSError(5, "Input/output error", "/x"), 73, "fix the storage"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 2, "give another path"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), 73, "free space"),
        (cli.Stopped("SIGTERM"), 75, "same command again"),
        (KeyboardInterrupt(), 130, "continues"),
        (ValueError("odd"), 1, "internal error"),
        (UserError("not finite", ExitCode.STOP), 93, "not finite"),
    ],
)
def test_each_end_has_its_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("clustertune.resolve.resolve.resolve", fail)
    found, out, err = call("show", TINY, "--json")
    assert found == code and words in err and strict(out)["exit_code"] == code
    assert ("Traceback" in err) is (code == 1)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"CT show {TINY} --json | head -1; exit ${{PIPESTATUS[1]}}", 0),
        (f"CT show {TINY} --json >/dev/full", 73),
        ("CT show nowhere --json >/dev/full", 2),
        (f"CT show {TINY} --json >&-", 0),
        (f"CT show {TINY} --json 2>&-", 0),
        (f"env -u HOME NO_COLOR=1 COLUMNS=60 LC_ALL=C CT show {TINY}", 0),
    ],
)
def test_odd_surroundings(line: str, code: int) -> None:
    command = ["bash", "-c", line.replace("CT", f"{sys.executable} -m clustertune")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=60, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_stop_outside_of_training_is_answered_with_75(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three."}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 400_000)
    child = subprocess.Popen(
        [sys.executable, "-m", "clustertune", "prepare", str(TINY), f"data.input={rows}", "data.format=messages", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        wait_for(lambda: child.poll() is not None or reads(child.pid, rows), "reading the rows")
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75 and strict(out)["exit_code"] == 75 and "SIGTERM" in err and "Traceback" not in err


def reads(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    with contextlib.suppress(OSError):
        return any(fd.readlink() == path for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_second_stop_does_not_break_off_what_the_first_began(signals_as_before: None) -> None:
    """Slurm signals every process of a job, and the batch script passes its own on: a command gets each twice."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, cli._stop)
    with pytest.raises(cli.Stopped, match="SIGUSR1"):
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_only_programs_start_is_hidden_and_works(call: Call) -> None:
    assert call("--version")[:2] == (0, f"clustertune {__version__}\n")
    code, shown, _ = call("--help")
    listed = set(re.findall(r"^  ([a-z][a-z-]+)  ", shown, re.MULTILINE))
    assert code == 0 and listed == {name for commands in cli.GROUPS.values() for name in commands}
    for name in ("job", "node", "part", "train", "torchrun-node"):
        assert name not in listed and call(name, "--help")[0] == 0


# --- what a command imports --------------------------------------------------------------------------------------------


HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "matplotlib", "lm_eval"}
SLOW = HEAVY | {"yaml", "rich"}
"""What a command that only looks at its arguments has no use for. typer checks them with pydantic, and lists them without."""
SCRIPT = "#!/bin/bash\n#SBATCH --time=1:00:00\ntrue\n"


def imported(tmp_path: Path, *arguments: str) -> set[str]:
    """The top-level packages that a command has imported when it ends."""
    code = (
        "import sys, clustertune.cli.app as cli; sys.argv[1:] = sys.argv[2:]\n"
        "try:\n    cli.main()\n"
        "finally:\n    open(found, 'w').write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    found = tmp_path / "modules"
    words = [sys.executable, "-c", f"found = {str(found)!r}\n{code}", "-", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(words, capture_output=True, check=False, env=environment, cwd=Path(__file__).parents[1])
    return set(found.read_text().split())


@pytest.mark.parametrize(
    ("arguments", "needed", "useless"),
    [
        (["--help"], {"typer"}, SLOW | {"pydantic"}),
        (["plan", "--help"], {"typer"}, SLOW),
        (["doctor", "sbatch", "FILE"], {"typer", "yaml"}, HEAVY),
        (["nonsense"], {"typer"}, SLOW - {"rich"}),
        (["show", "llama405b-oasst2", "--json"], {"clustertune", "yaml"}, HEAVY | {"rich"}),
        (["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--json"], {"clustertune", "yaml"}, HEAVY | {"rich"}),
    ],
)
def test_a_command_imports_what_it_needs(tmp_path: Path, arguments: list[str], needed: set[str], useless: set[str]) -> None:
    """Planning no framework, and a document no tables."""
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    modules = imported(tmp_path, *(str(script) if word == "FILE" else word for word in arguments))
    assert needed <= modules and modules & useless == set()


def test_a_plan_of_a_recipe_loads_nothing_that_makes_one() -> None:
    """Neither what drafts recipes, reads data nor simulates."""
    code = "import sys, clustertune.cli.planning; print(*(name for name in sys.modules if name.startswith('clustertune')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"clustertune.draft", "clustertune.data.prepare", "clustertune.simulate.simulator"}.isdisjoint(found)
