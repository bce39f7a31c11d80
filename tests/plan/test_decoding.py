"""How long answers take: the course of a server and of batches against schedulers written here, and published speeds."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from clustertune.plan.decoding import (
    SPEED_FACTOR,
    TP_LAYER_S,
    AnswerLengths,
    Course,
    DecodingSpeed,
    batches,
    continuous,
    products_per_s,
    token_sums,
)

LENGTHS = (
    AnswerLengths(120, 300, 1280, "half of them short"),
    AnswerLengths(500, 900, 1024, "most are cut"),
    AnswerLengths(30, 60, 2048, "few are long"),
    AnswerLengths(64, math.inf, 256, "none ends by itself"),
)


def drawn(lengths: AnswerLengths, count: int, draw: random.Random) -> list[int]:
    """Answers' lengths by Python's own log-normal."""
    if math.isinf(lengths.mean):
        return [lengths.longest] * count
    center = math.log(lengths.mean) - 0.8**2 / 2
    return [max(1, min(lengths.longest, math.ceil(draw.lognormvariate(center, 0.8)))) for _ in range(count)]


def serve(answers: list[int], at_once: int, prompt: float) -> Course:
    """A scheduler with continuous batching: each answer takes the slot that is free first, and a step a token."""
    free = [0] * min(at_once, len(answers))
    for length in answers:
        heapq.heappush(free, heapq.heappop(free) + length)
    read = sum(length * prompt + length * (length - 1) / 2 for length in answers)
    return Course(max(free), len(answers), sum(answers), read)


def mean(found: list[Course]) -> Course:
    return Course(*(sum(getattr(one, name) for one in found) / len(found) for name in Course.__dataclass_fields__))


def equal(found: Course, expected: Course, share: float) -> bool:
    return all(getattr(found, n) == pytest.approx(getattr(expected, n), rel=share) for n in Course.__dataclass_fields__)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda one: one.source)
@pytest.mark.parametrize(("answers", "at_once"), [(16, 64), (64, 64), (90, 64), (300, 32), (400, 20)])
def test_a_server_with_continuous_batching(lengths: AnswerLengths, answers: int, at_once: int) -> None:
    """Full slots first, then the tail of the longest: steps, tokens and reads of the cache."""
    draw = random.Random(7)
    expected = mean([serve(drawn(lengths, answers, draw), at_once, lengths.prompt) for _ in range(300)])
    assert equal(continuous(lengths, answers, at_once), expected, 0.06)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda one: one.source)
def test_batches_wait_for_their_longest(lengths: AnswerLengths) -> None:
    draw, found = random.Random(3), []
    for _ in range(300):
        made = drawn(lengths, 96, draw)
        longest = [max(made[start : start + 8]) for start in range(0, 96, 8)]
        read = sum(8 * (lengths.prompt * steps + steps * (steps - 1) / 2) for steps in longest)
        found.append(Course(sum(longest), 96, 8 * sum(longest), read))
    assert equal(batches(lengths, 96, 8), mean(found), 0.1)


def test_all_wait_for_the_longest_of_all() -> None:
    """32 ranks with 4 answers each take the steps of 128, and each its own tokens."""
    lengths = LENGTHS[2]
    together, alone = continuous(lengths, 4, 4, alike=32), continuous(lengths, 4, 4)
    assert together.steps == pytest.approx(continuous(lengths, 128, 128).steps) and together.steps > 1.5 * alone.steps
    assert together.tokens == alone.tokens


def test_waves_of_answers_take_the_mean_and_not_the_longest() -> None:
    """A thousand answers a slot: nearly all steps are full, and no slot waits for another's."""
    lengths = LENGTHS[0]
    assert continuous(lengths, 16_000, 16).steps == pytest.approx(1000 * lengths.cut_mean, rel=0.02)


LLAMA_8B, MISTRAL_7B, LLAMA_405B = (8.03e9, 131_072, 32), (7.24e9, 131_072, 32), (405.9e9, 516_096, 126)
H100, A100, RTX_4090 = (3350, 989, "hopper"), (1555, 312, "ampere"), (1008, 165, "ada")
MI300X, MI325X = (5200, 2615, "hopper"), (6000, 2615, "hopper")
"""GB/s, dense TFLOP/s of the type that is served; the share of the peak of AMD's is not known here, and taken as hopper's."""


