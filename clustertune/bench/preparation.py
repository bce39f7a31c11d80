"""The options of a benchmark, and the recipe that its ranks train: the given one with its steps and no saves in between."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clustertune import chain
from clustertune.errors import Problem, UserError
from clustertune.plan.lengths import SIGMA, Lengths
from clustertune.recipe.sections import CHOOSING
from clustertune.report.source import counted_share
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.resolve.tiny import ranks as tiny_ranks
from clustertune.training.bench_schedule import BenchSchedule

HELD_OUT = 0.05
"""Share of made-up conversations that the eval split takes (the recipe's default)."""
CONVERSATIONS = "synthetic.jsonl"


@dataclass(frozen=True)
class BenchRequest:
    """The command line."""

    recipe: str
    run_path: Path
    schedule: BenchSchedule
    overrides: tuple[str, ...] = ()
    tiny: bool = False
    ranks: int | None = None
    synthetic: bool = False
    """Random weights at the recipe's full size, made-up conversations: nothing comes from the Hub."""


@dataclass(frozen=True)
class Bench:
    """A benchmark as it is run."""

    request: BenchRequest
    whole: Resolved
    """The recipe as it was given: what is projected."""
    measured: Resolved
    """What the ranks train."""
    made: tuple[float, int] | None
    """Tokens and conversations that are made up; None: the recipe's own data."""

    @property
    def share(self) -> float:
        """What of the ranks' tokens counts."""
        return counted_share(self.measured.data_parallel_size, self.measured.world_size)

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of made-up conversations, for the plan; None: what the recipe says."""
        if self.made is None:
            return None
        longest = _longest(self.whole)
        drawn = lengths(_mean(self.whole), longest, _seed(self.whole))
        return Lengths(tuple(sorted(next(drawn) for _ in range(1000))), "made-up conversations")


def make(request: BenchRequest) -> Bench:
    """Resolve the recipe twice: as it is, and as it is measured. Raises UserError with all problems of the recipe."""
    given = list(request.overrides)
    ranks = request.ranks
    whole = resolve(request.recipe, given, tiny=request.tiny, ranks=ranks)
    whole.require_startable()
    if whole.recipe.trainer != "sft":
        fix = "clustertune run RECIPE train.max_steps=20: the report has its step times"
        raise UserError(
            Problem(
                f"{whole.recipe.trainer}: bench measures supervised fine-tuning", file=request.recipe, key="trainer", fix=fix
            )
        )
    if ranks is None and (shrunk := _ranks_here(whole, request)) is not None:
        ranks = shrunk
        whole = resolve(request.recipe, given, tiny=request.tiny, ranks=ranks)
    made = _to_make(request.schedule, whole) if request.synthetic else None
    own = [*_steps(request), *(_made_up(whole, request.run_path) if made else [])]
    keys = {text.partition("=")[0] for text in own}
    others = [text for text in given if text.partition("=")[0] not in keys]
    return Bench(request, whole, resolve(request.recipe, [*others, *own], tiny=request.tiny, ranks=ranks), made)


def _ranks_here(whole: Resolved, request: BenchRequest) -> int | None:
    """How many ranks a small or made-up model gets on this machine, where that is fewer than the recipe's; None: its own."""
    gpus = chain.visible_gpus()
    few = gpus or tiny_ranks(whole.accelerate)
    if whole.world_size <= few:
        return None
    if request.tiny or request.synthetic or whole.recipe.model.weights == "random":
        return few
    fix = (
        f"it needs {whole.world_size} GPUs: --tiny or --ranks N here, clustertune submit RECIPE train.max_steps=20 on a cluster"
    )
    raise UserError(Problem(f"this machine has {gpus} GPUs", file=request.recipe, key="slurm", fix=fix))


def _steps(request: BenchRequest) -> list[str]:
    """So many steps, and nothing else that would take time."""
    off = ["train.eval_strategy=no", "train.eval_on_start=false", "train.save_strategy=no", "train.report_to=none"]
    return [f"train.max_steps={request.schedule.total}", *off]


def _made_up(whole: Resolved, run_path: Path) -> list[str]:
    """Random weights and a local tokenizer for the recipe's own architecture, and conversations of our own."""
    found = ["model.weights=random", "model.revision=null", "model.path=null", "data.format=messages", "data.language=null"]
    found += [f"data.input={made_file(run_path)}", "data.revision=null", "data.expect=null"]
    found += [f"data.{key}=null" for key in ("limit", *CHOOSING) if getattr(whole.recipe.data, key) is not None]
    # The tokenizer is trained locally and brings its own special tokens.
    return [*found, *(f"train.{key}=null" for key in ("pad_token", "eos_token") if whole.train_args[key] is not None)]


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


def _to_make(schedule: BenchSchedule, whole: Resolved) -> tuple[float, int]:
    """Tokens and conversations that every step needs a new one of: a second epoch would begin with a smaller step."""
    rows = schedule.total * whole.global_batch_size
    packed = bool(whole.train_args["packing"])
    spare = 1.1 / (1 - HELD_OUT)
    return (rows * _longest(whole) * spare, 2) if packed else (0.0, math.ceil(rows * spare) + 2)


def make_conversations(bench: Bench) -> int:
    """Write the made-up conversations, where there are to be any. Returns how many. Raises OSError."""
    if bench.made is None:
        return 0
    tokens, count = bench.made
    path, whole = made_file(bench.request.run_path), bench.whole
    return write(path, _mean(whole), _longest(whole), tokens=tokens, count=count, seed=_seed(whole))


# --- synthetic ------------------------------------------------------------------------------------------------------------

# Conversations made up for a benchmark that has no data at hand: as long as real ones, of words that are a token each.

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


def conversations(mean: float, longest: int, *, tokens: float, count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """At least ``count`` conversations with at least ``tokens`` tokens together; each answers one question."""
    draw, known = random.Random(seed + 1), vocabulary()  # noqa: S311 - nothing secret
    made, total = 0, 0
    for length in lengths(mean, longest, seed):
        if made >= count and total >= tokens:
            return
        body = max(2, length - TEMPLATE_TOKENS)
        text = draw.choices(known, k=body)
        cut = max(1, body // 4)
        yield [
            {"role": "user", "content": " ".join(text[:cut])},
            {"role": "assistant", "content": " ".join(text[cut:])},
        ]
        made, total = made + 1, total + length


def write(path: Path, mean: float, longest: int, *, tokens: float, count: int, seed: int) -> int:
    """A JSON Lines file of ``messages``. Returns how many conversations it holds. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = 0
    with path.open("w", encoding="utf-8") as out:
        for made, messages in enumerate(conversations(mean, longest, tokens=tokens, count=count, seed=seed), start=1):  # noqa: B007
            out.write(json.dumps({"messages": messages}) + "\n")
    return made
