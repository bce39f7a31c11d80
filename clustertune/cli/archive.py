"""``clustertune archive``: copy the results of an ended run to a folder or an object store, and back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from clustertune.arguments import AsJson, existing_folder, path_argument
from clustertune.console import reply, say
from clustertune.errors import UserError, raise_if, storage_error, storing
from clustertune.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    find_problems,
    fsync_path,
    new_hasher,
    parse,
    render,
    write_durably,
)  # fmt: skip
from clustertune.rundir import RunDir, keep_private

KIND = "archive"
ALWAYS = (
    *("run.json", "accelerate.yaml", "deepspeed.json", "metrics.jsonl", "metrics.json", "report.html", "live.html"),
    *("stages", "telemetry", "adapter", "eval", "eval-base"),
)
"""What is always taken, as far as a run has it."""
_RESULTS = ("adapter", "merged", "checkpoints")
_NO_RESULT = "there is neither an adapter nor a merged model: nothing of what was trained is in the archive"
_PIECE = 16 << 20


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(archive)


def archive(
    source: Annotated[str, typer.Argument(metavar="RUN", help="Run folder; with --restore the archive.")],
    target: Annotated[
        str, typer.Argument(metavar="DEST", help="A folder or an address such as s3://; with --restore a new run folder.")
    ],
    restore: Annotated[bool, typer.Option("--restore", help="Copy a run back: archive --restore DEST RUN.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Copy the merged model too.")] = False,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Copy the newest checkpoint too, so that training can resume.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Then remove the run folder, with everything that was not copied.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy an ended run's adapter, scores and report elsewhere.

    Every file is read back and compared after it was written; the manifest is written last. The same command continues after
    an interruption. Credentials of an object store are read from the environment, as its own tools do.
    """
    keep_private()
    if restore:
        if merged or checkpoint or remove:
            raise _wrong("--restore brings back all that was archived", "leave the other options out")
        found, written = _restore(Destination(source), RunDir(path_argument(target)))
    else:
        run = RunDir(existing_folder(path_argument(source), "a run"))
        destination = Destination(target)
        if remove and not destination.outlives_us:
            raise _wrong("--remove: what is kept in memory ends with this command", "name a folder, or leave --remove out")
        with run.lock():
            found, written = _keep(run, destination, merged, checkpoint)
            kept = any(name.split("/")[0] in _RESULTS for name in found.files)
            if remove and not kept:
                raise _wrong(f"--remove: {_NO_RESULT}", "add --checkpoint, or let the run end first")
            if remove:
                run.run_json.unlink()  # from here on it is not a run
                shutil.rmtree(run.path)
        if not kept:
            say(f"warning: {source}: {_NO_RESULT}; add --checkpoint, or let the run end first")
    size = sum(record.size for record in found.files.values())
    document = {"from": source, "to": target, "files": len(found.files), "bytes": size, "written": written}
    what = "was there already, and is whole" if not written else f"{written} of {len(found.files)} files written, all compared"
    text = f"{target}: {what}, {size / 1e6:,.1f} MB" + (f"; {source} removed" if remove else "")
    reply(as_json, {**document, "removed": remove}, text)


