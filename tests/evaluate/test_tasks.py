"""lm-eval's tasks by name on made data sets of gsm8k's and arc's schema, offline; a base and an adapter beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from clustertune.data.local_model import make_local_model
from clustertune.errors import UserError
from clustertune.evaluate.answers import AnswerLog
from clustertune.evaluate.run import evaluate
from clustertune.evaluate.scores import read_result
from clustertune.manifest import find_problems, seal
from clustertune.recipe.sections import Eval
from tests.conftest import TEXTS, TINY_LLAMA
from tests.evaluate.conftest import forbid_network

COMMIT = "a" * 40
SETTINGS = Eval(tasks=["gsm8k", "arc_easy"], num_fewshot=2, limit=6, max_gen_toks=8, batch_size=2)


def write_repository(hub: Path, name: str, config: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """A data set as ``hf download`` leaves it: its files and the card that names them."""
    root = hub / f"datasets--{name.replace('/', '--')}"
    folder = root / "snapshots" / COMMIT / config
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    files = "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in splits)
    (folder.parent / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(count: int, more: int) -> list[dict[str, Any]]:
    return [{"question": f"Ann has {i} nodes and buys {more}.", "answer": f"{i}+{more}\n#### {i + more}"} for i in range(count)]


def choices(count: int, more: int) -> list[dict[str, Any]]:
    labels = ["A", "B", "C", "D"]
    return [
        {
            "id": f"q{i}",
            "question": f"Which is {i} plus {more}?",
            "choices": {"text": [str(i + more + k) for k in range(4)], "label": labels},
            "answerKey": labels[i % 4],
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Hub's cache with two data sets, and no network."""
    import datasets

    folder = tmp_path_factory.mktemp("hub")
    write_repository(folder, "openai/gsm8k", "main", {"train": sums(6, 3), "test": sums(9, 2)})
    write_repository(folder, "allenai/ai2_arc", "ARC-Easy", {"train": choices(6, 1), "test": choices(8, 3)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "converted")
        yield folder


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_local_model(TINY_LLAMA, TEXTS, tmp_path_factory.mktemp("other") / "tiny-llama", seed=1)


@pytest.fixture(scope="module")
def beside(tiny_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two models on two tasks, compared."""
    out = tmp_path_factory.mktemp("beside")
    with forbid_network() as attempts:
        result = evaluate(tiny_model, out / "tuned", settings=SETTINGS, device="cpu", base=other_model, base_out=out / "base")
    assert attempts == []
    return result, out


def test_generation_and_choices_with_few_shot(beside: tuple[dict[str, Any], Path]) -> None:
    result, out = beside
    assert {name: row["n"] for name, row in result["tasks"].items()} == {"gsm8k": 6, "arc_easy": 6}
    assert {"exact_match,strict-match", "exact_match_stderr,flexible-extract"} <= set(result["tasks"]["gsm8k"])
    assert 0 < result["tasks"]["arc_easy"]["acc_stderr,none"] < 1
    detail = result["details"]["gsm8k"]
    assert detail["num_fewshot"] == 2 and detail["revisions"] == {"openai/gsm8k": COMMIT}
    assert detail["limited"] and not detail["comparable"]
    samples = [json.loads(line) for line in (out / "tuned" / "samples.jsonl").read_text().splitlines()]
    prompt = next(row for row in samples if row["task"] == "gsm8k")["arguments"][0][0]
    assert prompt.count("Question:") == 3 and prompt.count("<|start_header_id|>user") == 3
    assert "scores" not in result and read_result(out / "tuned") == result


def test_the_base_is_asked_the_same(beside: tuple[dict[str, Any], Path], other_model: Path) -> None:
    result, out = beside
    row = result["paired"]["arc_easy"]["acc,none"]
    before = read_result(out / "base")
    assert before is not None and row["base"] == pytest.approx(before["tasks"]["arc_easy"]["acc,none"])
    assert row["tuned"] == pytest.approx(result["tasks"]["arc_easy"]["acc,none"])
    assert row["ci95"][0] <= row["difference"] <= row["ci95"][1]
    assert set(result["paired"]["gsm8k"]) == {"exact_match,strict-match", "exact_match,flexible-extract"}
    with pytest.raises(UserError, match=r"another .*prompts"):
        settings = SETTINGS.model_copy(update={"num_fewshot": 1})
        evaluate(other_model, out / "base", settings=settings, device="cpu")


def test_a_killed_one_goes_on_with_fewer_requests(
    beside: tuple[dict[str, Any], Path], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = AnswerLog.append, []

    def die(self: AnswerLog, entries: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            with self.path.open("ab") as log:
                log.write(b'{"key": "half a li')
            raise KeyboardInterrupt
        append(self, entries)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnswerLog, "append", die)
        evaluate(tiny_model, tmp_path / "out", settings=SETTINGS, device="cpu")
    (log,) = (tmp_path / "out").glob(".answers-*.tmp")
    lines = [json.loads(line) for line in log.read_text().splitlines()[:-1]]
    assert {(line["task"], line["doc"]) for line in lines} and len(lines) == 4
    result = evaluate(tiny_model, tmp_path / "out", settings=SETTINGS, device="cpu")
    assert result["resumed_prompts"] == 4
    assert result["tasks"] == beside[0]["tasks"]
    assert not find_problems(tmp_path / "out", "evaluation") and not list((tmp_path / "out").glob(".*"))
    samples = [(out / "samples.jsonl").read_text() for out in (tmp_path / "out", beside[1] / "tuned")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Eval(tasks=["gsm8", "arc_easy"], pass_mark={"arc_easy": {"accuracy": 0.5}}), "gsm8k"),
        (Eval(tasks=["arc_easy"], pass_mark={"arc_easy": {"accuracy": 0.5}}), "no metric 'accuracy'"),
        (Eval(tasks=["hellaswag"]), "Rowan/hellaswag is not available.* -> .*hf download Rowan/hellaswag"),
        (SETTINGS, "is the model that is scored"),
    ],
)
def test_what_cannot_be_scored(tiny_model: Path, tmp_path: Path, settings: Eval, message: str) -> None:
    """Unknown names come with near ones, a data set that is not there with the way to it; a model is not its own base."""
    beside = {"base": tiny_model, "base_out": tmp_path / "base"} if settings is SETTINGS else {}
    with pytest.raises(UserError, match=message):
        evaluate(tiny_model, tmp_path / "out", settings=settings, device="cpu", **beside)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model), dtype="auto")
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("adapter")
    wrapped.save_pretrained(str(folder))
    return folder


def test_it_is_scored_as_the_merged_model(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    from clustertune.merge import merge

    settings = SETTINGS.model_copy(update={"tasks": ["arc_easy"], "num_fewshot": 0})
    merge(tiny_model, adapter, tmp_path / "merged")
    merged = evaluate(tmp_path / "merged", tmp_path / "a", settings=settings, device="cpu")
    applied = evaluate(tiny_model, tmp_path / "b", settings=settings, device="cpu", adapter=adapter)
    assert applied["adapter"] == str(adapter.resolve())

    def likelihoods(folder: Path) -> list[float]:
        lines = (folder / "samples.jsonl").read_text().splitlines()
        return [float(given[0][0]) for line in lines for given in json.loads(line)["resps"]]

    # Merged weights are rounded to bfloat16 once more.
    assert likelihoods(tmp_path / "b") == pytest.approx(likelihoods(tmp_path / "a"), rel=0.05)
    assert merged["tasks"]["arc_easy"]["n"] == applied["tasks"]["arc_easy"]["n"]


def test_the_base_that_it_was_trained_on_is_named(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Trained on NF4 it may be scored on NF4 or on bfloat16: two evaluations, each of which names both."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from clustertune.merge import merge

    trained = shutil.copytree(adapter, tmp_path / "adapter")
    seal(trained, "adapter", {"base_quantization": "bitsandbytes nf4"})
    settings = SETTINGS.model_copy(update={"tasks": ["arc_easy"], "num_fewshot": 0, "limit": 1})

    def score(model: Path, out: str, adapter: Path | None) -> dict[str, Any]:
        return evaluate(model, tmp_path / out, settings=settings, device="cpu", adapter=adapter)

    plain = score(tiny_model, "plain", trained)
    assert (plain["trained_on"], plain["quantization"]) == ("bitsandbytes nf4", None)
    assert plain["notes"][0] == "The adapter was trained on a base in bitsandbytes nf4; it is scored on bfloat16 weights."
    assert score(tiny_model, "unknown", adapter)["trained_on"] == "unknown"
    merge(tiny_model, trained, tmp_path / "merged")
    merged = score(tmp_path / "merged", "merged-scores", None)
    assert (merged["trained_on"], merged["notes"][0]) == ("bitsandbytes nf4", plain["notes"][0])
    assert score(tiny_model, "base", None)["trained_on"] is None

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    # bitsandbytes' kernel for CPUs takes rows of whole blocks of 64.
    even = make_local_model({**TINY_LLAMA, "intermediate_size": 128}, TEXTS, tmp_path / "even", seed=0)
    model = AutoModelForCausalLM.from_pretrained(even, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "nf4")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "nf4")
    packed = score(tmp_path / "nf4", "packed", trained)
    assert (packed["trained_on"], packed["quantization"]) == ("bitsandbytes nf4", "bitsandbytes nf4")
    with pytest.raises(UserError, match=r"another .*quantization"):
        score(tmp_path / "nf4", "plain", trained)
    with pytest.raises(UserError, match=r"another .*trained_on"):
        score(tiny_model, "plain", adapter)
