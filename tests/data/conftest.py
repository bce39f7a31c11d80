"""Small inputs for the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from clustertune.data.prepare import prepare
from clustertune.recipe.sections import Data

Row = dict[str, Any]


def _row(identity: str, parent: str | None, text: str | None = None, **changes: Any) -> Row:
    """A flat row. The role follows the first letter of the id (p or a), the tree is ``t`` unless said otherwise."""
    row = {
        "message_id": identity,
        "parent_id": parent,
        "text": f"text of {identity}" if text is None else text,
        "role": "prompter" if identity.startswith("p") else "assistant",
        "lang": "en",
        "review_result": True,
        "deleted": False,
        "rank": None,
        "message_tree_id": "t",
    }
    return row | changes


class Outcome:
    """What ``prepare`` returned and wrote."""

    def __init__(self, result: dict[str, Any], out: Path) -> None:
        self.result = result
        self.out = out
        self.rejected: dict[str, int] = result["rejected"]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / f"{name}.jsonl").read_bytes().splitlines()]

    @property
    def conversations(self) -> list[dict[str, Any]]:
        return self.lines("train") + self.lines("eval")

    @property
    def texts(self) -> dict[str, list[str]]:
        """Contents by tree."""
        return {line["source"]["tree"]: [m["content"] for m in line["messages"]] for line in self.conversations}


def as_lines(rows: Iterable[Any]) -> bytes:
    """JSON lines; bytes stand as they are."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()) + b"\n" for row in rows)


@pytest.fixture
def row() -> Callable[..., Row]:
    return _row


@pytest.fixture
def lines() -> Callable[[Iterable[Any]], bytes]:
    return as_lines


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    """``run(rows)`` or ``run(bytes, suffix)`` or ``run(path=...)``: prepare into a fresh folder."""
    count = 0

    def call(content: Any = None, suffix: str = ".jsonl", *, path: Path | None = None, out: Path | None = None, **data: Any):
        nonlocal count
        count += 1
        if path is None:
            path = tmp_path / f"in{count}" / f"rows{suffix}"
            path.parent.mkdir()
            path.write_bytes(content if isinstance(content, bytes) else as_lines(content))
        seed = data.pop("seed", 42)
        out = out or tmp_path / f"out{count}"
        settings = Data(**{"name": "test", "format": "oasst-tree", "language": "en", "max_rejected": 1} | data)
        return Outcome(prepare(settings, recipe_folder=tmp_path, seed=seed, out=out, input_path=path), out)

    return call


@pytest.fixture
def nest() -> Callable[[list[Row]], list[Row]]:
    """The nested tree export of flat rows: replies in file order, null fields left out as the export does."""

    def call(rows: list[Row]) -> list[Row]:
        nodes = {r["message_id"]: {k: v for k, v in r.items() if k != "message_tree_id" and v is not None} for r in rows}
        trees = []
        for r in rows:
            if r["parent_id"] is None:
                trees.append({"message_tree_id": r["message_tree_id"], "tree_state": "ready", "prompt": nodes[r["message_id"]]})
            else:
                nodes[r["parent_id"]].setdefault("replies", []).append(nodes[r["message_id"]])
        return trees

    return call
