"""containers/versions.env and base.env as the builds read them."""

from __future__ import annotations

import pytest

from clustertune.containers import pins
from clustertune.errors import UserError

GOOD = """# why

PY_LM_EVAL=1.2
DEV_RUFF=0.1
BUILD_PIP=3
EXTRA_RAY=4
REF_LM_EVAL=0.9
DATE_LOCKS=2030-01-31
DATE_REFERENCE=2029-01-01
"""


def test_each_group_by_itself() -> None:
    """The reference's versions are other versions of the same packages, and must not mix with the stack's."""
    found = pins.parse(GOOD)
    assert found["PY"] == {"lm-eval": "1.2"} and found["REF"] == {"lm-eval": "0.9"}
    assert found.date_of("train") == "2030-01-31" and found.date_of("reference") == "2029-01-01"


@pytest.mark.parametrize(
    "line", ["PY_TORCH = 1", "PY_TORCH='1'", "export PY_TORCH=1", "PY_TORCH=1 # why", "PY_LM_EVAL=2", "DATE_X=today", "PIN_X=1"]
)
def test_a_line_that_make_reads_differently_is_refused(line: str) -> None:
    """One file, three readers (make, the shell, this): a quote or a blank means another thing to each."""
    with pytest.raises(UserError) as caught:
        pins.parse(f"{GOOD}{line}\n")
    assert len(caught.value.problems) == 1 and caught.value.problems[0].file == "containers/versions.env:10"


def test_every_fault_at_once() -> None:
    """Also the missing day of the locks."""
    with pytest.raises(UserError) as caught:
        pins.parse("oops\nPY_A=x\n")
    assert [problem.file for problem in caught.value.problems] == [
        "containers/versions.env:1", "containers/versions.env:2", "containers/versions.env",
    ]  # fmt: skip


def test_bases_are_names_with_digests() -> None:
    """A tag moves; Apptainer takes no tag beside a digest."""
    bases = pins.read_bases()
    for key in ("BASE_TRAIN", "BASE_MEGATRON"):
        name, _, digest = bases[key].partition("@sha256:")
        assert ":" not in name and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
