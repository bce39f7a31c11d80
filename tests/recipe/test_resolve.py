"""Layers, overrides, derivation, and the object that the stages of a run read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.recipe.native_rules import lora_defaults
from clustertune.resolve import view
from clustertune.resolve.resolve import accumulation, resolve
from clustertune.resolve.resolved import Derived, Resolved
from tests.recipe.conftest import Refuse


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.learning_rate=1e-4", ("train", "learning_rate"), 1e-4), ("lora=null", ("lora",), None),
        ("lora.r=4 lora.r=8", ("lora", "r"), 8), ("lora=null lora.r=8 lora.target_modules=all-linear", ("lora", "r"), 8),
        ("lora.target_modules=[q_proj, v_proj]", ("lora", "target_modules"), ["q_proj", "v_proj"]),
        ("data.input=/data/a b.jsonl", ("data", "input"), "/data/a b.jsonl"),
        ("data={name: d, input: x.jsonl, format: alpaca, language: null}", ("data", "format"), "alpaca"),
        ("train.report_to=none", ("train", "report_to"), "none"), ("train.eval_strategy=no", ("train", "eval_strategy"), "no"),
        ("slurm.time=2-00:00:00", ("slurm", "time"), "2-00:00:00"),
        ("train.model_init_kwargs.attn_implementation=eager", ("train", "model_init_kwargs"), {"attn_implementation": "eager"}),
    ],
)  # fmt: skip
def test_overrides_are_typed_as_in_a_recipe(override: str, path: tuple[str, ...], value: Any) -> None:
    words = override.split(" ") if override.startswith("lora") and "[" not in override else [override]
    resolved = resolve("tiny-oasst2", words)
    body = {**resolved.recipe.model_dump(), "train": resolved.train_args, "lora": resolved.lora}
    for key in path:
        body = body[key]
    assert body == value


@given(batch=st.integers(1, 5000), micro=st.integers(1, 16), ranks=st.integers(1, 600))
def test_accumulation_is_exact_or_its_advice_divides(batch: int, micro: int, ranks: int) -> None:
    found = accumulation({"global_batch_size": batch, "per_device_train_batch_size": micro}, ranks)
    if isinstance(found, Derived):
        assert found.value * micro * ranks == batch
    else:
        advised = int(str(found[2]).removeprefix("write "))
        assert batch % (micro * ranks) and advised > 0 and advised % (micro * ranks) == 0


def test_what_comes_from_the_hub_is_pinned(refused: Refuse) -> None:
    found = refused("llama405b-oasst2", ["model.revision=null", "data.revision=null"])
    assert [problem.key for problem in found] == ["model.revision", "data.revision"]
    assert resolve("llama405b-oasst2", ["model.revision=null", "model.path=/models/405b", "data.revision=null", "data.input=x"])
    assert refused("llama405b-oasst2", ["model.revision=main"])[0].key == "model.revision"
    assert refused("tiny-oasst2", ["model.path=/x"])[0].key == "model.path"


def test_the_chat_template_is_read_and_counts(recipes: Path, refused: Refuse) -> None:
    folder = recipes / "tiny-oasst2"
    assert refused(folder, ["model.chat_template=chat.jinja"])[0].file.endswith("chat.jinja")
    for name in ("../chat.jinja", "/etc/passwd"):
        assert refused(folder, [f"model.chat_template={name}"])[0].key == "model.chat_template"
    (folder / "chat.jinja").write_text("{{ messages }}")
    resolved = resolve(folder, ["model.chat_template=chat.jinja"])
    assert resolved.chat_template == "{{ messages }}"
    (folder / "chat.jinja").write_text("{{ messages | length }}")
    assert resolve(folder, ["model.chat_template=chat.jinja"]).fingerprint() != resolved.fingerprint()


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("train.learning_rate=1e-4", True), ("train.seed=1", True), ("lora.r=8", True), ("data.language=de", True),
        ("train.weight_decay=0.3", True),
        ("lora=null", True),
        ("train.report_to=none", False), ("expect.eval_loss=1.0", False), ("slurm.time=01:00:00", False),
        ("eval.limit=3", False), ("train.save_total_limit=9", False), ("train.ddp_timeout=7200", False),
        ("train.logging_steps=3", False), ("train.logging_first_step=false", False), ("train.eval_steps=3", False),
        ("train.eval_strategy=no", False), ("train.eval_on_start=true", False), ("train.per_device_eval_batch_size=3", False),
        ("train.dataloader_num_workers=2", False), ("train.dataloader_pin_memory=false", False),
        ("train.skip_memory_metrics=false", False), ("train.include_num_input_tokens_seen=all", False),
        ("train.log_level=debug", False), ("train.torch_empty_cache_steps=5", False),
        ("train.dataloader_drop_last=true", True), ("train.dataloader_in_order=false", True),
        ("train.eval_packing=false", True),
        ("train.max_length=128", True), ("train.optim=sgd", True), ("train.neftune_noise_alpha=5", True),
    ],
)  # fmt: skip
def test_the_fingerprint_follows_what_decides_the_weights(override: str, changes: bool, recipes: Path) -> None:
    """And not the place of the recipe."""
    assert (resolve("tiny-oasst2", [override]).fingerprint() != resolve(recipes / "tiny-oasst2").fingerprint()) is changes


def test_when_the_schedule_reads_the_evaluations_they_count() -> None:
    words = ["train.lr_scheduler_type=reduce_lr_on_plateau"]
    own = resolve("tiny-oasst2", words).fingerprint()
    for other in ("train.eval_steps=3", "train.per_device_eval_batch_size=3", "train.metric_for_best_model=loss"):
        assert resolve("tiny-oasst2", [*words, other]).fingerprint() != own
    assert resolve("tiny-oasst2", [*words, "train.ddp_timeout=7200"]).fingerprint() == own


def test_a_default_that_is_stated_is_the_same_run(recipes: Path) -> None:
    """TRL's own values stand in what a run reads, wherever they come from; show still prints only what is stated."""
    words = ["train.adam_beta2=0.999", "train.label_smoothing_factor=0.0"]
    plain, stated = resolve("tiny-oasst2"), resolve("tiny-oasst2", words)
    assert plain.fingerprint() == stated.fingerprint()
    assert plain.train_args["adam_beta2"] == 0.999 and plain.lora is not None and plain.lora["bias"] == "none"
    assert "train.adam_beta2" not in view.as_json(plain)["values"] and "adam_beta2" not in view.as_json(plain)["train_args"]


