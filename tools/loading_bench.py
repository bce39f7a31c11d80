"""Loading by rows against stock accelerate, on a model of random weights: bytes, memory and time of each rank.

``python -m tools.loading_bench --gb 1 --ranks 2``: each way is loaded, prepared and run forward once by ranks
that are forked from a process which has imported the stack; one line of JSON a way on stdout. ``rows`` and ``stock`` are the
same accelerate configuration (its RAM-efficient loading), ``whole`` is the one without it. With ``--zero`` it
is DeepSpeed's ZeRO-3, which has no ``whole``.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune.recipe.deepspeed_file import ZERO
from clustertune.resolve.resolved import Distribution
from tools.merge_bench import make_base

WAYS = ("rows", "stock", "whole")
SECONDS = 1800
"""After which a rank that hangs is ended, by default; it says where it was."""


@dataclass(frozen=True)
class Axes:
    """How the ranks are laid out: replicas of shards, each of them split over ``tp`` ranks."""

    ranks: int
    replicas: int = 1
    tp: int = 1
    zero: bool = False
    """Under ZeRO-3 in the place of FSDP2."""

    @property
    def shards(self) -> int:
        return self.ranks // (self.replicas * self.tp)

    @property
    def sizes(self) -> dict[str, int]:
        """accelerate's ``ParallelismConfig``."""
        return {"dp_replicate_size": self.replicas, "dp_shard_size": self.shards, "tp_size": self.tp}


@dataclass(frozen=True)
class Measured:
    """One rank's loading."""

    seconds: float
    read_bytes: int
    """By system calls while it loads (``rchar`` of ``/proc/self/io``): pages of mapped files do not count."""
    peak_bytes: int
    """Most resident memory beyond what the process had before; pages of mapped files that it touched count."""
    held_bytes: int
    """Anonymous resident memory beyond that, at the end: what the rank keeps."""
    loss: float


def make_model(folder: Path, gb: float) -> None:
    """Write a Llama of about ``gb`` GB in bfloat16, in files of a quarter of it."""
    hidden = 1024 if gb >= 0.2 else 256
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 2048}
    make_base(folder, gb, int(gb * 1e9 / 4), shape | {"num_attention_heads": 8, "num_key_value_heads": 2})


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _read_calls() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def _join(store: Path, ranks: int) -> None:
    """Make the process group by a file of this bench's own: a port that was free may be another program's by then."""
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)


def load(folder: Path, way: str, axes: Axes, store: Path) -> Measured:
    """Load and prepare the model in this rank, as the training does, with LoRA on its queries; then one forward pass.

    ``store``: a path at which the ranks meet.
    """
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 - else it is read while the time is taken
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from clustertune.training import parallelism
    from clustertune.training.figures import Startup
    from clustertune.training.loading import Loading

    if importlib.util.find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # accelerate 1.15 does while it prepares a model: 7 MB read that are not weights
    accelerator = _zero(store, axes) if axes.zero else _fsdp(way, store, axes)
    distribution = Distribution(kind="FSDP2", world_size=axes.ranks, ranks_per_node=axes.ranks, data_parallel_size=axes.shards)
    distribution = dataclasses.replace(distribution, efficient_loading=way == "rows")
    loading = Loading(distribution, Startup())
    if way == "rows" or not axes.zero:
        loading.install()
    torch.manual_seed(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, anonymous, calls, began = _status("VmRSS"), _status("RssAnon"), _read_calls(), time.perf_counter()
    base = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    if axes.tp > 1:
        parallelism.split(model, accelerator.torch_device_mesh["tp"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    seconds, peak = time.perf_counter() - began, _status("VmHWM") - before
    calls, resident = _read_calls() - calls, _status("RssAnon") - anonymous
    loading.remove()
    tokens = torch.arange(32, device=accelerator.device).reshape(1, 32)
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    torch.distributed.destroy_process_group()
    return Measured(seconds, calls, peak, resident, loss)


def _zero(store: Path, axes: Axes) -> Any:
    """An Accelerator with DeepSpeed's ZeRO-3, as a recipe's file asks for it."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from clustertune.training import deepspeed_engine

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed_engine.keep_gloo()
    _join(store, axes.ranks)
    config = {ZERO: {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True)
    plugin.set_deepspeed_weakref()
    return Accelerator(deepspeed_plugin=plugin)


def _fsdp(way: str, store: Path, axes: Axes) -> Any:
    """An Accelerator with FSDP2, as a recipe's file asks for it."""
    import torch
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    from clustertune.training import build

    flag = way != "whole"
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING=str(flag).lower())
    if not torch.cuda.is_available():
        build.use_cpu()
        build.install_cpu_fsdp()
    plugin = FullyShardedDataParallelPlugin(
        reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=flag,
    )  # fmt: skip
    _join(store, axes.ranks)
    mesh = ParallelismConfig(**axes.sizes) if axes.ranks > axes.shards else None
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, parallelism_config=mesh)
    accelerator._prepare_tp = lambda *args: args  # as clustertune/training/trainer.py
    return accelerator


def _forked(work: Callable[[int], object], count: int, seconds: int = SECONDS) -> None:
    """Run ``work(number)`` in ``count`` children. Raises torch's ProcessException where one fails, with its trace; the others,
    which would wait half an hour for it in a collective, are ended then. One that hangs says where it was, and fails."""
    from torch import multiprocessing

    def guarded(number: int) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)
        work(number)

    multiprocessing.start_processes(guarded, nprocs=count, start_method="fork")


def measure(folder: Path, way: str, axes: Axes, seconds: int = SECONDS) -> list[Measured]:
    """Every rank's figures, in rank order. To be called in a process with one thread that has imported the stack."""
    with tempfile.TemporaryDirectory() as left:

        def one(rank: int) -> None:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": axes.ranks, "LOCAL_WORLD_SIZE": axes.ranks}
            os.environ.update({key: str(value) for key, value in variables.items()})
            measured = load(folder, way, axes, Path(left, "store"))
            Path(left, str(rank)).write_text(json.dumps(asdict(measured)))

        _forked(one, axes.ranks, seconds)
        return [Measured(**json.loads(Path(left, str(rank)).read_text())) for rank in range(axes.ranks)]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.loading_bench", description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the shards: HSDP (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of a shard (default: %(default)s)")
    parser.add_argument("--zero", action="store_true", help="DeepSpeed's ZeRO-3 in the place of FSDP2")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of %(default)s")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="end a rank that takes longer (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    axes = Axes(parsed.ranks, parsed.replicas, parsed.tp, parsed.zero)
    ways = parsed.ways.split(",")
    if parsed.zero and (parsed.replicas > 1 or parsed.tp > 1 or "whole" in ways):
        parser.error("--zero splits over all --ranks; its ways are rows and stock")
    if parsed.ranks % (parsed.replicas * parsed.tp) or not set(ways) <= set(WAYS) or (parsed.tp > 1 and "stock" in ways):
        parser.error("--ranks divide by --replicas x --tp; ways are rows, stock and whole; stock knows no --tp")

    import torch

    import clustertune.training.figures  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path, parsed.gb)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for way in ways:
            measured = measure(path, way, axes, parsed.seconds)
            line = {"way": way, "model_bytes": size, **axes.sizes, "ranks": [asdict(one) for one in measured]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
