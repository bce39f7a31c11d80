"""The run folder: whose it is, where it lies, what its checkpoints and its adapter are worth. Reads headers, no pickle."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from clustertune import manifest
from clustertune.check.rule import FAIL, WARN, Seen, listed
from clustertune.checkpoint import store
from clustertune.doctor.recipe_context import RecipeContext, read_json, shards_of
from clustertune.errors import UserError
from clustertune.launch import cluster_paths
from clustertune.plan.predict import Plan
from clustertune.recipe.parameters import trained_count, weight_bytes
from clustertune.resolve.resolved import is_there
from clustertune.rundir import RunDir
from clustertune.secrets import SECRET, read_env
from clustertune.tensorfile import Tensor, read_header

TIMES = 4.0
"""A checkpoint this many times larger than adapter and optimizer state holds something else: the base."""


def _folder(context: RecipeContext) -> Path | None:
    """The run folder, where it exists."""
    with contextlib.suppress(OSError):
        return context.run_dir if context.run_dir is not None and context.run_dir.is_dir() else None
    return None


def run_of_another_recipe(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the run folder belongs to this recipe

    Why: a run is never continued with other settings: the job ends at its start
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    folder = _folder(context)
    if folder is None:
        if context.run_dir is not None and is_there(context.run_dir):
            yield Seen(FAIL, "is not a folder", "give another --run-dir", str(context.run_dir))
        return
    found, fix = "", "give another --run-dir"
    if read_json(folder / "run.json") is not None:
        found = "" if RunDir(folder).is_of(context.resolved) else "holds a run of another recipe or of other settings"
        fix = "give another --run-dir, or leave it out"
    elif (folder / "run.json").exists():
        found = "its run.json cannot be read"
    elif foreign := RunDir(folder).foreign():
        found, fix = f"is not a run: it holds {', '.join(foreign[:3])}", "give a new or empty --run-dir"
    if found:
        yield Seen(FAIL, found, fix, str(folder))


def run_on_one_node(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: all nodes see the run folder

    Why: ranks of other nodes write their shards elsewhere: .metadata is on one node only, and nothing can be loaded again
    See: https://github.com/huggingface/accelerate/issues/3010
    """
    if context.run_dir is not None and context.several_nodes:
        host = context.facts.hostname if context.facts else os.uname().nodename
        inputs = context.resolved.inputs.items()
        places = [(key, path) for key, path in inputs if not path.is_relative_to(context.resolved.folder)]
        places.insert(0, ("the run folder", context.run_dir))
        for problem in cluster_paths.find_unshared(places, context.cluster, host, context.mounts):
            yield Seen(FAIL, problem.message, problem.fix or "put it on shared storage", problem.file or "")


