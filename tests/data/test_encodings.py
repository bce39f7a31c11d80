"""Files in other encodings than UTF-8: named, and the command that a message prints makes a file that is read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertune.data.encodings import wide_encoding
from clustertune.errors import UserError

WESTERN = "Où est le nœud \u00ab deux \u00bb ? 3 \u20ac"
EASTERN = "Где второй узел? 第二个节点在哪里"
ROWS = [{"prompt": f"{number} TEXT", "completion": f"Réponse {number}"} for number in range(40)]


def table(rows: list[dict[str, str]], delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


WRITERS: dict[str, Any] = {
    ".jsonl": lambda rows: "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows),
    ".json": lambda rows: json.dumps(rows, ensure_ascii=False, indent=1),
    ".csv": lambda rows: table(rows, ","),
    ".tsv": lambda rows: table(rows, "\t"),
}
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
NAMES = ["rows", "my rows", 'it\'s "mine"', "-rows", "a.b$c"]


def text_of(kind: str, word: str) -> str:
    return str(WRITERS[kind]([{**row, "prompt": row["prompt"].replace("TEXT", word)} for row in ROWS]))


def write_again(message: str, folder: Path) -> Path:
    """Run the command of a message as it is printed, in ``folder``; returns the file that it wrote."""
    found = re.search(r"((?:\w+ -dc < .*?\| )?iconv .*)$", message, re.MULTILINE)
    assert found is not None, message
    done = subprocess.run(["bash", "-c", found[1]], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / shlex.split(found[1])[-1]


def check(run: Any, path: Path, word: str, message: str, folder: Path) -> None:
    folder.mkdir()
    fixed = write_again(message, folder)
    got = run(path=fixed, format="prompt-completion", max_rejected=0)
    texts = {line["prompt"][0]["content"] for line in got.conversations}
    assert texts == {f"{number} {word}" for number in range(40)} and not got.rejected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-16-be mark"])
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("word", [WESTERN, EASTERN], ids=["western", "eastern"])
def test_a_file_of_wide_characters_is_refused_with_a_command_that_works(
    encoding: str, kind: str, word: str, run: Any, tmp_path: Path
) -> None:
    place = (list(WRITERS).index(kind) + len(encoding)) % len(NAMES)
    packed = [*PACKED][place % len(PACKED)]
    path = tmp_path / f"{NAMES[place]}{kind}{packed}"
    text = ("\ufeff" if "mark" in encoding else "") + text_of(kind, word)
    path.write_bytes(PACKED[packed](text.encode(encoding.split(maxsplit=1)[0])))
    with pytest.raises(UserError) as caught:
        run(path=path, format="prompt-completion", max_rejected=1)
    (problem,) = caught.value.problems
    assert problem.file == str(path) and encoding[:6].upper() in problem.message
    check(run, path, word, str(problem.fix), tmp_path / "again")


def test_a_table_of_tabs_that_a_spreadsheet_calls_text_becomes_one(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "Book1.txt"
    path.write_bytes(text_of(".tsv", WESTERN).encode("utf-16"))
    with pytest.raises(UserError) as caught:
        run(path=path, format="prompt-completion")
    check(run, path, WESTERN, str(caught.value.problems[0].fix), tmp_path / "again")


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("encoding", "word"), [("latin-1", "Où est le nud ?"), ("cp1252", WESTERN)])
def test_a_file_of_one_byte_a_character_is_named_with_a_command_that_works(
    kind: str, encoding: str, word: str, run: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"my rows{kind}"
    path.write_bytes(text_of(kind, word).encode(encoding))
    if kind == ".json":
        with pytest.raises(UserError) as caught:
            run(path=path, format="prompt-completion")
        message = str(caught.value.problems[0].fix)
    else:
        (tmp_path / "good").mkdir()
        (tmp_path / "good" / path.name).write_bytes(
            text_of(kind, word).encode(encoding) + text_of(kind, "x").encode("ascii", "ignore")
        )
        message = run(path=tmp_path / "good" / path.name, format="prompt-completion").lines("rejected")[0]["detail"]
        message = message.replace(str(tmp_path / "good" / path.name), str(path))
    check(run, path, word, message, tmp_path / "again")


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_no_command_is_named_where_it_would_spoil_the_text(kind: str, run: Any, tmp_path: Path) -> None:
    """Rows of which others are in UTF-8, and letters that no western encoding has."""
    good, bad = text_of(kind, "Où"), text_of(kind, "Où")
    mixed = good.encode() + bad.encode("latin-1")
    other = text_of(kind, "Где второй узел").encode("cp1251", "replace") + good.encode("ascii", "ignore")
    chinese = text_of(kind, "第二个节点在哪里").encode("gb18030") + good.encode("ascii", "ignore")
    for content in (mixed, other, chinese):
        details = [one["detail"] for one in run(content, kind, format="prompt-completion").lines("rejected")]
        assert details and all("UTF-8" in one and "iconv" not in one for one in details)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_text(kind: str, run: Any) -> None:
    content = text_of(kind, WESTERN).encode("utf-8-sig")
    joined = content * 2 if kind == ".jsonl" else content
    got = run(joined, kind, format="prompt-completion", max_rejected=0)
    assert len(got.conversations) == (80 if kind == ".jsonl" else 40) and not got.rejected and not got.result["unused"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"{}\n" + b"\0" * 5000,
        b"\0" * 5000,
        b'{"a": "b\0c"}\n' * 9,
        "第二个节点".encode(),
        b"PAR1" + b"\x15\x00\x15\x1c" * 99,
    ],
)
def test_other_files_are_not_taken_for_wide_ones(content: bytes) -> None:
    assert wide_encoding(content) is None


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_table_of_semicolons_becomes_one_of_commas_in_any_encoding(
    sign: str, encoding: str, packed: str, run: Any, tmp_path: Path
) -> None:
    """As spreadsheets of half of Europe write it: the command for the commas, then the one for the encoding."""
    word = "Où, dit-il" if encoding == "latin-1" else WESTERN
    rows = [{**row, "prompt": row["prompt"].replace("TEXT", word)} for row in ROWS]
    path = tmp_path / f"my rows.csv{packed}"
    path.write_bytes(PACKED[packed](table(rows, sign).encode(encoding)))
    with pytest.raises(UserError) as caught:
        run(path=path, format="prompt-completion")
    (printed,) = re.findall(r"write commas: (.*)$", str(caught.value.problems[0].fix))
    done = subprocess.run(["bash", "-c", printed], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = tmp_path / shlex.split(printed)[-1]
    if not encoding.startswith("utf"):
        with pytest.raises(UserError) as caught:
            run(path=made, format="prompt-completion", max_rejected=1)
        made = write_again(str(caught.value).splitlines()[0].partition(" -> ")[0], tmp_path)
    got = run(path=made, format="prompt-completion", max_rejected=0)
    assert {line["prompt"][0]["content"] for line in got.conversations} == {f"{number} {word}" for number in range(40)}
