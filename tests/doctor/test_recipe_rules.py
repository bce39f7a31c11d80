"""Every rule of recipe, stack, data and run folder: silent on the faultless case, alone to speak on its own fault."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest
from clustertune.check.rule import FAIL, RECIPE, REFUSED, UNKNOWN, WARN, checks, exit_code
from clustertune.cluster.load import load_cluster
from clustertune.containers import pins
from clustertune.doctor import recipe_context, recipe_findings, recipe_plan, run_folder
from clustertune.doctor.recipe_context import ModelFolder
from clustertune.doctor.run_folder import needed
from clustertune.doctor.stack_faults import FAULTS, holds
from clustertune.errors import Problem, UserError
from clustertune.host import packages
from clustertune.host.facts import Mount
from clustertune.recipe.load import RECIPES
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.tensorfile import Tensor, build_header
from tests.doctor.recipe_case import (
    ACCELERATE,
    RUN_CASES,
    Case,
    full_disk,
    two_nodes,
    weight_file,
    write_checkpoint,
    write_model,
    write_run,
)
from tests.tree import REPO

Spoil = Callable[[Case], object]
RULES = {one.rule.id: one.rule for one in checks(RECIPE, REFUSED)}
HUB = {"name": "meta-llama/Llama-3.1-8B-Instruct", "revision": "0" * 40}


def override(*words: str) -> Spoil:
    return lambda case: case.overrides.extend(words)


def updates(attribute: str, old: str, new: str) -> Callable[..., Spoil]:
    """Sets keys of a mapping of the case; ``old`` stands for ``new`` in their names."""

    def given(**changes: Any) -> Spoil:
        return lambda case: getattr(case, attribute).update({key.replace(old, new): value for key, value in changes.items()})

    return given


cluster, versions, environment = updates("cluster", "__", "."), updates("versions", "_", "-"), updates("environment", " ", "")


def altered(**parts: Callable[[Resolved], Any]) -> Spoil:
    """Parts that resolve() would refuse, as a run.json of another release or program may have them."""

    def change(resolved: Resolved) -> Resolved:
        return replace(resolved, **{name: part(resolved) for name, part in parts.items()})

    return lambda case: setattr(case, "change", change)


def train(**changes: Any) -> Spoil:
    return altered(train_args=lambda resolved: {**resolved.train_args, **changes})


def section(name: str, **changes: Any) -> Spoil:
    """Keys of a recipe's section."""
    return lambda case: case.recipe[name].update(changes)


def edit(name: str, **changes: Any) -> Spoil:
    return lambda case: case.edit(name, **changes)


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
        config = {**ACCELERATE["fsdp_config"], **changes}
        config = {key: value for key, value in config.items() if value is not None}
        (case.folder / "accelerate.yaml").write_text(yaml.safe_dump({**ACCELERATE, "fsdp_config": config}))

    return spoil


whole_copies = fsdp(fsdp_cpu_ram_efficient_loading=False)
"""Each rank loads the whole base."""


def arm(case: Case) -> None:
    case.arch = "aarch64"
    case.versions["nvidia-nccl-cu13"] = "2.29.2.post1"


def full(case: Case) -> None:
    """All parameters are trained."""
    case.recipe["lora"] = None
    case.recipe["train"]["learning_rate"] = 1e-5


def long_steps(seconds: float) -> Spoil:
    """A network so slow that a step takes this long, about."""
    return both(two_nodes, cluster(network__measured_gb_s=30 / seconds), shared)


def shared(case: Case) -> None:
    """The case's folders lie on a file system that all nodes see."""
    case.cluster |= {"storage.bricks": (), "storage.pool": None, "storage.shared": str(case.root)}
    case.cluster["nodes"] = [
        {"name": "rno-it-gpu0007-1", "address": "10.21.133.35", "roles": ("compute", "slurmctld")},
        {"name": "rno-it-gpu0008-1", "address": "10.21.133.39", "roles": ("compute",)},
    ]


def slow_storage(gb_s: float) -> Spoil:
    return cluster(storage__read_gb_s=gb_s)


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


