"""The sentence splitter: the site's where it is, else trained here, and never downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import nltk
import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.evaluate import punkt
from tests.evaluate.conftest import IFEVAL

CORPUS = [(IFEVAL.folder / "punkt.txt").read_text()]


@pytest.fixture(autouse=True)
def no_site_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NLTK data, whatever this one has."""
    monkeypatch.setattr(nltk.data, "path", [])


def read_files(root: Path) -> list[bytes]:
    return [(root / punkt.FOLDER / name).read_bytes() for name in punkt.FILES]


class TestTrained:
    def test_the_same_text_gives_the_same_bytes(self, tmp_path: Path, nltk_data: Path) -> None:
        found = punkt.prepare(CORPUS, tmp_path)
        assert read_files(tmp_path) == read_files(nltk_data)
        for content in read_files(tmp_path):
            assert content.splitlines() == sorted(content.splitlines())
        assert punkt.prepare(["Another text. It has two sentences."], tmp_path / "b").sha256 != found.sha256

    @pytest.mark.parametrize(
        ("text", "sentences"),
        [
            ("We met Dr. Smith at 5 p.m. in the U.S. last week. It rained, e.g. on Sunday.", 2),
            ("Mr. Lee left early. Prof. Kim stayed! Why? Nobody knows.", 4),
            ("One line\n\nand no full stop", 1),
        ],
    )
    def test_knows_common_abbreviations(self, text: str, sentences: int, nltk_data: Path) -> None:
        with punkt.installed(nltk_data):
            from lm_eval.tasks.ifeval.instructions_util import count_sentences

            assert count_sentences(text) == sentences


class TestSiteCopy:
    def test_comes_first_and_nothing_is_trained(self, nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "none"), str(nltk_data)])
        found = punkt.prepare(CORPUS, tmp_path / "trained")
        assert (found.source, found.path) == (punkt.SITE, nltk_data)
        assert not (tmp_path / "trained").exists()

    @pytest.mark.parametrize("name", punkt.FILES[:1])
    def test_incomplete_is_refused(self, name: str, nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(nltk_data, tmp_path / "site")
        (tmp_path / "site" / punkt.FOLDER / name).unlink()
        monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "site")])
        with pytest.raises(UserError, match=f"lacks {name}"):
            punkt.prepare(CORPUS, tmp_path / "trained")

    def test_unreadable_is_refused(self, nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(nltk_data, tmp_path / "site")
        (tmp_path / "site" / punkt.FOLDER / "ortho_context.tab").write_text("no\ttable\there\n")
        monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "site")])
        with pytest.raises(UserError, match="does not load"):
            punkt.prepare(CORPUS, tmp_path / "trained")


class TestNoDownload:
    def test_is_an_error_that_names_it(self, nltk_data: Path) -> None:
        with pytest.raises(UserError, match=r"nltk\.download\('punkt_tab',\)") as caught, punkt.installed(nltk_data):
            nltk.download("punkt_tab")
        assert caught.value.code == ExitCode.FAILED

    def test_all_is_as_before_after(self, nltk_data: Path) -> None:
        path, download = list(nltk.data.path), nltk.download
        with punkt.installed(nltk_data):
            assert nltk.data.path == [str(nltk_data)]
            assert nltk.download != download
        assert (nltk.data.path, nltk.download) == (path, download)

    def test_with_the_data_it_does_not_ask(self, nltk_data: Path) -> None:
        with punkt.installed(nltk_data):
            from lm_eval.tasks.ifeval import instructions_util

            instructions_util.download_nltk_resources()
            assert instructions_util.count_sentences("One dog. Two cats.") == 2

    def test_no_splitter_of_another_folder_is_kept(self, nltk_data: Path, tmp_path: Path) -> None:
        text = "We saw Xyz. Smith there."
        punkt.train(["The Xyz. Adams and the Xyz. Baker met. Then Xyz. Clark came, and xyz. ended. " * 40], tmp_path)
        counts = []
        for folder in (nltk_data, tmp_path, nltk_data):
            with punkt.installed(folder):
                from lm_eval.tasks.ifeval.instructions_util import count_sentences

                counts.append(count_sentences(text))
        assert counts == [2, 1, 2]
