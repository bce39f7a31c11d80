"""Faults of run folders, secrets and disks, for test_recipe_rules.py."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest
from clustertune.check.rule import FAIL, WARN
from clustertune.host.facts import Mount
from tests.doctor.recipe_case import Case, write_checkpoint, write_run

LORA = 27_262_976
"""Parameters of the case's adapter: 32 layers x 32 x (4096 + 4096 + 4096 + 1024 + 4096 + 1024 + 4096 + 4096)."""


def foreign_run(case: Case) -> None:
    write_run(case)
    path = case.run / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "0" * 64}))


def no_run(case: Case) -> None:
    case.run.mkdir()
    (case.run / "thesis.tex").write_text("")


def two_nodes(case: Case) -> None:
    """The run folder is on this node's disk, and the cluster shares /pool."""
    case.recipe["slurm"]["nodes"] = 2
    case.recipe["train"]["per_device_train_batch_size"] = 2


HELD: list[int] = []


def in_use(case: Case) -> None:
    write_run(case)
    path = case.run / "lock"
    path.write_text("process 7 on node3\n")
    HELD.append(os.open(path, os.O_RDWR))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)


def damaged(*steps: int, whole: int | None = None) -> Callable[[Case], None]:
    """Checkpoints that lack a file, newer than a whole one or without any."""

    def spoil(case: Case) -> None:
        write_run(case)
        if whole is not None:
            write_checkpoint(case, whole)
        for step in steps:
            (write_checkpoint(case, step) / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()

    return spoil


def sentinel(case: Case) -> None:
    write_run(case)
    path = write_checkpoint(case, 80)
    (path / "checkpoint-is-incomplete.txt").write_text("")
    again(path, 80)


def again(path: Path, step: int) -> None:
    """Make a folder whole again as it is now."""
    (path / "MANIFEST.json").unlink()
    records = {name: manifest.FileRecord((path / name).stat().st_size, "0" * 64) for name in manifest.list_files(path)}
    manifest.seal(path, "checkpoint", {"step": step, "world_size": 8}, records)


def checkpoint(step: int = 40, **how: Any) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        write_run(case)
        write_checkpoint(case, step, **how)

    return spoil


def zero_of_other_ranks(case: Case) -> None:
    """FSDP loads a checkpoint of other ranks; DeepSpeed does not."""
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    (case.folder / "accelerate.yaml").write_text(yaml.safe_dump(zero))
    checkpoint(world=16)(case)


def adapter(case: Case, tensors: dict[str, list[int]], step: int = 40) -> None:
    """An exported adapter, its bytes a hole in the file."""
    write_run(case)
    write_checkpoint(case, 40)
    out = case.run / "adapter"
    out.mkdir()
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4
        for number in shape:
            size *= number
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (out / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    manifest.seal(out, "adapter", {"step": step}, {})


def whole_adapter(case: Case, step: int = 40, **instead: list[int]) -> None:
    """What PEFT saves for the case's recipe; ``instead``: other shapes of the first layer's q_proj, by ``A`` and ``B``."""
    tensors = {}
    for layer in range(32):
        for name, out in {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}.items():
            for part, shape in {"A": [32, 4096], "B": [out, 32]}.items():
                chosen = instead.get(part, shape) if (layer, name) == (0, "q_proj") else shape
                tensors[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"] = chosen
    adapter(case, {name: shape for name, shape in tensors.items() if shape != [-1]}, step)


def cut_adapter(case: Case) -> None:
    whole_adapter(case)
    path = case.run / "adapter" / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def left_over(case: Case) -> None:
    write_run(case)
    (case.run / ".merged.merging").mkdir()
    (case.run / ".merged.merging" / "model-00001.part").write_bytes(b"x" * 100)


def full_disk(share: float) -> Callable[[Case], None]:
    """The run folder's disk has this share of the 17.4 GB that the run writes: 4 checkpoints, adapter and merged model."""
    return lambda case: setattr(case, "mounts", [Mount(str(case.root), "xfs", free_bytes=int(share * 17.48e9))])


def env(text: str = "HF_TOKEN=x\n", mode: int = 0o600) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        case.env.write_text(text)
        case.env.chmod(mode)

    return spoil


def tracked(case: Case) -> None:
    if shutil.which("git") is None:
        pytest.skip("not installed: git (apt-get install)")
    env()(case)
    for words in (["init", "-q"], ["add", "-f", ".env"]):
        subprocess.run(["git", "-C", str(case.env.parent), *words], check=True, timeout=30)


def many_kept(case: Case) -> None:
    case.recipe["train"] |= {"save_total_limit": None, "save_steps": 1, "num_train_epochs": 20}
    case.cluster["storage.write_gb_s"] = 1000


def no_local_disk(case: Case) -> None:
    case.recipe["save"] = {"every": case.recipe["train"].pop("save_steps"), "local": {"path": str(case.root / "none")}}


def home_cache(case: Case) -> None:
    """A model of 16 GB, and no variable that says where the cache is."""
    case.environment = {"NLTK_DATA": case.environment["NLTK_DATA"]}
    case.recipe["model"] = {"name": "acme/Llama-3.1-8B-Instruct", "revision": "0" * 40}
    case.recipe["lora"] = {"r": 32}


RUN_CASES: list[tuple[str, str, Callable[[Case], object]]] = [
    ("run-of-another-recipe", FAIL, foreign_run),
    ("run-of-another-recipe", FAIL, lambda case: case.run.write_text("x")),
    ("run-of-another-recipe", FAIL, no_run),
    ("run-on-one-node", FAIL, two_nodes),
    ("run-in-use", WARN, in_use),
    ("checkpoint-damaged", WARN, damaged(80, whole=40)),
    ("checkpoint-damaged", FAIL, damaged(80, 40)),
    ("checkpoint-damaged", FAIL, sentinel),
    ("checkpoint-without-metadata", FAIL, checkpoint(metadata=False)),
    ("checkpoint-of-another-world", FAIL, zero_of_other_ranks),
    ("checkpoint-holds-base", WARN, checkpoint(size=17 * 10**9)),
    ("adapter-of-another-step", WARN, lambda case: whole_adapter(case, 20)),
    ("adapter-shapes", FAIL, lambda case: whole_adapter(case, A=[131072])),
    ("adapter-shapes", FAIL, lambda case: whole_adapter(case, B=[0, 32])),
    ("adapter-shapes", FAIL, lambda case: whole_adapter(case, B=[-1])),
    ("adapter-shapes", FAIL, lambda case: whole_adapter(case, A=[16, 4096])),
    ("adapter-shapes", FAIL, lambda case: whole_adapter(case, A=[32, 2048])),
    ("adapter-shapes", FAIL, cut_adapter),
    ("adapter-shapes", FAIL, lambda case: adapter(case, {})),
    ("left-overs", WARN, left_over),
    ("disk-space", FAIL, full_disk(0.9)),
    ("disk-space", WARN, full_disk(1.05)),
    ("local-disk", WARN, no_local_disk),
    ("checkpoints-kept", WARN, many_kept),
    ("env-file", FAIL, env(mode=0o644)),
    ("env-file", FAIL, env("export HF_TOKEN=x\n")),
    ("env-in-git", FAIL, tracked),
    ("token-in-environment", WARN, lambda case: case.environment.update(WANDB_API_KEY="x")),
    ("cache-in-home", WARN, home_cache),
]
