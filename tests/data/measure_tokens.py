"""Measures ``prepare`` on made conversations: ``python -m tests.data.measure_tokens DIR --count 200000``.

Makes ``DIR/COUNT.jsonl`` and a tokenizer of up to 130,000 entries that has learnt from another such text, then measures
reading and checking, tokens, rows, and what a rank does until its first row. Figures go to stdout as JSON; CPU
seconds are the process's own with its children's. ``taskset -c 0`` in front of it measures one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

VOCABULARY = 130_000
SYLLABLES = [a + b for a in ("b", "ch", "d", "f", "gr", "k", "l", "m", "n", "p", "r", "st", "t", "v", "w") for b in "aeiouy"]


def words(seed: int = 5, count: int = 150_000) -> list[str]:
    """Made words, the first ones the shortest, as in a language."""
    draw = random.Random(seed)
    return [
        "".join(draw.choices(SYLLABLES, k=1 + min(4, int(number**0.14))))
        + draw.choice(("", "", "n", "s", "r", "ng")) for number in range(count)
    ]  # fmt: skip


def conversations(count: int, mean_words: float, seed: int) -> Iterator[dict[str, Any]]:
    """Chats of 2 to 8 turns whose words come as often as Zipf's law says; answers are five times as long as questions."""
    draw, known = random.Random(seed), words()
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(len(known))))
    for _ in range(count):
        turns = 2 * draw.choice((1, 1, 2, 2, 3, 4))
        share = mean_words * draw.lognormvariate(-0.32, 0.8) / (turns / 2) / 6
        lengths = [max(3, int(share * (1 if turn % 2 == 0 else 5))) for turn in range(turns)]
        yield {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": " ".join(draw.choices(known, cum_weights=weights, k=k))}
                for turn, k in enumerate(lengths)
            ]
        }


def make_inputs(folder: Path, count: int, mean_words: float) -> Path:
    """The file of conversations and the tokenizer, kept where they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{count}.jsonl"
    if not data.exists():
        with data.open("w") as out:
            for body in conversations(count, mean_words, seed=1):
                out.write(json.dumps(body) + "\n")
    if not (folder / "tokenizer").exists():
        from clustertune.data.local_model import train_tokenizer

        texts = (m["content"] for body in conversations(12_000, mean_words, seed=2) for m in body["messages"])
        tokenizer = train_tokenizer(texts, VOCABULARY, 32768)
        tokenizer.save_pretrained(folder / "tokenizer")
    return data


class Memory:
    """The most memory that this process and all below it hold together (PSS: what they share counts once), bytes."""

    def __init__(self) -> None:
        self.peak, self._on = 0, True
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self._on:
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            with contextlib.suppress(psutil.Error):
                self.peak = max(self.peak, sum(process.memory_full_info().pss for process in family))
            time.sleep(0.5)

    def stop(self) -> int:
        self._on = False
        return self.peak


def cpu() -> float:
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def measure(data: Path, out: Path, max_length: int) -> dict[str, Any]:
    """All steps on one file; ``out`` is recreated where it was made of something else."""
    from clustertune.data import sequences, tokens
    from clustertune.data.prepare import prepare
    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.recipe.native_rules import train_defaults
    from clustertune.recipe.sections import Data

    found: dict[str, Any] = {"conversations": sum(1 for _ in data.open("rb")), "bytes": data.stat().st_size}
    memory, began = Memory(), cpu()
    prepare(Data(name="made", format="messages"), recipe_folder=data.parent, seed=1, out=out, input_path=data)
    found["read"] = {"cpu_s": round(cpu() - began, 1), "peak_mb": round(memory.stop() / 1e6)}
    settings = train_defaults() | {"packing": True, "max_length": max_length, "assistant_only_loss": True}
    settings["shuffle_dataset"] = True
    tokenizer = load_tokenizer(str(data.parent / "tokenizer"), None, None, settings)
    memory, wall = Memory(), time.perf_counter()
    made = tokens.make(out, tokenizer, settings)
    found["make"] = {"wall_s": round(time.perf_counter() - wall, 1), "peak_mb": round(memory.stop() / 1e6), **made}
    began = time.process_time()
    sequences.load(out / tokens.FOLDER, out, tokenizer, settings)
    found["rank_checks_and_maps"] = {"cpu_s": round(time.process_time() - began, 3)}
    began = time.process_time()
    rows = sequences.Sequences(out / tokens.FOLDER, "train").as_dataset()
    rows[len(rows) // 2]
    found["rank_maps_and_reads_a_row"] = {"cpu_s": round(time.process_time() - began, 4)}
    began, order = time.process_time(), random.Random(3).sample(range(len(rows)), min(2000, len(rows)))
    for number in order:
        rows[number]
    found["rows_per_cpu_s"] = round(len(order) / (time.process_time() - began))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--words", type=float, default=480, help="mean words of a conversation")
    parser.add_argument("--max-length", type=int, default=4096)
    given = parser.parse_args()
    source = make_inputs(given.folder, given.count, given.words)
    processes = len(os.sched_getaffinity(0))
    print(json.dumps(measure(source, given.folder / f"out-{given.count}-{processes}", given.max_length), indent=1))  # noqa: T201