mamba = altered(architecture=lambda of: {**of.architecture, "layer_types": [*["mamba"] * 31, "full_attention"]})
huge = altered(architecture=lambda of: {**of.architecture, "num_hidden_layers": 2400})
"""A model of a terabyte."""
FULL_DICTS = {**ACCELERATE["fsdp_config"], "fsdp_state_dict_type": "FULL_STATE_DICT"}
full_dicts = altered(accelerate=lambda of: {**of.accelerate, "fsdp_config": FULL_DICTS})
CASES: list[tuple[str, str, Spoil]] = [
    ("recipe-warning", WARN, altered(warnings=lambda _: ["odd"])),
    ("nothing-saved", FAIL, override("train.save_strategy=no")),
    ("learning-rate", WARN, override("train.learning_rate=0.01")),
    ("learning-rate", WARN, override("train.learning_rate=1e-6")),
    ("learning-rate", WARN, both(full, section("train", learning_rate=1e-3), cluster(storage__write_gb_s=1000))),
    ("loss-on-all-tokens", WARN, of_its_own),
    ("no-bfloat16", FAIL, cluster(compute__gpu="v100-sxm-32", compute__interconnect="nvlink2")),
    ("no-mixed-precision", WARN, override("train.bf16=false", "train.model_init_kwargs.dtype=float32")),
    ("packed-state", WARN, mamba),
    ("not-planned", UNKNOWN, cluster(compute__gpu="my-gpu")),
    ("shape-refused", FAIL, both(shared, section("slurm", time="2-00:00:00"), cluster(slurm__max_time="24:00:00"))),
    ("gpu-memory", FAIL, override("train.per_device_train_batch_size=2", "train.max_length=131072")),
    ("host-memory", FAIL, both(whole_copies, cluster(compute__memory_gb=24))),
    ("load-timeout", WARN, both(whole_copies, slow_storage(0.012))),
    ("load-timeout", FAIL, both(whole_copies, slow_storage(0.005))),
    ("prepare-time", WARN, both(cluster(slurm__max_time="24:00:00"), override("data.expect.train=1000000000000"))),
    (
        "checkpoint-interval-too-long",
        WARN,
        both(long_steps(120), section("train", save_steps=80), section("slurm", time="5-00:00:00")),
    ),
    ("checkpoint-interval-too-short", WARN, both(section("train", save_steps=1), cluster(storage__write_gb_s=0.05))),
    ("signal-margin", WARN, both(long_steps(600), section("train", save_steps=5), section("slurm", time="20-00:00:00"))),
    ("signal-margin", FAIL, override("slurm.time=00:05:00")),
    ("time-limit", WARN, both(override("train.num_train_epochs=30", "slurm.time=02:00:00"))),
    ("eval-gpus", WARN, both(huge, lambda c: c.recipe.setdefault("eval", {}).update(backend="hf"))),
    ("model-absent", WARN, hub),
    ("model-absent", FAIL, both(hub, environment(HF_HUB_OFFLINE="1"))),
    ("model-absent", FAIL, lambda c: c.recipe["model"].update(path="/nowhere/model")),
    ("model-incomplete", FAIL, lambda c: (c.model / "model-00002-of-00002.safetensors").unlink()),
    ("model-incomplete", FAIL, lambda c: (c.model / "model-00002-of-00002.safetensors").write_bytes(b"x")),
    ("model-incomplete", FAIL, lambda c: (c.model / "tokenizer.json").unlink()),
    ("model-json", FAIL, edit("config.json", num_hidden_layers=33)),
    ("no-chat-template", FAIL, edit("tokenizer_config.json", chat_template=None)),
    ("eos-not-in-template", WARN, edit("tokenizer_config.json", chat_template="{% generation %}{% endgeneration %}<|im_end|>")),
    ("tokenizer-mismatch", FAIL, edit("tokenizer.json", added_tokens=[{"id": 128256, "content": "<|extra|>"}])),
    ("weights-on-network", WARN, mount("nfs4", "hard")),
    ("weights-on-network", WARN, mount("fuse.mergerfs", "cache.files=auto-full")),
    ("staged-inputs", FAIL, lambda c: c.recipe.update(staged=str(c.root / "nowhere"))),
    ("staged-inputs", FAIL, both(parcel_of(revision="1" * 40), hub)),
    ("task-data", WARN, environment(HF_HUB_OFFLINE="1")),
    ("task-data", FAIL, both(environment(HF_HUB_OFFLINE="1"), override("eval.pass_mark.ifeval.prompt_level_strict_acc=0.6"))),
    ("punkt-data", WARN, environment(NLTK_DATA="")),
    ("versions-differ", WARN, versions(wandb="0.30.0")),
    ("stack-unseen", UNKNOWN, lambda c: setattr(c, "place", "login")),
    ("adapter-of-rank-0-only", FAIL, both(full_dicts, versions(accelerate="1.14.0"))),
    ("frozen-base-in-float32", FAIL, versions(accelerate="1.12.0")),
    ("no-float32-master", FAIL, both(full, versions(accelerate="1.13.0"), cluster(storage__write_gb_s=1000))),
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
    "model-absent": {"task-data"},
    "signal-margin": {"time-limit"},
    "checkpoint-interval-too-long": {"signal-margin"},
    "eval-gpus": {
        "gpu-memory",
        "model-json",
        "disk-space",
        "time-limit",
        "signal-margin",
        "checkpoint-interval-too-short",
        "checkpoint-interval-too-long",
    },
    "gpu-memory": {"signal-margin", "checkpoint-interval-too-long", "time-limit"},
    "not-planned": {"shape-refused"},
    "every-rank-loads-all": {"host-memory"},
    "nccl-hang-arm": {"nccl-hang-2-29-2"},
    "offline-asks-the-hub": {"task-data"},
    "host-memory": {"shape-refused"},
    "accumulated-loss": {"packed-see-each-other"},
}
"""Faults that come together: what is seen beside the one that is meant. ``versions-differ`` comes with every other release."""


