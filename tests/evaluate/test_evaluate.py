"""The whole evaluation: equal to a run by hand, without a network, whole or absent, and continued after a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.evaluate import run as room
from clustertune.evaluate.answers import AnswerLog
from clustertune.evaluate.run import evaluate
from clustertune.recipe.schema import Eval
from clustertune.recipe.tasks import first_task
from tests.evaluate.conftest import SETTINGS, Scored


def read_samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


class TestAgainstLmEvalByHand:
    @pytest.mark.parametrize("name", first_task().metrics)
    def test_scores_are_equal(self, scored: Scored, name: str) -> None:
        assert scored.result["scores"][name] == scored.hand["results"]["by_hand"][f"{name},none"]

    def test_standard_errors(self, scored: Scored) -> None:
        hand = scored.hand["results"]["by_hand"]
        for name in ("prompt_level_strict_acc", "prompt_level_loose_acc"):
            assert scored.result["stderr"][name] == hand[f"{name}_stderr,none"]
        assert hand["inst_level_strict_acc_stderr,none"] == "N/A"
        assert 0 < scored.result["stderr"]["inst_level_strict_acc"] < 0.5

    def test_every_answer_and_judgement_is_equal(self, scored: Scored) -> None:
        columns = ("resps", "arguments", "inst_level_strict_acc", "inst_level_loose_acc")
        ours = {sample["doc"]["key"]: [sample[c] for c in columns[:1] + columns[2:]] for sample in read_samples(scored.out)}
        theirs = {sample["doc"]["key"]: [sample[c] for c in columns[:1] + columns[2:]] for sample in scored.hand_samples}
        assert ours == theirs
        assert len({str(answer[0]) for answer in ours.values()}) > 10

    def test_chat_template_and_version(self, scored: Scored) -> None:
        assert scored.result["chat_template_sha"] == scored.hand["chat_template_sha"]
        assert scored.result["task_version"] == scored.hand["versions"]["by_hand"]


class TestOffline:
    def test_no_connection_was_tried(self, scored: Scored) -> None:
        assert scored.attempts == []


class TestOutput:
    def test_is_whole(self, scored: Scored) -> None:
        assert manifest.find_problems(scored.out, "evaluation") == []
        assert not list(scored.out.glob(".*"))
        assert json.loads((scored.out / "results.json").read_text()) == scored.result
        row = scored.result["tasks"]["ifeval"]
        assert row["n"] == 27 and row["prompt_level_strict_acc,none"] == scored.result["scores"]["prompt_level_strict_acc"]
        assert (
            "Not the IFEval benchmark (other prompts): these numbers compare with nothing published." in scored.result["notes"]
        )
        assert any("trained locally" in note for note in scored.result["notes"])
        assert scored.result["backend"]["name"] == "hf" and scored.result["backend"]["dtype"] == "bfloat16"

    def test_says_what_was_scored(self, scored: Scored, parity_data: Path) -> None:
        dataset = scored.result["dataset"]
        assert dataset["name"] == parity_data.name
        assert dataset["file"] == str(parity_data)
        assert dataset["sha256"] == manifest.hash_file(parity_data).sha256
        assert dataset["prompts"] == dataset["rows"] == 27
        assert dataset["is_benchmark"] is False
        assert dataset["drawn_arguments"] == 1
        assert scored.result["decoding"]["dtype"] == "bfloat16"
        assert scored.result["decoding"]["max_gen_toks"] == SETTINGS.max_gen_toks
        assert scored.result["punkt"] == {
            "source": "trained locally",
            "path": str(scored.out / "nltk_data"),
            "sha256": scored.result["punkt"]["sha256"],
        }

    def test_a_finished_one_is_returned_and_judged_anew(
        self, scored: Scored, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(room, "load_lm", lambda *_: pytest.fail("the model was loaded again"))
        settings = SETTINGS.model_copy(update={"pass_mark": {"ifeval": {"prompt_level_strict_acc": 0.999}}})
        before = manifest.read_manifest(scored.out)
        again = evaluate(tiny_model, scored.out, settings=settings, data=scored.data, device="cpu")
        assert again["scores"] == scored.result["scores"]
        assert again["pass"] == {
            "marks": {"ifeval": {"prompt_level_strict_acc": 0.999}},
            "difference_marks": {},
            "missed": ["ifeval prompt_level_strict_acc"],
            "passed": False,
        }
        assert manifest.read_manifest(scored.out) == before
        assert manifest.find_problems(scored.out) == []

    def test_a_finished_one_of_other_settings_is_not_overwritten(self, scored: Scored, tiny_model: Path) -> None:
        with pytest.raises(UserError, match="another max_gen_toks"):
            evaluate(tiny_model, scored.out, settings=Eval(max_gen_toks=9), data=scored.data, device="cpu")
        assert manifest.find_problems(scored.out) == []

    def test_a_damaged_one_is_refused(self, scored: Scored, tiny_model: Path, tmp_path: Path) -> None:
        import shutil

        shutil.copytree(scored.out, tmp_path / "copy")
        (tmp_path / "copy" / "samples.jsonl").write_text("{}\n")
        with pytest.raises(UserError, match=r"samples\.jsonl"):
            evaluate(tiny_model, tmp_path / "copy", settings=SETTINGS, data=scored.data, device="cpu")


class TestRefusals:
    def test_everything_wrong_at_once_and_nothing_left(self, tmp_path: Path) -> None:
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

    def test_a_folder_with_other_files(self, tiny_model: Path, parity_data: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(UserError, match=r"holds other files: thesis\.tex"):
            evaluate(tiny_model, tmp_path, settings=SETTINGS, data=parity_data, device="cpu")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]

    def test_a_full_disk_is_told_as_one(
        self, tiny_model: Path, parity_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_args: object) -> None:
            raise OSError(28, "No space left on device", str(tmp_path / "x"))

        monkeypatch.setattr(room.inputs.Inputs, "keep", full)
        with pytest.raises(UserError, match="No space left") as caught:
            evaluate(tiny_model, tmp_path / "out", settings=SETTINGS, data=parity_data, device="cpu")
        assert caught.value.code == ExitCode.STORAGE
        assert not (tmp_path / "out" / manifest.MANIFEST).exists()


def run_and_die(model: Path, out: Path, data: Path, batches: int) -> None:
    """In a forked child: evaluate, and SIGKILL in the middle of writing the batch after ``batches`` whole ones."""
    import torch

    torch.set_num_threads(1)
    append, seen = AnswerLog.append, []

    def append_and_die(self: AnswerLog, entries: Any) -> None:
        if len(seen) == batches:
            with self.path.open("ab") as log:
                log.write(b'{"key": "half a li')
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(1)
        append(self, entries)

    AnswerLog.append = append_and_die  # type: ignore[method-assign]
    evaluate(model, out, settings=SETTINGS, data=data, device="cpu")


def fork_and_wait(*args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run_and_die(*args)
        finally:
            os._exit(3)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")


def test_a_killed_evaluation_goes_on_to_the_same_answers(scored: Scored, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "ifeval"
    assert os.WTERMSIG(fork_and_wait(tiny_model, out, scored.data, 2)) == signal.SIGKILL
    assert not (out / manifest.MANIFEST).exists()
    result = evaluate(tiny_model, out, settings=SETTINGS, data=scored.data, device="cpu")
    assert result["resumed_prompts"] == 2 * SETTINGS.batch_size
    assert result["scores"] == scored.result["scores"]
    assert read_samples(out) == read_samples(scored.out)
    assert manifest.find_problems(out, "evaluation") == []
    assert not list(out.glob(".*"))
