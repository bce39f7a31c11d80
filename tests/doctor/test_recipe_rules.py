"""Every rule of recipe, stack, data and run folder: silent on the faultless case, alone to speak on its own fault."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest
from clustertune.check.rule import FAIL, UNKNOWN, WARN, exit_code
from clustertune.config.load import RECIPES
from clustertune.config.resolved import Resolved
from clustertune.containers import pins
from clustertune.doctor import recipe_findings, recipe_plan
from clustertune.doctor.recipe_findings import recipe_rules
from clustertune.errors import Problem, UserError
from clustertune.host.facts import Mount
from tests.doctor.recipe_case import ACCELERATE, Case, make, write_checkpoint, write_model, write_run
from tests.doctor.run_cases import RUN_CASES, checkpoint, env

Spoil = Callable[[Case], object]
RULES = {rule.id: rule for rule in recipe_rules()}
HUB = {"name": "meta-llama/Llama-3.1-8B-Instruct", "revision": "0" * 40}


def override(*words: str) -> Spoil:
    return lambda case: case.overrides.extend(words)


def cluster(**changes: Any) -> Spoil:
    return lambda case: case.cluster.update({key.replace("__", "."): value for key, value in changes.items()})


def versions(**changes: str) -> Spoil:
    return lambda case: case.versions.update({key.replace("_", "-"): value for key, value in changes.items()})


def environment(**changes: str) -> Spoil:
    return lambda case: case.environment.update(changes)


def train(**changes: Any) -> Spoil:
    """Arguments that resolve() would refuse, as a run.json of another release may have them."""

    def change(resolved: Resolved) -> Resolved:
        return replace(resolved, train_args={**resolved.train_args, **changes})

    return lambda case: setattr(case, "change", change)


def section(name: str, **changes: Any) -> Spoil:
    """Keys of a recipe's section."""
    return lambda case: case.recipe[name].update(changes)


def edit(name: str, **changes: Any) -> Spoil:
    return lambda case: case.edit(name, **changes)


def counted(**counts: int) -> Spoil:
    return lambda case: case.recipe["data"]["expect"].update(counts)


def both(*parts: Spoil) -> Spoil:
    return lambda case: [part(case) for part in parts]


def hub(case: Case, revision: str = "0" * 40) -> Path:
    """The model comes from the Hub; returns where the cache has it."""
    case.recipe["model"] = {**HUB, "revision": revision}
    return case.root / "hub" / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / revision


def cached(case: Case) -> None:
    folder = hub(case)
    folder.mkdir(parents=True)
    write_model(folder)


def no_revision(case: Case) -> None:
    cached(case)
    case.change = lambda resolved: replace(
        resolved, recipe=resolved.recipe.model_copy(update={"data": resolved.recipe.data.model_copy(update={"input": None})})
    )


def quantised(**changes: Any) -> Spoil:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_compute_dtype": "bfloat16", **changes}
    settings = {key: value for key, value in settings.items() if value is not None}

    def spoil(case: Case) -> None:
        case.recipe["train"]["model_init_kwargs"]["quantization_config"] = settings
        case.versions["bitsandbytes"] = "0.50.2"

    return spoil


def mount(kind: str, *options: str) -> Spoil:
    return lambda case: setattr(case, "mounts", [Mount(str(case.root), kind, options=list(options), free_bytes=10**15)])


def fsdp(**changes: Any) -> Spoil:
    def spoil(case: Case) -> None:
        import yaml

        config = {**ACCELERATE["fsdp_config"], **changes}  # type: ignore[dict-item]
        config = {key: value for key, value in config.items() if value is not None}
        (case.folder / "accelerate.yaml").write_text(yaml.safe_dump({**ACCELERATE, "fsdp_config": config}))

    return spoil


def fsdp1(**changes: Any) -> Spoil:
    return fsdp(fsdp_version=1, fsdp_use_orig_params=True, fsdp_sync_module_states=True, **changes)


def arm(case: Case) -> None:
    case.arch = "aarch64"
    case.versions["nvidia-nccl-cu13"] = "2.29.2.post1"


