"""The merge measured against copying the same bytes and against PEFT: ``python -m tools.merge_bench --gb 4``.

Each round copies, merges and, if asked, merges with PEFT, in this order, each from a cold page cache of its input
(``POSIX_FADV_DONTNEED``) and with every output file fsynced inside the time. Medians are over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from clustertune.console import emit_json, say
from clustertune.merge.lora import CONFIG, WEIGHTS
from clustertune.merge.pieces import plan_shards
from clustertune.tensorfile import Tensor, byte_size, read_header
from clustertune.training.base_weights import INDEX

_OURS = """
import json, sys, time
from pathlib import Path
import torch
def peak(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
idle = peak()
from clustertune.merge import merge
base, adapter, out, workers = sys.argv[1:]
done = merge(Path(base), Path(adapter), Path(out), shard_size="1GB", workers=int(workers) or None)
sys.stdout.write(json.dumps({"seconds": done["seconds"], "peak": peak(), "idle": idle}))
"""
_PEFT = """
import json, os, sys, time
import torch
def peak(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out, _ = sys.argv[1:]
idle, started = peak(), time.monotonic()
model = AutoModelForCausalLM.from_pretrained(base)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="1GB")
for name in os.listdir(out):
    fd = os.open(os.path.join(out, name), os.O_RDONLY); os.fsync(fd); os.close(fd)
sys.stdout.write(json.dumps({"seconds": time.monotonic() - started, "peak": peak(), "idle": idle}))
"""


_HIDDEN, _INTER, _VOCAB, _HEADS = 2048, 5632, 32000, 16
_BLOCK = 4 << 20


def _tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, "BF16", shape, Path(), 0, byte_size("BF16", shape))


def _write(path: Path, header: bytes, tensors: list[Tensor], scale: float) -> None:
    with path.open("wb") as out:
        out.write(header)
        for tensor in tensors:
            for start in range(0, tensor.size, _BLOCK):
                count = min(_BLOCK, tensor.size - start) // 2
                out.write(memoryview((torch.randn(count) * scale).bfloat16().view(torch.uint8).numpy()))


def _llama(shape: Mapping[str, int], layers: int) -> list[Tensor]:
    hidden, inter, vocab = (shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{m}_proj": (hidden if m in "qo" else keys, hidden) for m in "qkvo"}
    layer |= {"mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "model.norm": (hidden,),
    }
    shapes |= {f"model.layers.{number}.{name}": size for number in range(layers) for name, size in layer.items()}
    return [_tensor(f"{name}.weight", *size) for name, size in sorted(shapes.items())]


def make_base(folder: Path, gb: float, shard_size: int, shape: Mapping[str, int]) -> int:
    """Write a Llama of about ``gb`` (1e9 bytes) of bfloat16 in files of ``shard_size`` bytes, in little memory.

    ``shape``: keys of its ``config.json``. Returns its layers.
    """
    torch.manual_seed(0)
    ends, one = (sum(tensor.size for tensor in _llama(shape, layers)) for layers in (0, 1))
    layers = max(1, round((gb * 1e9 - ends) / (one - ends)))
    folder.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(_llama(shape, layers), shard_size)
    for shard in shards:
        _write(folder / shard.name, shard.header, shard.tensors, 0.02)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **shape, "num_hidden_layers": layers}))
    if len(shards) > 1:
        weights = {t.name: s.name for s in shards for t in s.tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return layers


def make_adapter(folder: Path, layers: int, rank: int) -> None:
    """Write a LoRA of ``rank`` on q, k, v and o of every layer."""
    tensors = []
    for number in range(layers):
        for m in "qkvo":
            key = f"base_model.model.model.layers.{number}.self_attn.{m}_proj"
            tensors += [_tensor(f"{key}.lora_A.weight", rank, _HIDDEN), _tensor(f"{key}.lora_B.weight", _HIDDEN, rank)]
    folder.mkdir(parents=True)
    (shard,) = plan_shards(tensors, 1 << 60)
    _write(folder / WEIGHTS, shard.header, shard.tensors, 0.02)
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = [f"{m}_proj" for m in "qkvo"]
    (folder / CONFIG).write_text(json.dumps(config))


def evict(folder: Path) -> None:
    """Write a folder's files to the disk and take them out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def copy(source: Path, target: Path) -> None:
    """``cp -r``, what links name too, and every file on the disk."""
    subprocess.run(["cp", "-rL", str(source), str(target)], check=True, timeout=3600)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)


