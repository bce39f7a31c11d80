"""What a push would send: the run's adapter, verified, its card, and nothing that is not on the list."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.adapter.export import ADAPTER_FILES
from clustertune.errors import Problem, UserError
from clustertune.host.credentials import holds_secret
from clustertune.manifest import MANIFEST, find_problems, hash_file, list_files, read_manifest
from clustertune.push.card import build_card
from clustertune.report import forms
from clustertune.report.content import get
from clustertune.rundir import RunDir

CARD = "README.md"
ALLOWED = (*ADAPTER_FILES, CARD)
"""All that a push ever sends."""
BASE = ("recipe", "recipe", "model", "name")
HEADER_LIMIT = 100 << 20
"""The safetensors format's own limit of its header, in bytes."""
_ROOTS = (
    "home|root|mnt|media|data\\d*|scratch|lustre|gpfs|beegfs|nfs|work|tmp|var|opt|srv|Users|users|fsx|shared|projects?|raid"
)
_PATH = re.compile(rf"(?<![\w.:/~-])/(?:{_ROOTS})(?:/[\w.@+-]+)+")


@dataclass(frozen=True)
class File:
    """One file of the repository."""

    name: str
    size: int
    sha256: str
    path: Path | None = None
    """Where it lies; None: ``data`` is its content."""
    data: bytes = b""

    def blob_id(self) -> str:
        """Git's name of the content, which the Hub gives for files that are not in LFS."""
        body = self.path.read_bytes() if self.path else self.data
        return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Upload:
    """Everything that goes, as it lies here."""

    files: tuple[File, ...]
    card: str
    left_out: tuple[str, ...]
    """Files of the adapter's folder that are not on the list."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def as_json(self) -> list[dict[str, Any]]:
        """Names, bytes and digests."""
        return [{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in self.files]


def pack(run: RunDir, repo: str, licence: str | None, secrets: Iterable[str] = ()) -> Upload:
    """Verify the adapter of ``run``, write its card, and look through all that would go.

    ``secrets``: values that must be in none of the files, such as the tokens of ``.env``. Raises UserError with everything
    that keeps the adapter from being pushed.
    """
    document = run.read()
    fix = "push from the folder that the training wrote: this file was changed, or is no run's"
    problems = forms.find_problems(document, forms.RUN, str(run.run_json), fix)
    if not problems and get(document, *BASE) is None:
        problems = [
            Problem("is missing: the card must name the base model", file=str(run.run_json), key=".".join(BASE), fix=fix)
        ]
    if problems:
        raise UserError(problems)
    if problems := _refusals(run, document):
        raise UserError(problems)
    if problems := find_problems(run.adapter, "adapter", allow_extra=True):
        fix = "--from export makes it again: clustertune run RECIPE --run-dir RUN --from export --to export"
        raise UserError(
            [*problems, Problem("the adapter is not whole: nothing of it is pushed", file=str(run.adapter), fix=fix)]
        )
    sealed = read_manifest(run.adapter, "adapter")
    card = build_card(run, document, sealed, repo, licence)
    files = [
        File(name, sealed.files[name].size, sealed.files[name].sha256, run.adapter / name)
        for name in ADAPTER_FILES
        if name in sealed.files
    ]
    text = card.encode()
    files.append(File(CARD, len(text), hashlib.sha256(text).hexdigest(), data=text))
    if problems := [problem for file in files for problem in look_through(file, run, secrets)]:
        raise UserError(problems)
    left = sorted({*list_files(run.adapter), *sealed.files} - {*ADAPTER_FILES, MANIFEST})
    return Upload(tuple(files), card, tuple(left))


def _refusals(run: RunDir, document: Mapping[str, Any]) -> list[Problem]:
    """A run that has no adapter to push, in words."""
    if run.adapter.is_dir():
        return []
    recipe = (document.get("recipe") or {}).get("recipe") or {}
    if recipe.get("lora") is None:
        text = "trains all parameters: there is no adapter, and a whole model is never pushed from here"
        return [Problem(text, file=str(run.path), fix="hf upload OWNER/NAME RUN/merged is the Hub's own command for a model")]
    return [Problem("has no adapter yet", file=str(run.path), fix="clustertune run RECIPE --to export")]


def look_through(file: File, run: RunDir, secrets: Iterable[str] = ()) -> list[Problem]:
    """Tokens and paths of this machine in what would go: all of a text, and the header of the tensors."""
    text = _text_of(file)
    where = str(file.path or file.name)
    problems = []
    known = [value for value in secrets if len(value) >= 8]
    if any(value in text for value in known) or holds_secret(text):
        fix = "take it out where it came from, and make a new token: this one is known to a file now"
        problems.append(Problem("holds what looks like a token (not shown)", file=where, fix=fix))
    found = {match[0] for match in _PATH.finditer(text)}
    found |= {place for place in _own_places(run) if place in text}
    if found:
        shown = sorted(found)[0]
        fix = "name the model by its Hub id, and data by its name, in the recipe"
        problems.append(Problem(f"names a path of this machine: {shown}", file=where, fix=fix))
    return problems


def _own_places(run: RunDir) -> list[str]:
    places = [run.path.resolve(), Path.cwd(), Path(os.path.expanduser("~"))]  # noqa: PTH111 - never raises
    return [str(place) for place in places if len(place.parts) > 2]


def _text_of(file: File) -> str:
    """What of a file can be read as text. Raises UserError where tensors have no readable header."""
    if file.path is None:
        return file.data.decode(errors="replace")
    if file.path.suffix != ".safetensors":
        return file.path.read_text(encoding="utf-8", errors="replace")
    try:
        with file.path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise UserError(Problem(f"is no safetensors file: {error}", file=str(file.path))) from None
    # Names of tensors are checked against the architecture at the export; what else stands there is free text.
    return json.dumps(header.get("__metadata__") or {}) + "\n" + "\n".join(header)


def still_same(upload: Upload) -> list[Problem]:
    """Files that were changed since they were verified."""
    return [
        Problem("was changed while it was pushed", file=str(file.path), fix="run the same command again")
        for file in upload.files
        if file.path is not None and hash_file(file.path).sha256 != file.sha256
    ]
