"""What an image has installed against the pins, and the program that asks inside it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune.containers import pins
from clustertune.errors import UserError
from clustertune.launch import inventory, stack
from tests.command import REPO, run

PINNED = pins.read()
SOURCE = REPO / "clustertune" / "launch" / "inventory.py"


def seen(**changes: str | None) -> stack.Stack:
    """An image as locked, but for ``changes`` (None: missing)."""
    packages = {**PINNED[pins.PY], **{name.replace("_", "-"): version for name, version in changes.items()}}
    return stack.Stack("3.12.3", {name: version for name, version in packages.items() if version is not None})


def judge(found: stack.Stack) -> tuple[list[str], list[str]]:
    problems, warnings = stack.judge(found, PINNED, "train.sif", (3, 11))
    return [problem.message for problem in problems], warnings


def test_an_image_of_this_checkout_is_as_pinned() -> None:
    """Also with torch's build for another device."""
    assert judge(seen()) == ([], []) == judge(seen(torch=PINNED[pins.PY]["torch"] + "+cpu"))


def test_each_difference_is_a_line() -> None:
    """The job continues: another version may be meant, and is in the log."""
    problems, warnings = judge(seen(trl="0.1", peft="9.9"))
    pinned = PINNED[pins.PY]
    assert problems == []
    assert warnings == [
        f"the image has peft 9.9, containers/versions.env {pinned['peft']}",
        f"the image has trl 0.1, containers/versions.env {pinned['trl']}",
    ]


def test_what_every_stage_needs_is_an_error_and_the_rest_a_warning() -> None:
    """All at once: an image is built for a quarter of an hour."""
    problems, warnings = judge(seen(pydantic=None, typer=None, wandb=None))
    assert [text.partition(" (")[0] for text in problems] == ["the image has no pydantic", "the image has no typer"]
    assert len(warnings) == 1 and "no wandb" in warnings[0]


def test_kernels_that_a_recipe_asks_for_are_looked_for() -> None:
    """Before hours of preparation; and one of two packages is enough for FlashAttention."""
    train = {"use_liger_kernel": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    problems = stack.lacking(seen(), train, "train.sif", gpus=True)
    assert [problem.key for problem in problems] == ["train.model_init_kwargs.attn_implementation", "train.use_liger_kernel"]
    assert not stack.lacking(seen(kernels="0.9", liger_kernel="0.9"), train, "train.sif", gpus=True)
    assert not stack.lacking(seen(), train, "train.sif", gpus=False)


def test_the_reference_stack_is_held_against_its_own_pins() -> None:
    """Its image is whole in its own way; 7 warnings at every start would be read by nobody."""
    reference = {name.replace("-", "_"): version for name, version in PINNED[pins.REF].items() if name in PINNED[pins.PY]}
    assert judge(seen(**reference)) == ([], [])
    assert len(judge(seen(**{**reference, "trl": "0.1"}))[1]) == 1


def test_a_python_that_is_too_old() -> None:
    """It would end in a syntax error of some file."""
    problems, _ = judge(stack.Stack("3.10.12", seen().packages))
    assert problems == ["Python 3.10.12, and clustertune needs 3.11 or later"]
    assert stack.oldest_python() == (3, 11)


def test_every_package_that_may_be_missing_is_pinned() -> None:
    """A name that was moved would be an error from then on."""
    assert set(stack.FOR_SOME) <= set(PINNED[pins.PY])


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ('welcome\nclustertune-inventory {"python": "3.12.1", "packages": {"a": "1"}}\nbye\n', "3.12.1"),
        ("clustertune-inventory {", None),
        ('clustertune-inventory {"python": "3"}', None),
        ("clustertune-inventory []", None),
        ("", None),
    ],
)
def test_the_answer_among_what_an_image_prints(text: str, python: str | None) -> None:
    """Entrypoints and shells print of their own."""
    found = stack.parse(text)
    assert (found.python if found else None) == python


def test_an_image_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not started, no Python, silent: with the words that it had."""
    with pytest.raises(UserError, match="does not start: /not/there"):
        stack.ask(["/not/there"], "x.sif")
    with pytest.raises(UserError, match=r"no Python 3.8 or later answers .*exit code 3.*no python3 here"):
        stack.ask(["sh", "-c", "echo no python3 here >&2; exit 3"], "x.sif")
    monkeypatch.setattr(stack, "SECONDS", 0.2)
    with pytest.raises(UserError, match="did not answer within"):
        stack.ask(["sleep", "20"], "x.sif")


def test_the_inventory_of_this_environment() -> None:
    """As the job asks for it."""
    found = stack.ask([sys.executable, "-m", stack.MODULE], "here")
    assert found.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.") and "pydantic" in found.packages
    assert set(stack.record(found, PINNED)) == {"python", "packages"}


def test_a_broken_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted installations leave folders without metadata; newer Pythons raise for them."""
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "broken" not in inventory.inventory()["packages"]

    class Raises:
        @property
        def metadata(self) -> dict[str, str]:
            return {}

    class Whole:
        metadata = {"Name": "A_b.c"}  # noqa: RUF012 - as importlib's
        version = "1"

    monkeypatch.setattr(inventory.metadata, "distributions", lambda: [Raises(), Whole()])
    assert inventory.inventory()["packages"] == {"a-b-c": "1"}


def test_the_inventory_needs_nothing() -> None:
    """Python 3.8 and its standard library: it is to answer in an image that lacks everything."""
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_old_pythons_answer() -> None:
    """For real, where one is here."""
    roots = sorted(Path.home().glob(".pyenv/versions/3.[89].*/bin/python3"))
    pythons = [str(path) for path in roots] or [found for name in ("python3.8", "python3.9") if (found := shutil.which(name))]
    if not pythons:
        pytest.skip("no Python 3.8 or 3.9 here")
    for python in pythons:
        done = subprocess.run([python, "-m", stack.MODULE], cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.partition(inventory.MARK)[2])["packages"]


@pytest.mark.parametrize("command", [["run", "--to", "train"], ["submit", "--tiny", "--dry-run"]])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    """Its callback raised in every rank, after the wait in the queue and the preparation."""
    words = [command[0], "recipes/tiny-oasst2", *command[1:], "--run-dir", tmp_path / "run", "--json"]
    done = run(*words, "train.report_to=[wandb,mlflow,tensorboard]")
    assert done.code == 2 and not (tmp_path / "run" / "data").exists()
    assert [problem["key"] for problem in done.json["problems"]] == ["train.report_to"] * 2
    assert "mlflow" in done.json["problems"][0]["message"]
