"""One evaluation, with the network forbidden, and the same prompts through ``lm_eval run`` by hand beside it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.data.rewards import NLTK_DATA
from clustertune.evaluate.run import evaluate
from clustertune.evaluate.tasks import locate_upstream
from clustertune.recipe.eval_tasks import first_task
from clustertune.recipe.sections import Eval
from tests.command import warm

SETTINGS = Eval(max_gen_toks=8, batch_size=8)
IFEVAL = first_task()
OWN = IFEVAL.folder / "prompts.jsonl"

# Google's set has rows like the first: "#" is not a letter, and lm-eval draws one. The second has the Hub's null arguments.
EXTRA_ROWS: list[dict[str, Any]] = [
    {
        "key": 901,
        "prompt": "Write a tweet with the hashtag sign in it.",
        "instruction_id_list": ["keywords:letter_frequency"],
        "kwargs": [{"letter": "#", "let_frequency": 4, "let_relation": "at least"}],
    },
    {
        "key": 902,
        "prompt": "Count to three.",
        "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
        "kwargs": [{"num_words": 3.0, "relation": "at least", "keywords": None}, {"num_words": None}],
        "remark": "a column of its own",
    },
]


class NetworkUsedError(Exception):
    """Something opened a connection."""


@contextmanager
def forbid_network() -> Iterator[list[Any]]:
    """Within: no connection but to a local socket file. Yields the attempts, because a library may swallow the error."""
    attempts: list[Any] = []
    originals = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(*args: Any, **_kwargs: Any) -> Any:
        if isinstance(args[0], socket.socket) and args[0].family == socket.AF_UNIX:
            return originals[0](*args)
        attempts.append(args[-1] if isinstance(args[0], socket.socket) else args)
        raise NetworkUsedError(str(args))

    socket.socket.connect = socket.socket.connect_ex = refuse  # type: ignore[method-assign,assignment]
    socket.getaddrinfo = refuse
    try:
        yield attempts
    finally:
        socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo = originals  # type: ignore[method-assign]


@dataclass
class Scored:
    result: dict[str, Any]
    out: Path
    data: Path
    attempts: list[Any]
    hand: dict[str, Any]
    """``results_*.json`` of the run by hand."""
    hand_samples: list[dict[str, Any]]


def start_by_hand(model: Path, data: Path, folder: Path) -> socket.socket:
    """``lm_eval run`` on a task file written here, not by the code under test; what is returned tells its end."""
    (folder / "task").mkdir(parents=True)
    body = {
        "include": str(locate_upstream(IFEVAL)),
        "task": "by_hand",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(data)}},
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": SETTINGS.max_gen_toks},
    }
    (folder / "task" / "by_hand.yaml").write_text(yaml.safe_dump(body))
    words = [
        *("run", "--model", "hf", "--model_args", f"pretrained={model},dtype=auto", "--device", "cpu", "--apply_chat_template"),
        *("--tasks", "by_hand", "--include_path", str(folder / "task"), "--batch_size", str(SETTINGS.batch_size)),
        *("--log_samples", "--output_path", str(folder / "out")),
    ]
    env = {**os.environ, "NLTK_DATA": str(NLTK_DATA)}
    with (folder / "log").open("wb") as log:
        return warm(stack=True).start(["tests.evaluate.by_hand", *words], folder, log.fileno(), log.fileno(), env)


@pytest.fixture(scope="session")
def parity_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of our own prompts the first of each kind of instruction, and the two peculiar rows."""
    seen: set[str] = set()
    rows = []
    for line in OWN.read_text().splitlines():
        kinds = set(json.loads(line)["instruction_id_list"])
        if not kinds <= seen:
            rows.append(line)
        seen |= kinds
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join([*rows, *map(json.dumps, EXTRA_ROWS)]) + "\n")
    return path


@pytest.fixture(scope="session")
def scored(tiny_model: Path, parity_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """The evaluation that most tests look at, and its counterpart by hand, run at the same time."""
    folder = tmp_path_factory.mktemp("by-hand")
    by_hand = start_by_hand(tiny_model, parity_data, folder)
    out = tmp_path_factory.mktemp("evaluation") / "ifeval"
    try:
        with forbid_network() as attempts:
            result = evaluate(tiny_model, out, settings=SETTINGS, data=parity_data, device="cpu")
        assert by_hand.recv(64) == b"0", (folder / "log").read_text()[-2000:]
    finally:
        by_hand.close()
    found = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    samples = next((folder / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    return Scored(result, out, parity_data, attempts, found, [json.loads(line) for line in samples])
