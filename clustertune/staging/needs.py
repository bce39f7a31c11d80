"""Which folders the ranks of a run read, and whether a copy of them on the node's own disk is wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from clustertune.cluster.schema import Cluster
from clustertune.launch import cluster_paths
from clustertune.manifest import MANIFEST
from clustertune.resolve.resolved import Resolved, expand_home
from clustertune.rundir import RunDir
from clustertune.staging import bundle
from clustertune.staging.cache import SourceFolder


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The Hub's cache, as huggingface_hub finds it (constants.py of 2.4), without its import of half a second."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")  # noqa: PTH118
    return expand_home(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub"))  # noqa: PTH118


def snapshot(cache: Path, kind: str, name: str, revision: str) -> Path:
    """Where a cache keeps one commit of a repository. ``kind``: ``models`` or ``datasets``."""
    return cache / f"{kind}--{name.replace('/', '--')}" / "snapshots" / revision


def local_model(resolved: Resolved, run: RunDir | None) -> Path | None:
    """The base model's folder: made by the run, in the offline bundle, or named by the recipe; None: the Hub has it."""
    model = resolved.recipe.model
    if model.weights == "random":
        return run.local_model(model.name) if run else None
    if (staged := bundle.staged_folder(resolved)) and (found := bundle.model_folder(staged)):
        return found
    return expand_home(model.path) if model.path else None


def model_folder(resolved: Resolved, run: RunDir | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the base model lies, whether or not it is there; None where the run makes it and no run is known."""
    model = resolved.recipe.model
    if (found := local_model(resolved, run)) or model.weights == "random":
        return found
    return snapshot(hub_cache(environ), "models", model.name, model.revision or "main")


def model_source(run: RunDir, resolved: Resolved) -> tuple[str, str | None]:
    """Where the base model is read from: a folder, or a Hub id and its commit."""
    model = resolved.recipe.model
    found = local_model(resolved, run)
    if found is None or (model.path and found == expand_home(model.path)):
        return model.path or model.name, model.revision
    return str(found), None


def sources(resolved: Resolved, run: RunDir | None) -> tuple[list[SourceFolder], list[str]]:
    """What the ranks of a run read, and a note for each thing that is not there yet."""
    found, notes = [], []
    recipe = resolved.recipe
    root = model_folder(resolved, run)
    made = recipe.model.weights == "random"
    if root is None or (made and not (root / MANIFEST).is_file()):
        notes.append(f"{recipe.model.name} is made by the run itself, which has not prepared it yet: clustertune prepare")
    else:
        found.append(SourceFolder("model", recipe.model.name.rsplit("/", 1)[-1], root, recipe.model.revision))
    if run is not None and recipe.megatron is None and (run.tokens / MANIFEST).is_file():
        found.append(SourceFolder("data", "data", run.tokens))
    elif recipe.megatron is not None:
        notes.append("Megatron-Bridge reads its data from the run folder")
    else:
        notes.append(f"no prepared data{f' in {run.path}' if run else ''}: the chain's first stage makes it, and jobs copy it")
    return found, notes


def is_wanted(resolved: Resolved, cluster: Cluster, path: Path, mounts: str) -> bool:
    """Whether ``path`` is to be copied to the node's disk: ``slurm.staging``, else where it is on shared storage.

    ``mounts``: the text of ``/proc/self/mountinfo``.
    """
    if cluster.storage.staging is None or resolved.recipe.slurm.staging is False:
        return False
    return bool(resolved.recipe.slurm.staging) or cluster_paths.is_shared(path, cluster, mounts)