def test_the_faultless_case_is_silent(case: Case) -> None:
    """A rule that cries on a good recipe is switched off, and the next real fault with it."""
    write_run(case)
    write_checkpoint(case, 40)
    assert [(item.rule, item.found) for item in case.findings()] == []


@pytest.mark.parametrize(("rule", "status", "spoil"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)])
def test_each_fault_is_found_and_no_other(rule: str, status: str, spoil: Spoil, case: Case) -> None:
    """The fault alone, or with those that it brings along: a rule that also fires on its neighbour's fault says nothing."""
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
    """A rule that no test makes fire may never fire; others refuse first, or have tests of their own."""
    assert set(RULES) - {rule for rule, _, _ in CASES} == {"storage-silent", "recipe-refused", "eval-tasks"}
    assert len(RULES) >= 30


def test_a_refused_recipe_is_told_as_findings() -> None:
    """Each problem with its place and remedy: the same words as submit's, in the same list as all others."""
    error = UserError([Problem("no such field", file="r/recipe.yaml:3", key="train.warmup_ratio", fix="warmup_steps: 0.03")])
    (found,) = list(recipe_findings.recipe_refused(error))
    assert (found.rule, found.status, found.where) == ("recipe-refused", FAIL, "r/recipe.yaml:3: train.warmup_ratio")
    assert (found.found, found.fix) == ("no such field", "warmup_steps: 0.03")
    assert exit_code([found]) == 2


REMEDY = ("checkpoint-interval-too-long", "checkpoint-interval-too-short", "load-timeout")
REMEDIED = [case for case in CASES if case[0] in REMEDY and case[:2] != ("load-timeout", WARN)]


@pytest.mark.parametrize(("rule", "_", "spoil"), REMEDIED)
def test_the_remedy_is_one(rule: str, _: str, spoil: Spoil, case: Case) -> None:
    """What a finding proposes, laid over the recipe, takes the finding away, and puts no other in its place."""
    spoil(case)
    before = case.findings()
    (found,) = [item for item in before if item.rule == rule]
    remedy = re.search(r"train\.\w+=\d+", found.fix)
    assert remedy is not None
    case.overrides.append(remedy[0])
    assert case.rules() <= {item.rule for item in before} - {rule}


