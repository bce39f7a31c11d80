"""How long a model's answers take: what a step of decoding costs, how many steps the longest answers need, and the prompts.

Answers end at different lengths. A server with continuous batching fills a slot again as soon as its answer ended, and is left
in the end with its longest answers; a batch of transformers waits for its longest, and computes padding behind the others.
GRPO's ranks wait for the longest answer of all of them.

A step reads the weights and the cache of all running answers, and sums each layer over the GPUs that share it; prompts, and
each token of the answers, take their products' FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

from clustertune.plan.constants import LENGTH_SIGMA, SECONDS, Constants, Term

BANDWIDTH_SHARE = 0.75
"""Of the memory's bandwidth that a step reads at, on one GPU. Published: 6.5 ms a step of Llama 3.1 8B on one H100 are 74 %, 75
tokens/s on one A100 77 % (docs/results/evaluation.md)."""
TP_LAYER_S = 1.4e-4
"""A layer's sums over the GPUs that share it, seconds of a step. Published: 405B in FP8 needs 116 us a
layer beside its reading over 8 MI300X, and 163 over 8 MI325X (docs/results/evaluation.md)."""
LAYER_S = 1e-3
"""A decoder layer of a step in transformers' eager mode, where its kernels' start and not the memory decides; assumed."""
SPEED_FACTOR = 1.6
"""How far the speed may be off, as a factor: of the published rows of docs/results/evaluation.md four of five lie within."""
MEAN_SHARE = 0.5
"""The mean length of answers as a share of the most that they may have, where nothing is known. Assumed."""
SHORT = 0.5
"""Lower end of a range: answers half as long as taken; at its upper end all reach the most that they may have."""

BINS = 128
"""Steps of the answers' lengths that are computed with."""
SETTLED = 6
"""Rounds of answers in each slot after which the slots are out of step, and each further round takes the mean length."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class AnswerLengths:
    """Tokens of prompts and answers. Answers are log-normal around their mean, and cut."""

    prompt: float
    mean: float
    """Of answers that nothing cuts."""
    longest: int
    """Tokens that cut an answer."""
    source: str
    """Where the mean is from."""

    @classmethod
    def of(cls, prompt: float, longest: int, known: float | None, source: str) -> AnswerLengths:
        """With the mean that is known, or :data:`MEAN_SHARE` of the most."""
        if known is None:
            return cls(prompt, MEAN_SHARE * longest, longest, f"assumed: {MEAN_SHARE:g} of the most")
        return cls(prompt, known, longest, source)

    def longer(self, tokens: float) -> float:
        """The share of answers with more tokens."""
        if tokens >= self.longest:
            return 0.0
        if tokens <= 0 or math.isinf(self.mean):
            return 1.0
        center = math.log(self.mean) - LENGTH_SIGMA**2 / 2
        return 1.0 - _NORMAL.cdf((math.log(tokens) - center) / LENGTH_SIGMA)

    @property
    def bin(self) -> float:
        """Tokens of one step of the lengths."""
        return self.longest / BINS

    @property
    def shares(self) -> list[float]:
        """:meth:`longer` in the middle of each bin."""
        return [self.longer((index + 0.5) * self.bin) for index in range(BINS)]

    @property
    def cut_mean(self) -> float:
        """Mean tokens of an answer as it is made."""
        return self.bin * sum(self.shares)

    @property
    def triangle(self) -> float:
        """Mean of an answer's tokens, each counted with those before it: half of its square."""
        return self.bin**2 * sum((index + 0.5) * share for index, share in enumerate(self.shares))

    @property
    def ends(self) -> tuple[float, float]:
        """Means at the lower end of a range, and at its upper one, where nothing ends by itself."""
        return SHORT * self.mean, math.inf

    def __str__(self) -> str:
        return f"answers of {self.cut_mean:,.0f} tokens on average, {self.longest:,} at most ({self.source})"


@dataclass(frozen=True)
class Course:
    """What is decoded in all, by one server or rank."""

    steps: float
    """Steps of decoding, each of which reads the weights."""
    answers: float
    tokens: float
    """Tokens that are computed behind the prompts, padding among them."""
    positions: float
    """Over all of them, the tokens whose keys and values each reads."""


def continuous(lengths: AnswerLengths, answers: int, at_once: int, alike: int = 1) -> Course:
    """Answers of a server that works on ``at_once``, the next begins where one ends. ``alike``: servers that are waited for."""
    tokens = answers * lengths.cut_mean
    steps, _ = _steps(lengths, answers, max(1, min(answers, at_once)), alike)
    return Course(steps, answers, tokens, tokens * lengths.prompt + answers * lengths.triangle)