def _copied(base: Path, out: Path) -> dict[str, float]:
    started = time.monotonic()
    copy(base, out)
    seconds = time.monotonic() - started
    return {"seconds": seconds, "wall": seconds}


def _script(text: str, base: Path, adapter: Path, out: Path, workers: int) -> dict[str, float]:
    started = time.monotonic()
    arguments = [sys.executable, "-c", text, str(base), str(adapter), str(out), str(workers)]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return {**json.loads(done.stdout.splitlines()[-1]), "wall": time.monotonic() - started}


def _differing(one: Path, other: Path) -> int:
    """Tensors whose bytes differ between two models, or that only one has."""

    def load(folder: Path) -> dict[str, Any]:
        return {t.name: t for p in folder.glob("*.safetensors") for t in read_header(p).tensors}

    ours, theirs = load(one), load(other)
    differing = len(set(ours) ^ set(theirs))
    for name in set(ours) & set(theirs):
        views = []
        for tensor in (ours[name], theirs[name]):
            with tensor.file.open("rb") as src:
                src.seek(tensor.offset)
                views.append(src.read(tensor.size))
        differing += views[0] != views[1]
    return differing


def _hardware(folder: Path) -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text()
    cpu = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {kind}, SHA instructions: "
        + ("yes" if " sha_ni" in info else "no"),
        "commit": (commit or "unknown") + (" with changes" if dirty else ""),
        "versions": f"Python {sys.version.split()[0]}, torch {version('torch')}, peft {version('peft')}",
    }


def _row(name: str, rounds: list[dict[str, float]], reference: float) -> dict[str, Any]:
    seconds = [r["seconds"] for r in rounds]
    row: dict[str, Any] = {"way": name, "seconds": statistics.median(seconds), "all": seconds}
    row["against_cp"] = row["seconds"] / reference
    row["process_seconds"] = statistics.median(r["wall"] for r in rounds)
    if "peak" in rounds[0]:
        row["peak_over_idle_bytes"] = max(int(r["peak"] - r["idle"]) for r in rounds)
    return row


def measure(folder: Path, gb: float, repeat: int, workers: int, with_peft: bool) -> dict[str, Any]:
    """Build the input in ``folder`` (made, and removed at the end), run the rounds, compare the bytes. Returns the figures."""
    base, adapter, out = folder / "base", folder / "adapter", folder / "out"
    ways: dict[str, Any] = {"cp -r + fsync": lambda: _copied(base, out)}
    ways["clustertune merge"] = lambda: _script(_OURS, base, adapter, out, workers)
    if with_peft:
        ways["PEFT merge_and_unload + save_pretrained"] = lambda: _script(_PEFT, base, adapter, out, workers)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    differing = None
    folder.mkdir(parents=True)
    try:
        shape = {"hidden_size": _HIDDEN, "intermediate_size": _INTER, "vocab_size": _VOCAB}
        shape |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _HEADS)
        make_adapter(adapter, make_base(base, gb, 10**9, shape), rank=16)
        size = sum(p.stat().st_size for p in base.iterdir())
        for number in range(repeat):
            for name, run in ways.items():
                evict(base)
                rounds[name].append(run())
                say(f"{number + 1}/{repeat} {name}: {rounds[name][-1]['seconds']:.2f} s")
                if name == "clustertune merge" and with_peft and number == 0:
                    out.rename(folder / "ours")
                elif name.startswith("PEFT") and number == 0:
                    differing = _differing(folder / "ours", out)
                    shutil.rmtree(folder / "ours")
                shutil.rmtree(out, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reference = statistics.median(r["seconds"] for r in rounds["cp -r + fsync"])
    rows = [_row(name, taken, reference) for name, taken in rounds.items()]
    return {"bytes": size, "repeat": repeat, "differing_tensors": differing, "rows": rows}


def main() -> None:
    """Parse the arguments, measure, print each round on stderr and the figures as JSON on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="bytes of the base, in 1e9")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--workers", type=int, default=0, help="threads of the merge; 0: its default")
    parser.add_argument("--folder", type=Path, default=Path("merge-bench"), help="scratch folder: made, then removed")
    parser.add_argument("--no-peft", action="store_true", help="leave PEFT out (it holds the whole model in memory)")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    result = measure(args.folder.resolve(), args.gb, args.repeat, args.workers, not args.no_peft)
    result["hardware"] = _hardware(args.folder.resolve().parent)
    emit_json(result)


if __name__ == "__main__":
    main()
