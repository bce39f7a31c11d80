"""Checkpoints on disk: which are complete, which is newest, which may be deleted; and when the next one is due.

Order is by step and attempt, never by mtime. A folder is ``checkpoints/step-000020``, or ``step-000020.a2`` when a second
attempt reaches that step again: what a killed attempt left behind is never written into. A checkpoint exists when its manifest
does.
"""

from __future__ import annotations

import math
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.errors import Problem, UserError
from clustertune.plan.schedule import COPY_BYTES_PER_S, WRITE_BYTES_PER_S, best_seconds, given_seconds
from clustertune.recipe.sections import Save

KIND = "checkpoint"
_NAME = re.compile(r"step-(\d{6,})(?:\.a(\d+))?")
_OF_RANK = re.compile(
    r"(?:^|/)(?:__(\d+)_\d+\.distcp|rng_state_(\d+)\.(?:safetensors|pth)|(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_\w+\.(?:pt|nvme\.json)"
    r"|offloaded_tensors/rank(\d+)/.*)$"
)
PROGRESS_SECONDS = 10.0
"""Between two lines that say how far a comparison has come."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, order=True)
class Checkpoint:
    """One checkpoint folder, whole or not."""

    step: int
    attempt: int
    path: Path


def parse(path: Path) -> Checkpoint | None:
    """The step and attempt in a folder's name; None for a folder that is not a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return Checkpoint(int(match[1]), int(match[2] or 1), path) if match else None


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoint folders, newest first, whole or not."""
    if not folder.is_dir():
        return []
    checkpoints = (parse(path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((c for c in checkpoints if c), reverse=True)


def verify(path: Path, *, hashes: bool = True) -> list[Problem]:
    """Everything that keeps a checkpoint from being whole; an empty list means whole. Reads no pickle."""
    problems = manifest.find_problems(path, KIND, hashes=hashes)
    links = [] if problems else [item for item in sorted(path.rglob("*")) if item.is_symlink()]
    fix = "copy what it leads to in its place: what a link leads to can change, and neither resuming nor the export follow it"
    problems += [Problem("is a link, not a plain file", file=str(item), fix=fix) for item in links]
    named = parse(path)
    if not problems and named is not None and (step := manifest.read_manifest(path).meta.get("step")) != named.step:
        problems.append(Problem(f"holds step {step}, its name says {named.step}", file=str(path)))
    return problems


def find_open(path: Path) -> list[Problem]:
    """What of a checkpoint another user could have written: other owners, files or folders that others can write to.

    The rule of :func:`clustertune.launch.node_folders.make_own_folder`. A digest does not help against who can seal again.
    """
    root = path.resolve()
    return list(filter(None, map(manifest.find_shared, [root, *sorted(root.rglob("*"))])))


def require_own(path: Path) -> None:
    """Raise UserError where another user could have written to a checkpoint, before anything of it is loaded."""
    if problems := find_open(path):
        more = [Problem(f"and {len(problems) - 3} more of its files", file=str(path))] if len(problems) > 3 else []
        raise UserError([*problems[:3], *more])


def close(path: Path) -> None:
    """Take the right to write from group and others: a umask of 002 or an ACL of the project's folder gives it to them."""
    for item in [path, *path.rglob("*")]:
        mode = item.lstat().st_mode
        if mode & _OTHERS and not stat.S_ISLNK(mode):
            item.chmod(stat.S_IMODE(mode) & ~_OTHERS)


def newest_whole(folder: Path, skip: Collection[Path] = ()) -> tuple[Checkpoint | None, list[tuple[Checkpoint, list[Problem]]]]:
    """The newest checkpoint that is whole by its manifest and the sizes of its files, and the newer ones that are broken.

    Nobody but :meth:`CheckpointStore.latest`, where all ranks share it, and the export compares the digests. ``skip``: those
    whose digests did not agree. Raises UserError where others can write to the newest whole one, or to one that holds a link:
    an older one in its place would be trained over again.
    """
    broken: list[tuple[Checkpoint, list[Problem]]] = []
    for checkpoint in list_checkpoints(folder):
        if checkpoint.path in skip:
            continue
        problems = verify(checkpoint.path, hashes=False)
        if not problems or any(path.is_symlink() for path in checkpoint.path.rglob("*")):
            require_own(checkpoint.path)
        if not problems:
            return checkpoint, broken
        broken.append((checkpoint, problems))
    return None, broken


