"""What needs processes of its own, in one program that imports the stack once: ``python -m tests.export.processes OUT``.

* ``OUT/<case>/pytorch_model_fsdp_0`` comes from accelerate's ``save_fsdp_model(adapter_only=True)`` on two gloo ranks, and
  ``OUT/<case>.pt`` holds what the ranks had trained, gathered without any checkpoint code.
* ``OUT/killed/out<N>`` is what an export leaves that is killed at its Nth write.
* ``OUT/cost.json`` is what an export costs beside a large base.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune import manifest
from clustertune.export import export as module
from clustertune.training import cpu_fsdp
from tests.export.conftest import ARCHITECTURE, LORA, make_tensors, save_shards, seal_checkpoint, write_recipe

CASES: dict[str, tuple[int, dict[str, Any]]] = {"fsdp1": (1, LORA), "fsdp2-head": (2, LORA | {"modules_to_save": ["lm_head"]})}


def build_model(lora: dict[str, Any]) -> torch.nn.Module:
    """The PEFT model with the same random weights wherever it is built."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **lora))


def gather(model: torch.nn.Module, version: int) -> dict[str, torch.Tensor]:
    """The whole adapter on every rank."""
    if version == 1:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            full = {
                name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): value.clone()
                for name, value in model.named_parameters()
            }
    else:
        full = {
            name.replace("_checkpoint_wrapped_module.", ""): value.full_tensor() for name, value in model.named_parameters()
        }
    trained = {k: v.detach() for k, v in full.items() if "lora_" in k or "modules_to_save" in k}
    return {k.replace(".default", "").replace(".modules_to_save", ""): v for k, v in trained.items()}


def train_and_save(version: int, lora: dict[str, Any], out: Path) -> None:
    """Two optimizer steps under FSDP with activation checkpointing, then accelerate's own save."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    cpu_fsdp.set_environment(fsdp1=version == 1)
    only_fsdp1: dict[str, Any] = {"use_orig_params": True, "sync_module_states": False} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        activation_checkpointing=True,
        **only_fsdp1,
    )
    cpu_fsdp.install()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2 == (version == 2)
    model = build_model(lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 96, (2, 12))
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    save_fsdp_model(plugin, accelerator, model, str(out), adapter_only=True)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out))
    trained = gather(model, version)
    if accelerator.is_main_process:
        torch.save(trained, out.with_suffix(".pt"))
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


def fork_ranks(world_size: int, *arguments: Any) -> None:
    """Run :func:`train_and_save` in forked ranks and raise where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
                os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
                train_and_save(*arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * world_size, codes


def fork(work: Callable[[], None]) -> int:
    """Exit code of ``work`` in a child."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write_checkpoint(checkpoint: Path, base_size: int = 0, *, apart: bool = False) -> Path:
    """A sealed checkpoint, with a base tensor of so many float32 values in the same file or in one of its own."""
    base = {"model.base_model.model.model.embed_tokens.weight": torch.ones(base_size)} if base_size else {}
    save_shards(checkpoint / "pytorch_model_fsdp_0", make_tensors() | base, file_per_tensor=apart)
    write_recipe(checkpoint, LORA)
    return seal_checkpoint(checkpoint)


def sweep_kills(folder: Path) -> None:
    """One export for each write, killed there, until one ends by itself."""
    checkpoint = write_checkpoint(folder / "step-000002")

    def export_until(point: int) -> None:
        left = point

        def killer(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        module.fsync_path = manifest.fsync_path = killer(manifest.fsync_path)
        for name in ("replace", "chmod", "mkdir", "write_text"):
            setattr(Path, name, killer(getattr(Path, name)))
        module.export(checkpoint, folder / f"out{point}")

    for point in range(1, 60):
        code = fork(lambda point=point: export_until(point))
        if code != -signal.SIGKILL:
            assert code == 0
            (folder / "points").write_text(str(point))
            return
    raise AssertionError("the export never ended by itself")


def measure_cost(folder: Path) -> None:
    """Peak memory above the start, and bytes read, in MiB: 200 MB of base in a file of its own, 40 MB in a shared one."""
    cases = {
        "apart": write_checkpoint(folder / "step-000004", 50_000_000, apart=True),
        "shared": write_checkpoint(folder / "step-000006", 10_000_000),
    }
    small = write_checkpoint(folder / "step-000002")

    def proc(name: str, key: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self", name).read_text().splitlines() if line.startswith(key))

    def measure(name: str, checkpoint: Path) -> None:
        module.export(small, folder / f"warm-{name}")
        peak, read = proc("status", "VmHWM"), proc("io", "rchar")
        summary = module.export(checkpoint, folder / f"adapter-{name}")
        cost = {"rss": (proc("status", "VmHWM") - peak) / 1024, "read": (proc("io", "rchar") - read) / 2**20}
        (folder / f"{name}.json").write_text(json.dumps(cost | {"warnings": summary["warnings"]}))

    for name, checkpoint in cases.items():
        assert fork(lambda name=name, checkpoint=checkpoint: measure(name, checkpoint)) == 0
        shutil.rmtree(checkpoint)


def main(out: Path) -> None:
    """All cases, and the adapter file of a run without sharding."""
    torch.set_num_threads(1)
    for name, (version, lora) in CASES.items():
        (out / name).mkdir()
        fork_ranks(2, version, lora, out / name)
    model = build_model(LORA)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    model.save_pretrained(out / "ddp")
    torch.save(get_peft_model_state_dict(model), out / "ddp.pt")
    sweep_kills(out / "killed")
    measure_cost(out / "cost")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
