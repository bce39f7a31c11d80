"""What a machine with network fetches from the Hub for those without, and NLTK's data."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune import console
from clustertune.errors import UserError
from clustertune.staging.survey import INDEX, choose
from clustertune.staging.worker import amount

DOWNLOADS = ".cache"
"""Where huggingface_hub keeps what it knows of a folder that it fills."""
ANSWER_SECONDS = 10.0


def list_files(kind: str, name: str, revision: str | None) -> list[str]:
    """The files of a commit that are needed. ``kind``: ``model`` or ``dataset``. Raises UserError where nothing answers."""
    import huggingface_hub

    with _asking(kind, name):
        api = huggingface_hub.HfApi()
        info = api.repo_info(name, revision=revision, repo_type=kind, timeout=ANSWER_SECONDS)
        names = [entry.rfilename for entry in getattr(info, "siblings", None) or [] if not entry.rfilename.startswith(".")]
        if kind != "model":
            return sorted(names)
        indices = {}
        for entry in names:
            if entry.endswith(INDEX) and "/" not in entry:
                path = huggingface_hub.hf_hub_download(name, entry, revision=revision)
                indices[entry] = sorted(set(json.loads(Path(path).read_bytes())["weight_map"].values()))
        return choose(names, indices)


def download(kind: str, name: str, revision: str | None, files: list[str], out: Path) -> None:
    """Load files of a commit into ``out``; what an earlier call has loaded is not loaded again. Raises UserError."""
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not console.stderr.is_terminal:
        disable_progress_bars()
    with _asking(kind, name):
        huggingface_hub.snapshot_download(name, revision=revision, repo_type=kind, local_dir=out, allow_patterns=files)


def digests(out: Path) -> dict[str, str]:
    """The Hub's own digest of each loaded file: SHA-256, or git's SHA-1 of a small one."""
    found = {}
    folder = out / DOWNLOADS / "huggingface" / "download"
    for path in folder.rglob("*.metadata"):
        lines = path.read_text(errors="replace").splitlines()
        if len(lines) > 1:
            found[path.relative_to(folder).as_posix().removesuffix(".metadata")] = lines[1].strip()
    return found


def tidy(out: Path) -> None:
    """Remove what only a further download would need."""
    shutil.rmtree(out / DOWNLOADS, ignore_errors=True)


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


def fetch_punkt(out: Path) -> bool:
    """Load NLTK's ``punkt_tab`` into an NLTK data folder; False where its site does not answer."""
    import nltk

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)
    try:
        output = io.StringIO()  # takes the text of its errors; the caller says what failed
        return bool(nltk.download("punkt_tab", download_dir=str(out), quiet=True, print_error_to=output))
    except (OSError, ValueError):
        return False
    finally:
        socket.setdefaulttimeout(before)


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
