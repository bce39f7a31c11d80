"""The page of a benchmark: every figure that a reader asks for, and words where there is none."""

from __future__ import annotations

import pytest

from clustertune.bench import page
from clustertune.bench.peer import start_of
from clustertune.errors import UserError
from tests.bench.documents import document


def test_a_page_holds_what_was_measured_and_on_what() -> None:
    """Hardware, versions, commit, image, recipe and command stand on the page: a figure without them is none."""
    text = page.render(document(), "x.recipe.json")
    for part in (
        "NVIDIA H100 80GB HBM3, 1 node, 2 ranks", "- commit: 000000000000", "torch main+cu129", "train.sif, sha256 ab12",
        "[x.recipe.json](x.recipe.json)", "`clustertune bench 'a b'`", "FSDP 2 (dp_shard 2)", "| MFU | 40.4 % |",
        "| peak memory of tensors, GPU | 60 GiB |", "Not hidden: 10.0 % of a step", "`nccl/AllGather`",
        "| step_s | 0.4 | 0.5 | 1.25 |", "100 steps (100 steps) take 0.5 h", "Price: 3 USD on demand (a list, 2026-04-29)",
        "| tokens/s per rank | 8,000 | 4,000 | 2 |", "- a note", "| one checkpoint | 2 s, 1.5 GB |",
    ):  # fmt: skip
        assert part in text, part
    assert "absent" not in text and "overrides" not in text
    assert "- overrides: `train.packing=false 'a=b c'`" in page.render(
        document(overrides=["train.packing=false", "a=b c"]), "x.recipe.json"
    )


def test_what_is_not_known_is_said() -> None:
    """No plan, no peer, no hours, no profile: words, and no empty table."""
    body = document(peer=None, plan={"unknown": "no GPU here"}, projection={"hours": None, "why": "no step count"})
    body |= {"image": None, "commit": None}
    body["ours"]["communication"] = None
    text = page.render(body, "x.json")
    for part in ("No plan: no GPU here", "TRL: no result. TRL: out of memory", "Not known: no step count."):
        assert part in text
    assert "## Communication" not in text and "- commit: unknown" in text and "None" not in text


@pytest.mark.parametrize("word", ["", "TRL", "nothing.py", "tests", "README.md"])
def test_a_peer_that_is_none_is_refused(word: str) -> None:
    """It would be found out only behind the first round."""
    with pytest.raises(UserError):
        start_of(word)
