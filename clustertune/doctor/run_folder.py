"""The run folder: whose it is, where it lies, what its checkpoints and its adapter are worth. Reads headers, no pickle."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.check.rule import FAIL, WARN, Finding, Rule, finding
from clustertune.checkpoint import store
from clustertune.config.parameters import trained_count, weight_bytes
from clustertune.config.resolved import is_there
from clustertune.doctor.recipe_context import Context
from clustertune.errors import Problem, UserError
from clustertune.launch import visible
from clustertune.tensorfile import Tensor, read_header

OURS = ("run.json", "lock", "owner.json", "requeued.json", "attempts", "jobs", "logs")
"""What a run folder holds from its first second."""
SENTINEL = "checkpoint-is-incomplete.txt"
"""What transformers' just-in-time checkpoint leaves while it writes; nothing there reads it (transformers 5.23)."""
LOOKED_AT = 3
"""How many of the newest checkpoints are compared with their manifests."""
TIMES = 4.0
"""A checkpoint this many times larger than adapter and optimizer state holds something else: the base."""

OTHER_RUN = Rule(
    "run-of-another-recipe",
    "the run folder belongs to this recipe",
    "a run is never continued with other settings: the job ends at its start",
    "https://huggingface.co/docs/transformers/main_classes/trainer",
)
HIDDEN = Rule(
    "run-on-one-node",
    "all nodes see the run folder",
    "ranks of other nodes write their shards elsewhere: .metadata lies on one node only, and nothing can be loaded again",
    "https://github.com/huggingface/accelerate/issues/3010",
)
IN_USE = Rule(
    "run-in-use",
    "nobody else works in the run folder",
    "the next command ends with exit code 75",
    "https://man7.org/linux/man-pages/man2/flock.2.html",
)
DAMAGED = Rule(
    "checkpoint-damaged",
    "the newest checkpoints are whole",
    "what came after the last whole one is computed again; a trainer that takes the newest dies, or goes on from garbage",
    "https://github.com/awslabs/awsome-distributed-ai/issues/190",
)
NO_METADATA = Rule(
    "checkpoint-without-metadata",
    ".metadata beside the shards",
    "without it no shard can be loaded: it is written by one rank, on one node where the folder is not shared",
    "https://github.com/huggingface/accelerate/issues/3010",
)
OTHER_WORLD = Rule(
    "checkpoint-of-another-world",
    "checkpoints of the same number of ranks",
    "sharded state can be spread over other ranks, random states and the place in the data cannot",
    "https://github.com/pytorch/torchtitan/issues/811",
)
WITH_BASE = Rule(
    "checkpoint-holds-base",
    "the size of a LoRA checkpoint",
    "hundreds of gigabytes of frozen weights are written at each save",
    "https://github.com/huggingface/accelerate/pull/2321",
)
STALE = Rule(
    "adapter-of-another-step",
    "the exported adapter is of the newest checkpoint",
    "merge and score are of an older model than the one that was trained",
    "https://github.com/huggingface/transformers/issues/30491",
)
SHAPES = Rule(
    "adapter-shapes",
    "tensors of the exported adapter",
    "a tensor of one dimension or of no size is a shard's rest: the adapter changes nothing, or cannot be loaded",
    "https://github.com/huggingface/peft/issues/970",
)
LEFT_OVER = Rule(
    "left-overs",
    "unfinished files of former attempts",
    "they take space that the next stage needs",
    "https://man7.org/linux/man-pages/man1/du.1.html",
)

RULES = (OTHER_RUN, HIDDEN, IN_USE, DAMAGED, NO_METADATA, OTHER_WORLD, WITH_BASE, STALE, SHAPES, LEFT_OVER)


def check(context: Context) -> Iterator[Finding]:
    """Everything about the run folder; nothing where none is asked about."""
    for look in LOOKS:
        yield from look(context)


def _folder(context: Context) -> Path | None:
    """The run folder, where it exists."""
    with contextlib.suppress(OSError):
        return context.run_dir if context.run_dir is not None and context.run_dir.is_dir() else None
    return None


