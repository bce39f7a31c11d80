"""Every rule of recipe, stack, data and run folder: silent on the faultless case, alone to speak on its own fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest
from clustertune.check.rule import FAIL, RECIPE, REFUSED, UNKNOWN, WARN, checks
from clustertune.cluster.load import load_cluster
from clustertune.containers import pins
from clustertune.doctor import recipe_context, recipe_rules
from clustertune.doctor.recipe_rules import bytes_to_write, holds
from clustertune.host.facts import Mount
from clustertune.recipe.layers import RECIPES
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from tests.doctor.recipe_case import (
    ACCELERATE,
    RUN_CASES,
    Case,
    two_nodes,
    weight_file,
    write_checkpoint,
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
    parts = bytes_to_write(context.plan, case.run)
    size = context.plan.schedule.checkpoint_bytes
    found = {name: round(part / size) for name, part in parts.items() if name.endswith("checkpoints")}
    assert found == ({f"{count} checkpoints": count} if count else {})
    assert {"adapter", "merged model"} <= set(parts)


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


def test_what_is_in_the_image_is_not_judged_from_outside(case: Case) -> None:
    """A faulty package of the login node's Python is not the image's, and the other way round."""
    about = {"stack-unseen", "checkpoint-runs-code", "versions-differ"}
    case.versions["torch"] = "2.5.1"
    case.place = "login"
    assert case.rules() & about == {"stack-unseen"}
    case.cluster["container.runtime"] = "none"
    assert case.rules() & about == {"checkpoint-runs-code", "versions-differ"}


# --- all rules together ------------------------------------------------------------------------------------------------


def test_the_shipped_recipes(tmp_path: Path) -> None:
    """The tiny one is clean. Of the 405B one only what is true is said: packed under sdpa, saved every 20 steps."""

    def faults(name: str) -> set[tuple[str, str]]:
        quiet, cluster = {"NLTK_DATA": str(tmp_path), "HF_HOME": "/pool/hf_cache"}, load_cluster("rno-rtxpro6000")
        context = recipe_context.build(resolve(name), cluster, environment=quiet, env_file=tmp_path / ".env")
        return {(one.rule, one.status) for one in recipe_rules.recipe_findings(context) if one.status in (WARN, FAIL)}

    expected = "model-absent recipe-warning checkpoint-interval-too-long weights-on-network"
    assert faults("tiny-oasst2") == set() and faults("llama405b-oasst2") == {(rule, WARN) for rule in expected.split()}


def test_a_login_node_needs_no_torch() -> None:
    """Neither to resolve and show a recipe nor to judge it: its import takes seconds, and a bare environment has none."""
    program = (
        "import sys\n"
        "from clustertune.cluster.load import load_cluster\n"
        "from clustertune.resolve.resolve import resolve\n"
        "from clustertune.resolve import view\n"
        "from clustertune.doctor import recipe_context, recipe_rules\n"
        "resolved = resolve('llama405b-oasst2')\n"
        "context = recipe_context.build(resolved, load_cluster('rno-rtxpro6000'))\n"
        "assert recipe_rules.recipe_findings(context) and view.as_json(resolved)\n"
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


def test_no_token_is_repeated(case: Case) -> None:
    """A finding goes into reports and mails."""
    secret = "hf_" + "Qx7" * 11
    case.env.write_text(f"HF_TOKEN={secret} x\n{secret}\n")
    case.env.chmod(0o644)
    case.environment |= {"HF_TOKEN": secret, "WANDB_API_KEY": secret}
    found = case.findings()
    assert {item.rule for item in found} == {"token-in-environment"}
    assert secret not in json.dumps([vars(item) for item in found])


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
