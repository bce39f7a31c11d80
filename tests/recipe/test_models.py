"""The public models that are known by name: each shows, plans and scales down, or is refused before the queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clustertune import draft
from clustertune.cli.app import app
from clustertune.cli.planning import _plan
from clustertune.errors import UserError
from clustertune.launch.serving import evaluation
from clustertune.recipe.layers import RECIPES
from clustertune.recipe.parameters import adapter_modules, matches, parameter_count
from clustertune.resolve import view
from clustertune.resolve.models import find_model, find_obstacles, known_models, read_models
from clustertune.resolve.resolve import resolve
from tests.command import events, run
from tests.recipe_runs import words

CONVERSATIONS = RECIPES / "tiny-oasst2" / "conversations.jsonl"
LISTED = sorted(read_models())
PUBLIC = list({find_model(name).architecture["model_type"]: name for name in known_models() if "/" in name}.values())
"""One of each family."""
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106], "dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024, "no_such_key": 1},
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


@pytest.fixture(scope="module")
def many() -> draft.PlanTarget:
    """Up to 64 nodes of 8 H200."""
    return draft.where("64x8xh200-sxm", None)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_known_model_shows_and_plans(name: str, many: draft.PlanTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA on modules that it has, on the fewest nodes on which it fits, with hours; and two layers of it."""
    monkeypatch.setattr("clustertune.plan.advise.MICRO", (1,))
    monkeypatch.setattr("clustertune.plan.advise.RATIOS", (1.0,))
    at = draft.PlanTarget(many.calibrated, (1, 2, 8, 32), 8, many.options)
    with draft.drafted("some-recipe", find_model(name), "lora", None, at) as (made, folder):
        resolved = resolve(folder)
        document = view.as_json(resolved)
        plan = _plan(
            at.calibrated, str(folder), ["data.expect.train=10000", "data.expect.mean_tokens=500"], tiny=False, lengths=None
        )
        small = parameter_count(resolve(folder, tiny=True).architecture)
    assert plan.fits and plan.hours and evaluation(resolved, at.calibrated.cluster).gpu_hours
    assert document["parameters"] == plan.shape.counted.total > 1e9 and small and small < 2e7
    chosen = made.recipe["lora"]["target_modules"]
    modules = adapter_modules(resolved.architecture)
    assert all(any(matches([target], module) for module in modules) for target in chosen)
    assert not any(matches(chosen, module) for module in modules if module.startswith("lm_head") or ".gate." in module)


def written(name: str, parent: Path) -> Path:
    """The recipe that ``new`` writes for a model."""
    folder = parent / "some-recipe"
    folder.mkdir()
    draft.write(draft.draft(find_model(name), "lora", None, 1, 8), folder)
    return folder


@pytest.mark.parametrize("name", ["google/gemma-3-12b-it", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"])
def test_weights_that_are_not_trained_as_published_are_refused_before_the_queue(name: str, tmp_path: Path) -> None:
    """The list knows how they are stored; a folder with another copy is taken."""
    folder = written(name, tmp_path)
    words = [str(folder), "--cluster", "dgx-h100", "--dry-run", "slurm.nodes=16", "train.global_batch_size=128"]
    told = str(CliRunner().invoke(app, ["submit", *words]).exception)
    assert "model.path" in told and find_model(name).section["name"] in told
    assert not find_obstacles(resolve(folder, [f"model.path={tmp_path}"]))
    assert not find_obstacles(resolve(folder, tiny=True))


def test_a_config_of_its_own(tmp_path: Path) -> None:
    """A config.json that is not listed: its folder is the model's, and each wrong key is named."""
    own = tmp_path / "Own model 5b"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({**find_model("Qwen/Qwen3-8B").architecture, "num_hidden_layers": 20}))
    found = find_model(str(own))
    assert found.section == {"name": "Own-model-5b", "path": str(own)} and found.architecture["num_hidden_layers"] == 20
    assert find_model(str(own / "config.json")) == found
    (own / "config.json").write_text(json.dumps(GEMMA | {"quantization_config": {"quant_method": "fp8"}}))
    assert any("fp8" in note for note in find_model(str(own)).notes)
    (own / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "x"}))
    with pytest.raises(UserError, match="hidden_size"):
        find_model(str(own))


def test_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is the snapshot's; one that is not there is refused, with the nearest name that is known."""
    import huggingface_hub.constants

    commit = "a" * 40
    cache = tmp_path / "models--some--model"
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit / "config.json").write_text(json.dumps(dict(find_model("Qwen/Qwen3-8B").architecture)))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_model("some/model").section == {"name": "some/model", "revision": commit}
    with pytest.raises(UserError, match="known model: Qwen/Qwen3-8B"):
        find_model("Qwen/Qwen3-8")


def test_attention_that_transformers_has_no_sdpa_for(tmp_path: Path) -> None:
    """gpt-oss has sinks: eager is taken."""
    folder = written("openai/gpt-oss-20b", tmp_path)
    key = "train.model_init_kwargs.attn_implementation"
    assert {item.key: item.value for item in resolve(folder).derived}[key] == "eager"


@pytest.mark.jobs
@pytest.mark.parametrize("name", LISTED)
def test_a_listed_model_runs_tiny(name: str, tmp_path: Path) -> None:
    """Two layers of its class, trained and exported by the recipe that ``new`` writes."""
    folder = tmp_path / "some-recipe"
    done = run("new", folder, "--model", name, "--data", CONVERSATIONS, "--gpus", "16x8xh200-sxm")
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    done = run("run", folder, "--tiny", "--to", "export", "--run-dir", run_dir, *words(name), network=False)
    assert done.code == 0, done.err
    assert len(events(run_dir, "step")) == 2 and (run_dir / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("folder", "config", "name"),
    [
        ("Tiny-Chat-30M", {}, "Tiny-Chat-30M"),
        ("hf", {"_name_or_path": "acme/Tiny-30M-Instruct"}, "Tiny-30M-Instruct"),
        ("Tiny-7b/hf", {}, "Tiny-7b"),
        (f"models--acme--Tiny/snapshots/{'a' * 40}", {}, "acme/Tiny"),
        ("somewhere/checkpoint-500", {}, "qwen3-"),
        ("hf", {"_name_or_path": "/tmp/hf"}, "qwen3-"),
    ],
)
def test_a_model_is_named_by_what_it_is(folder: str, config: dict[str, Any], name: str, tmp_path: Path) -> None:
    """A folder that says nothing is no name."""
    own = tmp_path / folder
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({**find_model("Qwen/Qwen3-8B").architecture, **config}))
    assert str(find_model(str(own)).section["name"]).startswith(name)
