"""What an image has installed, held against ``containers/versions.env`` before the first stage: which package is missing, and
which is of another version.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.containers import pins
from clustertune.errors import Problem, UserError
from clustertune.launch.inventory import MARK, inventory
from clustertune.process import captured
from clustertune.resolve import kernels
from clustertune.tree import ROOT

MODULE = "clustertune.launch.inventory"
SECONDS = 300.0
"""How long an image may take to answer: its first start on a node reads it over the network."""
FOR_SOME = {
    "wandb": "training with report_to: wandb",
    "matplotlib": "the report's plots",
    "bitsandbytes": "training on a 4-bit or 8-bit base",
    "lm-eval": "the stage eval",
    "nltk": "the stage eval",
    "langdetect": "the stage eval",
    "immutabledict": "the stage eval",
    "nvidia-ml-py": "GPU readings of the metrics",
    "xxhash": "digests of merged weights",
}
"""Packages that not every stage imports, and what fails without them. All others are needed by each."""
_MOST = 40
"""Lines of one kind."""


@dataclass(frozen=True)
class Stack:
    """What a Python has installed."""

    python: str
    packages: Mapping[str, str]


def parse(text: str) -> Stack | None:
    """The answer among what an image printed; None where there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            try:
                body = json.loads(line[len(MARK) :])
                return Stack(str(body["python"]), {str(k): str(v) for k, v in body["packages"].items()})
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                return None
    return None


def ask(command: Sequence[str], image: str) -> Stack:
    """Run the inventory in the container. Raises UserError (exit 2) where the image does not start or has no Python for it."""
    fix = "try it by hand: the command is in the job's log; clustertune doctor looks at runtime, image and binds"
    try:
        done = captured(command, SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"the container did not answer within {SECONDS:.0f} s", file=image, fix=fix) from None
    except OSError as error:
        text = f"the container does not start: {error.filename or command[0]}: {error.strerror}"
        raise UserError(text, file=image, fix=fix) from None
    found = parse(done.stdout)
    if found is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()][-4:]
        text = (
            f"no Python 3.8 or later answers in the image (exit code {done.returncode}): {' | '.join(lines)[:600] or 'no word'}"
        )
        raise UserError(text, file=image, key="container.image", fix=fix)
    return found


def oldest_python(pyproject: Path = ROOT / "pyproject.toml") -> tuple[int, ...]:
    """What ``requires-python`` of the project asks for."""
    text = str(tomllib.loads(pyproject.read_text())["project"]["requires-python"])
    found = re.search(r">=\s*([0-9.]+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def judge(stack: Stack, pinned: pins.Pins, image: str, oldest: tuple[int, ...]) -> tuple[list[Problem], list[str]]:
    """What keeps a job from running in an image, and what to warn of: one line for each difference.

    An image of the reference stack is whole in its own way: it is held against its own pins where these fit better.
    """
    problems, warnings = [], []
    fix = "build it from this checkout (make build-sif), or install it in the image"
    has = tuple(int(part) for part in re.findall(r"\d+", stack.python)[:2])
    if has < oldest[:2]:
        text = f"Python {stack.python}, and clustertune needs {'.'.join(map(str, oldest))} or later"
        problems.append(Problem(text, file=image, key="container.image", fix=fix))
    stack_pins = {**pinned[pins.PY]}
    reference = {**stack_pins, **{name: version for name, version in pinned[pins.REF].items() if name in stack_pins}}
    differences = min((_differences(stack, wanted) for wanted in (stack_pins, reference)), key=len)
    for name, version in sorted(stack_pins.items()):
        if name in stack.packages:
            continue
        if name in FOR_SOME:
            warnings.append(f"the image has no {name} ({version} in containers/versions.env): {FOR_SOME[name]} fails")
        else:
            problems.append(Problem(f"the image has no {name} ({version})", file=image, key="container.image", fix=fix))
    return problems[:_MOST], [*warnings, *differences][:_MOST]


def lacking(stack: Stack, train: Mapping[str, Any], image: str, *, gpus: bool) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for and an image does not have."""
    problems = []
    for key, value, packages in kernels.needed(train, gpus=gpus):
        if not any(name.lower() in stack.packages for name in packages):
            text = f"{value} needs {' or '.join(packages)}, and {image} has none"
            problems.append(Problem(text, key=key, fix=f"install {packages[0]} there, or leave {key} out"))
    return problems


def own() -> Stack:
    """What this Python has installed."""
    found = inventory()
    return Stack(str(found["python"]), found["packages"])


def trackers(train: Mapping[str, Any]) -> list[Problem]:
    """The trackers of a recipe's ``train`` section that this Python lacks."""
    return lacking(own(), train, "this Python", gpus=False) if train.get("report_to") not in (None, [], "none", "wandb") else []


def _differences(stack: Stack, wanted: Mapping[str, str]) -> list[str]:
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    return [
        f"the image has {name} {stack.packages[name]}, containers/versions.env {version}"
        for name, version in sorted(wanted.items())
        if name in stack.packages and stack.packages[name].partition("+")[0] != version
    ]


def record(stack: Stack, pinned: pins.Pins) -> dict[str, Any]:
    """For run.json: the Python, and the packages that are pinned."""
    return {"python": stack.python, "packages": {n: v for n, v in sorted(stack.packages.items()) if n in pinned[pins.PY]}}
