"""How long conversations are, and how many tokens a step really computes, packed or padded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from clustertune.errors import Problem, UserError, storage_error
from clustertune.resolve.resolved import Resolved

PACKED_SHARE = 0.98
"""Share of a packed sequence that is tokens, best-fit decreasing (TRL's "bfd"): https://arxiv.org/abs/2404.10830, 3.2, has
more than 99 % for long lists; 98 % leaves room for short ones."""
SIGMA = 0.8
"""Standard deviation of the lengths' logarithms where only their mean is known: about what chat data sets have."""
MOST = 10_000_000
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Tokens per conversation, chat template included."""

    tokens: tuple[int, ...]
    """A sample, ascending; one value where only the mean is known."""
    source: str

    def mean(self, longest: int) -> float:
        """Mean tokens of a conversation that is cut at ``longest``."""
        return sum(min(length, longest) for length in self.tokens) / len(self.tokens)

    def around_token(self, longest: int) -> float:
        """Mean length of the conversation that a token is in, cut at ``longest``: long ones count once for each of theirs.

        Where the mean alone is known, the lengths are taken to be log-normal around it (:data:`SIGMA`).
        """
        if len(self.tokens) > 1:
            cut = [min(length, longest) for length in self.tokens]
            return sum(length**2 for length in cut) / sum(cut)
        center = math.log(self.tokens[0]) - SIGMA**2 / 2
        above = (math.log(longest) - center) / SIGMA

        def moment(power: int) -> float:
            """Of the cut lengths: https://en.wikipedia.org/wiki/Log-normal_distribution#Partial_expectation."""
            below = math.exp(power * center + (power * SIGMA) ** 2 / 2) * _NORMAL.cdf(above - power * SIGMA)
            return float(below + longest**power * _NORMAL.cdf(-above))

        return moment(2) / moment(1)

    def padded(self, batch: int, longest: int) -> float:
        """Mean length of the longest of ``batch`` random conversations: what a micro batch is padded to."""
        count = len(self.tokens)
        result, below = 0.0, 0.0
        for index, length in enumerate(self.tokens, start=1):
            share = (index / count) ** batch
            result += min(length, longest) * (share - below)
            below = share
        return result


def known_lengths(resolved: Resolved) -> Lengths | None:
    """What the recipe says about its conversations' lengths: their mean, or the steps that a packed epoch is known to have."""
    counts, args = resolved.recipe.data.expect, resolved.train_args
    if counts is not None and counts.mean_tokens:
        return Lengths((max(1, round(counts.mean_tokens)),), "data.expect.mean_tokens")
    steps, batch = resolved.recipe.expect.steps, resolved.global_batch_size
    if counts is None or not counts.train or not steps or not args["packing"] or args["max_steps"] > 0:
        return None
    epochs = args["num_train_epochs"]
    mean = steps * batch * args["max_length"] * PACKED_SHARE / (counts.train * epochs)
    return Lengths((max(1, math.floor(mean)),), f"expect.steps {steps}")


def read_lengths(path: Path) -> Lengths:
    """A file of whole numbers, one a line, or JSON ``{"lengths": {"LENGTH": COUNT}}``. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise storage_error(error, "cannot be read", path) from None
    except UnicodeDecodeError:
        raise UserError(Problem("is not text", file=str(path))) from None
    fix = 'write one whole number a line, or {"lengths": {"512": 37, ...}}'
    try:
        counts = json.loads(text)["lengths"].items() if text.lstrip().startswith("{") else [(line, 1) for line in text.split()]
        pairs = [(int(length), int(count)) for length, count in counts]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(Problem("contains no lengths", file=str(path), fix=fix)) from None
    if not pairs or any(length < 1 or count < 0 for length, count in pairs) or not 0 < sum(count for _, count in pairs) <= MOST:
        raise UserError(Problem(f"must hold 1 to {MOST} lengths of 1 token or more", file=str(path), fix=fix))
    return of_counts(pairs, str(path))


def of_counts(pairs: Sequence[tuple[int, int]], source: str) -> Lengths:
    """The lengths of a histogram: pairs of a length in tokens and how many conversations have it."""
    return Lengths(tuple(sorted(_thinned(pairs))), source)


def _thinned(pairs: Sequence[tuple[int, int]], most: int = 20_000) -> list[int]:
    """The lengths of a histogram as a list, of large ones a share of each."""
    total = sum(count for _, count in pairs)
    step = max(1, math.ceil(total / most))
    found, behind = [], 0
    for length, count in sorted(pairs):
        behind += count
        found += [length] * (behind // step)
        behind %= step
    return found or [pairs[0][0]]
