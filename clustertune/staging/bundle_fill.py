"""``stage --to``: everything that a recipe needs from outside, with sums, in one folder for machines without network."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune import console, manifest
from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.data.prompts import read_prompts
from clustertune.data.sources import snapshot as cached_data
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if, storing
from clustertune.evaluate.tasks import TaskRows, data_sets, fetch_benchmark
from clustertune.launch import container_image
from clustertune.launch.container import enroot_name
from clustertune.manifest import SHA256, FileRecord
from clustertune.recipe.eval_tasks import reader_of, with_rows
from clustertune.recipe.layers import find_elsewhere
from clustertune.resolve.resolved import EVAL_DATA, Resolved
from clustertune.staging import bundle, hashed_copy, needs
from clustertune.staging.cache import SPARE
from clustertune.staging.hashed_copy import SourceFile, amount, choose

BEGUN = ".begun.tmp"
"""A file in a bundle that is being filled."""
ROWS = "--eval-data"
"""The option of ``stage`` that names a file of rows."""


@dataclass
class BundlePart:
    """One thing that goes into the folder."""

    what: str
    """``model``, ``data``, ``own prompts``, ``benchmark``, ``task``, ``container`` or ``recipe``."""
    name: str
    target: str
    """Its folder below the bundle."""
    root: Path | None = None
    """Where it lies here; None: on the network."""
    files: list[SourceFile] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The files to load, where it is on the network."""
    revision: str | None = None
    path: str | None = None
    """What of it a run reads, below the bundle, where that is not found by its name."""
    fetch: Callable[[Path], None] | None = None

    @property
    def bytes(self) -> int | None:
        """None: only the network knows."""
        return None if self.root is None else sum(file.size for file in self.files)

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and ``--dry-run``."""
        values = {"what": self.what, "name": self.name, "revision": self.revision, "to": self.target}
        count = len(self.files) if self.root is not None else len(self.names)
        return {**values, "from": str(self.root or "the network"), "files": count, "bytes": self.bytes}


class Collector:
    """Gathers the parts of one recipe."""

    def __init__(self, resolved: Resolved, cluster: Cluster, out: Path, rows: Path | None, stall: float) -> None:
        self._resolved, self._cluster, self._out, self._rows, self._stall = resolved, cluster, out, rows, stall
        self._tasks = resolved.recipe.eval.tasks
        self.notes: list[str] = []

    def plan(self) -> list[BundlePart]:
        """What goes in, and from where. Raises UserError with everything that is not available."""
        parts: list[BundlePart] = []
        problems: list[Problem] = []
        local = (self._model, self._data, self._prompts, self._benchmark)
        for find in (*local, self._task_data, self._container, self._recipe):
            with collect_problems(problems):
                parts += find()
        raise_if(problems)
        return parts

    def _model(self) -> list[BundlePart]:
        model = self._resolved.recipe.model
        if model.weights == "random":
            self.notes.append(f"model {model.name}: the run makes it itself, nothing is staged")
            return []
        if model.path:
            files = hashed_copy.survey(Path(model.path), "model", self._stall)
            target = f"{bundle.MODEL}/{Path(model.path).name}"
            return [BundlePart("model", model.name, target, Path(model.path), files, revision=model.revision, path=target)]
        return [self._repository("model", model.name, model.revision)]

    def _repository(self, kind: str, name: str, revision: str | None) -> BundlePart:
        """A repository of the Hub: from the cache of this machine where it is whole there, else from the network."""
        plural = f"{kind}s"
        revision = revision or "main"
        target = needs.snapshot(Path(bundle.HUB), plural, name, revision).as_posix()
        what = "data" if kind == "dataset" else kind
        path = target if kind == "model" else None
        root = needs.snapshot(needs.hub_cache(), plural, name, revision)
        if root.is_dir():
            with contextlib.suppress(UserError):
                files = hashed_copy.survey(root, kind, self._stall)
                if kind != "model" or any(file.name.endswith((".safetensors", ".bin")) for file in files):
                    return BundlePart(what, name, target, root, files, revision=revision, path=path)
        names = list_hub_files(kind, name, revision)
        fetch = partial(download, kind, name, revision, names)
        return BundlePart(what, name, target, names=names, revision=revision, path=path, fetch=fetch)

    def _data(self) -> list[BundlePart]:
        data, source = self._resolved.recipe.data, self._resolved.inputs.get("data.input")
        if data.sources or (data.input is not None and source is None):
            key, what = ("data.sources", "a mixture") if data.sources else ("data.input", "an address")
            fix = (
                f"clustertune prepare {self._resolved.name} --out DIR here, and a recipe with data.input: DIR, format: messages"
            )
            raise UserError(f"{what} is not staged: one file, folder or dataset of the Hub is", key=key, fix=fix)
        if source is None:
            return [self._repository("dataset", data.name, data.revision)]
        return [self._by_path("data", data.name, source, bundle.DATA)]

    def _by_path(self, what: str, name: str, source: Path, below: str) -> BundlePart:
        """A file or folder that the recipe names by its path; what lies in the recipe's own folder goes with that."""
        folder = Path(self._resolved.folder)
        if source.is_relative_to(folder):
            target = f"{bundle.RECIPES}/{folder.name}"
            return BundlePart(what, name, target, folder, path=f"{target}/{source.relative_to(folder).as_posix()}")
        path = f"{below}/{source.name}"
        if source.is_file():
            return BundlePart(what, name, below, source.parent, [_one(source)], path=path)
        return BundlePart(what, name, path, source, hashed_copy.survey(source, what, self._stall), path=path)

    def _prompts(self) -> list[BundlePart]:
        """The file of ``eval.data``."""
        source = self._resolved.inputs.get(EVAL_DATA)
        if source is None:
            return []
        read_prompts(source, EVAL_DATA)
        return [self._by_path(bundle.OWN, source.name, source, bundle.EVAL)]

    def _benchmark(self) -> list[BundlePart]:
        if (path := self._rows) is not None:
            target = f"{bundle.EVAL}/{path.name}"
            return [BundlePart("benchmark", path.name, bundle.EVAL, path.parent, [_one(path)], path=target)]
        sources = [task.hub for task in with_rows(self._tasks).values() if task.hub is not None]
        if sources and self._resolved.recipe.model.weights == "random":
            self.notes.append("benchmark: random weights are scored on the project's own prompts, nothing is staged")
            return []
        parts = []
        for source in sources:
            target = needs.snapshot(Path(bundle.HUB), "datasets", source.name, source.revision).as_posix()
            if (file := fetch_benchmark(source)) is not None:
                files = [_one(file)]
                parts.append(BundlePart("benchmark", source.name, target, file.parent, files, revision=source.revision))
            else:
                text = f"{source.name} is not available from the Hub or its cache: the project's own prompts would be scored"
                self.notes.append(f"warning: {text} -> {ROWS} FILE names a copy of its {source.file}")
        return parts

    def _task_data(self) -> list[BundlePart]:
        """The data sets of lm-eval's other tasks, from the Hub or its cache."""
        parts = []
        for name in sorted(set(data_sets(self._tasks).values())):
            cached = cached_data(name)
            parts.append(replace(self._repository("dataset", name, cached.name if cached else None), what="task"))
        return parts

    def _container(self) -> list[BundlePart]:
        settings = self._cluster.container
        if settings.runtime == "none" or settings.image is None:
            return []
        if settings.image.startswith("docker://"):
            text = "the image is in a registry, which machines without network do not reach"
            fix = f"enroot import --output train.sqsh '{enroot_name(settings.image)}', and the file as container.image"
            raise UserError(text, file=settings.image, key="container.image", fix=fix)
        # Held to its sum here: on the other side it cannot be fetched again.
        image, _ = container_image.look(settings)
        assert image is not None
        if not image.checked:
            self.notes.append(f"warning: {settings.image}.sha256 is not there: whether the image is whole is not checked")
        path = Path(settings.image)
        beside = path.with_name(path.name + ".sha256")
        files = [_one(path), *([_one(beside)] if beside.is_file() else [])]
        target = f"{bundle.CONTAINER}/{path.name}"
        return [BundlePart("container", path.name, bundle.CONTAINER, path.parent, files, path=target)]

    def _recipe(self) -> list[BundlePart]:
        folder = Path(self._resolved.folder)
        files = hashed_copy.survey(folder, "recipe", self._stall)
        parts = [BundlePart("recipe", folder.name, f"{bundle.RECIPES}/{folder.name}", folder, files)]
        recipe = self._resolved.recipe
        for path in find_elsewhere(folder, recipe.base or (), recipe.model.model_dump()):
            target = f"{bundle.RECIPES}/{path.parent.name}"
            parts.append(BundlePart("recipe", f"{path.parent.name}/{path.name}", target, path.parent, [_one(path)]))
        return parts

    def go(self, parts: Sequence[BundlePart], overrides: Sequence[str]) -> dict[str, Any]:
        """Fill the folder and seal it; files of an earlier try are compared and kept. Raises UserError."""
        began = time.perf_counter()
        with storing("cannot be written", self._out, named=True):
            before = self._begin_folder()
            missing = sum(f.size for part in parts for f in part.files if not (self._out / part.target / f.name).is_file())
            if missing + SPARE > (free := shutil.disk_usage(self._out).free):
                text = f"{amount(missing)} are needed, {amount(free)} are free"
                raise UserError(text, file=str(self._out), fix="free space, or give another --to", code=ExitCode.STORAGE)
            records: dict[str, FileRecord] = {}
            for part in parts:
                say(as_words(part.as_json()))
                written = self._load(part) if part.root is None else self._copy(part, part.root)
                records |= {f"{part.target}/{name}": record for name, record in written.items()}
                if part.revision and part.target.startswith(bundle.HUB):
                    kind = "models" if part.what == "model" else "datasets"
                    note_revision(self._out / bundle.HUB, kind, part.name, part.revision)
            for name in before.keys() - records.keys():  # of another revision
                (self._out / name).unlink(missing_ok=True)
            self._seal(parts, records, overrides)
        size = sum(record.size for record in records.values())
        summary = {"dir": str(self._out), "bytes": size, "files": len(records), "notes": self.notes}
        return {**summary, "seconds": round(time.perf_counter() - began, 3), "parts": [part.as_json() for part in parts]}

    def check(self) -> None:
        """The folder is new, empty, or one that we began for this recipe; the prompts are some. Writes nothing.

        Raises UserError.
        """
        out = self._out
        if self._rows is not None:
            # Their columns; the rehearsal does what needs lm-eval.
            TaskRows(reader_of(self._tasks, self._rows, ROWS), self._rows, self._rows.name)
        if out.exists() and not out.is_dir():
            raise UserError("is a file, not a folder", file=str(out), key="--to", fix="give another")
        if not out.exists():
            return
        if any(out.iterdir()) and not (out / BEGUN).exists() and not (out / manifest.MANIFEST).exists():
            raise UserError("holds something else", file=str(out), key="--to", fix="give a new or empty folder")
        if (out / manifest.MANIFEST).exists():
            sealed = bundle.read(out)
            if sealed.meta.get("recipe") != self._resolved.name:
                text = f"holds what recipe {sealed.meta.get('recipe')} needs"
                raise UserError(text, file=str(out), key="--to", fix="give a new folder")

    def _begin_folder(self) -> Mapping[str, FileRecord]:
        """Take the manifest from a finished one. Returns its files."""
        self.check()
        out = self._out
        out.mkdir(parents=True, exist_ok=True)
        (out / BEGUN).touch()
        if not (out / manifest.MANIFEST).exists():
            return {}
        before = bundle.read(out).files
        (out / manifest.MANIFEST).unlink()
        return before

    def _copy(self, part: BundlePart, root: Path) -> dict[str, FileRecord]:
        return hashed_copy.mirror(root, self._out / part.target, part.files, SHA256, self._stall)[0]

    def _load(self, part: BundlePart) -> dict[str, FileRecord]:
        """From the network, each file compared with the Hub's own digest of it: ``snapshot_download`` compares sizes."""
        assert part.fetch is not None
        root = self._out / part.target
        part.fetch(root)
        if not part.target.startswith(bundle.HUB):  # NLTK's: hashed where the folder is sealed
            return {}
        files = hashed_copy.survey(root, part.what, self._stall)
        known = [FileRecord(file.size, file.digest or "", file.algorithm or SHA256) for file in files]
        pairs = [(root / file.name, record if record.digest else None) for file, record in zip(files, known, strict=True)]
        answers = hashed_copy.hash_files(pairs, SHA256, self._stall, f"verifying {part.name}")
        for (path, record), answer in zip(pairs, answers, strict=True):
            if isinstance(answer, str):
                raise UserError(f"cannot be read: {answer}", file=str(path), code=ExitCode.STORAGE)
            if record is not None and answer != record:
                path.resolve().unlink()
                path.unlink()
                text = f"came from the network as {answer.digest[:12]}, the Hub says {record.digest[:12]}"
                raise UserError(text, file=str(path), fix="run the same command again", code=ExitCode.AGAIN)
            if path.is_symlink():  # plain files go onto any medium; two may have one blob
                plain = path.with_name(f".{path.name}.tmp")
                os.link(path.resolve(), plain)
                plain.replace(path)
        for folder in (root.parents[1] / "blobs", self._out / bundle.HUB / ".locks"):
            shutil.rmtree(folder, ignore_errors=True)
        records = zip(files, answers, strict=True)
        return {file.name: answer for file, answer in records if isinstance(answer, FileRecord) and answer.algorithm == SHA256}

    def _seal(self, parts: Sequence[BundlePart], records: dict[str, FileRecord], overrides: Sequence[str]) -> None:
        """What lies there and is none of the parts', as NLTK's other languages, goes with them; then sums and manifest."""
        (self._out / bundle.SUMS).unlink(missing_ok=True)
        other = [name for name in manifest.list_files(self._out) if name not in records]
        for name, record in manifest.record_files(self._out, other).items():
            records[name] = record
        lines = [f"{record.sha256}  {name}\n" for name, record in sorted(records.items())]
        manifest.write_durably(self._out / bundle.SUMS, "".join(lines))
        records[bundle.SUMS] = manifest.hash_file(self._out / bundle.SUMS)
        own = {part.what: {"name": part.name, "revision": part.revision, "path": part.path} for part in parts[::-1]}
        words = [word for word in overrides if not word.startswith(f"{bundle.STAGED}=")]
        data = self._resolved.recipe.data
        if data.input is not None:
            own["data"]["revision"] = None
        order = {"recipe": self._resolved.name, "tiny": self._resolved.tiny, "overrides": words}
        meta = {**order, "parts": own, "host": os.uname().nodename}
        manifest.seal(self._out, bundle.KIND, meta, records)
        (self._out / BEGUN).unlink()


