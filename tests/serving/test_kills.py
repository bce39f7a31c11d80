"""Servers, client and follower are killed at random moments: the same command goes on to the same answers, and nothing is left.

The seed of each moment is its number in the loop. ``pytest -m jobs -s`` prints what happened.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.evaluate.run import evaluate
from clustertune.launch.serving import Serving
from clustertune.recipe.sections import Eval
from tests.serving.conftest import gone, job, processes, step

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
KILLS = 20
SETTINGS = Eval(backend="vllm", limit=24, max_gen_toks=8)
Answers = list[tuple[Any, Any]]


def score(model: Path, out: Path) -> tuple[dict[str, Any], Answers]:
    """Scores and answers by the servers that the environment names."""
    result = evaluate(model, out, settings=SETTINGS, benchmark=False, device="cpu")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return result["tasks"], [(sample["doc_id"], sample["resps"]) for sample in samples]


@contextlib.contextmanager
def nodes(folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What a Slurm step runs: one node with two servers, or two nodes with one. A node that fails ends all, as srun does it."""
    folder.mkdir(parents=True, exist_ok=True)
    described = job(folder, "", servers=2 if count == 1 else 1)
    if count == 2:
        described = replace(described, shape=Serving(1, 1, 2, 2048, 4, 2), nodes=("127.0.0.1", "127.0.0.1"))
    replace(described, shape=replace(described.shape, max_num_seqs=2)).write(folder / "job.json")
    found = [step(folder, node) for node in range(count)]
    over = threading.Event()

    def srun() -> None:
        while not over.wait(0.05):
            if any(process.poll() for process in found):
                for process in found:
                    process.terminate()

    thread = threading.Thread(target=srun)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        for process in found:
            process.terminate()
            process.communicate()
        assert gone(processes(folder))


@pytest.fixture
def undisturbed(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, float]:
    """Scores and answers, and the seconds that they took."""
    monkeypatch.setenv("FAKE_DELAY", "0.1")
    monkeypatch.setenv("FAKE_MEET", "1")
    with nodes(tmp_path / "undisturbed", 1):
        monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(tmp_path / "undisturbed"))
        began = time.monotonic()
        return score(tiny_model, tmp_path / "undisturbed-out"), time.monotonic() - began


def kill_server(folder: Path, number: int, draw: random.Random, seconds: float) -> threading.Thread:
    """A server with its engine, at a random moment of the ``seconds`` after its start."""

    def kill() -> None:
        while len(found := sorted((folder / "pids").iterdir())) < 2 or not (text := found[number].read_text()):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, seconds))
        with contextlib.suppress(ProcessLookupError):  # it may be done
            os.killpg(int(text.split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [1, 2])
def test_a_server(count: int, tmp_path: Path, tiny_model: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers of a node; or the follower of a server over two nodes, which ends the step by its name."""
    want, seconds = undisturbed
    again = 0
    for seed in range(KILLS):
        out, folder, draw = tmp_path / f"out-{seed}", tmp_path / "job" / str(seed), random.Random(seed)
        with nodes(folder, count) as found:
            monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(folder))
            victim = draw.randrange(2) if count == 1 else 0  # port 0: a follower has none
            killer = kill_server(folder, victim, draw, seconds)
            try:
                result = score(tiny_model, out)
            except UserError as error:  # killed before it answered: the step ended, and is submitted again
                again += 1
                result = None
                if count == 2:
                    assert "node 1 (127.0.0.1) ended" in str(error) and found[1].wait(20) == 1, error
            killer.join()
        if result is None:
            with nodes(folder / "again", count):
                monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(folder / "again"))
                result = score(tiny_model, out)
        assert result == want, seed
    print(f"{KILLS} kills of a server on {count} nodes: the same scores, {again} jobs were submitted again")  # noqa: T201


def test_the_client(tmp_path: Path, tiny_model: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want, seconds = undisturbed
    resumed = 0
    with nodes(tmp_path / "job", 1):
        monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(tmp_path / "job"))
        for seed in range(KILLS):
            out = tmp_path / f"out-{seed}"
            client = multiprocessing.get_context("fork").Process(target=score, args=(tiny_model, out))
            client.start()
            client.join(random.Random(seed).uniform(0, seconds))
            client.kill()
            client.join()
            found = score(tiny_model, out)
            resumed += json.loads((out / "results.json").read_bytes())["resumed_prompts"]
            assert found == want, seed
    print(f"{KILLS} kills of the client: the same scores, {resumed} of {KILLS * 24} answers were there already")  # noqa: T201
