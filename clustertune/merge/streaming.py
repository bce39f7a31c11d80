"""Merge a LoRA adapter into its base, shard by shard, through buffers whose size does not depend on the model.

Each output file is read, changed, written and hashed in one pass by a few threads (matrix products, system calls and hashing
all release the interpreter's lock). Files are finished one by one in a staging folder, and moved singly into the output when
all are there: a directory rename can move half of a folder on a mergerfs pool.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from clustertune import __version__, bounded, lock
from clustertune.console import byte_progress, say
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if, storage_error
from clustertune.export import companions
from clustertune.manifest import (
    MANIFEST,
    DigestComparison,
    FileRecord,
    Manifest,
    find_problem,
    fsync_path,
    hash_file,
    list_files,
    parse_record,
    read_json,
    read_manifest,
    read_whole,
    seal,
    write_durably,
)
from clustertune.merge.base import Base, identity, read_base
from clustertune.merge.lora import Adapter, read_adapter
from clustertune.merge.pieces import (
    BUFFERS,
    CHUNK,
    InputFiles,
    Output,
    Piece,
    Shard,
    Worker,
    block_elements,
    cut,
    parse_size,
    plan_shards,
)
from clustertune.recipe import quantization
from clustertune.training.base_weights import INDEX, check_tensors, unproved


def _damaged(records: dict[str, FileRecord], places: dict[str, Path], workers: int) -> list[str]:
    """The names whose file is not there or does not have its hash."""

    def whole(name: str) -> bool:
        try:
            return find_problem(places[name], records[name]) is None
        except OSError:
            return False

    with ThreadPoolExecutor(workers) as pool:
        return [name for name, good in zip(records, pool.map(whole, records), strict=True) if not good]


def _resume(job: MergeJob, workers: int) -> Journal:
    """The journal to continue with: verified shards of the same inputs are kept, all else in staging is removed."""
    journal = Journal(job.staging).load()
    if journal.inputs not in (None, job.inputs):
        say(f"{job.staging}: base, adapter or shard size have changed since; the unfinished merge there is discarded")
        remove_published(job.out, journal)
    if journal.inputs != job.inputs:
        clear(job.staging, keep=set())
        journal = Journal(job.staging)
        journal.inputs = job.inputs
    planned = {s.name for s in job.shards}
    places = {n: (job.out if (job.out / n).exists() else job.staging) / n for n in journal.shards}
    for name in {*_damaged(journal.shards, places, workers), *(set(journal.shards) - planned)}:
        say(f"{places[name]}: not what was written; this file is merged again")
        places[name].unlink(missing_ok=True)
        del journal.shards[name]
    if job.out.is_dir():
        remove_temporary(job.out)
    # The journal stays until it is replaced: without it the files already moved into the output would belong to no merge.
    clear(job.staging, keep={*journal.shards, journal.path.name})
    journal.rewrite()
    if journal.shards:
        say(f"{job.staging}: continuing after {len(journal.shards)} of {len(job.shards)} files, verified")
    return journal


def _check_finished(job: MergeJob) -> None:
    """Raises UserError where the finished output has been damaged since."""
    with DigestComparison(job.out) as comparison:
        fix = "move the folder away, then run the same command again"
        raise_if(replace(problem, fix=fix) for problem in comparison.finish())
    if job.staging.is_dir():
        with locked(job.staging):
            clear(job.staging)


def _peak_rss() -> int:
    """Bytes; VmHWM and not getrusage, whose value a child inherits from its parent."""
    for line in read_whole(Path("/proc/self/status")).decode().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _summary(job: MergeJob, state: str, started: float, reused: int) -> dict[str, Any]:
    seconds = time.monotonic() - started
    return {
        **_described(job, state),
        "shards": len(job.shards),
        "reused_shards": reused,
        "seconds": round(seconds, 3),
        "gb_per_s": round(job.size / 1e9 / seconds, 3),
        "peak_rss_bytes": _peak_rss(),
    }


def _described(job: MergeJob, state: str) -> dict[str, Any]:
    counts = {"tensors": len(job.base.tensors), "merged": len(job.adapter.updates), "replaced": len(job.adapter.replaced)}
    return {"out": str(job.out), "state": state, **counts, "bytes": job.size, "warnings": job.adapter.warnings}


def _merge_locked(job: MergeJob, workers: int, started: float, architecture: ArchitectureCheck) -> dict[str, Any]:
    with locked(job.staging):
        if finished_manifest(job.out, job.inputs):  # another process has finished it between the plan and the lock
            clear(job.staging)
            return _summary(job, "already merged", started, len(job.shards))
        journal = _resume(job, workers)
        todo = [s for s in job.shards if s.name not in journal.shards]
        with byte_progress() as bar:
            task = bar.add_task("merging", total=sum(t.size for s in todo for t in s.tensors))

            def advance(size: int) -> None:
                bar.advance(task, size)
                architecture.finish(wait=False)

            try:
                if todo:
                    # The same bytes at about the same time: the page cache takes them from storage once.
                    with DigestComparison(job.base.folder) as base:
                        write_shards(job, journal, todo, job.limit_workers(workers), advance)
                        raise_if(base.finish())
                architecture.finish()
            except UserError as error:
                if error.code is ExitCode.CONFIG:  # made of weights that are refused, which may come back looking the same
                    clear(job.staging)
                raise
        publish(job, journal)
    return _summary(job, "merged", started, len(job.shards) - len(todo))


def plan(base: Path, adapter: Path, out: Path, *, shard_size: str | int = "5GB") -> dict[str, Any]:
    """What :func:`merge` would do, every check made and nothing written.

    Returns the files with their bytes, the bytes that are there already from an interrupted merge, and the free space.
    Raises UserError as :func:`merge` does, bar the check of free space.
    """
    job = prepare(base, adapter, out, shard_size)
    if not job.finished:
        with ArchitectureCheck(base) as architecture:
            architecture.finish()
    staged = job.staged_bytes()
    state = "already merged" if job.finished else "would continue" if staged else "would merge"
    return {
        **_described(job, state),
        "files": {**{s.name: s.size for s in job.shards}, **job.beside},
        "staged_bytes": staged,
        "free_bytes": free_bytes(out),
        "fits": bool(job.finished) or free_bytes(out) >= job.missing_bytes(),
    }


def merge(base: Path, adapter: Path, out: Path, *, shard_size: str | int = "5GB", workers: int | None = None) -> dict[str, Any]:
    """Merge a LoRA adapter into a base model; ``out`` is whole afterwards, or absent.

    The tensors are byte-equal to those of PEFT's default ``merge_and_unload()`` on CPU. The same command continues an
    interrupted merge after the last verified file, and says so where the merge is done already. ``workers``: threads,
    by default one per core up to 4.

    Returns counts, bytes, seconds, GB/s (1e9 bytes of output) and the process's peak resident bytes. Raises UserError: exit 2
    for inputs that do not fit or an output that stands in the way, 73 for storage (staged work is kept), 75 where another
    process merges into the same output.
    """
    started = time.monotonic()
    workers = workers or min(4, len(os.sched_getaffinity(0)))
    job = prepare(base, adapter, out, shard_size)
    for warning in job.adapter.warnings:
        say(f"warning: {warning}")
    if job.finished:
        _check_finished(job)
        return _summary(job, "already merged", started, len(job.shards))
    check_space(job)
    try:
        with ArchitectureCheck(base) as architecture:
            return _merge_locked(job, workers, started, architecture)
    except OSError as error:
        raise storage_error(error, "merging", Path(error.filename or job.staging)) from error


# --- publish --------------------------------------------------------------------------------------------------------------

# The last step: finished files move singly into the output, then its config, then its manifest.


def _write_text(job: MergeJob) -> dict[str, FileRecord]:
    """Everything but the weights, ``config.json`` last: until it is there nothing loads the folder."""
    texts = {name: read_whole(path) for name, path in job.companions.items()} | job.changed
    config = texts.pop("config.json")
    if len(job.shards) > 1:
        texts[INDEX] = index_text(job.base, job.shards).encode()
    texts["config.json"] = config
    for name, data in texts.items():
        (job.out / name).parent.mkdir(exist_ok=True)
        write_durably(job.out / name, data)
    return {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in texts.items()}


def _meta(job: MergeJob) -> dict[str, object]:
    # What an adapter's manifest says about the base that it was trained on.
    recorded = read_manifest(job.adapter.folder).meta if (job.adapter.folder / MANIFEST).exists() else {}
    trained_on = {quantization.BASE: recorded[quantization.BASE]} if quantization.BASE in recorded else {}
    return {
        "inputs": job.inputs,
        "base": {
            "name": job.base.folder.resolve().name,
            "files": {p.name: {"header_sha256": hashlib.sha256(h.text).hexdigest()} for p, h in job.base.headers.items()},
        },
        "adapter": {"name": job.adapter.folder.resolve().name, "sha256": job.adapter.sha256, **trained_on},
        "tensors": {"all": len(job.base.tensors), "merged": len(job.adapter.updates), "replaced": len(job.adapter.replaced)},
        "shard_size": job.shard_size,
        "versions": {"clustertune": __version__, "torch": version("torch")},
    }


def publish(job: MergeJob, journal: Journal) -> None:
    """Make ``out`` whole from the finished shards in staging, then remove staging.

    May be interrupted anywhere and called again. Raises UserError: 73 where the storage fails, 75 where an input changed.
    """
    if not unchanged(job):  # the output may be a mixture
        message = "base or adapter changed while they were merged"
        raise UserError(message, file=str(job.base.folder), fix="run the same command again", code=ExitCode.AGAIN)
    try:
        if not journal.published:
            journal.begin_publish([*(s.name for s in job.shards), *([INDEX] if len(job.shards) > 1 else []), *job.beside])
        job.out.mkdir(exist_ok=True)
        fsync_path(job.out.parent)
        for shard in job.shards:
            staged = job.staging / shard.name
            if staged.exists():
                staged.rename(job.out / shard.name)
        fsync_path(job.out)
        seal(job.out, KIND, _meta(job), {**journal.shards, **_write_text(job)})
        clear(job.staging)
    except OSError as error:
        raise storage_error(error, "finishing", job.out) from error


# --- pipeline -------------------------------------------------------------------------------------------------------------

# The threads share one queue of pieces, file after file. A free thread takes the next piece.


class _Line:
    """The pieces that are left, and the buffers for them.

    A buffer is taken before the piece, so the first piece that is not finished always has one, and no thread waits forever.
    """

    def __init__(self, job: MergeJob, todo: list[Shard], workers: int) -> None:
        self._workers, self._guard, self._stopped = workers, threading.Lock(), False
        self.buffers: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(BUFFERS * workers):
            self.buffers.put(bytearray(CHUNK))
        self.outputs, self.journal_guard = list[Output](), threading.Lock()
        self._pieces = self._all(job, todo)

    def _all(self, job: MergeJob, todo: list[Shard]) -> Iterator[tuple[Output, Piece]]:
        for shard in todo:
            path = job.staging / shard.name
            try:
                output = Output(path, shard.size)
            except OSError as error:
                raise storage_error(error, "writing", path) from error
            self.outputs.append(output)
            for piece in cut(shard, job.adapter):
                yield output, piece

    def take(self) -> tuple[Output, Piece, bytearray] | None:
        """The next piece, or None where there is none or the line was stopped."""
        buffer = self.buffers.get()
        with self._guard:
            taken = None if self._stopped else next(self._pieces, None)
        if taken is None:
            self.buffers.put(buffer)  # for the next who waits, and then finds the end as well
            return None
        if len(buffer) < taken[1].size:
            buffer = bytearray(taken[1].size)
        return (*taken, buffer)

    def stop(self) -> None:
        """Let no thread begin another piece, or wait for a buffer that a failed piece holds."""
        with self._guard:
            self._stopped = True
        for _ in range(self._workers):
            self.buffers.put(bytearray())


def _load_torch() -> int:
    """Import torch with one thread per product: the workers are the parallelism, and the products' bits do not depend on it.

    Returns the threads that it had before.
    """
    import torch

    before: int = torch.get_num_threads()
    torch.set_num_threads(1)
    return before


@contextmanager
def _torch_beside() -> Iterator[Future[int]]:
    """Import torch, which takes as long as copying gigabytes, while the first pieces are copied."""
    pool = ThreadPoolExecutor(1)
    loading = pool.submit(_load_torch)
    pool.shutdown(wait=False)
    try:
        yield loading
    finally:
        if not loading.exception():
            import torch

            torch.set_num_threads(loading.result())


def _work(line: _Line, worker: Worker, journal: Journal, torch: Future[int], advance: Callable[[int], None]) -> None:
    while taken := line.take():
        output, piece, buffer = taken
        if piece.is_computed:
            torch.result()
        view = memoryview(buffer)[: piece.size]
        worker.make(piece, view, output)
        try:
            if output.add(view, piece.offset, partial(line.buffers.put, buffer)):
                record = output.finish()
                with line.journal_guard:
                    journal.add_shard(output.path.name, record)
        except OSError as error:
            raise storage_error(error, "writing", output.path) from error
        if not isinstance(piece.content, bytes):
            advance(piece.size)


def write_shards(job: MergeJob, journal: Journal, todo: list[Shard], workers: int, advance: Callable[[int], None]) -> None:
    """Write output files into staging and note each in the journal when it is on the device.

    ``advance`` is called with the number of bytes of weights written. Raises UserError (exit 73) where the storage fails.
    """
    if not todo:
        return
    line, source, failures = _Line(job, todo, workers), InputFiles(), list[BaseException]()

    def run(torch: Future[int]) -> None:
        try:
            _work(line, Worker(source), journal, torch, advance)
        except BaseException as error:
            failures.append(error)
            line.stop()

    try:
        with _torch_beside() as torch, ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(run, torch) for _ in range(workers)]:
                    future.result()
            except BaseException:
                line.stop()
                raise
    finally:
        source.close()
        for output in line.outputs:
            output.abandon()
    if failures:
        raise failures[0]


# --- job -------------------------------------------------------------------------------------------------------------------

# Everything about one merge that is known, and checked, before a byte is written.


FORMAT = 1
"""Raise it when the bytes of an output change for the same inputs: staged work of older versions is then not continued."""
WORKING_MEMORY = 192 << 20
"""Bytes for the buffers of all workers together; what torch, MKL and the plan of a 405B model take comes on top."""


@dataclass(frozen=True)
class MergeJob:
    """One merge, planned."""

    base: Base
    adapter: Adapter
    out: Path
    shards: list[Shard]
    companions: dict[str, Path]
    """The files beside the weights, from where they come."""
    changed: dict[str, bytes]
    """The content of those that are not copied."""
    shard_size: int
    inputs: str
    """Hash of all that decides the output's bytes; large base files count by header, size and modification time."""
    base_identity: dict[str, list[Any]]
    finished: Manifest | None
    """The manifest of ``out`` where the very same merge is there already."""

    @property
    def staging(self) -> Path:
        """The folder of unfinished work."""
        return staging_folder(self.out)

    @property
    def beside(self) -> dict[str, int]:
        """Bytes of the files beside the weights, by name; ``config.json`` last."""
        sizes = {name: path.stat().st_size for name, path in self.companions.items() if name not in self.changed}
        return {**{name: len(text) for name, text in self.changed.items()}, **sizes}

    @property
    def size(self) -> int:
        """Bytes of the output but its manifest."""
        return sum(s.size for s in self.shards) + sum(self.beside.values())

    def staged_bytes(self) -> int:
        """Bytes that an earlier, interrupted merge of the same inputs has left finished (by name and size)."""
        journal = Journal(self.staging).load()
        if journal.inputs != self.inputs:
            return 0
        sizes = {s.name: s.size for s in self.shards}
        places = [(name, folder / name) for name in journal.shards for folder in (self.staging, self.out)]
        return sum(p.stat().st_size for name, p in places if p.exists() and p.stat().st_size == sizes.get(name))

    def missing_bytes(self) -> int:
        """Bytes that still have to be found on the disk. A file that a killed merge left unfinished gives its room back."""
        unfinished = sum(p.stat().st_blocks * 512 for p in self.staging.glob("*.part"))
        return self.size - self.staged_bytes() - unfinished

    def worker_bytes(self) -> int:
        """Upper bound of one worker's buffers: A; the update, the sum and B of a block; a raw one; what waits to be hashed."""
        largest = 0
        for name, update in self.adapter.updates.items():
            rows, columns = self.base.tensors[name].shape[-2:]
            block = block_elements(rows, columns)
            block_rows = block // max(1, columns)
            factors = 4 * (update.rank * columns + 2 * block + 2 * block_rows * update.b.shape[1])
            largest = max(largest, factors + CHUNK + BUFFERS * max(CHUNK, 4 * block))
        return max(largest, 32 << 20)

    def limit_workers(self, count: int) -> int:
        """At most ``count``, as many as fit into ``WORKING_MEMORY``; at least one."""
        return max(1, min(count, WORKING_MEMORY // self.worker_bytes()))


def prepare(base_folder: Path, adapter_folder: Path, out: Path, shard_size: str | int) -> MergeJob:
    """Check everything and plan the output. Raises UserError with every problem found; nothing is written."""
    problems = place_problems(base_folder, adapter_folder, out)
    base, adapter, limit = None, None, 0
    with collect_problems(problems):
        limit = parse_size(shard_size)
    with collect_problems(problems):
        base = read_base(base_folder)
    with collect_problems(problems):
        try:
            adapter = read_adapter(adapter_folder, base)
        except UserError:
            if base is not None:  # what the adapter lacks in the base may lack in the base's own architecture
                with ArchitectureCheck(base_folder) as architecture:
                    architecture.finish()
            raise
    if problems or base is None or adapter is None:
        raise UserError(problems)
    shards = plan_shards(list(base.tensors.values()), limit)
    files, changed = companion_files(base, adapter)
    base_identity = base.identity()
    decides = {
        "format": FORMAT,
        "base": base_identity,
        "headers": {p.name: hashlib.sha256(h.text).hexdigest() for p, h in base.headers.items()},
        "adapter": adapter.sha256,
        "companions": {name: hash_file(path).sha256 for name, path in files.items()},
        "shard_size": limit,
    }
    inputs = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    finished = finished_manifest(out, inputs)
    if not finished and base.unrecorded:
        say(unproved(base_folder, base.unrecorded))
    return MergeJob(base, adapter, out, shards, files, changed, limit, inputs, base_identity, finished)


_CHECK_SECONDS, _CHECK_MEMORY = 600.0, 8 << 30


class ArchitectureCheck:
    """Compares a base's tensors with those of its architecture in a child: the memory of transformers is not the merge's, and
    its import takes as long as copying gigabytes."""

    def __init__(self, folder: Path) -> None:
        """Begin. The child is a fork: before this process starts threads."""
        self._folder, self._guard = folder, threading.Lock()

        def compare() -> dict[str, Any]:
            return {"problems": [asdict(problem) for problem in check_tensors(folder)]}

        self._child = bounded.Pending(compare, _CHECK_SECONDS, _CHECK_MEMORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard, self._child:
            pass

    def finish(self, *, wait: bool = True) -> None:
        """Raises UserError for tensors that the architecture has and the files do not, or in another shape. Not ``wait``: only
        if that is known already."""
        with self._guard:
            if not wait and not self._child.is_ready():
                return
            answer = self._child.answer()
        if answer.found is None:
            text = "transformers cannot make this model without its values, or not within 10 minutes and 8 GiB"
            raise UserError(text, file=str(self._folder / "config.json"), fix="compare it with the file of the model's makers")
        raise_if(Problem(**problem) for problem in answer.found["problems"])


def check_space(job: MergeJob) -> None:
    """Raises UserError (exit 73) where what is still to be written does not fit."""
    need, free = job.missing_bytes(), free_bytes(job.out)
    if free < need:
        message = f"needs {need / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        fix = "free space, then run the same command again"
        raise UserError(message, file=str(job.out), fix=fix, code=ExitCode.STORAGE)


def unchanged(job: MergeJob) -> bool:
    """Whether the inputs are still those that were planned with."""
    try:
        adapter = identity(job.adapter.folder / name for name in job.adapter.identity)
        return job.base.identity() == job.base_identity and adapter == job.adapter.identity
    except OSError:
        return False


# --- target ----------------------------------------------------------------------------------------------------------------

# The output folder: what else goes in beside the weights, whether there is room, and what already stands there.


KIND = "merged"
_OTHER = ("preprocessor_config.json", "processor_config.json", *companions.TEXTS)


def companion_files(base: Base, adapter: Adapter) -> tuple[dict[str, Path], dict[str, bytes]]:
    """The files beside the weights by name, ``config.json`` last: from where they come, and those with another content.

    The adapter's tokenizer, if it has one, and its chat template are those of the training and go before the base's; the EOS
    and the padding of that tokenizer go into the base's ``config.json`` and ``generation_config.json``.
    """
    tokenizer = companions.matching(adapter.folder, companions.TOKENIZER)
    trained = bool({"tokenizer.json", "tokenizer.model"} & set(tokenizer))
    if not trained:
        tokenizer = companions.matching(base.folder, companions.TOKENIZER)
    chat, before = (companions.matching(folder, companions.CHAT) for folder in (adapter.folder, base.folder))
    if not chat and not (trained and companions.has_template(tokenizer)):
        chat = before
    extra = base.folder / "additional_chat_templates"
    if extra.is_dir() and chat and [read_whole(p) for p in chat.values()] == [read_whole(p) for p in before.values()]:
        chat |= {f"{extra.name}/{p.name}": p for p in sorted(extra.glob("*.jinja"))}
    generation = companions.matching(base.folder, (companions.GENERATION,))
    files = {**companions.matching(base.folder, _OTHER), **generation, **tokenizer, **chat}
    files["config.json"] = base.folder / "config.json"
    raise_if(companions.problems_of(files))
    if not trained:
        return files, {}
    held = read_json(generation[companions.GENERATION]) if generation else None
    config, aligned = companions.aligned_configs(base.config, held, companions.stop_ids(tokenizer))
    changed = {companions.GENERATION: aligned} if aligned != held else {}
    changed |= {"config.json": config} if config != base.config else {}
    return files, {name: (json.dumps(body, indent=2) + "\n").encode() for name, body in changed.items()}


def index_text(base: Base, shards: list[Shard]) -> str:
    """``model.safetensors.index.json`` as ``save_pretrained`` writes it."""
    metadata: dict[str, Any] = {**base.index_metadata, "total_size": sum(t.size for s in shards for t in s.tensors)}
    weights = {t.name: shard.name for shard in shards for t in shard.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weights}, indent=2, sort_keys=True) + "\n"


def place_problems(base: Path, adapter: Path, out: Path) -> list[Problem]:
    """Whether ``out`` lies where it would destroy or swallow its inputs."""
    target = out.resolve()
    problems = []
    for what, folder in (("base", base.resolve()), ("adapter", adapter.resolve())):
        if target == folder or folder in target.parents:
            where = "is" if target == folder else "lies inside"
            problems.append(Problem(f"{where} the {what} {folder}", file=str(out), fix="give a folder of its own"))
        elif target in folder.parents:
            problems.append(Problem(f"holds the {what} {folder}", file=str(out), fix="give a folder of its own"))
    return problems


def finished_manifest(out: Path, inputs: str) -> Manifest | None:
    """The manifest of ``out`` if it is a merge of the same inputs, None if ``out`` is free or begun by us.

    Raises UserError where something else stands there; nothing is ever overwritten.
    """
    if not os.path.lexists(out):
        return None
    if not out.is_dir():
        raise UserError("exists and is not a folder", file=str(out), fix="give another name")
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        if manifest.kind != KIND:
            raise UserError(f"holds a finished {manifest.kind}", file=str(out), fix="give another name")
        if manifest.meta.get("inputs") != inputs:
            message = "holds a finished merge of other inputs (base, adapter or shard size)"
            raise UserError(message, file=str(out), fix="give another name, or move it away")
        return manifest
    ours = set(Journal(staging_folder(out)).load().published)
    foreign = [name for name in list_files(out) if name not in ours]
    if foreign:
        message = f"exists, is not a finished merge and holds {foreign[0]}"
        raise UserError(message, file=str(out), fix="give another name, or move it away")
    return None


def free_bytes(out: Path) -> int:
    """Bytes that an ordinary user may still write where ``out`` will be."""
    return shutil.disk_usage(next(folder for folder in out.resolve().parents if folder.exists())).free


def remove_published(out: Path, journal: Journal) -> None:
    """Take back what an earlier merge of other inputs had moved into ``out`` and never finished."""
    for name in journal.published:
        (out / name).unlink(missing_ok=True)
    remove_temporary(out)
    for folder in {(out / name).parent for name in journal.published} - {out}:
        if folder.is_dir():
            folder.rmdir()


def remove_temporary(out: Path) -> None:
    """Remove what a killed :func:`~clustertune.manifest.write_durably` left."""
    for path in out.rglob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.tmp", path.name):
            path.unlink()


# --- stage ----------------------------------------------------------------------------------------------------------------

# The staging folder beside the output: one merge at a time, and a journal of the files that are on the device.
#
# ``.<out>.merging/`` holds finished shards under their final names, ``journal.jsonl`` and ``lock``; it never holds a
# ``config.json`` or an index, so nothing loads it by mistake.


def staging_folder(out: Path) -> Path:
    """Where the work for ``out`` lies until it is whole."""
    return out.with_name(f".{out.name}.merging")


class Journal:
    """What of an output is done: per line one event, durable before the next step begins.

    First line ``{"inputs": id}``; then ``{"shard", "size", "xxh3_128"}`` per finished shard; ``{"publish": [names]}`` once
    files begin to move into the output.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.inputs: str | None = None
        self.shards: dict[str, FileRecord] = {}
        self.published: list[str] = []

    def load(self) -> Journal:
        """Read what is there, up to the first line that is torn or unknown."""
        try:
            text = read_whole(self.path)
        except FileNotFoundError:
            return self
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._apply(json.loads(line))
            except (ValueError, RecursionError, KeyError, TypeError):
                break
        return self

    def _apply(self, event: dict[str, Any]) -> None:
        if "inputs" in event:
            self.inputs = str(event["inputs"])
        elif "publish" in event:
            self.published = [str(name) for name in event["publish"]]
        else:
            self.shards[str(event["shard"])] = parse_record(event)

    def rewrite(self) -> None:
        """Write all of it again, so that nothing is appended after a torn line."""
        events: list[dict[str, Any]] = [{"inputs": self.inputs}]
        events += [{"shard": name, **record.as_json()} for name, record in self.shards.items()]
        events += [{"publish": self.published}] if self.published else []
        write_durably(self.path, "".join(json.dumps(event) + "\n" for event in events))

    def add_shard(self, name: str, record: FileRecord) -> None:
        """Note a shard that is on the device. Callers from several threads serialise."""
        self.shards[name] = record
        self._append({"shard": name, **record.as_json()})

    def begin_publish(self, names: list[str]) -> None:
        """Note that files named ``names`` in the output are ours from now on."""
        self.published = names
        self._append({"publish": names})

    def _append(self, event: dict[str, Any]) -> None:
        with self.path.open("ab") as out:
            out.write(json.dumps(event).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the staging folder against other processes, also of other nodes where the filesystem's locks reach.

    Raises UserError: exit 75 where another merge holds it, 73 where the folder cannot be made.
    """
    held = lock.held(folder / "lock", "is merging into it", shown=folder, fix="wait for it, then run the same command again")
    with ExitStack() as stack:
        try:
            stack.enter_context(held)
        except OSError as error:
            raise storage_error(error, "making the staging folder", folder) from error
        yield


def clear(folder: Path, keep: set[str] | None = None) -> None:
    """Remove the files of a staging folder that are not in ``keep``; without ``keep`` the folder itself, the lock last."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name == "lock"):
        if keep is None or path.name not in {*keep, "lock"}:
            path.unlink()
    if keep is None:
        folder.rmdir()
        fsync_path(folder.parent)