def full(case: Case) -> None:
    """All parameters are trained."""
    case.recipe["lora"] = None
    case.recipe["train"]["learning_rate"] = 1e-5


def long_steps(seconds: float) -> Spoil:
    """A network so slow that a step takes this long, about."""
    return both(nodes2, cluster(network__measured_gb_s=30 / seconds), shared)


def nodes2(case: Case) -> None:
    case.recipe["slurm"]["nodes"] = 2
    case.recipe["train"]["per_device_train_batch_size"] = 2


def shared(case: Case) -> None:
    """The case's folders lie on a file system that all nodes see."""
    case.cluster |= {"storage.bricks": (), "storage.pool": None, "storage.shared": str(case.root)}
    case.cluster["nodes"] = [
        {"name": "rno-it-gpu0007-1", "address": "10.21.133.35", "roles": ("compute", "slurmctld")},
        {"name": "rno-it-gpu0008-1", "address": "10.21.133.39", "roles": ("compute",)},
    ]


def slow_storage(gb_s: float) -> Spoil:
    return cluster(storage__read_gb_s=gb_s)


def mamba(case: Case) -> None:
    case.change = lambda resolved: replace(
        resolved, architecture={**resolved.architecture, "layer_types": [*["mamba"] * 31, "full_attention"]}
    )


def no_spare_token(case: Case) -> None:
    case.edit("tokenizer.json", model={"vocab": {"a": 0, "<|eot_id|>": 2}}, added_tokens=[])


def elsewhere(case: Case) -> None:
    """A laptop on which somebody looks at another cluster's recipe; nothing says where its cache is."""
    hub(case)
    case.hostname = "laptop"
    case.environment.pop("HF_HOME")


def logged_in(case: Case) -> None:
    """As ``hf auth login`` leaves it, whatever the cache's own variable says."""
    (case.root / "token").write_text("hf_x")


def no_slurm(case: Case) -> None:
    case.cluster = {"slurm": None, "nodes": [{"name": case.hostname, "address": "10.21.133.35", "roles": ("compute",)}]}
    case.cluster |= {"storage.bricks": (), "storage.pool": None, "storage.shared": None}


def huge(case: Case) -> None:
    """A model of a terabyte."""
    case.change = lambda resolved: replace(resolved, architecture={**resolved.architecture, "num_hidden_layers": 2400})


def huge_by_transformers(case: Case) -> None:
    """The same, scored in one process."""
    huge(case)
    case.recipe.setdefault("eval", {})["backend"] = "hf"


def full_dicts(case: Case) -> None:
    """resolve() refuses it; a run.json of another program may have it."""
    config = {**ACCELERATE["fsdp_config"], "fsdp_state_dict_type": "FULL_STATE_DICT"}  # type: ignore[dict-item]
    case.change = lambda resolved: replace(resolved, accelerate={**resolved.accelerate, "fsdp_config": config})


def expected(case: Case) -> None:
    """What was prepared is not what the recipe expects."""
    write_run(case)
    (case.run / "data").mkdir()
    counts = {"train": {"conversations": 19_999}, "eval": {"conversations": 500}}
    manifest.seal(case.run / "data", "dataset", counts, {})


def parcel_of(**model: str) -> Spoil:
    """The recipe reads from a folder that was staged, of this model."""

    def spoil(case: Case) -> None:
        folder = case.root / "parcel"
        (folder / "hub").mkdir(parents=True)
        (case.root / "model").rename(folder / "model")
        (case.folder / "chats.jsonl").rename(folder / "chats.jsonl")
        shutil.copytree(case.root / "nltk", folder / "nltk_data")
        meta = {
            "model": {"name": HUB["name"], "revision": None, "path": "model", **model},
            "data": {"name": "chats", "revision": None, "path": "chats.jsonl"},
        }
        manifest.seal(folder, "parcel", {"parts": meta}, {})
        case.recipe["staged"] = str(folder)
        case.recipe["expect"] = {"hours": 1.0, "steps": 157}
        case.environment = {}

    return spoil


