"""Where a run's base model lies, which folders its ranks read, and whether a copy on the node's own disk is wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BaseModel:
    """Where a run's base model lies; :func:`base_of` says it."""

    name: str
    revision: str | None
    """At the Hub."""
    folder: Path | None
    """Made by the run, in the offline bundle, or named by the recipe; None: the Hub has it."""
    is_made: bool = False
    """By the run; its folder is None where the run is not known."""

    @property
    def source(self) -> tuple[str, str | None]:
        """What ``from_pretrained`` takes: the folder, or the Hub's name and commit."""
        return (self.name, self.revision) if self.folder is None else (str(self.folder.absolute()), None)

    def path(self, environ: Mapping[str, str] = os.environ) -> Path | None:
        """The folder, or where the Hub's cache has the commit, there or not; None where only a run could say it."""
        if self.folder is not None or self.is_made:
            return self.folder
        return snapshot(hub_cache(environ), "models", self.name, self.revision or "main")

    def fetch(self, *, offline: bool = False) -> Path:
        """The folder; of a model of the Hub its snapshot, downloaded unless ``offline``. Raises OSError, ValueError."""
        if self.folder is not None:
            return self.folder
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.name, revision=self.revision, local_files_only=offline))

    def find(self) -> Path | None:
        """The same as far as it is on this machine; None: it is not."""
        try:
            folder = self.fetch(offline=True)
        except (OSError, ValueError):
            return None
        return folder if folder.is_dir() else None


def base_of(resolved: Resolved, run: RunDir | None) -> BaseModel:
    """Where the base model is, of a run or of a recipe that has no run folder yet."""
    model = resolved.recipe.model
    if model.weights == "random":
        return BaseModel(model.name, None, run.local_model(model.name) if run else None, is_made=True)
    staged = bundle.staged_folder(resolved)
    folder = (bundle.model_folder(staged) if staged else None) or (expand_home(model.path) if model.path else None)
    return BaseModel(model.name, model.revision, folder)


def sources(resolved: Resolved, run: RunDir | None) -> tuple[list[SourceFolder], list[str]]:
    """What the ranks of a run read, and a note for each thing that is not there yet."""
    folders, notes = [], []
    recipe = resolved.recipe
    base = base_of(resolved, run)
    root = base.path()
    if root is None or (base.is_made and not (root / MANIFEST).is_file()):
        notes.append(f"{recipe.model.name} is made by the run itself, which has not prepared it yet: clustertune prepare")
    else:
        folders.append(SourceFolder("model", recipe.model.name.rsplit("/", 1)[-1], root, recipe.model.revision))
    if run is not None and recipe.megatron is None and (run.tokens / MANIFEST).is_file():
        folders.append(SourceFolder("data", "data", run.tokens))
    elif recipe.megatron is not None:
        notes.append("Megatron-Bridge reads its data from the run folder")
    else:
        notes.append(f"no prepared data{f' in {run.path}' if run else ''}: the chain's first stage makes it, and jobs copy it")
    return folders, notes


def is_wanted(resolved: Resolved, cluster: Cluster, path: Path, mounts: str) -> bool:
    """Whether ``path`` is to be copied to the node's disk: ``slurm.staging``, else where it is on shared storage.

    ``mounts``: the text of ``/proc/self/mountinfo``.
    """
    if cluster.storage.staging is None or resolved.recipe.slurm.staging is False:
        return False
    return bool(resolved.recipe.slurm.staging) or cluster_paths.is_shared(path, cluster, mounts)