def _owner(context: Context) -> Iterator[Finding]:
    folder = _folder(context)
    if folder is None:
        if context.run_dir is not None and is_there(context.run_dir):
            yield finding(OTHER_RUN, FAIL, "is no folder", "give another --run-dir", where=str(context.run_dir))
        return
    body = _read(folder / "run.json")
    if body is not None:
        if body.get("fingerprint") != context.resolved.fingerprint():
            text = "holds a run of another recipe or of other settings"
            yield finding(OTHER_RUN, FAIL, text, "give another --run-dir, or leave it out", where=str(folder))
    elif (folder / "run.json").exists():
        yield finding(OTHER_RUN, FAIL, "its run.json cannot be read", "give another --run-dir", where=str(folder))
    elif foreign := sorted(p.name for p in folder.iterdir() if p.name not in OURS and not p.name.endswith(".tmp")):
        text = f"is no run: it holds {', '.join(foreign[:3])}"
        yield finding(OTHER_RUN, FAIL, text, "give a new or empty --run-dir", where=str(folder))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _hidden(context: Context) -> Iterator[Finding]:
    if context.run_dir is None or not context.several_nodes:
        return
    host = context.facts.hostname if context.facts else os.uname().nodename
    places = [("the run folder", context.run_dir)]
    if (given := context.resolved.input_path) is not None and not given.is_relative_to(context.resolved.folder):
        places.append(("data.input", given))
    for problem in visible.find_problems(places, context.cluster, host, context.mounts):
        yield finding(HIDDEN, FAIL, problem.message, problem.fix or "put it on shared storage", where=problem.file or "")


def _in_use(context: Context) -> Iterator[Finding]:
    folder = _folder(context)
    path = folder / "lock" if folder else None
    if path is None or not path.is_file():
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        owner = _read(path.with_name("owner.json")) or {}
        job = f" (job {owner['job']} on {owner.get('host')})" if owner.get("job") else ""
        fix = "wait for it, or give another --run-dir"
        yield finding(IN_USE, WARN, f"{holder}{job} works in it", fix, where=str(folder))
    except OSError:  # a file system without locks tells nothing
        pass
    finally:
        os.close(fd)


def _checkpoints(context: Context) -> Iterator[Finding]:
    folder = _folder(context)
    listed = store.list_checkpoints(folder / "checkpoints") if folder else []
    broken, whole = [], None
    for checkpoint in listed[:LOOKED_AT]:
        # Sizes only: the hashes of a full 405B checkpoint would be a read of terabytes.
        problems = store.verify(checkpoint.path, hashes=False)
        if not problems and not any((path / SENTINEL).exists() for path in (checkpoint.path, *_shards(checkpoint.path))):
            whole = checkpoint
            break
        broken.append((checkpoint, _words(problems[0]) if problems else f"{SENTINEL} lies in it"))
    for checkpoint, why in broken:
        after = f"the run goes on from {whole.path.name}" if whole else "no older one of the newest three is whole"
        fix = (
            "nothing, if that is enough; else fix the storage and copy it back"
            if whole
            else "look at the storage, then train anew"
        )
        status = WARN if whole or len(listed) > LOOKED_AT else FAIL
        yield finding(DAMAGED, status, f"{checkpoint.path.name} is not whole: {why}; {after}", fix, where=str(checkpoint.path))
    for checkpoint in [found for found in (whole, *(item for item, _ in broken)) if found]:
        for shards in _shards(checkpoint.path):
            if not (shards / ".metadata").is_file():
                text = f"{checkpoint.path.name}/{shards.name} holds shards and no .metadata"
                fix = "save to a folder that all nodes share; go on from another checkpoint"
                # A broken one is passed over: that it is broken was said, this is what may be behind it.
                yield finding(NO_METADATA, FAIL if checkpoint is whole else WARN, text, fix, where=str(shards))
    if whole is not None:
        yield from _whole(context, whole)


def _words(problem: Problem) -> str:
    """What is wrong, with the name of the file."""
    return f"{Path(problem.file).name}: {problem.message}" if problem.file else problem.message


def _shards(path: Path) -> list[Path]:
    """Folders of a checkpoint that hold torch's sharded files."""
    with contextlib.suppress(OSError):
        return sorted({file.parent for file in path.glob("*/*.distcp")})
    return []


