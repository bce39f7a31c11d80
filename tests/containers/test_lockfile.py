"""The lock format: whatever pip would not hold to a hash is refused."""

from __future__ import annotations

import pytest

from clustertune.containers import lock as locks
from clustertune.containers.lock import LockedPackage, PackageLock
from clustertune.errors import UserError

A, B = "a" * 64, "b" * 64
LOCK = PackageLock(
    "train", "3.12", "x86_64-manylinux_2_28", "2030-01-31",
    {"kiln": LockedPackage("kiln", "1.0", (A, B)), "oven-x": LockedPackage("oven-x", "2+cpu", (B,))}, ("kiln",),
)  # fmt: skip


def test_read_what_was_written() -> None:
    """Byte for byte: lock-check tells an edit by hand by it."""
    assert locks.parse(LOCK.text(), "x.lock") == LOCK
    assert locks.parse(LOCK.text(), "x.lock").text() == LOCK.text()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (f" \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}", "", "has no hash"),
        (A, A[:-1], "no NAME==VERSION with --hash"),
        (A, A.upper(), "no NAME==VERSION with --hash"),
        ("kiln==1.0", "kiln>=1.0", "no NAME==VERSION with --hash"),
        ("kiln==1.0", "kiln @ https://example.org/kiln.whl", "no NAME==VERSION with --hash"),
        ("kiln==1.0", "--index-url https://example.org kiln==1.0", "no NAME==VERSION with --hash"),
        ("oven-x==2+cpu", "Kiln==2", "appears twice"),
        ("# python: 3.12\n", "", "does not say `python`"),
        ("# from source: kiln\n", "# from source: spoon\n", "built from source and not in the lock"),
    ],
)
def test_what_pip_would_not_hold_to_a_hash(old: str, new: str, fault: str) -> None:
    """One line without a hash turns hash checking off for what it names."""
    assert old in LOCK.text()
    with pytest.raises(UserError) as caught:
        locks.parse(LOCK.text().replace(old, new), "x.lock")
    assert [problem.message for problem in caught.value.problems if fault in problem.message]
    assert all(problem.file == "x.lock" for problem in caught.value.problems)


def test_an_empty_file_is_no_lock() -> None:
    """All faults at once."""
    with pytest.raises(UserError) as caught:
        locks.parse("", "x.lock")
    assert len(caught.value.problems) == 5


def test_a_layer_adds_and_never_changes() -> None:
    """Else an extra would move the version that the image was tested with."""
    layer = PackageLock(
        "extra-pan", "3.12", LOCK.platform, LOCK.before, {"pan": LockedPackage("pan", "1", (A,))}, ("pan",), "train"
    )
    whole = LOCK.with_layer(layer)
    assert set(whole.entries) == {"kiln", "oven-x", "pan"} and whole.from_source == ("kiln", "pan")
    other = PackageLock(
        "extra-kiln", "3.12", LOCK.platform, LOCK.before, {"kiln": LockedPackage("kiln", "2.0", (A,))}, (), "train"
    )
    with pytest.raises(UserError, match=r"kiln is 2\.0 here and 1\.0"):
        LOCK.with_layer(other)
