"""What a benchmark trains: the given recipe with its own number of steps and nothing in between, on made-up data if asked."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune import chain
from clustertune.errors import UserError
from clustertune.plan.lengths import SIGMA, Lengths
from clustertune.recipe.sections import CHOOSING
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved

HELD_OUT = 0.05
"""Share of made-up conversations that the eval split takes (the recipe's default)."""
CONVERSATIONS = "synthetic.jsonl"
_NOTHING_ELSE = (
    "train.logging_steps=1", "train.eval_strategy=no", "train.eval_on_start=false", "train.save_strategy=no",
    "train.report_to=none",
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A benchmark as it is run."""

    run_path: Path
    warmup: int
    """Optimizer steps that are not timed: compilation, first connections, allocator."""
    steps: int
    """Timed."""
    whole: Resolved
    """The recipe as it was given: what is planned."""
    measured: Resolved
    """What the ranks train."""
    overrides: tuple[str, ...] = ()
    """As they were given."""
    synthetic: bool = False
    """Random weights at the recipe's full size, made-up conversations: nothing comes from the Hub."""

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of made-up conversations, for the plan; None: what the recipe says."""
        if not self.synthetic:
            return None
        drawn = lengths(_mean(self.whole), _longest(self.whole), _seed(self.whole))
        return Lengths(tuple(sorted(next(drawn) for _ in range(1000))), "made-up conversations")


def make(
    recipe: str,
    overrides: Sequence[str],
    run_path: Path,
    warmup: int,
    steps: int,
    *,
    tiny: bool = False,
    ranks: int | None = None,
    synthetic: bool = False,
) -> Bench:
    """Resolve the recipe twice: as it is, and as it is measured. Raises UserError with all problems of the recipe."""
    whole = chain.resolve_here(recipe, overrides, tiny=tiny, ranks=ranks, made_up=synthetic)
    if whole.recipe.trainer != "sft":
        fix = "clustertune run RECIPE train.max_steps=20: the report has its step times"
        text = f"{whole.recipe.trainer}: bench measures supervised fine-tuning"
        raise UserError(text, file=recipe, key="trainer", fix=fix)
    own = [f"train.max_steps={warmup + steps}", *_NOTHING_ELSE, *(_made_up(whole, run_path) if synthetic else [])]
    keys = {text.partition("=")[0] for text in own}
    others = [text for text in overrides if text.partition("=")[0] not in keys]
    measured = resolve(recipe, [*others, *own], tiny=tiny, ranks=whole.world_size)
    return Bench(run_path, warmup, steps, whole, measured, tuple(overrides), synthetic)


def _made_up(whole: Resolved, run_path: Path) -> list[str]:
    """Random weights and a local tokenizer for the recipe's own architecture, and conversations of our own."""
    names = ["model.weights=random", "model.revision=null", "model.path=null", "data.format=messages", "data.language=null"]
    names += [f"data.input={made_file(run_path)}", "data.revision=null", "data.expect=null"]
    names += [f"data.{key}=null" for key in ("limit", *CHOOSING) if getattr(whole.recipe.data, key) is not None]
    # The tokenizer is trained locally and brings its own special tokens.
    return [*names, *(f"train.{key}=null" for key in ("pad_token", "eos_token") if whole.train_args[key] is not None)]


def made_file(run_path: Path) -> Path:
    """Where made-up conversations lie: beside the run folder."""
    return run_path.absolute().with_name(run_path.name + "." + CONVERSATIONS)


def _longest(whole: Resolved) -> int:
    return int(whole.train_args["max_length"])


def _mean(whole: Resolved) -> float:
    """Tokens of a conversation: what the recipe expects of its own, or a quarter of the longest."""
    expected = whole.recipe.data.expect
    return float(expected.mean_tokens) if expected and expected.mean_tokens else _longest(whole) / 4


def _seed(whole: Resolved) -> int:
    return int(whole.train_args["seed"])


def needed(bench: Bench) -> tuple[float, int]:
    """Tokens and conversations that every step needs a new one of: a second epoch would begin with a smaller step."""
    rows = (bench.warmup + bench.steps) * bench.whole.global_batch_size
    spare = 1.1 / (1 - HELD_OUT)
    packed = bool(bench.whole.train_args["packing"])
    return (rows * _longest(bench.whole) * spare, 2) if packed else (0.0, math.ceil(rows * spare) + 2)


# --- made-up conversations: as long as real ones, of words that are a token each ------------------------------------------

WORDS = 1000
SHORTEST = 8
TEMPLATE_TOKENS = 12
"""Header and end of two turns in the chat template."""
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru")


def vocabulary() -> list[str]:
    """The vocabulary: each word ends in another one's beginning, so that a tokenizer learns whole words."""
    return [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES][:WORDS]


def lengths(mean: float, longest: int, seed: int) -> Iterator[int]:
    """Tokens of one conversation after the other: log-normal with this mean before the cut at ``longest``."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    center = mean / math.exp(SIGMA**2 / 2)
    while True:
        yield max(SHORTEST, min(longest, round(center * math.exp(draw.gauss(0, SIGMA)))))


def write_conversations(bench: Bench) -> None:
    """Write a JSON Lines file of conversations, each of which answers one question. Raises OSError."""
    whole, (tokens, count) = bench.whole, needed(bench)
    draw, known = random.Random(_seed(whole) + 1), vocabulary()  # noqa: S311 - nothing secret
    path, made, total = made_file(bench.run_path), 0, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for length in lengths(_mean(whole), _longest(whole), _seed(whole)):
            if made >= count and total >= tokens:
                return
            body = max(2, length - TEMPLATE_TOKENS)
            text, cut = draw.choices(known, k=body), max(1, body // 4)
            turns = [("user", text[:cut]), ("assistant", text[cut:])]
            messages = [{"role": role, "content": " ".join(words)} for role, words in turns]
            out.write(json.dumps({"messages": messages}) + "\n")
            made, total = made + 1, total + length