def _one(path: Path) -> SourceFile:
    """A single file, by name."""
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", file=str(path)) from None
    return SourceFile(path.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


# --- the Hub --------------------------------------------------------------------------------------------------------


ANSWER_SECONDS = 10.0


def list_hub_files(kind: str, name: str, revision: str | None) -> list[str]:
    """The files of a commit that are needed. ``kind``: ``model`` or ``dataset``. Raises UserError where nothing answers."""
    import huggingface_hub

    with _asking(kind, name):
        api = huggingface_hub.HfApi()
        info = api.repo_info(name, revision=revision, repo_type=kind, timeout=ANSWER_SECONDS)
        names = [entry.rfilename for entry in getattr(info, "siblings", None) or [] if not entry.rfilename.startswith(".")]
        return choose(names) if kind == "model" else sorted(names)


def download(kind: str, name: str, revision: str | None, files: list[str], out: Path) -> None:
    """Load files of a commit into the Hub's cache of a bundle; what an earlier call has loaded is kept. Raises UserError.

    ``out``: the snapshot's folder there, which has the name of the revision that the recipe gives.
    """
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not console.stderr.is_terminal:
        disable_progress_bars()
    with _asking(kind, name):
        cache = out.parents[2]
        made = huggingface_hub.snapshot_download(name, revision=revision, repo_type=kind, cache_dir=cache, allow_patterns=files)
    if Path(made) != out:  # by its commit, where the recipe has none
        shutil.rmtree(out, ignore_errors=True)
        Path(made).replace(out)


@contextlib.contextmanager
def _asking(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the exceptions of the Hub's clients have no common base
        of_the_disk = isinstance(error, OSError) and error.errno is not None and error.filename
        if isinstance(error, UserError) or of_the_disk:
            raise
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "run this on a machine with network; a gated model needs HF_TOKEN in .env; or name a local copy"
        key = "model.path=DIR" if kind == "model" else "data.input=PATH"
        raise UserError(f"{name} is not available from the Hub: {message}", fix=f"{fix}: {key}") from None


def note_revision(cache: Path, kind: str, name: str, revision: str) -> None:
    """Have a cache answer for ``main`` too: programs that name no revision find the one that is there."""
    refs = cache / f"{kind}--{name.replace('/', '--')}" / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / "main").write_text(revision)


def as_words(part: dict[str, Any]) -> str:
    """``model org/name, 12.3 GB in 4 files, from PATH``."""
    if part["bytes"] == 0 and not part["files"]:
        return f"{part['what']} {part['name']}: in {part['from']}, with it"
    size = f"{amount(part['bytes'])} in " if part["bytes"] is not None else ""
    return f"{part['what']} {part['name']}: {size}{part['files']} files, from {part['from']}"