def of_its_own(case: Case) -> None:
    """The recipe without a base, and nothing said about whose tokens count."""
    base = yaml.safe_load((RECIPES / "_base" / f"{case.recipe.pop('base')}.yaml").read_text())
    case.recipe |= {"lora": base["lora"], "train": base["train"] | case.recipe["train"]}
    del case.recipe["train"]["assistant_only_loss"]


REGIONAL = "accelerate.dynamo_config.dynamo_use_regional_compilation=true"
"""Without it the recipe is also doubtful: compiled as a whole."""
CASES: list[tuple[str, str, Spoil]] = [
    ("recipe-doubtful", WARN, lambda c: setattr(c, "change", lambda r: replace(r, warnings=["odd"]))),
    ("double-recomputation", FAIL, train(activation_checkpointing=True)),
    ("nothing-saved", FAIL, override("train.save_strategy=no")),
    ("save-only-model", FAIL, train(save_only_model=True)),
    ("single-checkpoint", WARN, both(shared, nodes2, override("train.save_total_limit=1"))),
    ("learning-rate", WARN, override("train.learning_rate=0.01")),
    ("learning-rate", WARN, override("train.learning_rate=1e-6")),
    ("learning-rate", WARN, both(full, section("train", learning_rate=1e-3), cluster(storage__write_gb_s=1000))),
    ("long-warmup", WARN, override("train.warmup_steps=100")),
    ("long-warmup", WARN, override("train.warmup_steps=0.6")),
    ("loss-on-all-tokens", WARN, of_its_own),
    (
        "compile-shapes",
        WARN,
        both(
            fsdp(fsdp_activation_checkpointing=False),
            override(REGIONAL, "train.torch_compile=true", "train.packing=false", "train.eval_steps=400"),
        ),
    ),
    ("quantised-compute", WARN, quantised(bnb_4bit_compute_dtype=None)),
    ("no-bfloat16", FAIL, cluster(compute__gpu="v100-sxm-32", compute__interconnect="nvlink2")),
    ("no-mixed-precision", WARN, override("train.bf16=false", "train.model_init_kwargs.dtype=float32")),
    ("packed-state", WARN, mamba),
    ("no-evaluation", WARN, lambda c: c.recipe["data"]["expect"].update(eval=0)),
    ("revision-not-pinned", FAIL, no_revision),
    ("not-planned", UNKNOWN, cluster(compute__gpu="my-gpu")),
    ("shape-refused", FAIL, both(shared, section("slurm", time="2-00:00:00"), cluster(slurm__max_time="24:00:00"))),
    ("gpu-memory", FAIL, override("train.per_device_train_batch_size=2", "train.max_length=131072")),
    ("host-memory", FAIL, both(fsdp1(), cluster(compute__memory_gb=24))),
    ("load-timeout", WARN, both(fsdp1(), slow_storage(0.012))),
    ("load-timeout", FAIL, both(fsdp1(), slow_storage(0.005))),
    ("prepare-time", WARN, both(cluster(slurm__max_time="24:00:00"), counted(train=10**12))),
    ("saves-seldom", WARN, both(long_steps(120), section("train", save_steps=80), section("slurm", time="5-00:00:00"))),
    ("saves-often", WARN, both(section("train", save_steps=1), cluster(storage__write_gb_s=0.05))),
    ("warning-lead", WARN, both(long_steps(300), section("train", save_steps=5), section("slurm", time="20-00:00:00"))),
    ("warning-lead", FAIL, override("slurm.time=00:05:00")),
    ("time-limit", WARN, both(override("train.num_train_epochs=30", "slurm.time=02:00:00"))),
    ("much-evaluation", WARN, override("train.eval_steps=1")),
    ("eval-gpus", WARN, huge_by_transformers),
    ("small-micro-batch", WARN, both(long_steps(20), section("train", per_device_train_batch_size=1, save_steps=40))),
    ("model-absent", WARN, hub),
    ("model-absent", FAIL, both(hub, environment(HF_HUB_OFFLINE="1"))),
    ("model-absent", FAIL, lambda c: c.recipe["model"].update(path="/nowhere/model")),
    ("gated-model", WARN, hub),
    ("model-incomplete", FAIL, lambda c: (c.model / "model-00002-of-00002.safetensors").unlink()),
    ("model-incomplete", FAIL, lambda c: (c.model / "model-00002-of-00002.safetensors").write_bytes(b"x")),
    ("model-incomplete", FAIL, lambda c: (c.model / "tokenizer.json").unlink()),
    ("model-json", FAIL, edit("config.json", num_hidden_layers=33)),
    ("model-code", WARN, edit("config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})),
    ("no-chat-template", FAIL, edit("tokenizer_config.json", chat_template=None)),
    ("template-without-marks", WARN, edit("tokenizer_config.json", chat_template="{{ messages }}{{ eos_token }}")),
    ("pad-is-eos", FAIL, override("train.pad_token=<|nowhere|>")),
    ("pad-is-eos", FAIL, train(**{"pad_token": "<|eot_id|>"})),
    ("pad-is-eos", FAIL, both(no_spare_token, edit("tokenizer_config.json", pad_token=None))),
    ("pad-is-eos", FAIL, both(no_spare_token, edit("tokenizer_config.json", pad_token="<|eot_id|>"))),  # noqa: S106
    ("eos-not-in-template", WARN, edit("tokenizer_config.json", chat_template="{% generation %}{% endgeneration %}<|im_end|>")),
    ("tokenizer-mismatch", FAIL, edit("tokenizer.json", added_tokens=[{"id": 128256, "content": "<|extra|>"}])),
    ("weights-on-network", WARN, mount("nfs4", "hard")),
    ("weights-on-network", WARN, mount("fuse.mergerfs", "cache.files=auto-full")),
    ("pool-without-mmap", FAIL, mount("fuse.mergerfs", "cache.files=off")),
    ("pool-without-mmap", FAIL, mount("fuse.mergerfs", "direct_io")),
    ("dataset-absent", FAIL, lambda c: (c.folder / "chats.jsonl").unlink()),
    ("dataset-differs", WARN, expected),
    ("staged-inputs", FAIL, lambda c: c.recipe.update(staged=str(c.root / "nowhere"))),
    ("staged-inputs", FAIL, both(parcel_of(revision="1" * 40), hub)),
    ("task-data", WARN, environment(HF_HUB_OFFLINE="1")),
    ("task-data", FAIL, both(environment(HF_HUB_OFFLINE="1"), override("eval.pass_mark.ifeval.prompt_level_strict_acc=0.6"))),
    ("eval-tasks", FAIL, override("eval.tasks=[ifeval,gsm8]")),
    ("punkt-data", WARN, environment(NLTK_DATA="")),
    ("wandb-mode", WARN, environment(TRANSFORMERS_OFFLINE="yes", WANDB_MODE="online")),
    ("versions-differ", WARN, versions(wandb="0.30.0")),
    ("package-missing", FAIL, override("train.use_liger_kernel=true")),
    ("package-missing", FAIL, override("train.model_init_kwargs.attn_implementation=flash_attention_2")),
    ("package-missing", FAIL, both(override("train.optim=paged_adamw_8bit"), lambda c: c.versions.pop("bitsandbytes"))),
    ("package-missing", FAIL, lambda c: c.versions.pop("wandb")),
    ("stack-unseen", UNKNOWN, lambda c: setattr(c, "place", "login")),
    ("adapter-of-rank-0-only", FAIL, both(full_dicts, versions(accelerate="1.14.0"))),
    ("frozen-base-in-float32", FAIL, versions(accelerate="1.12.0")),
    ("no-float32-master", FAIL, both(full, versions(accelerate="1.13.0"), cluster(storage__write_gb_s=1000))),
    ("empty-adapter", FAIL, versions(peft="0.21.2")),
    ("empty-adapter", FAIL, both(versions(peft="0.21.0"), fsdp1(fsdp_activation_checkpointing=False))),
    ("every-rank-loads-all", WARN, both(versions(transformers="5.5.4"), cluster(compute__memory_gb=100))),
    ("every-rank-loads-all", FAIL, both(versions(transformers="5.22.0"), cluster(compute__memory_gb=100))),
    ("offline-asks-the-hub", FAIL, both(environment(HF_HUB_OFFLINE="1"), versions(transformers="4.57.3"))),
    ("packed-see-each-other", FAIL, versions(transformers="4.53.0")),
    ("accumulated-loss", FAIL, both(versions(transformers="4.45.2"), section("train", per_device_train_batch_size=2))),
    ("nccl-hang-arm", WARN, arm),
    ("nccl-hang-2-29-2", FAIL, versions(nvidia_nccl_cu13="2.29.2")),
    ("nccl-2-28", WARN, versions(nvidia_nccl_cu12="2.28.7")),
    ("checkpoint-runs-code", WARN, versions(torch="2.5.1+cu124")),
    ("punkt-format", WARN, versions(nltk="3.8.1")),
    *RUN_CASES,
]
COMPANIONS = {
    "prepare-time": {"time-limit"},
    "gated-model": {"model-absent"},
    "cache-in-home": {"model-absent"},
    "model-absent": {"gated-model", "task-data"},
    "revision-not-pinned": {"dataset-absent"},
    "warning-lead": {"time-limit"},
    "saves-seldom": {"warning-lead"},
    "eval-gpus": {"gpu-memory", "model-json", "disk-space", "time-limit", "warning-lead", "saves-often", "saves-seldom"},
    "gpu-memory": {"warning-lead", "saves-seldom", "time-limit"},
    "not-planned": {"shape-refused"},
    "every-rank-loads-all": {"host-memory"},
    "nccl-hang-arm": {"nccl-hang-2-29-2"},
    "task-data": {"dataset-absent"},
    "wandb-mode": {"task-data"},
    "offline-asks-the-hub": {"task-data"},
    "host-memory": {"shape-refused"},
    "accumulated-loss": {"packed-see-each-other"},
    "much-evaluation": {"saves-often"},
    "checkpoint-of-another-world": {"package-missing"},  # the made stack has no DeepSpeed
}
"""Faults that come together: what is seen beside the one that is meant. ``versions-differ`` comes with every other release."""


def test_the_faultless_case_is_silent(tmp_path: Path) -> None:
    """A rule that cries on a good recipe is switched off, and the next real fault with it."""
    case = make(tmp_path)
    write_run(case)
    write_checkpoint(case, 40)
    assert [(item.rule, item.found) for item in case.findings()] == []


@pytest.mark.parametrize(("rule", "status", "spoil"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)])
def test_each_fault_is_found_and_no_other(rule: str, status: str, spoil: Spoil, tmp_path: Path) -> None:
    """The fault alone, or with those that it brings along: a rule that also fires on its neighbour's fault says nothing."""
    case = make(tmp_path)
    spoil(case)
    found = case.findings()
    mine = [item for item in found if item.rule == rule]
    assert [item.status for item in mine] == [status] * len(mine), found
    assert mine, [(item.rule, item.found) for item in found]
    others = {item.rule for item in found} - {rule} - COMPANIONS.get(rule, set())
    assert others <= {"versions-differ"}, [(item.rule, item.found) for item in found if item.rule in others]
    for item in mine:
        assert (item.why, item.link) == (RULES[rule].why, RULES[rule].link)
        assert item.where
        assert item.fix or status == UNKNOWN
        assert "\n" not in item.found + item.fix


def test_every_rule_has_a_case() -> None:
    """A rule that no test makes fire may never fire; storage that is silent and a refused recipe have tests of their own."""
    assert set(RULES) - {rule for rule, _, _ in CASES} == {"storage-silent", "recipe-refused"}
    assert len(RULES) >= 30


def test_rules_are_told_apart_and_linked() -> None:
    """People search and suppress ids; a link is what they read next."""
    ids = [rule.id for rule in recipe_rules()]
    assert len(set(ids)) == len(ids)
    for rule in RULES.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id)
        assert rule.link.startswith("https://")
        assert not rule.why.endswith(".")


