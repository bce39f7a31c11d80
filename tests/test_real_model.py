"""A real pretrained model through the chain: SmolLM2-135M-Instruct with its own tokenizer and chat template.

``CLUSTERTUNE_SMOLLM2`` names the folder that ``make model-smollm2`` made (models/SmolLM2-135M-Instruct where it is unset).
``CLUSTERTUNE_MODELS`` names a folder of other real models, or of their config.json and tokenizers alone, for a look at what
``prepare`` makes of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clustertune.rundir import RunDir
from tests.command import run
from tests.tree import REPO

SMOLLM2 = Path(os.environ.get("CLUSTERTUNE_SMOLLM2", REPO / "models" / "SmolLM2-135M-Instruct"))
OTHERS = sorted(path.parent for path in Path(os.environ.get("CLUSTERTUNE_MODELS", "/nonexistent")).glob("*/config.json"))
RECIPE = "recipes/smollm2-135m-oasst2"


@pytest.mark.jobs
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="a 93 MB download: make model-smollm2")
def test_a_real_model_trains_exports_and_merges_as_peft_does(tmp_path: Path) -> None:
    """Three steps of two ranks; the base has its own tokenizer, pads with EOS, ties its head, and marks no answers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [RECIPE, f"model.path={SMOLLM2}", "train.max_steps=3", "train.eval_strategy=no", "train.eval_on_start=false"]
    words += ["train.max_length=128", "train.save_steps=3", "data.limit=24", "train.learning_rate=1e-3"]
    done = run("run", *words, "--ranks", "2", "--run-dir", tmp_path / "run", "--to", "merge")
    assert done.code == 0, done.err
    folder = RunDir(tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    theirs = PeftModel.from_pretrained(base, folder.adapter).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder.merged, dtype=torch.bfloat16).state_dict()
    changed = [name for name in before if not torch.equal(ours[name], before[name])]
    assert len(changed) == 120 and all(".self_attn." in name for name in changed), "four projections of thirty layers"
    # Both add in float32 or in bfloat16: one unit in the last place of the sum.
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), rtol=2**-7, atol=1e-6) for name in theirs)
    here, there = (AutoTokenizer.from_pretrained(path) for path in (SMOLLM2, folder.merged))
    chat = [{"role": "user", "content": "Hello"}]
    assert there.eos_token_id == here.eos_token_id == there.pad_token_id
    assert there.apply_chat_template(chat, tokenize=False) == here.apply_chat_template(chat, tokenize=False)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("event") == "step"]
    assert len(losses) == 3 and all(0 < loss < 5 for loss in losses), "a model that knows English, not random weights"


@pytest.mark.real_input
@pytest.mark.parametrize("model", OTHERS or [None], ids=lambda path: path.name if path else "none")
def test_another_real_model_is_prepared_as_new_writes_it_and_runs_tiny(model: Path | None, tmp_path: Path) -> None:
    """Its tokenizer with its own chat template, or with the one that ``new`` chooses for a base model: every answer ends with
    the token that stops it, only answers carry labels, and the scaled-down architecture trains and exports."""
    if model is None:
        pytest.skip("CLUSTERTUNE_MODELS names no folder with real models: their licences allow local tests only")
    from clustertune.data.sequences import Sequences
    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.resolve.resolve import resolve

    made = tmp_path / "made"
    rows_of = REPO / RECIPE / "conversations.jsonl"
    done = run("new", made, "--model", model, "--data", rows_of, "--gpus", "1x2xh100-sxm", stack=True)
    assert done.code == 0, done.err
    done = run("prepare", made, "--out", tmp_path / "data", stack=True)
    assert done.code == 0, done.err
    resolved = resolve(made)
    tokenizer = load_tokenizer(str(model), None, resolved.chat_template, resolved.train_args)
    rows = Sequences(tmp_path / "data" / "tokens", "eval")
    for row in (rows[number] for number in range(len(rows))):
        ids, labels = list(row["input_ids"]), list(row["labels"])
        learnt = tokenizer.decode([token for token, label in zip(ids, labels, strict=True) if label != -100])
        assert tokenizer.eos_token in learnt and 0 < sum(label != -100 for label in labels) < len(labels)
        assert ids.count(tokenizer.bos_token_id) <= 1 or tokenizer.bos_token_id == tokenizer.eos_token_id or len(rows) > 1
    done = run("run", made, "--tiny", "--to", "export", "--run-dir", tmp_path / "run", stack=True)
    assert done.code == 0, done.err
    assert RunDir(tmp_path / "run").adapter.is_dir()


@pytest.mark.jobs
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="a 93 MB download: make model-smollm2")
def test_the_tutorial_as_it_is_told(tmp_path: Path) -> None:
    """Every line of docs/tutorial.md from the CSV on; the tuned model gives the promised answer, the base does not."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPO / "docs" / "tutorial.md").read_text(), re.M | re.S)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / SMOLLM2.name).symlink_to(SMOLLM2)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    answers = [line for line in printed.splitlines() if line == "Her name is Pixel."]  # not the row that prepare shows
    assert len(blocks) == 6 and len(answers) == 1
    (run_folder,) = (tmp_path / "runs" / "cat").iterdir()
    assert (run_folder / "report.html").is_file()