def batches(lengths: AnswerLengths, answers: int, batch: int, alike: int = 1) -> Course:
    """Answers of transformers: each batch takes its longest answer's steps, with padding behind the others."""
    batch = min(batch, answers)
    longest, triangle = _steps(lengths, batch, batch, alike)
    tokens = answers * longest
    return Course(math.ceil(answers / batch) * longest, answers, tokens, tokens * lengths.prompt + answers * triangle)


@lru_cache(maxsize=4096)
def _steps(lengths: AnswerLengths, answers: int, at_once: int, alike: int) -> tuple[float, float]:
    """Expected steps until the last answer ended, and half of their square: by bins, how many answers begin in each, and how
    likely one of them still runs."""
    width, alive = lengths.bin, [1.0, *lengths.shares[1:], 0.0]
    ending = [before - after for before, after in pairwise(alive)]
    left = [math.log1p(-min(share, 1 - 1e-12)) for share in lengths.shares]
    settled = max(0, answers // at_once - SETTLED) * at_once
    begun, waiting = [float(at_once)], float(answers - settled - at_once)
    steps, triangle = settled * lengths.cut_mean / at_once, 0.0
    while True:
        recent = begun[-BINS:][::-1]
        none_runs = math.exp(alike * sum(count * log for count, log in zip(recent, left, strict=False)))
        steps += width * (1 - none_runs)
        triangle += width**2 * (1 - none_runs) * (len(begun) - 0.5)
        if len(begun) > BINS and none_runs > 1 - 1e-6:
            return steps, triangle
        ended = sum(count * share for count, share in zip(recent, ending, strict=False))
        begun.append(min(ended, waiting))
        waiting -= begun[-1]


@dataclass(frozen=True)
class DecodingSpeed:
    """GPUs that decode together: what each of them reads and computes."""

    weights: float
    """Bytes that a step reads."""
    cache: float
    """Bytes of one token's keys and values."""
    flops: float
    """Of one token."""
    bytes_per_s: float
    """Of the memory, nominal."""
    flops_per_s: float
    """That matrix products reach."""
    beside: float = 0.0
    """Seconds of a step beside reading: the start of sums over GPUs."""
    sums: float = 0.0
    """Seconds of one token's sums over GPUs."""
    least: float = 0.0
    """Seconds of a step that the host takes."""

    @property
    def token(self) -> float:
        """Seconds of one token's products and sums."""
        return self.flops / self.flops_per_s + self.sums

    @property
    def step(self) -> float:
        """Seconds of a step of decoding without cache and products."""
        return max(self.weights / self.bytes_per_s / BANDWIDTH_SHARE + self.beside, self.least)

    def prompts(self, lengths: AnswerLengths, course: Course) -> Term:
        """The prompts, bound by products."""
        values = {"answers": course.answers, "prompt": lengths.prompt, **self._token_values}
        text = "{answers} prompts x {prompt} tokens x " + self._token_text
        return Term("prompts", course.answers * lengths.prompt * self.token, SECONDS, text, values)

    @property
    def _token_text(self) -> str:
        products = "{flops} FLOPs / {products} FLOP/s"
        return f"({products} + {{sums}} us of sums over GPUs)" if self.sums else products

    @property
    def _token_values(self) -> dict[str, float]:
        return {"flops": self.flops, "products": self.flops_per_s, "sums": 1e6 * self.sums}

    def answers(self, course: Course) -> Term:
        """The answers: weights in each step, the cache and the products of each token."""
        speed = self.bytes_per_s * BANDWIDTH_SHARE
        values: dict[str, float | int | str] = {"steps": course.steps, "step": self.step, "tokens": course.tokens}
        values |= {"cache": course.positions * self.cache / 1e9, "speed": speed / 1e9, **self._token_values}
        value = course.steps * self.step + course.positions * self.cache / speed + course.tokens * self.token
        text = "{steps} steps until the longest ended x {step} s + {cache} GB of cache / {speed} GB/s + {tokens} tokens x "
        return Term("answers", value, SECONDS, text + self._token_text, values)

    def seconds(self, lengths: AnswerLengths, course: Course) -> float:
        """Of prompts and answers."""
        return self.prompts(lengths, course).value + self.answers(course).value


def products_per_s(peak_flops: float, generation: str) -> float:
    """FLOP/s of a GPU's matrix products in 16 bits."""
    return peak_flops * Constants().gemm(generation)


def token_sums(layers: float, hidden: int, gpus: int, link_bytes_per_s: float) -> float:
    """Seconds of one token's two sums in each layer over ``gpus`` that a link joins; 0 for one, and for a link unknown."""
    if gpus == 1 or link_bytes_per_s <= 0:
        return 0.0
    return layers * 2 * 2 * (gpus - 1) / gpus * hidden * 2 / link_bytes_per_s