class Destination:
    """A folder, or an address that fsspec opens; files are named relative to it, with ``/``."""

    def __init__(self, given: str) -> None:
        self.shown, self._fs, self._root = given, None, Path(given)
        self.outlives_us = not given.startswith("memory://")
        if "://" not in (local := re.sub("^(file|local)://(?=/)", "", given)):
            self._root = path_argument(local).absolute()
            return
        try:
            import fsspec

            from clustertune.recipe.schema import check_input

            self._fs, self._path = fsspec.core.url_to_fs(check_input(given))
        except (ImportError, ValueError) as error:
            self.shown = given.partition("://")[0] + "://***"
            fix = "name a folder, or an address such as s3://bucket/name whose package is installed"
            raise _wrong(f"{self.shown}: {error}", fix) from None

    @contextlib.contextmanager
    def open(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        """A file, for ``rb`` or ``wb``; what is written in a folder is on its disk afterwards.

        Raises FileNotFoundError where it is not there, UserError where storage refuses it or cannot be reached.
        """
        if self._fs is not None:
            with self._reached(name):
                if mode == "wb":
                    self._fs.makedirs(f"{self._path}/{name}".rpartition("/")[0], exist_ok=True)
                with self._fs.open(f"{self._path}/{name}", mode) as file:
                    yield file
            return
        path = self._root / name
        try:
            with self._open(path, mode) as file:
                yield file
        except OSError as error:
            if mode == "rb" and isinstance(error, FileNotFoundError):
                raise
            raise storage_error(error, "cannot be read" if mode == "rb" else "cannot be written", path) from None

    @contextlib.contextmanager
    def _open(self, path: Path, mode: str) -> Iterator[IO[bytes]]:
        """A file of a folder. A link is refused, and so is a pipe, which a reader may wait for forever."""
        if mode == "wb":
            path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UserError("is not a plain file", file=str(path), fix="remove it, or name another place")
        with os.fdopen(fd, mode) as file:
            yield file
            if mode == "wb":
                file.flush()
                os.fsync(file.fileno())
                # It is read back from the disk, where that can be.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if mode == "wb":
            fsync_path(path.parent)

    def meets(self, folder: Path) -> bool:
        """Whether one lies in the other."""
        if self._fs is not None:
            return False
        own, other = self._root.resolve(), folder.resolve()
        return own.is_relative_to(other) or other.is_relative_to(own)

    def commit(self, found: Manifest) -> None:
        """Write the manifest, whole or not at all."""
        if self._fs is None:
            with storing("cannot be written", self._root / MANIFEST):
                write_durably(self._root / MANIFEST, render(found))
        else:
            with self.open(MANIFEST, "wb") as out:
                out.write(render(found).encode())

    def names(self) -> set[str]:
        """All files there."""
        if self._fs is None:
            there = (path for path in self._root.rglob("*") if path.is_file() or path.is_symlink())
            return {path.relative_to(self._root).as_posix() for path in there}
        with self._reached(""):
            return {str(name).removeprefix(self._path).lstrip("/") for name in self._fs.find(self._path)}

    def record(self, name: str) -> FileRecord | None:
        """Size and SHA-256 of a file, read whole; None where it is not there."""
        digest, size = new_hasher("sha256"), 0
        try:
            with self.open(name, "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    size += len(piece)
        except FileNotFoundError:
            return None
        return FileRecord(size, digest.hexdigest())

    def manifest(self) -> Manifest | None:
        """What was archived here; None where nothing was, or not to the end. Raises UserError for something else's manifest."""
        try:
            with self.open(MANIFEST, "rb") as file:
                found = parse(file.read(), f"{self.shown}/{MANIFEST}")
        except FileNotFoundError:
            return None
        if found.kind != KIND:
            raise UserError(f"holds a {found.kind}, not an {KIND}", file=self.shown)
        return found

    @contextlib.contextmanager
    def _reached(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each storage has its own exceptions
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            fix = "is the address right, is there a network, are the keys in the environment? Then the same command again"
            raise UserError(f"{type(error).__name__}: {message}", file=f"{self.shown}/{name}", fix=fix) from None


def copy(source: Destination, target: Destination, names: dict[str, FileRecord | None]) -> tuple[dict[str, FileRecord], int]:
    """Copy files that are not there yet with these digests (None: the source's own), and read each back.

    Returns their records, and how many were written. Raises UserError where one differs on the way.
    """
    records, written = {}, 0
    for name, expected in names.items():
        mine = source.record(name)
        fix = "take another copy; this one is damaged"
        if mine is None:
            raise UserError("missing", file=f"{source.shown}/{name}", fix=fix)
        if expected is not None and mine != expected:
            text = f"differs from the manifest's digest: {mine.digest[:12]}, not {expected.digest[:12]}"
            raise UserError(text, file=f"{source.shown}/{name}", fix=fix)
        if target.record(name) != mine:
            with source.open(name, "rb") as read, target.open(name, "wb") as out:
                shutil.copyfileobj(read, out, _PIECE)
            written += 1
            if target.record(name) != mine:
                text = "was read back with other content than was written"
                fix = "is the file still being written to, or the storage broken?"
                raise UserError(text, file=f"{target.shown}/{name}", fix=fix)
        records[name] = mine
    return records, written


def _keep(run: RunDir, target: Destination, merged: bool, checkpoint: bool) -> tuple[Manifest, int]:
    from clustertune.checkpoint import store

    resolved = run.resolved()
    _demand_apart(target, run)
    if run.stage("train") is None:
        fix = f"clustertune run {resolved.name} first, or archive another"
        raise UserError("its training has not ended", file=str(run.path), fix=fix)
    chosen = [run.path / name for name in ALWAYS]
    if merged or not run.adapter.exists():  # a full training's result is the model
        chosen.append(run.merged)
    if checkpoint:
        newest, _ = store.newest_whole(run.checkpoints) if run.checkpoints.is_dir() else (None, [])
        if newest is None:
            raise UserError("no complete checkpoint in this folder", file=str(run.checkpoints), fix="leave --checkpoint out")
        chosen.append(newest.path)
    problems = [problem for path in chosen if (path / MANIFEST).exists() for problem in find_problems(path, allow_extra=True)]
    raise_if(problems)
    names = sorted(
        path.relative_to(run.path).as_posix()
        for top in chosen
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file() and not path.is_symlink() and not (path.name.startswith(".") and path.name.endswith(".tmp"))
    )
    before = target.manifest()
    mark = {"run": resolved.name, "fingerprint": resolved.fingerprint()}
    foreign = sorted(target.names() - set(names) - {MANIFEST}) if before is None else []
    if foreign or (before is not None and before.meta != mark):
        what = f"{before.meta.get('run')}" if before else foreign[0]
        raise UserError(f"holds something else: {what}", file=target.shown, fix="name a new or empty place")
    known = before.files if before is not None else {}
    source = Destination(str(run.path))
    for name in names:
        if name in known and source.record(name) != known[name]:
            fix = "name a new place: what was archived is never overwritten"
            raise UserError(f"{name} has changed since it was archived", file=target.shown, fix=fix)
    records, written = copy(source, target, dict.fromkeys(names))
    found = Manifest(KIND, {**known, **records}, mark)
    if before is None or before.files != found.files:
        target.commit(found)
        written = max(written, 1)
    return found, written


def _restore(source: Destination, run: RunDir) -> tuple[Manifest, int]:
    found = source.manifest()
    if found is None:
        fix = "archive the run again, or name the place that --restore is to read first"
        raise UserError("no archive, or one that was never finished", file=source.shown, fix=fix)
    _demand_apart(source, run)
    target = Destination(str(run.path))
    if run.path.is_dir() and (foreign := sorted(target.names() - found.files.keys() - {"lock"})):
        raise UserError(f"holds something else, such as {foreign[0]}", file=str(run.path), fix="name a new folder")
    with storing("cannot be written", run.path), run.lock():
        order = sorted(found.files, key=lambda name: (name == "run.json", name.endswith(MANIFEST), name))
        _, written = copy(source, target, {name: found.files[name] for name in order})
    return found, written


def _demand_apart(destination: Destination, run: RunDir) -> None:
    if destination.meets(run.path):
        text = "one of run folder and archive lies inside the other"
        raise UserError(text, file=destination.shown, fix="name a place outside of the run")


def _wrong(text: str, fix: str) -> UserError:
    return UserError(text, file="command line", fix=fix)
