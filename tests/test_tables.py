"""Tables in a window of 80 columns: no line is longer, no word and no number is broken, and nothing is left out."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.command import run
from tests.monitor import simulated

ON = ("--cluster", "nebius-h100")
COMMANDS = {
    "plan": ("plan", "llama405b-oasst2", *ON),
    "clusters": ("plan", "llama70b-lora", "--clusters", "all"),
    "show": ("show", "llama405b-oasst2"),
}


def shown(words: tuple[str, ...], columns: int) -> list[str]:
    """Lines of a command in a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (("COLUMNS", str(columns)), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
            patch.setenv(key, value)
        done = run(*words)
    assert done.code == 0, done.err
    return re.sub(r"\x1b\[[0-9;]*m", "", done.out + done.err).splitlines()


def words_of(lines: list[str]) -> set[str]:
    return {word.strip(",") for line in lines for word in line.split()} - {""}


def check(command: tuple[str, ...]) -> list[str]:
    narrow, wide = shown(command, 80), shown(command, 400)
    lost = {word for word in words_of(wide) - words_of(narrow) if not set(word) <= {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}}
    assert lost == set()
    return narrow


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_is_broken(name: str) -> None:
    narrow = check(COMMANDS[name])
    # Sentences outside of tables are left to the terminal, so that a command in them can be copied as one line.
    drawn = [line for line in narrow if line.startswith((" ", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"))]
    assert drawn and max(map(len, drawn)) <= 80


def test_runs_with_long_names(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a-recipe-with-a-long-name-of-its-own" / "20261127-0123456789abcdef"
    simulated.make(folder, time.time())
    narrow = check(("runs", str(tmp_path / "runs")))
    assert any(str(folder) in line for line in narrow)
