"""Which files of a folder a run needs, and what is known of their content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, hub_digest, read_manifest

_OTHER_WEIGHTS = re.compile(
    r".*\.(pth|pt|gguf|ggml|onnx|onnx_data|msgpack|h5|ot|tflite|mlmodel|nemo|bin|safetensors|ckpt)(\.index\.json)?"
)
_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{kind}(\.index\.json)?")
    for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin"))
)
"""What transformers loads, the first that is there; each alone or as shards with an index."""


@dataclass(frozen=True)
class SourceFile:
    """One file as it was found."""

    name: str
    """Below the folder, with ``/``."""
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str | None = None
    """The digest that its manifest, or the name of its blob in the Hub's cache, gives for its content."""
    algorithm: str | None = None
    """``sha256``, ``xxh3_128`` or ``git_sha1``."""


def survey(root: Path, what: str) -> list[SourceFile]:
    """The files of ``root`` that a run needs, sorted by name.

    ``what``: ``model`` leaves out weights that transformers would not load (other formats, the publisher's own); anything
    else is taken whole. Raises UserError where the folder is none or contradicts its own manifest, OSError.
    """
    if not root.is_dir():
        problem = "is a file, not a folder" if root.exists() else "no such folder"
        raise UserError(problem, file=str(root), fix="is the storage mounted, and the name right?")
    found = dict(_walk(root))
    names = choose(found) if what == "model" else sorted(found)
    known = read_manifest(root).files if MANIFEST in found else {}
    files, problems = [], []
    for name in names:
        path = found[name]
        state, record = path.stat(), known.get(name)
        if record and record.size != state.st_size:
            problems.append(Problem(f"{state.st_size} bytes, the folder's manifest says {record.size}", file=str(path)))
        digest, algorithm = (record.digest, record.algorithm) if record else hub_digest(path) or (None, None)
        files.append(SourceFile(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, digest, algorithm))
    problems += [Problem("missing", file=str(root / name)) for name in known if name not in found]
    if problems:
        raise UserError([*problems, Problem("is incomplete or damaged", file=str(root), fix="copy or make it again")])
    if not files:
        raise UserError("contains no file", file=str(root), fix="is the storage mounted, and the name right?")
    return files


def _walk(root: Path) -> Iterable[tuple[str, Path]]:
    """All files, links to files followed, without hidden folders (.git, .cache of a download) and unfinished downloads."""
    for folder, dirs, names in os.walk(root):
        dirs[:] = sorted(name for name in dirs if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith((".incomplete", ".lock", ".tmp")) or not path.is_file():
                if path.is_symlink() and not path.exists():
                    fix = "the cache is damaged: load the model again"
                    raise UserError("a link to a file that is not there", file=str(path), fix=fix)
                continue
            yield path.relative_to(root).as_posix(), path


def choose(names: Iterable[str]) -> list[str]:
    """The files of a model that transformers and the tokenizer read, sorted.

    Weights in other formats stay behind: beside Llama's safetensors lie the publisher's own, as large again.
    """
    there = set(names)
    chosen = {name for name in there if "/" not in name and not _OTHER_WEIGHTS.fullmatch(name)}
    for weights in _WEIGHTS:
        if loaded := {name for name in there if weights.fullmatch(name)}:
            return sorted(chosen | loaded)
    # Weights under a name of their own: nothing is left out.
    return sorted(there if any(_OTHER_WEIGHTS.fullmatch(name) for name in there) else chosen)
