"""``clustertune bench`` as a user types it: what is refused, what is only shown, and a real training that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.cli.stages import RESULT
from tests.command import run

SMALL = ["train.max_length=64", "train.packing=false"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tiny --synthetic", "--synthetic"), ("--run-dir tests", "--run-dir"), ("--run-dir README.md/x", "is a file"),
        ("train.max_lenght=64", "max_lenght"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_at_once(words: str, expected: str) -> None:
    """Nothing is made before the command line is known to be right."""
    done = run("bench", "tiny-oasst2", *words.split(), "--json")
    assert done.code == 2, done.err
    assert expected in json.dumps(done.json)


def test_weights_that_no_machine_here_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 billion random weights on a laptop would end in the kernel's out-of-memory killer, after an hour of writing them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("bench", "llama405b-oasst2", "--synthetic")
    assert done.code == 2 and "812 GB of weights each" in done.err


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    """It says folder, steps, command and plan, and leaves no folder."""
    words = ["bench", "tiny-oasst2", "--dry-run", "--steps", "9", "--run-dir", str(tmp_path / "r")]
    found = run(*words, "--json").json
    assert (found["warmup"], found["steps"]) == (5, 9)
    assert found["train"][-2:] == ["--attempt", "1"] and list(tmp_path.iterdir()) == []


@pytest.mark.jobs
@pytest.mark.timeout(900)
def test_a_recipe_is_measured(tmp_path: Path) -> None:
    """Real ranks: figures of every kind, no checkpoint, and a run folder that compare reads."""
    folder = tmp_path / "run"
    words = ["--steps", "4", "--warmup", "1", "--run-dir", folder]
    done = run("bench", "tiny-oasst2", *words, "--json", *SMALL, "train.per_device_train_batch_size=2")
    assert done.code == 0, done.err
    found = done.json
    assert json.loads((folder / RESULT).read_text()) == found
    assert found["step_s"]["n"] == 4 and found["tokens_per_s_per_gpu"] > 0 and found["tokens"] > 0
    assert found["distributed"]["type"] == "FSDP" and found["peak"]["rss_gib"] > 0
    assert found["utilisation"]["mfu"] is None and "unknown" in found["plan"]
    assert not list((folder / "checkpoints").glob("step-*"))
