"""A second tier of checkpoints on the nodes' own disks: saved often, lost with their node, restored from what survived.

Each rank writes its files to its node, and sends a copy of them to a rank of the next node. All nodes keep the same manifest,
of the files of all ranks: a step is whole where each file is found on some node. An attempt that finds a whole one newer than
the newest of shared storage copies it there, hashed on its way, and resumes from that copy like from any other checkpoint, also
with another number of ranks. What is read back was written by this user into a folder that is closed to all others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from clustertune import manifest
from clustertune.checkpoint.shards import PIECE, write_new
from clustertune.checkpoint.store import KIND, CheckpointStore, list_checkpoints, newest_whole, parse
from clustertune.errors import Problem, UserError
from clustertune.manifest import FileRecord, Manifest
from clustertune.plan.schedule import LOCAL_KEPT
from clustertune.recipe.schema import LocalSave

_LINK = (errno.ELOOP, errno.ENOTDIR)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name_of(run: Path, created: object) -> str:
    """The name of a run's folder below ``save.local.path``: no other run's, also none that lay at the same path before."""
    return f"{run.name}-{hashlib.sha256(f'{run.resolve()} {created}'.encode()).hexdigest()[:12]}"


def open_root(base: Path, name: str) -> tuple[Path, str]:
    """This node's folder of a run, made where it is missing, for this user alone; and what tells it from other nodes'.

    Raises OSError where ``base`` is missing or takes no folder, UserError where one of the two is a link or is open to others.
    """
    outer = inner = -1
    shown = base
    try:
        outer = os.open(base, _FOLDER)
        mode = os.fstat(outer).st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise _refused(base, f"others can rename what lies in it (mode {stat.S_IMODE(mode):04o})", "chmod +t, or go-w")
        shown = base / name
        if not os.path.lexists(shown):
            os.mkdir(name, 0o700, dir_fd=outer)
        inner = os.open(name, _FOLDER, dir_fd=outer)
        found = os.fstat(inner)
    except FileExistsError:  # another rank of this node
        return open_root(base, name)
    except OSError as error:
        if error.errno not in _LINK:
            raise
        raise _refused(shown, "is a link, or no folder", "name the folder itself, or another one") from None
    finally:
        for fd in (outer, inner):
            if fd >= 0:
                os.close(fd)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        text = f"belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: others could put files into it"
        raise _refused(shown, text, "remove it, or chmod 0700 your own")
    return shown, f"{_BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename} {found.st_dev} {found.st_ino}"


def _refused(path: Path, text: str, fix: str) -> UserError:
    return UserError(Problem(f"save.local.path: {text}", file=str(path), fix=fix))


class _Unreadable(Exception):
    """A file of a node cannot be read."""


class _Held(NamedTuple):
    """What a node holds of a step."""

    manifest: bytes
    files: set[str]


@dataclass
class LocalTier:
    """This rank's side of the local checkpoints of an attempt: in the place of a store."""

    root: Path | None
    """None where this node has no such folder."""
    nodes: Sequence[Sequence[int]]
    """The ranks of each node that has one."""
    shared: CheckpointStore
    every: LocalSave
    off: str = ""
    """Why nothing is saved locally in this attempt."""
    group: Any = None
    """Of all ranks, for the copies to neighbours: the save thread's own."""
    _damaged: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, settings: LocalSave, run: Path, created: object, shared: CheckpointStore) -> LocalTier:
        """Make or find the folders of all nodes. Raises UserError on all ranks alike where one must not be used."""
        base, root, key, why, problems = Path(settings.path), None, None, "", list[Problem]()
        try:
            if base.resolve().is_relative_to(run.resolve()):
                raise _refused(base, "is in the run folder, which is shared storage", "name a disk of the node itself")
            root, key = open_root(base, name_of(run, created))
        except UserError as error:
            problems = error.problems
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
            why = f"rank {shared.ranks.rank}, {os.uname().nodename}: {getattr(error, 'strerror', error)}: {base}"
        found = shared.ranks.gather((key, why, problems))
        if problems := [problem for _, _, each in found for problem in each]:
            raise UserError(list(dict.fromkeys(problems)))
        keys = [key for key, _, _ in found]
        nodes = [[rank for rank, one in enumerate(keys) if one == key] for key in dict.fromkeys(keys) if key is not None]
        tier = cls(root, nodes, shared, settings, next((why for _, why, _ in found if why), ""))
        if tier.off:
            tier._tell(f"warning: nothing is saved locally in this attempt: {tier.off}")
        elif settings.neighbour and tier._neighbours is None:
            text = "there is one node" if len(nodes) == 1 else "the nodes have unequal numbers of ranks"
            tier._tell(f"note: local checkpoints have no copy on a neighbour: {text}")
        return tier

    def on(self, ranks: Any) -> LocalTier:
        """The same among others of its ranks' threads."""
        return replace(self, shared=self.shared.on(ranks), group=ranks.process_group)

    def path(self, step: int) -> Path:
        """The folder of this step on this node, made or not."""
        assert self.root is not None
        return self.root / self.shared.path(step).name

    def _tell(self, text: str) -> None:
        if self.shared.ranks.rank == 0:
            self.shared.tell(text)

    @property
    def _node(self) -> int:
        return next((at for at, ranks in enumerate(self.nodes) if self.shared.ranks.rank in ranks), -1)

    @property
    def _is_first(self) -> bool:
        """Of its node's ranks."""
        return self._node >= 0 and self.nodes[self._node][0] == self.shared.ranks.rank

    @property
    def _neighbours(self) -> tuple[int, int] | None:
        """The ranks that this one's copy goes to and that it keeps a copy of; None where there is no such ring."""
        if len(self.nodes) < 2 or len({len(ranks) for ranks in self.nodes}) > 1:
            return None
        index = self.nodes[self._node].index(self.shared.ranks.rank)
        return self.nodes[(self._node + 1) % len(self.nodes)][index], self.nodes[self._node - 1][index]

    # -- a save, in the thread of saves ---------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """A new folder on each node; what an interrupted save left goes before. Raises as :meth:`CheckpointStore.begin`."""
        self.shared.check_fence()
        path, fault = self.path(step), None
        if self._is_first and self.root is not None:
            try:
                for one in list_checkpoints(self.root):
                    if one.attempt <= self.shared.attempt and not (one.path / manifest.MANIFEST).exists():
                        shutil.rmtree(one.path, ignore_errors=True)
                path.mkdir(mode=0o700)
            except OSError as error:
                fault = (error.errno, error.strerror)
        if faults := [fault for fault in self.shared.ranks.gather(fault) if fault]:
            raise OSError(*faults[0], str(path))
        return path

    def commit(self, path: Path, meta: Mapping[str, Any], records: Mapping[str, FileRecord]) -> int:
        """Copy to the neighbours, then write the manifest on each node. Returns the bytes of all ranks' files, once.

        Raises OSError on every rank where one could not, UserError where another attempt has taken over.
        """
        ranks = self.shared.ranks
        parts = ranks.gather(dict(records))
        merged = {name: record for part in parts for name, record in part.items()}
        around = self._neighbours if self.every.neighbour else None
        fault = _swap(path, parts[ranks.rank], parts[around[1]], *around, self.group) if around else ""
        self.shared.check_fence()
        if not any(faults := ranks.gather(fault)) and self._is_first:
            try:
                manifest.seal(path, KIND, {**meta, "attempt": self.shared.attempt}, merged)
            except OSError as error:
                fault = str(error)
        if faults := [f"rank {rank}: {text}" for rank, text in enumerate(ranks.gather(fault)) if text]:
            raise OSError("; ".join(faults))
        return sum(record.size for record in merged.values())

    def prune(self) -> list[Path]:
        """Keep the newest two whole steps on each node; what a later attempt made is left alone."""
        self.shared.check_fence()
        if self._is_first and self.root is not None:
            with contextlib.suppress(OSError):  # the step that was saved is whole all the same
                known = [one for one in list_checkpoints(self.root) if one.attempt <= self.shared.attempt]
                known = [one for one in known if (one.path / manifest.MANIFEST).exists()]
                for one in sorted(known, key=lambda one: (one.attempt, one.step), reverse=True)[LOCAL_KEPT:]:
                    (one.path / manifest.MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(one.path, ignore_errors=True)
        return []

    def clear(self) -> None:
        """Remove this run's local checkpoints: it has ended."""
        if self._is_first and self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)

    # -- a restart ------------------------------------------------------------------------------------------------

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """As :meth:`CheckpointStore.latest`, once a newer one that the nodes hold has been copied to shared storage.

        Raises OSError on all ranks where shared storage does not take it, UserError as ``latest`` does.
        """
        ranks, known = self.shared.ranks, 0
        if ranks.rank == 0:
            try:
                newest, _ = newest_whole(self.shared.folder)
                known = newest.step if newest else 0
            except UserError:  # latest says it
                known = 10**9
        known, found, looked = ranks.broadcast(known), None, False
        while True:
            if self._bring(known) or not looked:
                found, looked = self.shared.latest(), True
            step = int(found[1]["step"]) if found else 0
            if step >= known:
                return found
            known = step  # the newest shared one is damaged: the nodes may hold a newer one than the next

    def _bring(self, known: int) -> bool:
        """Have the nodes copy the newest step after ``known`` that they hold whole to shared storage; False: there is none."""
        ranks = self.shared.ranks
        held = ranks.gather(self._survey(known) if self._is_first else ({}, []))
        for text in [text for _, texts in held for text in texts]:
            self._tell(text)
        steps = {key for found, _ in held for key in found}
        for name, digest in sorted(steps, key=lambda key: parse(Path(key[0])), reverse=True):  # type: ignore[arg-type, return-value]
            holders = [rank for rank, (found, _) in enumerate(held) if (name, digest) in found]
            whole = manifest.parse(held[holders[0]][0][name, digest].manifest, name)
            places = {}
            for at, file in enumerate(sorted(whole.files)):  # no node reads more than others
                there = [rank for rank in holders if file in held[rank][0][name, digest].files]
                turn = at % max(1, len(there))
                places[file] = there[turn:] + there[:turn]
            if self._restore(name, whole, places):
                return True
        return False

    def _survey(self, known: int) -> tuple[dict[tuple[str, str], _Held], list[str]]:
        """What this node holds of steps after ``known``, by folder and digest of the manifest; and what is wrong."""
        found: dict[tuple[str, str], _Held] = {}
        wrong = []
        try:
            there = list_checkpoints(self.root) if self.root is not None else []
        except OSError as error:
            return found, [f"{os.uname().nodename}: {error}"]
        for one in there:
            path = one.path / manifest.MANIFEST
            if one.step <= known or one.attempt > self.shared.attempt:
                continue
            try:
                text = path.read_bytes()
                whole = manifest.parse(text, str(path))
            except FileNotFoundError:  # an interrupted save
                continue
            except (OSError, UserError) as error:
                wrong.append(f"{os.uname().nodename}: {error}")
                continue
            if whole.kind == KIND and whole.meta.get("step") == one.step and whole.files:
                names = {name for name, record in whole.files.items() if _is_there(one.path / name, record)}
                found[one.path.name, hashlib.sha256(text).hexdigest()] = _Held(text, names)
        return found, wrong

    def _restore(self, name: str, whole: Manifest, places: Mapping[str, list[int]]) -> bool:
        """Have the nodes copy a step to shared storage, each file from one that holds it; False where one is nowhere whole."""
        ranks, step, left, records = self.shared.ranks, int(whole.meta["step"]), dict(places), dict[str, FileRecord]()
        target: Path | None = None
        while not (lost := sorted(file for file, holders in left.items() if not holders)) and left:
            target = target or self.shared.begin(step)
            with ThreadPoolExecutor(1, thread_name_prefix="restore") as pool:
                copying = pool.submit(self._copy_own, name, whole, left, target)
                while any(ranks.gather(not copying.done())):  # no rank waits in a collective for long
                    wait([copying], timeout=1.0)
            parts = ranks.gather((*copying.result(), self._damaged))
            self._damaged = []
            if faults := [fault for _, _, fault, _ in parts if fault]:
                if ranks.rank == 0:
                    shutil.rmtree(target, ignore_errors=True)
                raise OSError("; ".join(faults))
            for done, wrong, _, damaged in parts:
                records |= done
                left = {file: holders[1:] if file in wrong else holders for file, holders in left.items() if file not in done}
                for text in damaged:
                    self._tell(f"local checkpoint of step {step} is damaged: {text}")
        if lost:
            if target is not None and ranks.rank == 0:
                shutil.rmtree(target, ignore_errors=True)
            ranks.barrier()
            text = f"{len(lost)} of its {len(places)} files survived on no node ({lost[0]})"
            self._tell(f"the local checkpoint of step {step} is newer than the shared one, but is skipped: {text}")
            return False
        assert target is not None
        meta = {key: value for key, value in whole.meta.items() if key != "attempt"}
        self.shared.commit(target, meta, records)
        self._tell(f"step {step} was whole on the nodes' own disks: copied to {target.name}")
        return True

    def _copy_own(
        self, name: str, whole: Manifest, left: Mapping[str, list[int]], target: Path
    ) -> tuple[dict[str, FileRecord], list[str], str]:
        """This rank's share of the copies: the records of the files, those that are damaged, and what the target refused."""
        done, wrong = dict[str, FileRecord](), list[str]()
        for at, file in enumerate(sorted(left)):
            ranks_there = next(one for one in self.nodes if left[file][0] in one)
            if ranks_there[at % len(ranks_there)] != self.shared.ranks.rank:
                continue
            assert self.root is not None
            source = self.root / name / file
            try:
                done[file] = write_new(target / file, _read(source), whole.files[file].algorithm)
                if done[file] != whole.files[file]:
                    raise _Unreadable("content differs from the manifest's digest")
            except _Unreadable as error:
                done.pop(file, None)
                (target / file).unlink(missing_ok=True)
                wrong.append(file)
                self._damaged.append(f"{os.uname().nodename}: {source}: {error}")
            except OSError as error:
                return done, wrong, f"rank {self.shared.ranks.rank}: {error}"
        return done, wrong, ""


