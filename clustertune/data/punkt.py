"""NLTK's sentence splitter, found and tried before anything costly: scorers need it after all generation.

lm-eval downloads ``punkt_tab`` when its scorer is imported; without a network it continues and fails after the last prompt
(EleutherAI/lm-evaluation-harness#2266). Here the data is there before the import, and a download is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, UserError
from clustertune.manifest import write_durably
from clustertune.replaced import replaced

FOLDER = Path("tokenizers", "punkt_tab", "english")
FILES = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")
"""What NLTK's ``load_punkt_params`` reads."""

SITE = "NLTK_DATA"
TRAINED = "trained locally"
NOTE = "Sentences were split with punkt parameters trained locally: counts can differ from the official ones."
"""What a reader must know of scores by :data:`TRAINED` ones."""

_PROBE = "Dr. Smith arrived at noon. He left again! Did anyone see him?"


@dataclass(frozen=True)
class Punkt:
    """Which sentence splitter scores the answers."""

    source: str
    """:data:`SITE`, or :data:`TRAINED`: its sentence counts can differ from the official parameters'."""
    path: Path
    """The NLTK data folder (what ``NLTK_DATA`` must hold to repeat the scoring)."""
    sha256: str
    """Over the four parameter files."""


def locate_site_copy() -> Path | None:
    """The first NLTK data folder (``NLTK_DATA``, then NLTK's own search path) that has the English parameters."""
    import nltk

    for entry in nltk.data.path:
        if _is_folder(Path(entry) / FOLDER):
            return Path(entry)
    return None


def _is_folder(path: Path) -> bool:
    """NLTK looks in the home folder too, which another user's process (a container's, a job's) may not enter."""
    try:
        return path.is_dir()
    except OSError:
        return False


def train(texts: Iterable[str], folder: Path) -> None:
    """Train Punkt on ``texts`` and write its four files below ``folder`` in NLTK's layout; the same text, the same bytes.

    NLTK's own ``save_punkt_params`` writes sets in hash order and only below its search path.
    """
    from nltk.tokenize.punkt import PunktTrainer

    trainer = PunktTrainer()
    for text in texts:
        trainer.train(text, finalize=False)
    trainer.finalize_training()
    params = trainer.get_params()
    lines = {
        "abbrev_types.txt": sorted(params.abbrev_types),
        "collocations.tab": sorted("\t".join(pair) for pair in params.collocations),
        "ortho_context.tab": sorted(f"{word}\t{flags}" for word, flags in params.ortho_context.items()),
        "sent_starters.txt": sorted(params.sent_starters),
    }
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        write_durably(target / name, "\n".join(lines[name]))


def prepare(texts: Iterable[str], folder: Path) -> Punkt:
    """The site's copy where there is one, else parameters trained on ``texts`` below ``folder``; either is tried.

    Raises UserError where the site's copy is there but does not load: a silent change of splitter would change scores.
    """
    root, source = locate_site_copy(), SITE
    if root is None:
        root, source = folder, TRAINED
        train(texts, folder)
    missing = [name for name in FILES if not (root / FOLDER / name).is_file()]
    problem = f"lacks {', '.join(missing)}" if missing else _try_out(root)
    if problem:
        fix = "unpack punkt_tab.zip of nltk_data there again, or take the folder out of NLTK_DATA"
        raise UserError(f"NLTK's punkt_tab data {problem}", file=str(root / FOLDER), fix=fix)
    digest = hashlib.sha256()
    for name in FILES:
        digest.update((root / FOLDER / name).read_bytes())
    return Punkt(source, root, digest.hexdigest())


def _try_out(root: Path) -> str | None:
    """Split a known text with the parameters; what is wrong, or None."""
    with installed(root):
        from nltk.tokenize.punkt import PunktTokenizer

        try:
            found = len(PunktTokenizer("english").tokenize(_PROBE))
        except (OSError, ValueError, LookupError, IndexError, UnicodeError) as error:
            return f"does not load: {error}"
    # "Dr." may or may not be a known abbreviation; a splitter that finds no boundary at all, or one at each word, is broken.
    return None if found in (3, 4) else f"splits three sentences into {found}"


class NoDownloadError(RuntimeError):
    """Something asked NLTK for the network in the middle of an evaluation."""


def _refuse(*args: Any, **_kwargs: Any) -> None:
    raise NoDownloadError(f"nltk.download{args!r} during an evaluation")


@contextmanager
def installed(root: Path) -> Iterator[None]:
    """While the context lasts, NLTK looks in ``root`` first, keeps no tokenizer of another folder, and cannot download."""
    import nltk
    from nltk import tokenize

    _forget(tokenize)
    try:
        with replaced(nltk.data, path=[str(root), *nltk.data.path]), replaced(nltk, download=_refuse):
            yield
    except NoDownloadError as error:
        fix = "give the data by NLTK_DATA; nothing is downloaded at run time"
        raise UserError(str(error), ExitCode.FAILED, file=str(root), fix=fix) from error
    finally:
        _forget(tokenize)


def _forget(tokenize: Any) -> None:
    """Drop the tokenizers that NLTK and lm-eval keep for the process: they may stem from another folder."""
    import sys

    tokenize._get_punkt_tokenizer.cache_clear()
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.")]:
        if (kept := vars(sys.modules[name]).get("_get_sentence_tokenizer")) is not None:
            kept.cache_clear()
    sys.modules["nltk.data"].clear_cache()
