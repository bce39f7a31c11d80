"""What the documents tell a person to type is there, is run by a test, and does what they say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from clustertune.cli.app import app
from clustertune.manifest import find_problems
from tests import tree
from tests.command import Done, run

DOCUMENTS = {
    name: text
    for name, text in tree.texts().items()
    if name.endswith(".md") and (name == "README.md" or name.startswith(("docs/", "recipes/", "eval/")))
}

# --- reading the documents ---------------------------------------------------------------------------------------------


def code_blocks(text: str, language: str = r"\w*") -> list[str]:
    """The fenced blocks of a Markdown text; with ``language`` only those of that name."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str, program: str) -> list[str]:
    """The lines of a document's shell blocks that start ``program``, without prompt and comments, blanks folded."""
    lines = "\n".join(code_blocks(text, "sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [shlex.join([program, *words[1:]]) for words in found if words and words[0] in (program, f".venv/bin/{program}")]


def mentioned_targets(text: str) -> set[str]:
    """``make X`` in a code block or between backquotes."""
    inline = "\n".join(re.findall(r"`([^`\n]+)`", text))
    return set(re.findall(r"^\s*\$?\s*make ([a-z][a-z0-9-]*)", "\n".join([*code_blocks(text), inline]), re.MULTILINE))


def missing_paths(text: str, name: str) -> list[str]:
    """Linked files, and paths between backquotes below a folder of the tree, that are not there."""
    root, folder = tree.REPO, (tree.REPO / name).parent
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    # Of the repository, not of what lies there: builds and runs leave folders that a fresh clone has not.
    tops = {file.split("/")[0] for file in tree.files() if "/" in file}
    named = [word.rstrip("/") for word in re.findall(r"`([\w./-]+)`", text) if "/" in word and word.split("/")[0] in tops]
    return [path for path in linked if path and not (folder / path).exists()] + [
        path for path in named if "NAME" not in path and not (root / path).exists() and not (folder / path).exists()
    ]


def usage_error(line: str) -> str | None:
    """What the command line says against a command's arguments, none of it run; None where it takes them."""
    words = shlex.split(line)[1:]
    try:
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            default = getattr(command, "default", None)  # doctor RECIPE is doctor check RECIPE
            if not (words and words[0] in command.commands) and not default:
                return f"no command {' '.join(words[:1])!r}"
            command = command.commands[words.pop(0) if words and words[0] in command.commands else default]
        command.make_context(command.name, words)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


COMMANDS = sorted({line for text in DOCUMENTS.values() for line in commands(text, "clustertune")})
"""Every command of the documents. Those that need neither a cluster nor hours run below or in the tests of their rooms."""


# --- the rules ---------------------------------------------------------------------------------------------------------


def test_every_target_that_is_told_exists() -> None:
    """The first command that a newcomer types must not be an error."""
    there = set(re.findall(r"^([a-z][a-z0-9-]*):", tree.texts()["Makefile"], re.MULTILINE))
    assert {name: gone for name, text in DOCUMENTS.items() if (gone := mentioned_targets(text) - there)} == {}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_that_is_told_parses(line: str) -> None:
    """An option that was renamed."""
    assert usage_error(line) is None


def test_every_path_that_is_told_exists() -> None:
    """A link that leads nowhere."""
    assert {name: gone for name, text in DOCUMENTS.items() if (gone := missing_paths(text, name))} == {}


# --- the commands ------------------------------------------------------------------------------------------------------


def command_of(start: str, replaced: dict[str, Path | str]) -> list[str]:
    """The arguments of the one told command that begins so, its example paths replaced."""
    (line,) = (line for line in COMMANDS if line.startswith(f"clustertune {start}"))
    words = shlex.split(line)[1:]
    assert set(replaced) <= set(words), f"{line} has other example paths"
    return [str(replaced.get(word, word)) for word in words]


def test_the_commands_before_training(tmp_path: Path) -> None:
    """``show`` and ``prepare`` as they are printed there."""
    for line in (line for line in COMMANDS if line.startswith("clustertune show-cluster ") and "--write" not in line):
        done = run(*shlex.split(line)[1:])
        assert done.code == 0 and line.rpartition(" ")[2] in done.out
    for line in (line for line in COMMANDS if line.startswith("clustertune show ")):
        done = run(*shlex.split(line)[1:])
        assert done.code == 0 and (done.json if "--json" in line else "learning_rate" in done.out)
    done = run(*command_of("prepare recipes/tiny-oasst2 --out", {"/tmp/data": tmp_path / "data"}), stack=True)
    assert done.code == 0
    assert find_problems(tmp_path / "data", "dataset", allow_extra=True) == []  # tokens/ has a manifest of its own
    assert find_problems(tmp_path / "data" / "tokens", "tokens") == []


def test_a_run_that_is_only_told(tmp_path: Path) -> None:
    """An override and a choice of stages, up to the point where the ranks would start."""
    done = run(*command_of("run recipes/tiny-oasst2 lora", {}), "--dry-run", "--run-dir", tmp_path / "run")
    assert done.code == 0
    assert "stages: prepare, train, export\n" in done.err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished_copy(finished: tuple[Path, Done], tmp_path: Path) -> Path:
    """The finished run for this test alone: another worker's tests may hold the lock of the shared one."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_the_commands_on_a_run(finished_copy: Path) -> None:
    """``checkpoint verify`` and ``report`` as they are printed there."""
    (finished_copy / "report.html").unlink()
    for start in ("checkpoint verify", "report runs"):
        done = run(*command_of(start, {"runs/tiny-oasst2/ID": finished_copy}))
        assert done.code == 0, done.err
    assert (finished_copy / "report.html").is_file()


@pytest.mark.jobs
def test_the_commands_on_models(finished_copy: Path, tmp_path: Path) -> None:
    """``export``, ``merge`` and ``eval`` as they are printed there, each with what the one before made."""
    adapter, merged, prompts = tmp_path / "adapter", tmp_path / "merged", tmp_path / "prompts.jsonl"
    prompts.write_text(tree.texts()["eval/ifeval/prompts.jsonl"].partition("\n")[0] + "\n")
    (base,) = (finished_copy / "model").iterdir()
    for step in (
        command_of("export", {"runs/tiny-oasst2/ID": finished_copy, "/tmp/adapter": adapter}),
        command_of("merge", {"BASE": base, "ADAPTER": adapter, "OUT": merged}),
        [
            *command_of("eval MODEL --data prompts.jsonl", {"MODEL": merged, "prompts.jsonl": prompts}),
            *("--out", str(tmp_path / "eval"), "--max-gen-toks", "4"),
        ],
    ):
        done = run(*step, stack=True)
        assert done.code == 0, (step, done.err)
    assert find_problems(adapter, "adapter") == [] == find_problems(merged, "merged")
    assert (tmp_path / "eval" / "results.json").is_file()