def engine(
    model: tuple[float, float, int], gpu: tuple[float, float, str], gpus: int = 1, weight_bytes: int = 2
) -> DecodingSpeed:
    (parameters, cache, layers), (bandwidth, peak, generation) = model, gpu
    beside = layers * TP_LAYER_S if gpus > 1 else 0.0
    return DecodingSpeed(
        weight_bytes * parameters / gpus, cache / gpus, 2 * parameters / gpus, bandwidth * 1e9,
        products_per_s(peak * 1e12, generation), beside, token_sums(layers, 16384, gpus, 350e9),
    )  # fmt: skip


def amd(gpu: tuple[float, float, str]) -> DecodingSpeed:
    """405B in FP8 on eight."""
    return engine(LLAMA_405B, gpu, 8, 1)


PUBLISHED = [
    # yobitelcomm.github.io/bench, concurrency sweep: time per output token, prompts left out
    *(("H100 8B", engine(LLAMA_8B, H100), at_once, 0, 128, 128 * seconds) for at_once, seconds in ((1, 6.48e-3), (4, 6.59e-3))),
    # johnmusgrave.com/p/vllm-throughput-latency-sweep-on: 75 tokens/s at one request
    ("A100 8B", engine(LLAMA_8B, A100), 1, 0, 128, 128 / 75),
    # mushfiqrahman.dev/?p=1668, workload A: output tokens/s
    *(
        ("RTX 4090 7B", engine(MISTRAL_7B, RTX_4090), at_once, 256, 128, at_once * 128 / speed)
        for at_once, speed in ((4, 210), (8, 377), (16, 644), (32, 975), (48, 1190))
    ),
    # blogs.oracle.com, "Serving Llama 3.1 405B model with AMD Instinct MI300X": benchmark_latency.py of October 2024
    *(
        ("8 MI300X 405B", amd(MI300X), at_once, 128, 128, seconds)
        for at_once, seconds in ((1, 3.53), (16, 4.375), (64, 6.919), (128, 10.34), (256, 17.75))
    ),
    # docs.vultr.com, inference cookbook, stress testing of Llama 3.1 405B: total and output tokens/s; by its latencies 188
    # tokens an answer
    *(
        ("8 MI325X 405B", amd(MI325X), at_once, 188 * (whole - speed) / speed, 188, at_once * 188 / speed)
        for at_once, whole, speed in (
            (5, 423, 153),
            (25, 1953, 738),
            (50, 3428, 1296),
            (100, 5254, 1986),
            (150, 6927, 2619),
            (300, 13937, 3249),
            (500, 15944, 3673),
        )
    ),
]


def test_published_speeds() -> None:
    """Four of five rows of fixed lengths lie within the factor of the range, and no mean of a machine is off by more."""
    errors: dict[str, list[float]] = {}
    for name, served, at_once, prompt, longest, seconds in PUBLISHED:
        lengths = AnswerLengths(prompt, math.inf, longest, "fixed")
        found = served.seconds(lengths, continuous(lengths, at_once, at_once))
        errors.setdefault(name, []).append(math.log(found / seconds))
    every = [error for found in errors.values() for error in found]
    assert sum(abs(error) <= math.log(SPEED_FACTOR) for error in every) >= 0.8 * len(every)
    assert all(abs(sum(found) / len(found)) <= math.log(SPEED_FACTOR) for found in errors.values())
    assert abs(sum(every) / len(every)) < 0.15


def test_a_published_set_of_answers_that_spread() -> None:
    """1,000 conversations of ShareGPT, all sent at once: 229,711 and 203,068 tokens in 30.85 s (vllm-project/vllm, pull request
    18566; the GPU is not said, and taken to be an H100), 256 at once."""
    lengths = AnswerLengths(229.7, 203.1, 2048, "ShareGPT")
    found = engine(LLAMA_8B, H100).seconds(lengths, continuous(lengths, 1000, 256))
    assert 30.85 / SPEED_FACTOR < found < 30.85 * SPEED_FACTOR
