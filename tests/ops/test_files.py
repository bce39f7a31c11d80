"""Blocks in files of others, their differences, backups and replacement."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import ExitCode, UserError
from clustertune.ops.files import Change, block, diff, foreign, inside, put, read, with_block
from tests import faults

LINES = ["/dev/sda1 /a xfs defaults 0 0", "b c d"]
FOREIGN = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([b"UUID=1 / ext4 x 0 1", b"# a", b"", b"\t", b"a\r", b"\xff\xfe", b"# >>> other x: y", b"x \\"]),
        max_size=9,
    ).map(b"\n".join),
    st.lists(st.sampled_from([b"a", b"b\r\n", b"\n", b"\r", b"# <<< clustertune other 0123456789abcdef\n"]), max_size=9).map(
        b"".join
    ),
)


def put_in(text: bytes | None, lines: list[str], **more: bool) -> bytes:
    return with_block(text, "storage", lines, shown="/etc/fstab", **more)


@given(FOREIGN, FOREIGN)
def test_lines_of_others_stay_as_they_are(before: bytes, after: bytes) -> None:
    """Whatever stands around the block is found again byte by byte, when it comes, changes and goes."""
    once = put_in(before, LINES)
    assert once.startswith(before)
    assert put_in(once, LINES) == once
    assert block(once, "storage", shown="f") == LINES
    # Somebody appends: a block in the middle is replaced where it stands.
    more = once + after
    other = put_in(more, ["new"])
    assert other.startswith(before)
    assert other.endswith(after)
    assert len(other) == len(more) - len(once) + len(put_in(before, ["new"]))
    assert put_in(put_in(before, ["new"]), []) == before
    assert put_in(other, []) == before + after


@given(FOREIGN)
def test_the_lines_of_others_keep_their_numbers(text: bytes) -> None:
    """A refusal names the line, so it must be the one that an editor shows."""
    shown = text.decode(errors="replace").split("\n")
    found = dict(foreign(put_in(text, LINES), "storage", shown="f"))
    assert [found[n + 1] for n in range(len(shown)) if n + 1 in found] == [
        line.rstrip("\r") for n, line in enumerate(shown) if n + 1 in found
    ]
    assert all(not line.startswith("/dev/sda1") for line in found.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace(b"b c d", b"b c e"), "edited by hand"),
        (lambda t: t.replace(b"b c d\n", b"b c d\nmine\n"), "edited by hand"),
        (lambda t: t.replace(b"# <<<", b"# gone <<<"), "1 begin and 0 end"),
        (lambda t: t.replace(b"# >>>", b"# gone >>>"), "0 begin and 1 end"), (lambda t: t + t, "2 begin and 2 end"),
        (lambda t: b"\n".join(reversed(t.split(b"\n"))), "1 begin and 1 end"),
    ],
)  # fmt: skip
def test_a_block_that_somebody_touched_is_not_replaced(change: object, words: str) -> None:
    """Their lines would be lost, or what lies between two blocks."""
    text = change(b"first\n" + put_in(b"", LINES))  # type: ignore[operator]
    with pytest.raises(UserError, match=words) as caught:
        put_in(text, ["new"])
    assert caught.value.problems[0].file is not None
    assert caught.value.problems[0].file.startswith("/etc/fstab")
    if "edited" in words:
        assert put_in(text, ["new"], force=True) == b"first\n" + put_in(b"", ["new"])
    else:
        with pytest.raises(UserError):
            put_in(text, ["new"], force=True)


@given(FOREIGN, st.integers(min_value=0, max_value=400))
def test_a_block_that_breaks_off_is_completed(before: bytes, length: int) -> None:
    """Of a file that was copied to a full disk: whatever is left of the block is ours, whatever was before it is not."""
    whole = put_in(before, LINES)
    torn = whole[: max(len(before), len(whole) - length)]
    if b"# >>> clustertune storage" in torn and b"edit that, not this" in torn.split(b"# >>> clustertune storage")[1]:
        assert put_in(torn, LINES).startswith(before)
        assert put_in(torn, LINES).count(b"# <<< clustertune storage") == 1
    else:
        assert put_in(torn, LINES).startswith(torn)


def test_a_file_is_replaced_with_a_backup_and_keeps_its_mode(tmp_path: Path) -> None:
    """The old text is what an operator goes back to; a file that was private must not become readable."""
    file = tmp_path / "fstab"
    file.write_bytes(b"old\n")
    file.chmod(0o640)
    # The second change in the same second: neither backup is lost.
    first, second = (
        put(tmp_path, Change("/fstab", before, after), when=0)
        for before, after in ((b"old\n", b"new\n"), (b"new\n", b"newer\n"))
    )
    assert first == tmp_path / "fstab.clustertune-19700101T000000Z" and second is not None
    assert [path.read_bytes() for path in (first, second, file)] == [b"old\n", b"new\n", b"newer\n"]
    assert {path.stat().st_mode & 0o777 for path in (first, file)} == {0o640}
    assert put(tmp_path, Change("/fstab", b"newer\n", b"newer\n")) is None
    assert len(list(tmp_path.iterdir())) == 3


def test_a_new_file_has_no_backup_and_one_that_changed_meanwhile_is_left(tmp_path: Path) -> None:
    """The plan was made of another text: writing it would undo what came since."""
    new = Change("/etc/exports.d/x.exports", None, b"x\n", mode=0o600)
    assert put(tmp_path, new) is None and not Change("/etc/y", None, b"").needed
    assert (tmp_path / "etc/exports.d/x.exports").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="meanwhile") as caught:
        put(tmp_path, Change("/etc/exports.d/x.exports", b"old\n", b"new\n"))
    assert caught.value.code is ExitCode.AGAIN
    assert (tmp_path / "etc/exports.d/x.exports").read_bytes() == b"x\n"


def test_killed_at_any_step_a_file_is_old_or_new(tmp_path: Path) -> None:
    """Half a fstab does not boot; the same call completes it."""
    file = tmp_path / "fstab"

    def change(number: int) -> None:
        file.write_bytes(b"old\n")
        put(tmp_path, Change("/fstab", b"old\n", b"new\n"), when=number)

    steps = 0
    for steps in faults.sweep(change, calls=(*faults.CALLS, "fdopen")):
        text = file.read_bytes()
        assert text in (b"old\n", b"new\n")
        put(tmp_path, Change("/fstab", text, b"new\n"), when=steps)
        assert file.read_bytes() == b"new\n"
    assert steps > 5 and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path) -> None:
    """A full disk ends in a located message, and the file keeps its content."""
    (tmp_path / "fstab").write_bytes(b"old\n")
    full = faults.fault_at(1, OSError(28, "No space left on device"), ("fsync",))
    with full, pytest.raises(UserError, match="No space") as caught:
        put(tmp_path, Change("/fstab", b"old\n", b"new\n"))
    assert caught.value.code is ExitCode.STORAGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fstab"]
    assert (tmp_path / "fstab").read_bytes() == b"old\n"


def test_links_of_a_tree_stay_inside_it(tmp_path: Path) -> None:
    """An image's /etc/slurm -> /etc/slurm-llnl means the image's: else this machine's own file would be replaced."""
    tree = tmp_path / "tree"
    (tree / "etc/real").mkdir(parents=True)
    (tree / "etc/link").symlink_to("/etc/real")
    (tree / "etc/up").symlink_to("../../../../etc/real")
    for way in ("/etc/link/f", "/etc/up/f", "/../etc/./link//f"):
        assert inside(tree, way) == tree / "etc/real/f"
    (tree / "a").symlink_to("b")
    (tree / "b").symlink_to("a")
    with pytest.raises(UserError, match="circle"):
        inside(tree, "/a/x")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder or a pipe in its place must not hang or be replaced."""
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "p")
    for name in ("/d", "/p"):
        with pytest.raises(UserError, match="plain file"):
            read(tmp_path, name)
    assert read(tmp_path, "/absent") is None


def test_a_difference_reads_like_diff() -> None:
    """It is what the operator decides on; a secret is not in it, and nothing steers the terminal."""
    change = Change("/etc/fstab", b"a\nb", b"a\nb\nc\x1b[2J\n")
    assert diff(change) == [
        "--- /etc/fstab", "+++ /etc/fstab", "@@ -1,2 +1,3 @@", " a", "-b", "\\ No newline at end of file", "+b", "+c\\x1b[2J",
    ]  # fmt: skip
    assert diff(Change("/x", None, b"a\n"))[0] == "--- /dev/null"
    secret = "\n".join(diff(Change("/x", b"old", b"password\n", secret=True)))
    assert "password" not in secret
    assert "secret" in secret
    assert diff(Change("/x", b"a", b"a")) == []