def _whole(context: Context, checkpoint: store.Checkpoint) -> Iterator[Finding]:
    found = manifest.read_manifest(checkpoint.path)
    world = found.meta.get("world_size")
    if isinstance(world, int) and world != context.resolved.world_size:
        text = f"{checkpoint.path.name} was written by {world} ranks, the job has {context.resolved.world_size}"
        fix = f"use {world} ranks, or another run folder"
        yield finding(OTHER_WORLD, WARN, text, fix, where=str(checkpoint.path))
    trained = _adapter_size(context)
    if trained:
        size, adapter = sum(record.size for record in found.files.values()), 12.0 * trained
        weights = weight_bytes(context.resolved.architecture) or 0
        # float32 adapter and AdamW's two moments; below a tenth of the base it is something small.
        if size > TIMES * adapter and size > 0.1 * weights + adapter:
            text = f"{checkpoint.path.name} has {size / 1e9:,.1f} GB, adapter and optimizer are {adapter / 1e9:,.1f} GB"
            fix = "look at lora.modules_to_save; accelerate writes the adapter only (adapter_only) for PEFT models"
            yield finding(WITH_BASE, WARN, text, fix, where=str(checkpoint.path))


def _adapter_size(context: Context) -> int | None:
    """Parameters of the adapter; None without one, or where they cannot be counted."""
    lora = context.resolved.recipe.lora
    return None if lora is None else trained_count(context.resolved.architecture, lora)


def _adapter(context: Context) -> Iterator[Finding]:
    folder = _folder(context)
    out = folder / "adapter" if folder else None
    if folder is None or out is None or not out.is_dir():
        return
    with contextlib.suppress(UserError):
        step = manifest.read_manifest(out, "adapter").meta.get("step")
        newest = next(
            (c for c in store.list_checkpoints(folder / "checkpoints") if (c.path / manifest.MANIFEST).exists()), None
        )
        if newest is not None and isinstance(step, int) and step != newest.step:
            text = f"the adapter is of step {step}, the newest checkpoint of step {newest.step}"
            fix = f"move {out} and what was made of it away, then --from export"
            yield finding(STALE, WARN, text, fix, where=str(out))
    path = out / "adapter_model.safetensors"
    try:
        tensors = read_header(path).tensors
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield finding(SHAPES, FAIL, f"{path.name}: {error}", "move the folder away, then --from export", where=str(out))
        return
    bad = list(bad_shapes(tensors))
    count = _adapter_size(context)
    found = sum(_count(tensor) for tensor in tensors)
    if count and not bad and found != count and not (context.resolved.recipe.lora or {}).get("modules_to_save"):
        bad.append(f"{found:,} parameters, the recipe trains {count:,}")
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        text = f"{'; '.join(bad[:3])}{more}"
        yield finding(SHAPES, FAIL, text, "export it anew: clustertune export", where=str(out))


def _count(tensor: Tensor) -> int:
    number = 1
    for size in tensor.shape:
        number *= size
    return number


def bad_shapes(tensors: list[Tensor]) -> Iterator[str]:
    """What is wrong with the shapes of an adapter: A is rank x in, B is out x rank, none is flat or empty, all are pairs."""
    if not tensors:
        yield "it holds no tensor"
    known = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in known.items():
        if ".lora_A." not in name and ".lora_B." not in name:
            continue
        if len(shape) < 2 or 0 in shape:
            yield f"{name} has shape {list(shape)}"
            continue
        is_a = ".lora_A." in name
        other = name.replace(".lora_A.", ".lora_B.") if is_a else name.replace(".lora_B.", ".lora_A.")
        pair = known.get(other)
        if pair is None:
            yield f"{other} is missing"
        elif is_a and len(pair) > 1 and pair[1] != shape[0]:
            yield f"{name} has {shape[0]} rows, {other} {pair[1]} columns"


def _left_over(context: Context) -> Iterator[Finding]:
    """Files that a killed export or merge leaves; while somebody works here they are his."""
    folder = _folder(context)
    if folder is None or any(_in_use(context)):
        return
    found = {}
    for path in [*folder.glob(".*ing"), *folder.glob("*.partial")]:
        with contextlib.suppress(OSError):
            inside = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
            found[path.name] = sum(item.stat().st_size for item in inside)
    if sum(found.values()):
        text = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in sorted(found.items())[:4])
        fix = "run the same command again: it goes on with them; or remove them"
        yield finding(LEFT_OVER, WARN, text, fix, where=str(folder))


LOOKS = (_owner, _hidden, _in_use, _checkpoints, _adapter, _left_over)
