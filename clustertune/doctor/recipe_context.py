"""What the rules of recipe, stack and folders look at: the recipe on its cluster, and the base model's folder.

Nothing here imports torch: it runs on a login node. Weights are never read, only their names and sizes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clustertune import bounded, secrets
from clustertune.cluster.schema import Cluster, same_host
from clustertune.containers import pins
from clustertune.errors import Problem, UserError
from clustertune.host import packages
from clustertune.host.facts import HostFacts, Mount
from clustertune.host.mounts import mount_of, own_mounts
from clustertune.launch import cluster_paths
from clustertune.manifest import read_whole
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.predict import Plan, make_plan
from clustertune.recipe.sections import Recipe, parse_minutes
from clustertune.resolve.resolved import Resolved, expand_home, is_there
from clustertune.rundir import RunDir
from clustertune.staging import bundle, needs
from clustertune.tensorfile import read_header

# --- the model ------------------------------------------------------------------------------------------------------------

MOST_BYTES = 64 << 20
"""Above this size a JSON file is not read: Llama 3's tokenizer.json is 9 MB, Gemma's 33 MB."""
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "sentencepiece.bpe.model",
    "spiece.model", "vocab.txt",
)  # fmt: skip
"""One of these holds the vocabulary."""


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none that can be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        body = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def token(value: object) -> str | None:
    """A special token, which files give as text or as an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


@dataclass(frozen=True)
class ModelFolder:
    """A folder in the Hugging Face layout."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """``config.json``; of a model with pictures its text part."""
        values = read_json(self.path / "config.json")
        inner = values.get("text_config") if values else None
        return {**values, **inner} if values and isinstance(inner, dict) else values

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return read_json(self.path / "tokenizer_config.json") or {}

    @cached_property
    def _special(self) -> dict[str, Any]:
        return read_json(self.path / "special_tokens_map.json") or {}

    @cached_property
    def vocabulary(self) -> dict[str, int] | None:
        """Token -> id by ``tokenizer.json`` and the added tokens; None where only another format is there."""
        body = read_json(self.path / "tokenizer.json")
        model = body.get("model") if body else None
        listed = model.get("vocab") if isinstance(model, dict) else None
        if not body or not isinstance(listed, dict | list):
            return None
        if isinstance(listed, dict):
            ids = {key: value for key, value in listed.items() if isinstance(value, int)}
        else:  # Unigram: [[token, score], ...]
            ids = {str(item[0]): at for at, item in enumerate(listed) if isinstance(item, list) and item}
        added = body.get("added_tokens")
        for item in added if isinstance(added, list) else ():
            if isinstance(item, dict) and isinstance(item.get("id"), int):
                ids[str(item.get("content"))] = item["id"]
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        for number, item in decoder.items() if isinstance(decoder, dict) else ():
            if str(number).isdigit() and (name := token(item)):
                ids[name] = int(number)
        return ids

    def special(self, name: str) -> str | None:
        """``eos_token``, ``pad_token`` and the like."""
        return token(self.tokenizer_config.get(name)) or token(self._special.get(name))

    @cached_property
    def template(self) -> str | None:
        """The chat template: a file of its own, or a key of the tokenizer's configuration; of several the default one."""
        try:
            return read_whole(self.path / "chat_template.jinja").decode()
        except (OSError, UnicodeDecodeError):
            pass
        stated = self.tokenizer_config.get("chat_template")
        if isinstance(stated, list):
            named = {str(item.get("name")): item.get("template") for item in stated if isinstance(item, dict)}
            stated = named.get("default") or next(iter(named.values()), None)
        return stated if isinstance(stated, str) and stated else None

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def weights(self) -> tuple[int, list[str], int | None]:
        """Bytes of the weight files that are there, names of those that are missing or empty, bytes that there should be."""
        index = read_json(self.path / INDEX)
        if index is None:
            sizes = [_size(path) for path in sorted(self.path.glob("*.safetensors"))]
            return sum(sizes), [] if any(sizes) else ["model.safetensors"], None
        listed = index.get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        names = [name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]
        byte_sizes = {name: _size(self.path / name) for name in names}
        meta = index.get("metadata")
        total = meta.get("total_size") if isinstance(meta, dict) else None
        expected = int(total) if isinstance(total, int | float) and math.isfinite(total) else None
        return sum(byte_sizes.values()), [name for name in names if not byte_sizes[name]], expected

    @cached_property
    def damaged(self) -> dict[str, str]:
        """Weight files that are not whole, with what is wrong: by their headers, which say how long each file is."""
        faults = {}
        for path in sorted(self.path.glob("*.safetensors")):
            if not _size(path) or not path.is_file():
                continue
            try:
                read_header(path)
            except (OSError, ValueError) as error:
                faults[path.name] = str(error)
        return faults