def _is_there(path: Path, record: FileRecord) -> bool:
    """Whether a file of this size, our own and no link, lies there."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == record.size and found.st_uid == os.getuid()


def _read(path: Path) -> Iterator[bytes]:
    """A file piece by piece, no link followed. Raises _Unreadable, never OSError: that is the target's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _Unreadable(error.strerror) from None
    try:
        while True:
            try:
                piece = os.read(fd, PIECE)
            except OSError as error:
                raise _Unreadable(error.strerror) from None
            if not piece:
                return
            yield piece
    finally:
        os.close(fd)


def _swap(
    path: Path, mine: Mapping[str, FileRecord], theirs: Mapping[str, FileRecord], to: int, source: int, group: Any
) -> str:
    """Send this rank's files to one rank and keep those of another, a piece at a time. Returns what went wrong here.

    Nothing that the storage does breaks the exchange off: the others would wait for it.
    """
    faults = []

    def outgoing() -> Iterator[torch.Tensor]:
        for name, record in sorted(mine.items()):
            pieces, left = _read(path / name), record.size
            while left:
                piece = torch.zeros(min(PIECE, left), dtype=torch.uint8)
                try:
                    piece[:] = torch.frombuffer(bytearray(next(pieces)), dtype=torch.uint8)
                except (_Unreadable, StopIteration, RuntimeError, ValueError) as error:
                    faults.append(f"{name}: {error}")
                left -= len(piece)
                yield piece

    def incoming() -> Iterator[torch.Tensor]:
        for _, record in sorted(theirs.items()):
            yield from (torch.empty(min(PIECE, record.size - at), dtype=torch.uint8) for at in range(0, record.size, PIECE))

    def exchanged() -> Iterator[torch.Tensor]:
        for sent, got in zip_longest(outgoing(), incoming()):
            work = [] if sent is None else [dist.isend(sent, to, group=group)]
            work += [] if got is None else [dist.irecv(got, source, group=group)]
            for one in work:
                if one is not None:
                    one.wait()
            if got is not None:
                yield got

    arriving = exchanged()
    for name, record in sorted(theirs.items()):
        pieces = (memoryview(next(arriving).numpy()) for _ in range(0, record.size, PIECE))
        try:
            if write_new(path / name, pieces, record.algorithm) != record:
                faults.append(f"{name}: arrived damaged")
        except OSError as error:
            faults.append(str(error))
        for _ in pieces:  # of a file that could not be written
            pass
    for _ in arriving:
        pass
    return "; ".join(faults)