def newest_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint, as :func:`newest_whole` has it; None: there is none, or it must not be read."""
    try:
        newest, _ = newest_whole(folder)
    except UserError:
        return None
    return newest.step if newest else None


def is_final(path: Path) -> bool:
    """Whether a whole checkpoint is the last step's: nothing is left to train, and an older one is never exported for it."""
    return bool(manifest.read_manifest(path).meta.get("final"))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder that ``path`` means: itself, or the newest whole one of a run or of a checkpoints folder.

    Raises UserError naming what is wrong with each candidate.
    """
    if (path / manifest.MANIFEST).exists() or parse(path):
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, broken = newest_whole(folder)
    if checkpoint:
        return checkpoint.path
    problems = [problem for _, faults in broken for problem in faults[:3]]
    raise UserError(
        [
            Problem("no complete checkpoint in this folder", file=str(folder), fix="train first: clustertune run RECIPE"),
            *problems,
        ]
    )


@dataclass
class CheckpointStore:
    """The checkpoints folder of one run, as all ranks of one attempt use it together.

    A node that was cut off may continue while the scheduler has given its job to others. ``fence`` raises UserError once
    that is so; rank 0 asks it before anything appears or disappears here, and all ranks then raise alike.
    """

    folder: Path
    attempt: int
    limit: int | None
    """How many whole checkpoints are kept beside those of ``is_kept``; None keeps all."""
    ranks: manifest.Ranks
    tell: Callable[[str], None]
    """Where a deletion is announced; called on rank 0 only."""
    fence: Callable[[], object] = lambda: None
    is_kept: Callable[[Checkpoint], bool] = lambda _: False
    """Whether a checkpoint stays whatever the limit; asked on rank 0."""
    _read_back: Path | None = None
    """The checkpoint that this attempt resumed from, whose bytes were compared."""

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its metadata: rank 0 chooses by manifests (attribute caches of NFS clients differ),
        then all ranks compare the digests, each those of its share of the files.

        Raises UserError on all ranks where others can write to it.
        """
        damaged: list[Path] = []
        while True:
            chosen = self.on_first(lambda: self._choose(damaged))
            if chosen is None:
                return None
            if not (problems := self._compare(chosen)):
                self._read_back = chosen
                return chosen, manifest.read_manifest(chosen).meta
            damaged.append(chosen)
            if self.ranks.rank == 0:
                self.tell(f"checkpoint {chosen.name} is incomplete or damaged and is skipped: {problems[0]}")

    def _choose(self, damaged: list[Path]) -> Path | None:
        """The newest that is whole but for those known to be ``damaged``. Raises UserError where it must not be loaded."""
        checkpoint, broken = newest_whole(self.folder, damaged)
        for bad, problems in broken:
            damaged.append(bad.path)
            self.tell(f"checkpoint {bad.path.name} is incomplete or damaged and is skipped: {problems[0]}")
        return checkpoint.path if checkpoint is not None else None

    def on_first(self, act: Callable[[], Any]) -> Any:
        """What rank 0 does, for all ranks: its value, or the OSError or UserError that it met, raised on each of them alike."""
        value: Any = None
        failure: tuple[Any, ...] | None = None
        if self.ranks.rank == 0:
            try:
                value = act()
            except OSError as error:
                failure = (OSError, error.errno, error.strerror, error.filename)
            except UserError as error:
                failure = (UserError, error.problems, error.code)
        value, failure = self.ranks.broadcast((value, failure))
        if failure is not None:
            raise failure[0](*failure[1:])
        return value

    def _compare(self, path: Path) -> list[Problem]:
        """What is wrong with the content of a checkpoint, by all ranks. None waits for another longer than a second."""
        rank, size = manifest.sharers(path, self.ranks)
        reported_at = time.monotonic()
        with manifest.DigestComparison(path, rank, size, small=0) as comparison:
            while True:
                parts = self.ranks.gather((comparison.running, comparison.hashed, comparison.bytes))
                if not any(running for running, _, _ in parts):
                    break
                if self.ranks.rank == 0 and time.monotonic() - reported_at > PROGRESS_SECONDS:
                    reported_at = time.monotonic()
                    done, total = (sum(part[column] for part in parts) / 1e9 for column in (1, 2))
                    self.tell(f"comparing {path.name} with its digests: {done:,.1f} of {total:,.1f} GB")
                comparison.wait(1.0)
            return [problem for problems in self.ranks.gather(comparison.finish()) for problem in problems]

    def on(self, ranks: manifest.Ranks) -> CheckpointStore:
        """The same store among others of its ranks' threads."""
        return replace(self, ranks=ranks)

    def path(self, step: int) -> Path:
        """The folder of this step, made or not."""
        return self.folder / (f"step-{step:06d}" if self.attempt == 1 else f"step-{step:06d}.a{self.attempt}")

    def begin(self, step: int) -> Path:
        """A new, empty folder for this step. One that exists is never written into: OSError, on every rank alike.

        Raises UserError where another attempt has taken over.
        """
        self.check_fence()
        path = self.path(step)

        def make() -> None:
            self.folder.mkdir(exist_ok=True)  # a run folder that was deleted is not recreated, empty but for this
            path.mkdir()
            close(path)

        self.on_first(make)
        return path

    def change(self, path: Path, **meta: Any) -> None:
        """Change what the manifest of a whole checkpoint says; its files stay. Raises OSError or UserError on all ranks."""
        self.ranks.barrier()
        self.check_fence()

        def seal() -> None:
            sealed = manifest.read_manifest(path, KIND)
            manifest.seal(path, KIND, {**sealed.meta, **meta}, sealed.files)

        self.on_first(seal)

    def commit(self, path: Path, meta: Mapping[str, Any], records: Mapping[str, manifest.FileRecord] | None = None) -> int:
        """Make the folder whole: rank 0 writes the manifest last. Returns bytes.

        ``records``: what this rank wrote, fsynced and hashed; each rank does that here for its files that are not among them.
        Raises OSError on every rank where the storage failed on any, UserError where another attempt has taken over: the
        folder then has no manifest.
        """
        self.ranks.barrier()
        names = self.ranks.broadcast(manifest.list_files(path) if self.ranks.rank == 0 else None)
        records, error = dict(records or {}), None
        try:
            if self.ranks.rank == 0:
                close(path)
            records |= manifest.record_files(path, [n for n in self._own(names) if n not in records])
        except OSError as caught:
            error = f"rank {self.ranks.rank}: {caught}"
        parts = self.ranks.gather((records, error))
        self.check_fence()
        if not (errors := [e for _, e in parts if e]) and self.ranks.rank == 0:
            merged = {name: record for part, _ in parts for name, record in part.items()}
            try:
                manifest.seal(path, KIND, {**meta, "attempt": self.attempt}, merged)
            except OSError as caught:
                errors = [f"rank 0: {caught}"]
        if errors := self.ranks.broadcast(errors):
            raise OSError("; ".join(errors))
        if self.ranks.rank == 0 and (problems := find_open(path)):  # NFS that maps owners, a file system without modes
            self.tell(f"warning: the storage keeps neither owner nor mode, the next attempt would refuse it: {problems[0]}")
        return sum(record.size for part, _ in parts for record in part.values())

    def check_fence(self) -> None:
        """Ask rank 0's fence, for all ranks."""
        self.on_first(self.fence)

    def _own(self, names: list[str]) -> list[str]:
        return [name for name in names if self._owner(name) == self.ranks.rank]

    def _owner(self, name: str) -> int:
        """The rank that wrote a file: a client must fsync its own writes on NFS."""
        match = _OF_RANK.search(name)
        return int(next(filter(None, match.groups()))) % self.ranks.world_size if match else 0

    def prune(self) -> list[Path]:
        """Remove what is older than the newest ``limit`` whole checkpoints, and what earlier attempts left unfinished.

        Rank 0 alone deletes, says so, and takes the manifest first. A damaged checkpoint (a manifest, but files that
        are missing or of another size) is neither counted nor removed; no file is read. At least one whole checkpoint always
        stays, and the one that this attempt resumed from, the newest whose every byte was read back. What a later attempt
        made is left alone: its steps may be lower, and it may be what that attempt resumes from.
        """
        removed: list[Path] = []
        self.check_fence()
        if self.ranks.rank == 0:
            intact = 0
            for checkpoint in list_checkpoints(self.folder):
                if checkpoint.attempt > self.attempt:
                    continue
                if not (checkpoint.path / manifest.MANIFEST).exists():
                    if checkpoint.attempt < self.attempt and intact:
                        self._remove(checkpoint, "left unfinished by an earlier attempt", removed)
                elif self.is_kept(checkpoint):
                    continue
                elif verify(checkpoint.path, hashes=False):
                    self.tell(f"checkpoint {checkpoint.path.name} is damaged: kept, not counted")
                elif self.limit is not None and intact >= max(self.limit, 1) and checkpoint.path != self._read_back:
                    self._remove(checkpoint, f"older than the newest {max(self.limit, 1)}", removed)
                else:
                    intact += 1
        self.ranks.barrier()
        return removed

    def _remove(self, checkpoint: Checkpoint, why: str, removed: list[Path]) -> None:
        self.fence()  # comparing hashes takes a while
        try:
            (checkpoint.path / manifest.MANIFEST).unlink(missing_ok=True)
            manifest.fsync_path(checkpoint.path)
            shutil.rmtree(checkpoint.path)
        except OSError as error:  # on NFS a file that is open stays in its folder as .nfs...: no reason to stop
            self.tell(f"checkpoint {checkpoint.path.name} could not be removed ({why}): {error.strerror or error}")
            return
        removed.append(checkpoint.path)
        self.tell(f"checkpoint {checkpoint.path.name} removed: {why}")