def test_what_is_staged_is_looked_at_where_it_lies(case: Case, tmp_path: Path) -> None:
    """An air-gapped run has neither the recipe's paths nor the cache: its parcel has all, and the model in it is judged."""
    parcel_of()(case)
    assert [(item.rule, item.found) for item in case.findings()] == []
    (tmp_path / "parcel" / "model" / "tokenizer.json").unlink()
    assert case.rules() == {"model-incomplete"}


STAGING = {"path": "/local/staging", "gb": 1000.0}
NEAR: list[tuple[str, str | None, Spoil]] = [
    ("load-timeout", None, slow_storage(0.005)),  # ranks that read their own rows wait for nobody
    ("punkt-format", None, both(versions(nltk="3.8.1"), override("eval.tasks=[gsm8k]"))),
    ("every-rank-loads-all", None, versions(transformers="5.22.0")),  # 8 x 16 GB fit into 3.9 TB
    ("weights-on-network", None, both(mount("nfs4"), cluster(storage__staging=STAGING))),
    ("weights-on-network", WARN, both(mount("nfs4"), cluster(storage__staging=STAGING), section("slurm", staging=False))),
    ("weights-on-network", WARN, elsewhere),
    ("model-absent", UNKNOWN, elsewhere),
    ("versions-differ", None, lambda c: setattr(c, "versions", {**c.versions, **pins.read()[pins.REF]})),
    ("versions-differ", None, versions(torch="2.13.0+cu130")),
    ("offline-asks-the-hub", None, versions(transformers="4.57.3")),
    ("loss-on-all-tokens", None, override("train.assistant_only_loss=false")),
    ("token-in-environment", None, both(environment(**{"HF_TOKEN": "x"}), no_slurm)),
    ("nccl-hang-arm", None, versions(nvidia_nccl_cu13="2.28.9")),
    ("every-rank-loads-all", None, versions(transformers="5.5.4")),
    ("packed-see-each-other", None, both(versions(transformers="4.53.0"), override("train.packing=false"))),
    *((rule, None, both(cluster(compute__gpu="v100-sxm-32", compute__interconnect="nvlink2"), override(
        "train.bf16=false", "train.model_init_kwargs.dtype=float32"))) for rule in ("no-bfloat16", "no-mixed-precision")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "status", "spoil"), NEAR, ids=[f"{number}-{case[0]}" for number, case in enumerate(NEAR)])
def test_what_is_nearly_the_fault(rule: str, status: str | None, spoil: Spoil, case: Case) -> None:
    """On the other side of each condition: silent (None), or said with less weight."""
    spoil(case)
    assert [item.status for item in case.findings() if item.rule == rule] == ([status] if status else [])


def test_a_model_type_says_that_its_layers_carry_a_state(case: Case) -> None:
    """Bamba's description needs no layer_types for it: transformers' source says so."""
    resolved = case.context().resolved
    named = replace(resolved, architecture={**resolved.architecture, "model_type": "bamba"})
    found = list(recipe_plan.packed_state(replace(case.context(), resolved=named)))
    assert len(found) == 1 and "bamba has layers with a state" in found[0].found
    assert not list(recipe_plan.packed_state(case.context()))


