"""Mistakes of the first minute, each with the line that mends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run

ON = ("--cluster", "dgx-h100")
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
        (("plan", "lama8b-lima", *ON), "no recipe 'lama8b-lima'", "llama8b-lima?"),
        (("plan", "llama8b-lima", "--cluster", "dgx"), "no cluster 'dgx'", "dgx-h100?"),
        (("plan", "llama8b-lima", "--gpus", "8xh100"), "NODESxGPUSxNAME", "h100-sxm (80 GB), h100-pcie (80 GB)"),
        (("plan", "llama8b-lima", "--gpus", "1x8xa100"), "no figures of a100", "a100-sxm-80 (80 GB), a100-sxm-40 (40 GB)"),
        (("plan", "llama8b-lima", *ON, "learning_rate=1e-4"), "unknown key", "train.learning_rate?"),
        (("show", "llama8b-lima", "r=8"), "unknown key", "lora.r?"),
        (("plan", "llama8b-lima", *ON, "train.lr=1e-4"), "train.lr", "write learning_rate"),
        (("plan", "llama70b-lora", *ON, "lora.rank=8"), "lora.rank", "write r"),
        (("plan", "llama8b-lima", *ON, "train.learning_rate", "=", "1e-4"), "one recipe", "without blanks"),
        (("plan", "llama8b-lima", *ON, "train.learning_rate=fast"), "'fast'", "number"),
        (("plan", "llama8b-lima", *ON, "train.max_length=200000"), "131072 positions", "at most 131072"),
        (("plan", "llama8b-lima", *ON, "lora.target_modules=[q_prj]"), "'q_prj'", "q_proj?"),
        (("plan", "llama8b-lima", *ON, "slurm.gpus_per_node=16"), "has 8 GPUs", "8 or fewer"),
        (("plan", "llama8b-lima", *ON, "slurm.time=2h"), "'2h'", "48:00:00"),
        (("plan", "llama8b-lima", *ON, "eval.tasks=ifeval"), "not a list", "write [...]"),
        (("plan", "llama8b-lima"), "0 GPUs", "--gpus 2x8xh100-sxm"),
        (("run", "llama8b-lima"), "needs 8 GPUs", "--tiny"),
        (("run", "llama8b-lima", "--resume"), "--resume", "the same command again"),
        (("train", "llama8b-lima"), "no command of its own", "clustertune run llama8b-lima"),
        (("trian", "llama8b-lima"), "no such command", "run?"),
        (("evaluate", "x"), "no such command", "eval?"),
        (("run", "tabs"), "tabs/recipe.yaml:2", "spaces, not tabs"),
        (("run", "crooked"), "crooked/recipe.yaml:4", "same number of blanks"),
        (("run", "crooked"), "accelerate.yaml: does not exist", "clustertune new"),
        (("run", "twice"), "appears twice", "keep one"),
        (("run", "tiny-oasst2", "data.input=nowhere.jsonl"), "nowhere.jsonl", "data.input=PATH"),
        (("run", "tiny-oasst2", "eval.data=nowhere.jsonl"), "nowhere.jsonl", "eval.data=PATH"),
        (("run", "tiny-oasst2", "eval.data=rules.jsonl"), "rules.jsonl:1: regex", "\\("),
        (("new", "mine", *MODEL, "--data", "turns.jsonl"), "messages[0]", "correct these rows"),
        (("new", "mine", *MODEL, "--data", "columns.csv"), "question, reply", "data.columns={"),
        (("new", "mine", *MODEL, "--data", "data.xlsx"), "no file of a known kind", ".jsonl"),
        (("eval", "empty"), "config.json: missing", "model folder"),
        (("chat", "latest"), "no such folder", "a recipe that has run"),
        (("compare", "runs"), "two or more", "clustertune compare RUN RUN"),
        (("sweep", "llama8b-lima"), "nothing is varied", "train.learning_rate=1e-5,5e-5"),
        (("submit", "llama8b-lima"), "no Slurm", "--cluster"),
    ],
)
def test_a_mistake_is_named_with_what_mends_it(words: tuple[str, ...], says: str, mends: str, tmp_path: Path) -> None:
    (tmp_path / "semicolons.csv").write_text("prompt;completion\nWhat?;That.\n")
    (tmp_path / "latin1.csv").write_bytes("prompt,completion\nGrüße,Hallo\n".encode("latin1"))
    (tmp_path / "columns.csv").write_text("question,reply\nA?,B\n")
    (tmp_path / "data.xlsx").write_text("x")
    (tmp_path / "empty").mkdir()
    rows = {"turns": [{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}]}
    rows["rules"] = [{"prompt": "a", "regex": "("}]
    for name, found in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    crooked = "base: sft-lora\nmodel:\n  name: a/b\n data: x\n"
    twice = "base: sft-lora\ntrain: {max_length: 1}\ntrain: {max_length: 2}\n"
    for name, text in (("tabs", "base: sft-lora\n\ttrain: {}\n"), ("crooked", crooked), ("twice", twice)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(text)
    done = run(*words, cwd=tmp_path, stack=words[0] in ("run", "eval"))
    assert done.code == 2 and says in done.err and mends in done.err


def test_a_text_with_semicolons_in_one_column_is_a_table(tmp_path: Path) -> None:
    """A column of its own name, semicolons in its values; and tabs where the name says so."""
    from clustertune.data.rows import RowLocation, read_file

    for name, body in (("one.csv", "text\na;b\n"), ("two.tsv", "prompt\tcompletion\na;b\tc\n")):
        (tmp_path / name).write_text(body)
        found = list(read_file(lambda name=name: (tmp_path / name).open("rb"), RowLocation(name, "train"), name))  # type: ignore[misc]
        assert len(found) == 1 and isinstance(found[0][1], dict)