def verify_all(path: Path) -> tuple[Path | None, list[Problem], list[str]]:
    """Of one checkpoint, or all of a folder or run: the newest complete one, everything that is wrong, what is unfinished."""
    if (path / manifest.MANIFEST).exists() or parse(path):
        return path, verify(path), list(map(str, find_open(path)[:1]))
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    problems, notes, newest = [], list[str](), None
    for checkpoint in list_checkpoints(folder):
        if not (checkpoint.path / manifest.MANIFEST).exists():
            notes.append(f"{checkpoint.path} has no manifest: it was never finished, and is not used")
        elif faults := verify(checkpoint.path):
            problems += faults
        else:
            newest = newest or checkpoint.path
            notes += map(str, find_open(checkpoint.path)[:1])
    if newest is None and not problems:
        problems.append(
            Problem("no complete checkpoint in this folder", file=str(folder), fix="train first: clustertune run RECIPE")
        )
    return newest, problems, notes


@dataclass
class Cadence:
    """Rank 0's answer, at the end of each step, to whether a save is due: the recipe's ``save`` section."""

    save: Save
    between: float
    """As :func:`seconds_between_ends` gives it."""
    state_bytes: float = 0.0
    """Of a rank's part of the state: what a save is planned by until one was measured."""
    clock: Callable[[], float] = time.monotonic
    _cost: float | None = None
    _write: float | None = None
    _last: float = field(default=math.nan)

    def seconds(self) -> float | None:
        """Between two saves; None where they come by steps."""
        if self.save.every != "auto":
            return given_seconds(self.save.every)
        cost = self._cost if self._cost is not None else self.state_bytes / COPY_BYTES_PER_S
        write = self._write if self._write is not None else self.state_bytes / WRITE_BYTES_PER_S
        return best_seconds(cost, write, self.between)

    def is_due(self, step: int, *, busy: bool = False) -> bool:
        """Whether to save behind this step. The first one starts the clock.

        ``busy``: the previous save is still being written. A save that is due by time begins after it. A save that is due at
        a step cannot move to another step, so training waits for the previous one.
        """
        now = self.clock()
        if math.isnan(self._last):
            self._last = now
        if step in self.save.milestones:
            return True
        every = self.seconds()
        return now - self._last >= every and not busy if every is not None else step % int(self.save.every) == 0

    def began(self) -> None:
        """A save begins."""
        self._last = self.clock()

    def measured(self, stall: float, write: float) -> None:
        """What the save before took."""
        self._cost, self._write = stall, write
