"""Where DeepSpeed's state lies: the disk of the node, looked at before a model is loaded; and what a CPU gets instead."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.training import deepspeed_engine
from tests.command import REPO
from tests.damage import refused

PARAM = deepspeed_engine.NVME_VARIABLES["offload_param"]


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """The tiny recipe with its parameters on NVMe, in an environment that says nothing yet."""
    for name in ("_base", "tiny-oasst2"):
        shutil.copytree(REPO / "recipes" / name, tmp_path / "recipes" / name)
    folder = tmp_path / "recipes" / "tiny-oasst2"
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}
    (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, **auto}))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: deepspeed.json, zero3_init_flag: true}\n"
    (folder / "accelerate.yaml").write_text(text)
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
    for name in (PARAM, *caches, "DS_ACCELERATOR", "DS_BUILD_AIO"):
        monkeypatch.setenv(name, "")  # so that what is set below goes away again
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return resolve(folder, ["lora=null"])


def test_a_job_s_own_folder_holds_it(resolved: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """storage.scratch of the cluster file reaches a rank as the folder of its compilers' caches."""
    job = tmp_path / "clustertune-17"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(job / "triton"))
    assert deepspeed_engine.set_environment(resolved, "run", cuda=True) == []
    assert os.environ[PARAM] == str(job / "swap") and (job / "swap").stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(job / "extensions") and "DS_ACCELERATOR" not in os.environ


def test_a_disk_that_is_too_small_or_no_folder_is_told_before_the_model_is_loaded(
    resolved: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it needs; swap files of an earlier attempt are written over and count as room."""
    monkeypatch.setenv(PARAM, str(tmp_path / "swap"))
    need = deepspeed_engine.swap_bytes(resolved, "offload_param")
    assert need == 2 * 3_147_456
    monkeypatch.setattr(deepspeed_engine, "free_bytes", lambda _: need - 1)
    with refused("takes about", ExitCode.STORAGE):
        deepspeed_engine.set_environment(resolved, "run", cuda=True)
    (tmp_path / "swap" / "1_param.tensor.swp").write_bytes(b"x")
    deepspeed_engine.set_environment(resolved, "run", cuda=True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(PARAM, str(tmp_path / "file"))
    with pytest.raises(UserError, match="offload_param cannot lie there"):
        deepspeed_engine.set_environment(resolved, "run", cuda=True)


@pytest.mark.parametrize(
    ("variables", "notes", "device"),
    [({}, 0, "nvme"), ({"DS_ACCELERATOR": "cpu"}, 2, "cpu"), ({"DS_ACCELERATOR": "cpu", "DS_BUILD_AIO": "1"}, 1, "nvme")],
)
def test_without_a_gpu_nothing_is_compiled(
    variables: dict[str, str], notes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replacement with a note; on a GPU, and with DeepSpeed's own word for it, none."""
    for name in ("DS_ACCELERATOR", "DS_BUILD_AIO"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    zero: dict[str, Any] = {"offload_param": {"device": "nvme", "nvme_path": "/x"}, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": {"stage": 3, **zero}}
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=config))
    assert len(deepspeed_engine.fit_to_cpu(SimpleNamespace(deepspeed_plugin=plugin))) == notes
    assert config["zero_optimization"]["offload_param"]["device"] == device
    assert config.get("zero_force_ds_cpu_optimizer") is (False if notes else None)
    assert deepspeed_engine.fit_to_cpu(SimpleNamespace(deepspeed_plugin=None)) == []