def test_a_refused_recipe_is_told_as_findings() -> None:
    """Each problem with its place and remedy: the same words as submit's, in the same list as all others."""
    error = UserError([Problem("no such field", file="r/recipe.yaml:3", key="train.warmup_ratio", fix="warmup_steps: 0.03")])
    (found,) = list(recipe_findings.refused(error))
    assert (found.rule, found.status, found.where) == ("recipe-refused", FAIL, "r/recipe.yaml:3: train.warmup_ratio")
    assert (found.found, found.fix) == ("no such field", "warmup_steps: 0.03")
    assert exit_code([found]) == 2


def test_what_loading_is_held_against_is_the_recipes_own_timeout(tmp_path: Path) -> None:
    """A longer ddp_timeout is the remedy that is proposed: it must silence the rule."""
    case = make(tmp_path)
    slow_storage(0.005)(case)
    assert "load-timeout" not in {item.rule for item in case.findings()}  # ranks that read their own rows wait for nobody
    fsdp1()(case)
    (found,) = [item for item in case.findings() if item.rule == "load-timeout"]
    remedy = re.search(r"train\.ddp_timeout=\d+", found.fix)
    assert remedy is not None
    case.overrides.append(remedy[0])
    assert "load-timeout" not in {item.rule for item in case.findings()}


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("saves-seldom", both(long_steps(120), section("train", save_steps=80), section("slurm", time="5-00:00:00"))),
        ("saves-often", both(section("train", save_steps=1), cluster(storage__write_gb_s=0.05))),
        ("small-micro-batch", both(long_steps(20), section("train", per_device_train_batch_size=1))),
    ],
)
def test_the_remedy_is_one(rule: str, spoil: Spoil, tmp_path: Path) -> None:
    """What a finding proposes, laid over the recipe, takes the finding away, and puts no other in its place."""
    case = make(tmp_path)
    spoil(case)
    before = case.findings()
    (found,) = [item for item in before if item.rule == rule]
    remedy = re.search(r"train\.\w+=\d+", found.fix)
    assert remedy is not None
    case.overrides.append(remedy[0])
    after = {item.rule for item in case.findings()}
    assert rule not in after
    assert after <= {item.rule for item in before}


