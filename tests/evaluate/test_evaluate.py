"""The whole evaluation: equal to a run by hand, without a network, whole or absent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.evaluate import run as room
from clustertune.evaluate.run import evaluate
from clustertune.recipe.eval_tasks import first_task
from clustertune.recipe.sections import Eval
from tests.evaluate.conftest import SETTINGS, Scored


def test_all_is_equal_to_lm_eval_by_hand(scored: Scored) -> None:
    """Scores, standard errors, each answer and judgement, template and version."""
    result, hand = scored.result, scored.hand["results"]["by_hand"]
    row = result["tasks"]["ifeval"]
    assert all(row[f"{name},none"] == hand[f"{name},none"] for name in first_task().metrics)
    for name in ("prompt_level_strict_acc", "prompt_level_loose_acc"):
        assert row[f"{name}_stderr,none"] == hand[f"{name}_stderr,none"]
    assert hand["inst_level_strict_acc_stderr,none"] == "N/A" and 0 < row["inst_level_strict_acc_stderr,none"] < 0.5

    def judged(samples: list[dict[str, Any]]) -> dict[int, list[Any]]:
        return {s["doc"]["key"]: [s[c] for c in ("resps", "inst_level_strict_acc", "inst_level_loose_acc")] for s in samples}

    ours = judged([json.loads(line) for line in (scored.out / "samples.jsonl").read_text().splitlines()])
    assert ours == judged(scored.hand_samples)
    assert len({str(answer[0]) for answer in ours.values()}) > 10
    assert result["chat_template_sha"] == scored.hand["chat_template_sha"]
    assert result["details"]["ifeval"]["version"] == scored.hand["versions"]["by_hand"]


def test_the_output_is_whole_and_says_what_was_scored(scored: Scored, parity_data: Path) -> None:
    """And no connection was tried."""
    result = scored.result
    assert scored.attempts == []
    assert manifest.find_problems(scored.out, "evaluation") == []
    assert not list(scored.out.glob(".*"))
    assert json.loads((scored.out / "results.json").read_text()) == result
    row = result["tasks"]["ifeval"]
    assert row["n"] == 27
    assert "Not the IFEval benchmark (other prompts): these numbers compare with nothing published." in result["notes"]
    assert result["backend"]["name"] == "hf" and result["backend"]["dtype"] == result["decoding"]["dtype"] == "bfloat16"
    data = {"name": parity_data.name, "file": str(parity_data), "sha256": manifest.hash_file(parity_data).sha256}
    data |= {"prompts": 27, "rows": 27, "is_benchmark": False}
    assert data.items() <= result["details"]["ifeval"]["dataset"].items()
    assert result["decoding"]["max_gen_toks"] == SETTINGS.max_gen_toks


def test_a_finished_one_is_returned_and_judged_anew(
    scored: Scored, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of other settings is not overwritten, a damaged one is refused."""
    monkeypatch.setattr(room, "load_lm", lambda *_: pytest.fail("the model was loaded again"))
    settings = SETTINGS.model_copy(update={"pass_mark": {"ifeval": {"prompt_level_strict_acc": 0.999}}})
    before = manifest.read_manifest(scored.out)
    again = evaluate(tiny_model, scored.out, settings=settings, data=scored.data, device="cpu")
    assert again["tasks"] == scored.result["tasks"]
    assert again["pass"] == {
        "marks": {"ifeval": {"prompt_level_strict_acc": 0.999}}, "difference_marks": {},
        "missed": ["ifeval prompt_level_strict_acc"], "passed": False,
    }  # fmt: skip
    with pytest.raises(UserError, match="another max_gen_toks"):
        evaluate(tiny_model, scored.out, settings=Eval(max_gen_toks=9), data=scored.data, device="cpu")
    assert manifest.read_manifest(scored.out) == before and manifest.find_problems(scored.out) == []
    shutil.copytree(scored.out, tmp_path / "copy")
    (tmp_path / "copy" / "samples.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"samples\.jsonl"):
        evaluate(tiny_model, tmp_path / "copy", settings=SETTINGS, data=scored.data, device="cpu")


def test_everything_wrong_is_told_at_once_and_nothing_left(tmp_path: Path) -> None:
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    data.write_text('{"key": 1}\nno json\n')
    model.mkdir()
    with pytest.raises(UserError) as caught:
        evaluate(model, tmp_path / "out", settings=SETTINGS, data=data, device="cuda:99")
    text = str(caught.value)
    for part in ("config.json: missing", "has no tokenizer", f"{data}:1: prompt", f"{data}:2: invalid-json", "cuda:99"):
        assert part in text
    assert caught.value.code == ExitCode.CONFIG
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_and_a_full_disk(
    tiny_model: Path, parity_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds other files: thesis\.tex"):
        evaluate(tiny_model, tmp_path / "mine", settings=SETTINGS, data=parity_data, device="cpu")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["thesis.tex"]

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(room.tasks.Inputs, "write_tasks", full)
    with pytest.raises(UserError, match="No space left") as caught:
        evaluate(tiny_model, tmp_path / "out", settings=SETTINGS, data=parity_data, device="cpu")
    assert caught.value.code == ExitCode.STORAGE
    assert not (tmp_path / "out" / manifest.MANIFEST).exists()
