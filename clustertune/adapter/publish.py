"""Where an export goes: nothing that is there is overwritten, and one export at a time writes beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clustertune.errors import Problem, UserError
from clustertune.lock import held
from clustertune.manifest import MANIFEST, Manifest, find_problems, list_files, read_manifest

LOCK = "lock"
NAMES = {"adapter": "adapter", "merged": "model"}
"""What people call the kinds of an export."""


def find_published(out: Path, kind: str, checkpoint: Path, source_sha: str, is_ours: Callable[[str], bool]) -> Manifest | None:
    """The manifest of an export of the same checkpoint that lies whole in ``out``, None where ``out`` is free.

    ``is_ours`` knows the files that an export leaves which was killed ahead of its manifest. Raises UserError where ``out``
    holds anything else: nothing published is overwritten.
    """
    if not out.exists():
        return None
    elsewhere = "give another --out, or remove it yourself"
    if not out.is_dir():
        raise UserError(Problem("is a file", file=str(out), fix=elsewhere))
    if not (out / MANIFEST).exists():
        foreign = [name for name in list_files(out) if not is_ours(name) and not name.startswith(f".{MANIFEST}.")]
        if foreign:
            raise UserError(Problem(f"is not empty: {', '.join(foreign[:5])}", file=str(out), fix=elsewhere))
        return None
    manifest = read_manifest(out)
    source = manifest.meta.get("checkpoint", {})
    if manifest.kind != kind or source.get("manifest_sha256") != source_sha:
        held_there = NAMES.get(manifest.kind, manifest.kind)
        words = f"holds the {held_there} of {source.get('name')} (step {manifest.meta.get('step')}), not that of {checkpoint}"
        raise UserError(Problem(words, file=str(out), fix=elsewhere))
    if problems := find_problems(out, kind, allow_extra=True):
        damaged = Problem(f"the {NAMES[kind]} that was exported here is damaged", file=str(out), fix=elsewhere)
        raise UserError([*problems, damaged])
    return manifest


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A sibling folder of ``out`` that no reader takes for an export, for one export at a time, gone afterwards."""
    stage = out.resolve().with_name(f".{out.resolve().name}.exporting")
    with held(stage / LOCK, "is exporting into it", shown=out, fix="wait for it, then run the same command again"):
        try:
            yield stage
        finally:
            # The lock last: from then on the folder may be the next export's.
            for file in [*staged(stage), stage / LOCK]:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                stage.rmdir()


def staged(stage: Path) -> list[Path]:
    """The files of a staging folder, sorted."""
    return sorted(file for file in stage.iterdir() if file.name != LOCK)