def test_what_is_staged_is_looked_at_where_it_lies(tmp_path: Path) -> None:
    """An air-gapped run has neither the recipe's paths nor the cache: its parcel has all, and the model in it is judged."""
    case = make(tmp_path)
    parcel_of()(case)
    assert [(item.rule, item.found) for item in case.findings()] == []
    (tmp_path / "parcel" / "model" / "tokenizer.json").unlink()
    (tmp_path / "parcel" / "chats.jsonl").unlink()
    assert {item.rule for item in case.findings()} == {"model-incomplete", "dataset-absent"}


@pytest.mark.parametrize(("spoil", "fires"), [(cluster(compute__memory_gb=100), True), (cluster(), False)])
def test_ranks_that_load_all_hurt_only_where_the_node_is_small(spoil: Spoil, fires: bool, tmp_path: Path) -> None:
    """8 x 16 GB fit into 3.9 TB: a rule that cries there is ignored where they do not."""
    case = make(tmp_path)
    both(versions(transformers="5.22.0"), spoil)(case)
    assert ("every-rank-loads-all" in {item.rule for item in case.findings()}) is fires


@pytest.mark.parametrize("pad", [None, "<|eot_id|>"])
def test_a_spare_token_is_taken_in_silence(pad: str | None, tmp_path: Path) -> None:
    """The ranks choose Llama's own right pad where the tokenizer names none but EOS: there is nothing to fix."""
    case = make(tmp_path)
    case.edit("tokenizer_config.json", pad_token=pad)
    assert case.findings() == []


