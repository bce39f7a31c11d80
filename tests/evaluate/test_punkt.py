"""The sentence splitter: NLTK's official parameters, shipped, and never downloaded."""

from __future__ import annotations

import nltk
import pytest

from clustertune.data import rewards

TEXT = "Dr. Smith met Ms. Jones in the U.S. on Jan. 5 at 9 a.m. in Seoul. He left again! Did anyone see him?"


def test_the_official_parameters_are_found_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nltk_data has of them, and how lm-eval's scorer counts with them."""
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_args, **_more: pytest.fail("a download"))
    rewards.use_shipped_punkt()
    rewards.use_shipped_punkt()
    assert nltk.data.path == [str(rewards.NLTK_DATA)]
    from lm_eval.tasks.ifeval import instructions_util
    from nltk.tokenize.punkt import PunktTokenizer

    instructions_util.download_nltk_resources()
    known = PunktTokenizer("english")._params
    counts = [len(part) for part in (known.abbrev_types, known.sent_starters, known.collocations, known.ortho_context)]
    assert counts == [156, 39, 37, 20_366]
    assert instructions_util.count_sentences(TEXT) == 3
