"""The sentence splitter: the site's where it is, else trained here, and never downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import nltk
import pytest

from clustertune.data import punkt
from clustertune.errors import ExitCode, UserError
from tests.evaluate.conftest import IFEVAL

CORPUS = [(IFEVAL.folder / "punkt.txt").read_text()]


@pytest.fixture(autouse=True)
def no_site_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NLTK data, whatever this one has."""
    monkeypatch.setattr(nltk.data, "path", [])


def read_files(root: Path) -> list[bytes]:
    return [(root / punkt.FOLDER / name).read_bytes() for name in punkt.FILES]


def test_the_same_text_gives_the_same_bytes(tmp_path: Path, nltk_data: Path) -> None:
    found = punkt.prepare(CORPUS, tmp_path)
    assert read_files(tmp_path) == read_files(nltk_data)
    for content in read_files(tmp_path):
        assert content.splitlines() == sorted(content.splitlines())
    assert punkt.prepare(["Another text. It has two sentences."], tmp_path / "b").sha256 != found.sha256


def test_comes_first_and_nothing_is_trained(nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "none"), str(nltk_data)])
    found = punkt.prepare(CORPUS, tmp_path / "trained")
    assert (found.source, found.path) == (punkt.SITE, nltk_data)
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("abbrev_types.txt", None, "lacks abbrev_types.txt"), ("ortho_context.tab", "no\ttable\there\n", "does not load")],
)
def test_a_damaged_site_copy_is_refused(
    name: str, content: str | None, message: str, nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of splitter without a message would change scores."""
    file = Path(shutil.copytree(nltk_data, tmp_path / "site")) / punkt.FOLDER / name
    file.unlink() if content is None else file.write_text(content)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "site")])
    with pytest.raises(UserError, match=message):
        punkt.prepare(CORPUS, tmp_path / "trained")


def test_a_download_is_an_error_that_names_it(nltk_data: Path) -> None:
    """With the data the scorer does not ask; afterwards all is as before."""
    path, download = list(nltk.data.path), nltk.download
    with punkt.installed(nltk_data):
        from lm_eval.tasks.ifeval import instructions_util

        assert nltk.data.path == [str(nltk_data)] and nltk.download != download
        instructions_util.download_nltk_resources()
        assert instructions_util.count_sentences("One dog. Two cats.") == 2
    assert (nltk.data.path, nltk.download) == (path, download)
    with pytest.raises(UserError, match=r"nltk\.download\('punkt_tab',\)") as caught, punkt.installed(nltk_data):
        nltk.download("punkt_tab")
    assert caught.value.code == ExitCode.FAILED