def _size(path: Path) -> int:
    """Bytes of a file; 0 where it is not there (the cache's links may point to nothing)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- the recipe -----------------------------------------------------------------------------------------------------------

SECONDS = 5.0
"""How long a folder may take to answer: the server of an NFS mount may be gone."""
_TRUE = ("1", "ON", "YES", "TRUE")
"""What huggingface_hub takes for true (huggingface_hub/constants.py)."""


@dataclass(frozen=True)
class RecipeContext:
    """One recipe on one cluster, as seen from this machine; made by :func:`build`."""

    resolved: Resolved
    cluster: Cluster
    facts: HostFacts | None
    """Of the machine on which this runs; None: not collected."""
    run_dir: Path | None
    """The run folder that is asked about, which need not exist."""
    plan: Plan | None
    no_plan: str
    """Why there is none."""
    versions: Mapping[str, str]
    """Version of each package of the ranks' Python, names in lower case with ``-``; empty: it cannot be seen from here."""
    versions_of: str
    """Whose they are."""
    environment: Mapping[str, str]
    env_file: Path
    pins: Mapping[str, str] = field(default_factory=dict)
    """containers/versions.env, names as in ``versions``."""
    reference_pins: Mapping[str, str] = field(default_factory=dict)
    """The same of the reference image."""
    mounts: str = ""
    """``/proc/self/mountinfo``."""
    arch: str = ""
    """``x86_64`` or ``aarch64``."""
    silent: tuple[Path, ...] = ()
    """Folders whose file system did not answer: no rule looks there."""
    staged: Path | None = None
    """The folder that ``clustertune stage --to`` made, where the recipe reads from one and it is whole: its variables are in
    ``environment``."""
    staged_problems: tuple[Problem, ...] = ()
    """What is wrong with it."""

    @property
    def where(self) -> str:
        """The recipe file, as findings name it."""
        return f"{self.resolved.name}/recipe.yaml"

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""
        return self.resolved.recipe

    @property
    def args(self) -> dict[str, Any]:
        """The trainer's arguments."""
        return self.resolved.train_args

    @property
    def real_plan(self) -> Plan | None:
        """The plan of a run that is meant to give a model."""
        return self.plan if self.is_real else None

    @property
    def is_real(self) -> bool:
        """A run that is meant to give a model: neither a tiny one nor one with random weights."""
        return not self.resolved.tiny and self.recipe.model.weights == "hub"

    @property
    def inputs_seen(self) -> bool:
        """Whether there is a point in looking at model and data: every folder answers, and what was staged is whole."""
        return not self.silent and not self.staged_problems

    @property
    def minutes(self) -> float:
        """The job's time limit."""
        return parse_minutes(self.recipe.slurm.time) or 0.0

    @property
    def offline(self) -> bool:
        """The Hub is not to be asked, or not reached by the nodes."""
        if self.cluster.network.internet != "all":
            return True
        return any(self.environment.get(key, "").upper() in _TRUE for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))

    def version(self, package: str) -> str | None:
        """Of one package; None: not there, or not seen."""
        return self.versions.get(pins.normal(package))

    @property
    def hub(self) -> Path:
        """The Hub's cache, as the job will find it."""
        return needs.hub_cache(self.environment)

    @property
    def home_cache(self) -> bool:
        """No variable says where the cache is: it lies in the home folder."""
        keys = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
        return not any(self.environment.get(key) for key in keys)

    def not_cached(self, name: str) -> str:
        """What is said of something that a job without network would look for in vain."""
        return f"{name} is not in {self.hub}, and HF_HUB_OFFLINE is set"

    @cached_property
    def model(self) -> ModelFolder | None:
        """The base model's files as far as they are on this machine; None: there is none, or it did not answer."""
        if self.staged_problems:
            return None
        run = RunDir(self.run_dir) if self.run_dir is not None else None
        folder = needs.base_of(self.resolved, run).path(self.environment)
        if folder is None or any(folder.is_relative_to(path) for path in self.silent):
            return None
        return ModelFolder(folder) if folder.is_dir() else None

    @property
    def real_model(self) -> ModelFolder | None:
        """The same of a run that is meant to give a model."""
        return self.model if self.is_real else None

    @property
    def is_ours(self) -> bool:
        """This machine is one of the cluster's, so that what it has mounted is what its jobs see."""
        host = self.facts.hostname if self.facts else platform.node()
        return same_host(host, (node.name for node in self.cluster.nodes)) is not None

    def lies_on(self, path: Path) -> Mount:
        """The file system of a path: what is mounted here, or for another machine's path what the cluster file says."""
        storage, pool = self.cluster.storage, self.cluster.storage.pool
        if not self.is_ours:
            if not path.is_absolute():
                return Mount("/", "unknown")
            if pool and path.is_relative_to(pool.mount):
                return Mount(pool.mount, "fuse.mergerfs")
            for brick in storage.bricks:
                if path.is_relative_to(brick.mount):
                    return Mount(brick.mount, f"nfs{storage.nfs_version[:1]}")
        known = mount_of(str(path), self.facts.mounts) if self.facts and path.is_absolute() else None
        return known or cluster_paths.filesystem(path, self.mounts)

    @property
    def weights_at(self) -> Path:
        """Where ranks read the weights from: the model's folder, or where the Hub's cache will have it."""
        model = self.recipe.model
        if self.staged is not None:
            return bundle.model_folder(self.staged) or self.hub
        if model.path is not None:
            return expand_home(model.path)
        if not self.is_ours and self.home_cache and self.cluster.storage.shared:
            return Path(self.cluster.storage.shared)  # another machine's home folder tells nothing
        return self.hub