def run_in_use(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: no other command works in the run folder

    Why: the next command ends with exit code 75
    Fix: wait for it, or give another --run-dir
    See: https://man7.org/linux/man-pages/man2/flock.2.html
    """
    folder = _folder(context)
    path = folder / "lock" if folder else None
    if path is None or not path.is_file():
        return
    with contextlib.suppress(OSError), path.open("rb") as lock:  # a file system without locks tells nothing
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(200).decode(errors="replace").strip() or "another process"
            owner = read_json(path.with_name("owner.json")) or {}
            job = f" (job {owner['job']} on {owner.get('host')})" if owner.get("job") else ""
            yield Seen(WARN, f"{holder}{job} works in it", where=str(folder))


def checkpoint_damaged(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the newest checkpoints are whole

    Why: what came after the last whole one is computed again; a trainer that takes the newest dies, or resumes from garbage
    See: https://github.com/awslabs/awsome-distributed-ai/issues/190
    """
    whole, broken, more = context.newest
    after, fix = "no older one of the newest three is whole", "look at the storage, then train again"
    if whole:
        after = f"the run resumes from {whole.path.name}"
        fix = "nothing, if that is enough; else fix the storage and copy it back"
    for checkpoint, why in broken:
        text = f"{checkpoint.path.name} is incomplete or damaged: {why}; {after}"
        yield Seen(WARN if whole or more else FAIL, text, fix, str(checkpoint.path))


def checkpoint_without_metadata(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: .metadata beside the shards

    Why: without it no shard can be loaded: it is written by one rank, on one node where the folder is not shared
    Fix: save to a folder that all nodes share; resume from another checkpoint
    See: https://github.com/huggingface/accelerate/issues/3010
    """
    whole, broken, _ = context.newest
    for checkpoint in [found for found in (whole, *(item for item, _ in broken)) if found]:
        for shards in shards_of(checkpoint.path):
            if not (shards / ".metadata").is_file():
                text = f"{checkpoint.path.name}/{shards.name} holds shards and no .metadata"
                # A broken one is skipped: that it is broken was reported, this is what may be behind it.
                yield Seen(FAIL if checkpoint is whole else WARN, text, where=str(shards))


def checkpoint_of_another_world(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a checkpoint of as many ranks, under DeepSpeed

    Why: DeepSpeed keeps what each rank held: other ranks cannot load it, and the job ends at its start
    See: https://www.deepspeed.ai/tutorials/universal-checkpointing/
    """
    if context.resolved.distribution.is_deepspeed and (whole := context.newest.whole):
        world = manifest.read_manifest(whole.path).meta.get("world_size")
        if isinstance(world, int) and world != context.resolved.world_size:
            text = f"{whole.path.name} was written by {world} ranks, the job has {context.resolved.world_size}"
            yield Seen(FAIL, text, f"use {world} ranks, or another run folder", str(whole.path))


def checkpoint_holds_base(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the size of a LoRA checkpoint

    Why: hundreds of gigabytes of frozen weights are written at each save
    Fix: look at lora.modules_to_save; accelerate writes the adapter only (adapter_only) for PEFT models
    See: https://github.com/huggingface/accelerate/pull/2321
    """
    whole, trained = context.newest.whole, _adapter_size(context)
    if whole is None or not trained:
        return
    # float32 adapter and AdamW's two moments; below a tenth of the base it is something small.
    size, adapter = sum(record.size for record in manifest.read_manifest(whole.path).files.values()), 12.0 * trained
    weights = weight_bytes(context.resolved.architecture) or 0
    if size > TIMES * adapter and size > 0.1 * weights + adapter:
        text = f"{whole.path.name} has {size / 1e9:,.1f} GB, adapter and optimizer are {adapter / 1e9:,.1f} GB"
        yield Seen(WARN, text, where=str(whole.path))


def _adapter_size(context: RecipeContext) -> int | None:
    """Parameters of the adapter; None without one, or where they cannot be counted."""
    lora = context.resolved.lora
    return None if lora is None else trained_count(context.resolved.architecture, lora)


def adapter_of_another_step(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the exported adapter is of the newest checkpoint

    Why: merge and score are of an older model than the one that was trained
    See: https://github.com/huggingface/transformers/issues/30491
    """
    folder = _folder(context)
    if folder is None:
        return
    out = folder / "adapter"
    with contextlib.suppress(UserError):
        step = manifest.read_manifest(out, "adapter").meta.get("step")
        listed = store.list_checkpoints(folder / "checkpoints")
        newest = next((one.step for one in listed if (one.path / manifest.MANIFEST).exists()), step)
        if isinstance(step, int) and step != newest:
            text = f"the adapter is of step {step}, the newest checkpoint of step {newest}"
            yield Seen(WARN, text, f"move {out} and what was made of it away, then --from export", str(out))


def adapter_shapes(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: tensors of the exported adapter

    Why: a tensor of one dimension or of no size is a leftover of a shard: the adapter changes nothing, or cannot be loaded
    See: https://github.com/huggingface/peft/issues/970
    """
    folder = _folder(context)
    if folder is None:
        return
    path = folder / "adapter" / "adapter_model.safetensors"
    try:
        tensors = read_header(path).tensors
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield Seen(FAIL, f"{path.name}: {error}", "move the folder away, then --from export", str(path.parent))
        return
    bad = list(bad_shapes(tensors))
    count, found = _adapter_size(context), sum(math.prod(tensor.shape) for tensor in tensors)
    if count and not bad and found != count and not (context.recipe.lora or {}).get("modules_to_save"):
        bad.append(f"{found:,} parameters, the recipe trains {count:,}")
    if bad:
        yield Seen(FAIL, listed(bad, 3, "; "), "export it again: clustertune export", str(path.parent))


def bad_shapes(tensors: list[Tensor]) -> Iterator[str]:
    """What is wrong with the shapes of an adapter: A is rank x in, B is out x rank, none is flat or empty, all are pairs."""
    if not tensors:
        yield "it contains no tensor"
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


def left_overs(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: unfinished files of former attempts

    Why: they take space that the next stage needs
    Fix: run the same command again: it continues with them; or remove them
    See: https://man7.org/linux/man-pages/man1/du.1.html
    """
    # What a killed export or merge leaves; while another command works here it is that command's.
    folder = _folder(context)
    if folder is None or any(run_in_use(context)):
        return
    found = {}
    for path in [*folder.glob(".*ing"), *folder.glob("*.partial")]:
        with contextlib.suppress(OSError):
            inside = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
            found[path.name] = sum(item.stat().st_size for item in inside)
    if sum(found.values()):
        text = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in sorted(found.items())[:4])
        yield Seen(WARN, text, where=str(folder))


# --- run secrets ----------------------------------------------------------------------------------------------------------

# The ``.env`` file: whose it is, who can read it, whether git has it. No value of it is looked at, none is repeated.

GIT_SECONDS = 5.0


def env_file(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the .env file is yours alone, and can be parsed

    Why: other users can use a token that they can read; a file that is refused leaves the job without its tokens
    See: https://huggingface.co/docs/hub/security-tokens
    """
    if context.env_file.parent in context.silent:
        return
    try:
        read_env(context.env_file, lambda _note: None)
    except UserError as error:
        for problem in error.problems:
            fix = problem.fix or "write it again: KEY=value, one a line, mode 0600"
            yield Seen(FAIL, problem.message, fix, problem.file or str(context.env_file))


def env_in_git(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: git does not have the .env file

    Why: what was committed once goes to everybody who clones, and stays in the history
    See: https://docs.github.com/en/code-security/secret-scanning/introduction/about-secret-scanning
    """
    path = context.env_file
    if path.parent in context.silent or not path.exists():
        return
    command = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", "--", path.name]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=False).returncode == 0:
            fix = f"git rm --cached {path.name}, name it in .gitignore, and renew every token that stood in it"
            yield Seen(FAIL, "git tracks it", fix, str(path))


def token_in_environment(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: tokens in the shell's environment

    Why: every process of this shell inherits them, and logs of an environment hold them; clustertune's jobs read them from .env
    See: https://huggingface.co/docs/hub/security-tokens
    """
    named = [name for name in SECRET if context.environment.get(name)]
    if named and context.cluster.slurm is not None:
        fix = f"unset {' '.join(named)}, and keep them in {context.env_file} with mode 0600"
        yield Seen(WARN, f"{', '.join(named)} set in this shell", fix, context.resolved.name)


# --- run space ------------------------------------------------------------------------------------------------------------

# Room for what a run writes: checkpoints with the one that is being written, adapter, merged model.

SPARE = 1.1
"""Filling a file system to the last byte slows it down, and others write there too."""
ALL_KEPT = 1e12
"""Bytes of checkpoints, without a limit on them, that are worth a word."""


def existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next((folder for folder in (path, *path.parents) if is_there(folder)), Path(path.anchor or "."))


def needed(plan: Plan, run_dir: Path) -> dict[str, float]:
    """Bytes that the run has yet to write there, by what they are.

    Retention deletes the oldest checkpoint after the newest is whole: limit + 1 of them are there at once.
    """
    schedule = plan.schedule
    limit = plan.resolved.train_args.get("save_total_limit")
    most = schedule.checkpoints if schedule.checkpoints is not None else (int(limit) if limit else 1)
    count = min(int(limit) + 1, most) if limit else most
    there = len(store.list_checkpoints(run_dir / "checkpoints")) if is_there(run_dir / "checkpoints") else 0
    found = {f"{max(0, count - there)} checkpoints": max(0, count - there) * schedule.checkpoint_bytes}
    for name, folder in (("adapter", "adapter"), ("merged model", "merged")):
        if not is_there(run_dir / folder / "MANIFEST.json"):
            found[name] = schedule.disk.get(name, 0.0)
    return {name: size for name, size in found.items() if size}


def disk_space(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: room for checkpoints, adapter and merged model

    Why: a save that finds the disk full ends the run (exit 73); a merge ends after hours
    Fix: free space, give a --run-dir elsewhere, or lower train.save_total_limit
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    # A path of the cluster's machines: on another one the disk that is here in its place is another one.
    elsewhere = context.run_dir is not None and not context.is_ours and not is_there(context.run_dir.parent)
    if context.plan is None or context.run_dir is None or context.silent or elsewhere:
        return
    parts = needed(context.plan, context.run_dir)
    need, free = sum(parts.values()), _free(context, existing(context.run_dir))
    if free is not None and SPARE * need > free:
        sizes = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in parts.items())
        text = f"{need / 1e9:,.1f} GB are to be written ({sizes}), {free / 1e9:,.1f} GB are free"
        yield Seen(FAIL if need > free else WARN, text if need > free else f"tight: {text}", where=str(context.run_dir))


def _free(context: RecipeContext, path: Path) -> float | None:
    """Bytes that a user may still write where ``path`` lies: what was collected of its mount, else what the system says."""
    for mount in sorted(context.facts.mounts if context.facts else [], key=lambda m: -len(m.point)):
        if path.is_relative_to(mount.point) and mount.free_bytes is not None and mount.point != "/":
            return float(mount.free_bytes)
    with contextlib.suppress(OSError):
        return float(shutil.disk_usage(path).free)
    return None


def checkpoints_kept(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a limit on the checkpoints that are kept

    Why: without one every save stays, until the disk is full
    Fix: train.save_total_limit=3
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    plan = context.real_plan
    many = plan.schedule.checkpoints if plan and not context.args.get("save_total_limit") else None
    if plan and many and many * plan.schedule.checkpoint_bytes > ALL_KEPT:
        size = many * plan.schedule.checkpoint_bytes / 1e12
        yield Seen(WARN, f"train.save_total_limit is not given: {many} checkpoints, {size:,.1f} TB")