def test_memory_that_is_nearly_full_is_said(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is off by three per cent decides."""
    monkeypatch.setattr(recipe_plan, "TIGHT", 0.05)
    (found,) = [item for item in case.findings() if item.rule == "gpu-memory"]
    assert found.status == WARN
    assert found.found.startswith("tight")


# --- the run folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps", "there", "count"),
    [(3, 5, 0, 4), (1, 5, 0, 2), (3, 100, 0, 2), (None, 5, 0, 32), (3, 5, 3, 1), (3, 5, 4, 0)],
)
def test_the_newest_checkpoint_is_written_beside_those_that_are_kept(
    limit: int | None, steps: int, there: int, count: int, case: Case
) -> None:
    """Retention removes the oldest after the newest is whole: room for the limit alone is too little, once in every run."""
    case.recipe["train"] |= {"save_total_limit": limit, "save_steps": steps}
    write_run(case)
    for number in range(there):
        write_checkpoint(case, number + 1)
    context = case.context()
    assert context.plan is not None
    parts = needed(context.plan, case.run)
    size = context.plan.schedule.checkpoint_bytes
    found = {name: round(part / size) for name, part in parts.items() if name.endswith("checkpoints")}
    assert found == ({f"{count} checkpoints": count} if count else {})
    assert {"adapter", "merged model"} <= set(parts)


def test_what_is_there_needs_no_more_room(case: Case) -> None:
    """A finished export and merge are not written again."""
    write_run(case)
    for name in ("adapter", "merged"):
        (case.run / name).mkdir()
        (case.run / name / "MANIFEST.json").write_text("{}")
    plan = case.context().plan
    assert plan and all(name.endswith("checkpoints") for name in run_folder.needed(plan, case.run))


@pytest.mark.parametrize(("hostname", "fires"), [("rno-it-gpu0007-1", True), ("laptop", False)])
def test_the_disk_of_a_laptop_is_not_the_clusters(
    hostname: str, fires: bool, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder's path means another disk there, unless it is there."""
    full_disk(0.5)(case)
    case.hostname = hostname
    near = case.context()
    assert list(run_folder.disk_space(near)), "the parent exists, so its room can be measured on any machine"
    monkeypatch.setattr(run_folder, "is_there", lambda path: path in (tmp_path, Path("/")))
    far = dataclasses.replace(near, run_dir=tmp_path / "runs" / "name" / "id")
    assert bool([*run_folder.disk_space(far)]) is fires


# --- releases with known faults ----------------------------------------------------------------------------------------


def test_versions_are_compared_as_pip_does() -> None:
    """1.9 is before 1.15, a release candidate before its release, a local part counts for nothing."""
    for ranges, inside, outside in (
        ("<1.15", "1.14.0 1.15.0.dev0 1.15.0rc1 1.9.0", "1.15 1.15.0"), (">=2.28.3,<2.28.9", "2.28.3", "2.28.9.post1 2.28.2"),
        (">=0.21.0,<=0.21.2", "0.21.2 0.21", "0.21.3"), ("<2.6", "2.5.1+cu124", "2.6.0+cpu"),
        (">=4.57.2,<4.57.4", "v4.57.3", "4.57.4"), ("==4.57.2", "4.57.2", "4.57.2.post1"),
    ):  # fmt: skip
        assert all(holds(version, ranges) for version in inside.split()), ranges
        assert not any(holds(version, ranges) for version in [*outside.split(), "nonsense", ""]), ranges


RANGES = {
    "frozen-base-in-float32": ("accelerate", "1.13.0", "1.6.0 1.12.0"),
    "packed-see-each-other": ("transformers", "4.53.1", "4.40.0 4.53.0"),
    "nccl-2-28": ("nvidia-nccl-cu13", "2.28.2 2.28.9", "2.28.3 2.28.8"),
    "nccl-hang-2-29-2": ("nvidia-nccl-cu13", "2.29.1 2.29.3", "2.29.2"),
    "checkpoint-runs-code": ("torch", "2.6.0", "2.0.0 2.5.1"),
    "punkt-format": ("nltk", "3.8.2", "3.8.0 3.8.1"),
}


def test_a_range_ends_where_it_ends(case: Case) -> None:
    """A fix that is not seen keeps people from upgrading; a fault that is not seen costs them the run."""
    context = case.context()
    looks = {one.rule.id: one for one in checks(RECIPE)}
    for rule, (package, outside, inside) in RANGES.items():
        for version in f"{outside} {inside}".split():
            found = list(looks[rule](replace(context, versions={**context.versions, package: version})))
            assert bool(found) is (version in inside.split()), (rule, version)


def test_every_range_can_be_read() -> None:
    """A typing mistake in a range would silence its rule for ever."""
    for part in (part for row in FAULTS.values() for ranges in row["versions"] for part in ranges.split(",")):
        assert part.strip("<>=") and holds(part.strip("<>="), part) is ("=" in part), part


def test_what_is_in_the_image_is_not_judged_from_outside(case: Case) -> None:
    """A faulty package of the login node's Python is not the image's, and the other way round."""
    about = {"stack-unseen", "checkpoint-runs-code", "versions-differ"}
    case.versions["torch"] = "2.5.1"
    case.place = "login"
    assert case.rules() & about == {"stack-unseen"}
    case.cluster["container.runtime"] = "none"
    assert case.rules() & about == {"checkpoint-runs-code", "versions-differ"}


def test_what_a_recipe_may_need_is_looked_for_on_nodes() -> None:
    """A package that no node is asked for would be called missing wherever facts come from a node."""
    wanted = {"bitsandbytes", "torchao", "gptqmodel", "fbgemm-gpu", "deepspeed", "flash-attn", "kernels", "liger-kernel"}
    assert wanted <= set(packages.STACK)


# --- all rules together ------------------------------------------------------------------------------------------------


def test_the_shipped_recipes(tmp_path: Path) -> None:
    """The tiny one is clean. Of the 405B one only what is true is said: packed under sdpa, saved every 20 steps."""

    def faults(name: str) -> set[tuple[str, str]]:
        quiet, cluster = {"NLTK_DATA": str(tmp_path), "HF_HOME": "/pool/hf_cache"}, load_cluster("rno-rtxpro6000")
        context = recipe_context.build(resolve(name), cluster, environment=quiet, env_file=tmp_path / ".env")
        return {(one.rule, one.status) for one in recipe_findings.recipe_findings(context) if one.status in (WARN, FAIL)}

    expected = "model-absent recipe-warning checkpoint-interval-too-long weights-on-network"
    assert faults("tiny-oasst2") == set() and faults("llama405b-oasst2") == {(rule, WARN) for rule in expected.split()}


def test_a_login_node_needs_no_torch() -> None:
    """Neither to resolve and show a recipe nor to judge it: its import takes seconds, and a bare environment has none."""
    program = (
        "import sys\n"
        "from clustertune.cluster.load import load_cluster\n"
        "from clustertune.resolve.resolve import resolve\n"
        "from clustertune.resolve import show\n"
        "from clustertune.doctor import recipe_context, recipe_findings\n"
        "resolved = resolve('llama405b-oasst2')\n"
        "context = recipe_context.build(resolved, load_cluster('rno-rtxpro6000'))\n"
        "assert recipe_findings.recipe_findings(context) and show.as_json(resolved)\n"
        "print(sorted({'torch', 'transformers', 'trl', 'peft', 'accelerate', 'datasets', 'nltk'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, cwd=REPO)
    assert done.stdout == "[]\n"


def test_a_folder_that_hangs_holds_nobody(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard mount whose server is gone: told as such, and no rule looks there again."""
    write_run(case)
    (case.run / "run.json").write_text("{}")  # what a look there would complain of
    monkeypatch.setattr(recipe_context, "unanswered", lambda paths: tuple(path for path in paths if path == case.run))
    found = case.findings()
    assert [(item.rule, item.status, item.where) for item in found] == [("storage-silent", FAIL, str(case.run))]


def test_a_look_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is left behind and named; that nothing is there is an answer."""
    monkeypatch.setattr(recipe_context, "is_there", lambda path: path == tmp_path or time.sleep(60))
    assert recipe_context.unanswered([tmp_path, Path("/hangs")], seconds=0.5) == (Path("/hangs"),)
    monkeypatch.undo()
    assert recipe_context.unanswered([tmp_path, Path("/nowhere/x"), Path("x" * 5000)], seconds=30) == ()


def test_variables_that_name_the_cache(case: Case) -> None:
    """As huggingface_hub takes them, the first that is set."""
    del case.environment["HF_HOME"]
    wanted = {"XDG_CACHE_HOME": "/x/huggingface/hub", "HF_HOME": "/h/hub", "HUGGINGFACE_HUB_CACHE": "/c", "HF_HUB_CACHE": "/d"}
    for name, where in wanted.items():
        case.environment[name] = where[:2]
        assert case.context().hub == Path(where)


def test_another_machines_disks_are_taken_from_the_cluster_file(case: Case) -> None:
    """On a laptop /pool is not a pool; the cluster file says what it is where jobs run."""
    case.hostname = "laptop"
    for path, kind in (("/pool/x", "fuse.mergerfs"), ("/shared/x", "nfs4"), ("/other", "ext4")):
        assert case.context().lies_on(Path(path)).kind == kind


def test_no_token_is_repeated(case: Case) -> None:
    """A finding goes into reports and mails."""
    secret = "hf_" + "Qx7" * 11
    case.env.write_text(f"HF_TOKEN={secret} x\n{secret}\n")
    case.env.chmod(0o644)
    case.environment |= {"HF_TOKEN": secret, "WANDB_API_KEY": secret}
    found = case.findings()
    assert {item.rule for item in found} == {"token-in-environment"}
    assert secret not in json.dumps([vars(item) for item in found])


def test_little_is_enough(case: Case, tmp_path: Path) -> None:
    """A CPU cluster, no facts, no run folder: rules that cannot judge stay silent or say so."""
    case.cluster = {"compute.gpus": 0, "compute.gpu": None, "compute.interconnect": "none", "compute.numa_gpus": ()}
    case.cluster["slurm"] = None
    assert "not-planned" in case.rules()
    nowhere = tmp_path / "none" / ".env"
    context = recipe_context.build(case.context().resolved, case.made_cluster(), environment={}, env_file=nowhere)
    found = recipe_findings.recipe_findings(context)
    assert "rule-broken" not in {item.rule for item in found}


# --- what is read of a model's folder ----------------------------------------------------------------------------------

SMALL = (
    "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
OF_A_RUN = (
    "run.json", "owner.json", "lock", "metrics.jsonl", "data/MANIFEST.json", "adapter/MANIFEST.json",
    "adapter/adapter_model.safetensors", "checkpoints/step-000040/MANIFEST.json",
)  # fmt: skip
GARBAGE = {
    "empty": b"",
    "binary": bytes(range(256)),
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "cut": b'{"model": ',
    "deep": b"[" * 100_000,
    "odd": json.dumps(
        {
            "metadata": [1], "weight_map": [1], "model": {"vocab": 3}, "added_tokens": 7, "added_tokens_decoder": [1],
            "eos_token": 3, "pad_token": [], "chat_template": 5, "vocab_size": "x", "auto_map": "x.X", "text_config": 9,
        }
    ).encode(),
    "nan": b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "x.safetensors", "b": 7, "c": "../../etc/passwd"}}',
}  # fmt: skip


@pytest.mark.parametrize("kind", GARBAGE)
def test_no_file_of_a_model_or_a_run_can_end_the_doctor(kind: str, case: Case) -> None:
    """A download that was cut, a page or a folder in place of a file, a run after a power loss: the other rules still speak."""
    write_run(case)
    write_checkpoint(case, 40)
    paths = [*(case.model / name for name in SMALL), *(case.run / name for name in OF_A_RUN)]
    alone = [[path] for path in paths] if kind in ("odd", "null") else []
    for group in [*alone, paths]:
        before = {path: path.read_bytes() for path in group if path.exists()}
        for path in group:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(GARBAGE[kind])
        case.findings()
        for path in group:
            path.unlink()
        for path, content in before.items():
            path.write_bytes(content)


def test_a_folder_in_place_of_a_file_is_no_trouble(case: Case) -> None:
    """Half an unpacked archive looks so."""
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (case.model / name).unlink()
        (case.model / name).mkdir()
        case.findings()


def test_weights_are_not_read(case: Case) -> None:
    """800 GB over NFS take minutes: names and sizes are enough."""
    count = 50 << 28
    header = build_header([Tensor("a", "F32", (count,), Path(), 0, 4 * count)])
    with (case.model / "model-00001-of-00002.safetensors").open("wb") as out:
        out.write(header)
        out.truncate(len(header) + 4 * count)
    before = _bytes_read()
    assert case.findings() == []
    assert _bytes_read() - before < 64 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_the_caches_links_are_followed(case: Case, tmp_path: Path) -> None:
    """The Hub's cache holds links to blobs: a link to nothing is a file that is missing."""
    weights = case.model / "model-00001-of-00002.safetensors"
    weights.symlink_to(weights.rename(tmp_path / "blob"))
    assert case.findings() == []
    (tmp_path / "blob").unlink()
    assert [(item.rule, weights.name in item.found) for item in case.findings()] == [("model-incomplete", True)]


@pytest.mark.parametrize("index", [True, False], ids=["sharded", "one file"])
@pytest.mark.parametrize("spoil", [-1, 4, b"<html>Not found</html>"], ids=["a byte less", "the start alone", "a page"])
def test_a_file_that_broke_off_is_told(index: bool, spoil: int | bytes, case: Case) -> None:
    """A download that was stopped leaves a file that is there, and its header says that it should be longer."""
    path = case.model / "model-00001-of-00002.safetensors"
    if not index:
        (case.model / "model.safetensors.index.json").unlink()
        (case.model / "model-00002-of-00002.safetensors").unlink()
        path = path.rename(case.model / "model.safetensors")
        assert case.findings() == []
    path.write_bytes(weight_file(64)[:spoil] if isinstance(spoil, int) else spoil)
    assert [(item.rule, item.status, path.name in item.found) for item in case.findings()] == [("model-incomplete", FAIL, True)]


def test_other_kinds_of_tokenizers(case: Case) -> None:
    """XLM-R, T5, BERT and Kimi have none of the usual names."""
    last = "tokenizer.json"
    for name in ("tiktoken.model", "sentencepiece.bpe.model", "spiece.model", "vocab.txt"):
        (case.model / last).rename(case.model / name)
        assert case.findings() == []
        last = name


def test_a_model_folder_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens as text or object, in the configuration or beside it; a template as a file, a key, or one of several;
    Unigram lists its tokens, the others map them, added ones stand apart; one file of weights needs no index."""
    write_model(tmp_path)
    folder = ModelFolder(tmp_path)
    assert (folder.special("eos_token"), folder.special("pad_token")) == ("<|eot_id|>", "<|finetune_right_pad_id|>")
    templates = [{"name": "default", "template": "D"}, {"name": "tool"}]
    added = {"9": {"content": "<y>"}, "z": {}}
    vocab = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": 5, "content": "<x>"}]}
    for name, body in {
        "tokenizer_config.json": {"chat_template": templates, "added_tokens_decoder": added},
        "special_tokens_map.json": {"eos_token": {"content": "</s>"}},
        "tokenizer.json": vocab,
    }.items():
        (tmp_path / name).write_text(json.dumps(body))
    folder = ModelFolder(tmp_path)
    assert (folder.special("eos_token"), folder.special("pad_token"), folder.template) == ("</s>", None, "D")
    assert folder.vocabulary == {"<unk>": 0, "a": 1, "<x>": 5, "<y>": 9}
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ModelFolder(tmp_path).template == "J"
    for path in tmp_path.glob("*safetensors*"):
        path.unlink()
    for size, weights in ((10, (10, [], None)), (0, (0, ["model.safetensors"], None))):
        (tmp_path / "model.safetensors").write_bytes(b"x" * size)
        assert ModelFolder(tmp_path).weights == weights
    monkeypatch.setattr(recipe_context, "MOST_BYTES", 10)
    assert ModelFolder(tmp_path).config is None, "somebody's weights named config.json"


def test_a_model_with_pictures_is_judged_by_its_text_part(case: Case) -> None:
    """Its vocabulary and layers stand one level deeper."""
    case.edit("config.json", text_config={"vocab_size": 3})
    assert {"tokenizer-mismatch", "model-json"} & case.rules()