def unanswered(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The paths whose file system does not answer in time; that nothing is there is an answer too."""
    works = {str(path): _look(path) for path in paths}
    if not bounded.ask(lambda: {"there": [work() for work in works.values()]}, SECONDS).silent:
        return ()  # as nearly always: one child for all of them
    return tuple(Path(path) for path, answer in bounded.ask_all(works, 1.0).items() if answer.silent)


def _look(path: Path) -> bounded.Work:
    return lambda: {"there": is_there(path)}


def build(
    resolved: Resolved,
    cluster: Cluster,
    facts: HostFacts | None = None,
    *,
    run_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
    env_file: Path = secrets.DEFAULT,
    arch: str | None = None,
) -> RecipeContext:
    """Everything that the rules need; what is not available is left out and named. Never raises for what a user can cause.

    ``facts``: of this machine, its versions those of the ranks' Python; None: what is installed here is looked at.
    ``run_dir``: the run folder, which need not exist; None: no findings on one. ``environment``: what a job will
    inherit; None: this process's.
    """
    plan, why = _plan(resolved, cluster)
    variables = os.environ if environment is None else environment
    versions, versions_of = _versions(cluster, facts)
    pinned = pins.Pins()
    with contextlib.suppress(OSError, UserError):  # `make lock` says what is wrong with it
        pinned = pins.read()
    context = RecipeContext(
        resolved=resolved,
        cluster=cluster,
        facts=facts,
        run_dir=None if run_dir is None else run_dir.absolute(),
        plan=plan,
        no_plan=why,
        versions=versions,
        versions_of=versions_of,
        environment=variables,
        env_file=env_file,
        pins=pinned[pins.PY],
        reference_pins=pinned[pins.REF],
        mounts=own_mounts(),
        arch=arch or platform.machine(),
    )
    staged = bundle.staged_folder(resolved)
    places = (context.run_dir, context.hub, context.weights_at, *resolved.inputs.values(), env_file.parent, staged)
    silent = unanswered(path for path in dict.fromkeys(places) if path is not None)
    if silent:
        return replace(context, silent=silent, run_dir=None if context.run_dir in silent else context.run_dir)
    if staged is None or (problems := tuple(bundle.find_problems(resolved))):
        return replace(context, staged_problems=problems if staged else ())
    inherited = dict(variables)
    bundle.enter(resolved, inherited)
    return replace(context, staged=staged, environment=inherited)


def _plan(resolved: Resolved, cluster: Cluster) -> tuple[Plan | None, str]:
    if resolved.tiny:
        return None, "a tiny run is not planned"
    try:
        where = find_calibrated(cluster)
        return make_plan(resolved, where.machine(resolved.recipe.slurm.nodes), where.constants), ""
    except UserError as error:
        return None, str(error.problems[0])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # an unforeseen architecture
        return None, f"the planner does not understand this model: {type(error).__name__}: {error}"


def _versions(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, str], str]:
    """What ranks will load: the packages of this Python, unless the cluster runs them in an image and this is outside."""
    place = facts.place if facts else "login"
    inside = bool(facts and (facts.container or "container" in place or place == "here"))
    if cluster.container.runtime != "none" and not inside:
        return {}, f"{cluster.container.image or 'the image'}, which is not open here"
    if facts and facts.packages:
        return {pins.normal(item.name): item.version for item in facts.packages}, facts.executable or "this Python"
    return {pins.normal(item["name"]): item["version"] for item in packages.look()["packages"]}, "this Python"
