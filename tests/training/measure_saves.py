"""What a save costs a training, and what the machine's memory and disk allow: ``python -m tests.training.measure_saves``.

Ranks of FSDP2 on CPU and gloo hold a random Llama of float32 parameters and AdamW's moments. In turn, on the same state: a
save that training waits for; one behind training, of which only the copy stops it; the same copy by torch's stager; the
machine's own memmove of the same bytes; and the same bytes written from one buffer and fsynced. Medians over the turns of the
slowest rank; the first copy, which touches its memory for the first time, is listed apart. Beside the seconds: page faults and
CPU seconds of rank 0's copy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from clustertune.checkpoint.saving import RankState, StateWriter
from clustertune.checkpoint.store import CheckpointStore
from clustertune.training.collectives import Group
from clustertune.training.trainer import state_parts

PIECE = 16 << 20


def build(layers: int, hidden: int) -> tuple[Any, Any]:
    """A sharded model with the state of one step."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, vocab_size=4096, num_attention_heads=16, num_key_value_heads=16)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(4096, (1, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(do: Callable[[], Any]) -> tuple[float, int, float]:
    """Seconds, page faults and CPU seconds of this process."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    do()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_minflt - before.ru_minflt, cpu


def measure(rank: int, given: argparse.Namespace, folder: Path) -> None:
    """One rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(given.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given.port))
    torch.set_num_threads(given.threads)
    dist.init_process_group("gloo")
    model, optimizer = build(given.layers, given.hidden)
    group, ranks = Group(), Group.apart()
    store = CheckpointStore(folder / "checkpoints", 1, 1, ranks, lambda _: None)
    writer = StateWriter(store, ranks, ranks.process_group)
    rows: dict[str, list[tuple[float, int, float]]] = {}
    step, turn, size = 0, 0, 0

    def take(name: str, do: Callable[[], Any]) -> None:
        group.barrier()
        seconds, *rest = timed(do)
        rows.setdefault(name if turn else f"first {name}", []).append((group.maximum([seconds])[0], *rest))

    def collect() -> tuple[dict[str, Any], list[torch.Tensor]]:
        states = {"model_0": {"model": get_model_state_dict(model)}}
        states["optimizer_0"] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        return states, state_parts(model, optimizer)

    def save(states: Any, parts: list[torch.Tensor]) -> Any:
        nonlocal step
        step += 1
        return writer.start(step, RankState(states, parts, 0), {"step": step})

    for turn in range(given.turns + 1):  # noqa: B007
        states, parts = collect()
        size = sum(part.nbytes for part in parts)
        held: list[Any] = []
        take("copy", lambda: held.extend(writer.copy(states, parts)))  # noqa: B023
        take("torch's stager", lambda: writer._stager.stage({"states": states, "parts": parts}))  # noqa: B023
        take("write behind", save(*held).result)
        states, parts = collect()
        take("waiting save", lambda: save(states, parts).result())  # noqa: B023
        pairs = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in zip(held[1], parts, strict=True)]
        take("memmove", lambda: [ctypes.memmove(*pair) for pair in pairs])  # noqa: B023
        take("plain write", lambda: plain(folder / f"plain-{rank}", size))  # noqa: B023
    if rank == 0:
        body = {"bytes_of_a_rank": size, "state_bytes": size * given.ranks, "turns": given.turns, "tensors": len(parts)}
        for name, found in rows.items():
            if name == "first copy" or not name.startswith("first "):  # the first turn warms up
                seconds = statistics.median(one[0] for one in found)
                body[name] = {
                    "seconds": round(seconds, 3),
                    "least": round(min(one[0] for one in found), 3),
                    "most": round(max(one[0] for one in found), 3),
                    "gb_per_s_of_all_ranks": round(size * given.ranks / seconds / 1e9, 2),
                    "page_faults": int(statistics.median(one[1] for one in found)),
                    "cpu_seconds": round(statistics.median(one[2] for one in found), 3),
                }
        stalls = zip(rows["waiting save"], rows["copy"], strict=True)
        body["ratio"] = round(statistics.median(one[0] / other[0] for one, other in stalls), 1)
        body["load"] = [round(one, 1) for one in os.getloadavg()]
        sys.stdout.write(json.dumps(body, indent=1) + "\n")
    dist.destroy_process_group()


def plain(path: Path, size: int) -> None:
    """Write as many bytes from one buffer, and have them on the disk: what ``dd conv=fsync`` does."""
    piece = memoryview(b"\1" * PIECE)
    with path.open("wb", buffering=0) as out:
        for at in range(0, size, PIECE):
            out.write(piece[: min(PIECE, size - at)])
        os.fsync(out.fileno())
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 8, "hidden": 512, "ranks": 2, "threads": 1, "turns": 7, "port": 29581}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; by default the folder for temporary files")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        torch.multiprocessing.spawn(measure, (given, folder), given.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