@pytest.mark.parametrize(
    ("words", "section", "expected"),
    [
        ("lora=null lora.r=4 lora.target_modules=all-linear", "lora", {"r": 4, "target_modules": "all-linear"}),
        ("lora={} lora.r=4 lora.target_modules=all-linear", "lora", {"r": 4, "target_modules": "all-linear"}),
        ("expect=null expect.steps=3", "expect", {"steps": 3}),
        ("train.model_init_kwargs=null train.model_init_kwargs.dtype=bfloat16",
         "train.model_init_kwargs", {"dtype": "bfloat16"}),
        ("data.expect=null data.expect.train=7", "data.expect", {"train": 7}),
    ],
)  # fmt: skip
def test_what_the_command_line_set_to_null_stays_away(words: str, section: str, expected: dict[str, Any]) -> None:
    """Also where it then gives a key of it: NF4 that was switched off would come back with the dtype."""
    origins = resolve("llama70b-qlora", words.split()).origins
    resolved = resolve("llama70b-qlora", words.split())
    body: Any = {**resolved.recipe.model_dump(mode="json", exclude_defaults=True), "train": resolved.train_args}
    body["lora"] = {key: value for key, value in (resolved.lora or {}).items() if value != lora_defaults()[key]}
    for key in section.split("."):
        body = body[key]
    assert {key: value for key, value in body.items() if key not in ("task_type", "attn_implementation")} == expected
    below = {key for key, origin in origins.items() if key.startswith(f"{section}.") and origin not in ("default", "derived")}
    assert below == {f"{section}.{key}" for key in expected}


def test_a_null_of_a_recipe_holds_against_its_base_and_under_an_override(recipes: Path) -> None:
    folder = recipes / "tiny-oasst2"
    recipe = folder / "recipe.yaml"
    recipe.write_text(re.sub(r"\nlora:\n(  .*\n)+", "\nlora: null\n", recipe.read_text()))
    resolved = resolve(folder, ["lora.r=4", "lora.target_modules=[q_proj]"])
    assert resolved.lora is not None and resolved.lora["lora_alpha"] == lora_defaults()["lora_alpha"]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("slurm.nodes=1", True), ("slurm.gpus_per_node=4", True),
        ("accelerate.parallelism_config={parallelism_config_tp_size: 2}", True),
        ("train.global_batch_size=64", False), ("train.per_device_train_batch_size=2", False),
    ],
)  # fmt: skip
def test_a_run_is_the_same_on_other_ranks_and_another_mesh(override: str, same: bool) -> None:
    """Its global batch is not."""
    other, own = resolve("llama405b-oasst2", [override]), resolve("llama405b-oasst2")
    assert (other.fingerprint() == own.fingerprint()) is same


def test_all_problems_of_all_files_at_once(recipes: Path, refused: Refuse) -> None:
    folder = recipes / "tiny-oasst2"
    edit(folder / "recipe.yaml", "global_batch_size", "global_batchsize")
    edit(folder / "accelerate.yaml", "fsdp_version: 2", "fsdp_version: 2\n  fsdp_use_orig_params: true")
    edit(folder / "model.json", "hidden_size", "hiden_size")
    edit(recipes / "_base" / "sft-lora.yaml", "lora_dropout: 0.05", "lora_dropout: 5")
    found = refused(folder, ["lora.r=0"])
    files = {problem.file.rsplit("/", 1)[-1].split(":")[0] for problem in found}
    assert files == {"recipe.yaml", "accelerate.yaml", "model.json", "sft-lora.yaml", "command line"}
    assert all(":" in problem.file for problem in found if problem.file.rpartition("/")[2].startswith("sft-lora"))


DDP = ["accelerate.distributed_type=MULTI_GPU", "accelerate.fsdp_config=null"]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], "float32"), (["lora=null"], "bfloat16"), (["lora=null", "reduce_dtype=float32"], "float32"),
        (["reduce_dtype=bfloat16"], "bfloat16"), (["train.bf16=false"], None), (DDP, None),
    ],
)  # fmt: skip
def test_gradients_are_summed_in_float32_where_it_costs_nothing(overrides: list[str], wanted: str | None) -> None:
    """Or where the recipe says so; the choice is one of FSDP's under mixed precision."""
    found = resolve("recipes/tiny-oasst2", ["train.bf16=true", *overrides])
    assert found.distribution.reduce_dtype == wanted == Resolved.from_dict(found.as_dict()).distribution.reduce_dtype
    if wanted is None:  # where nothing reads it, it is refused
        with pytest.raises(UserError, match="only FSDP under mixed precision reads"):
            resolve("recipes/tiny-oasst2", ["train.bf16=true", *overrides, "reduce_dtype=float32"])
    elif "reduce_dtype" not in "".join(overrides):  # what it is decides the weights
        other = {"float32": "bfloat16", "bfloat16": "float32"}[wanted]
        changed = resolve("recipes/tiny-oasst2", ["train.bf16=true", *overrides, f"reduce_dtype={other}"])
        assert changed.fingerprint() != found.fingerprint()