STAGING = {"path": "/local/staging", "gb": 1000.0}
NEAR: list[tuple[str, str | None, Spoil]] = [
    ("single-checkpoint", None, override("train.save_total_limit=1")),
    ("checkpoint-holds-base", None, checkpoint(size=1_500_000_000)),
    ("checkpoint-holds-base", None, both(lambda c: c.recipe.update(lora={"r": 512}), checkpoint(size=7 * 10**9))),
    ("weights-on-network", None, both(mount("nfs4"), cluster(storage__staging=STAGING))),
    ("weights-on-network", WARN, both(mount("nfs4"), cluster(storage__staging=STAGING), section("slurm", staging=False))),
    ("weights-on-network", WARN, elsewhere),
    ("model-absent", UNKNOWN, elsewhere),
    ("gated-model", None, elsewhere),
    ("gated-model", None, both(hub, environment(HF_HUB_CACHE="/other/hub"), logged_in)),
    ("gated-model", WARN, both(hub, environment(**{"HF_TOKEN_PATH": "/nowhere/token"}), logged_in)),
    ("gated-model", None, both(hub, environment(**{"HF_TOKEN": "x"}))),
    ("gated-model", None, both(hub, env())),
    ("versions-differ", None, lambda c: setattr(c, "versions", {**c.versions, **pins.read()[pins.REF]})),
    ("versions-differ", None, versions(torch="2.13.0+cu130")),
    ("offline-asks-the-hub", None, versions(transformers="4.57.3")),
    ("dataset-absent", None, both(environment(HF_HUB_OFFLINE="1"))),
    ("dataset-differs", None, lambda c: (c.recipe["data"]["expect"].update(train=19_999, eval=None), expected(c))),
    ("loss-on-all-tokens", None, override("train.assistant_only_loss=false")),
    ("compile-shapes", None, override("train.torch_compile=true")),
    ("compile-shapes", WARN, override(REGIONAL, "accelerate.dynamo_config.dynamo_backend=INDUCTOR", "train.packing=false")),
    ("package-missing", None, both(override("train.use_liger_kernel=true"), versions(liger_kernel="0.8.5"))),
    ("wandb-mode", None, environment(HF_HUB_OFFLINE="1", WANDB_MODE="offline")),
    ("env-file", None, env()),
    ("token-in-environment", None, both(environment(**{"HF_TOKEN": "x"}), no_slurm)),
    ("nccl-hang-arm", None, versions(nvidia_nccl_cu13="2.28.9")),
    ("every-rank-loads-all", None, versions(transformers="5.5.4")),
    ("packed-see-each-other", None, both(versions(transformers="4.53.0"), override("train.packing=false"))),
    *((rule, None, both(cluster(compute__gpu="v100-sxm-32", compute__interconnect="nvlink2"), override(
        "train.bf16=false", "train.model_init_kwargs.dtype=float32"))) for rule in ("no-bfloat16", "no-mixed-precision")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "status", "spoil"), NEAR, ids=[f"{number}-{case[0]}" for number, case in enumerate(NEAR)])
