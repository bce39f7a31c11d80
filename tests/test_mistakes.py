"""Mistakes of the first minute, each with the line that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import run

MODEL = ("--model", "HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("words", "says", "mends"),
    [
        (("show", "llama8b-lima", "train.model_init_kwargs={a:", "b,", "c:", "d}"), "the shell has cut", "{a: b, c: d}'"),
        (("show", "llama8b-lima", "--learning_rate", "1e-4"), "--learning_rate", "train.learning_rate=VALUE"),
        (("show", "llama8b-lima", "--lora.r=4"), "--lora.r", "lora.r=VALUE"),
        (("show", "llama8b-lima", "--nothing"), "--nothing", "usage:"),
        (("plan", "llama8b-lima", "eval.tasks=[mmluu]", "--cluster", "dgx-h100"), "'mmluu'", "mmlu?"),
        (("new", "mine", "--model", "./nothing", "--data", "semicolons.csv"), "no such file or folder", "config.json"),
        (("new", "mine", *MODEL, "--data", "semicolons.csv"), "separated by ';'", "csv.writer"),
        (("new", "mine", *MODEL, "--data", "latin1.csv"), "byte 0xfc", "iconv -f LATIN1"),
        (("report", "runs"), "no such folder", "latest"),
    ],
)
def test_a_mistake_is_named_with_what_mends_it(words: tuple[str, ...], says: str, mends: str, tmp_path: Path) -> None:
    (tmp_path / "semicolons.csv").write_text("prompt;completion\nWhat?;That.\n")
    (tmp_path / "latin1.csv").write_bytes("prompt,completion\nGrüße,Hallo\n".encode("latin1"))
    done = run(*words, cwd=tmp_path)
    assert done.code == 2 and says in done.err and mends in done.err


def test_a_text_with_semicolons_in_one_column_is_a_table(tmp_path: Path) -> None:
    """A column of its own name, semicolons in its values; and tabs where the name says so."""
    from clustertune.data.rows import RowLocation, read_file

    for name, body in (("one.csv", "text\na;b\n"), ("two.tsv", "prompt\tcompletion\na;b\tc\n")):
        (tmp_path / name).write_text(body)
        found = list(read_file(lambda name=name: (tmp_path / name).open("rb"), RowLocation(name, "train"), name))  # type: ignore[misc]
        assert len(found) == 1 and isinstance(found[0][1], dict)