def test_what_is_nearly_the_fault(rule: str, status: str | None, spoil: Spoil, tmp_path: Path) -> None:
    """On the other side of each condition: silent (None), or said with less weight."""
    case = make(tmp_path)
    spoil(case)
    assert [item.status for item in case.findings() if item.rule == rule] == ([status] if status else [])


def test_a_model_type_says_that_its_layers_carry_a_state(tmp_path: Path) -> None:
    """Bamba's description needs no layer_types for it: transformers' source says so."""
    case = make(tmp_path)
    resolved = case.context().resolved
    named = replace(resolved, architecture={**resolved.architecture, "model_type": "bamba"})
    found = list(recipe_plan.packed(replace(case.context(), resolved=named)))
    assert [item.rule for item in found] == ["packed-state"] and "bamba has layers with a state" in found[0].found
    assert not list(recipe_plan.packed(case.context()))


def test_memory_that_is_nearly_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is off by three per cent decides."""
    case = make(tmp_path)
    monkeypatch.setattr(recipe_plan, "TIGHT", 0.05)
    (found,) = [item for item in case.findings() if item.rule == "gpu-memory"]
    assert found.status == WARN
    assert found.found.startswith("tight")


def test_hours_are_said_as_people_say_them() -> None:
    """Seconds where they are few, minutes and hours where they are many."""
    assert [recipe_plan.hours(seconds) for seconds in (30, 600, 7200)] == ["30 s", "10 min", "2.0 h"]
