"""Packages that an image has, held against containers/versions.env: which package is missing, and which differs."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.containers import lock_file, pins
from clustertune.errors import Problem, UserError
from clustertune.launch.inventory import MARK, inventory
from clustertune.process import captured
from clustertune.resolve import kernels
from clustertune.tree import ROOT

MODULE = "clustertune.launch.inventory"
INVENTORY_SECONDS = 300.0
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
        done = captured(command, INVENTORY_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"the container did not answer within {INVENTORY_SECONDS:.0f} s", file=image, fix=fix) from None
    except OSError as error:
        text = f"the container does not start: {error.filename or command[0]}: {error.strerror}"
        raise UserError(text, file=image, fix=fix) from None
    stack = parse(done.stdout)
    if stack is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()][-4:]
        text = (
            f"no Python 3.8 or later answers in the image (exit code {done.returncode}): {' | '.join(lines)[:600] or 'no word'}"
        )
        raise UserError(text, file=image, key="container.image", fix=fix)
    return stack


def too_old(python: str) -> str:
    """What is wrong with a Python that ``requires-python`` of the project does not allow; empty for another."""
    required = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    match = re.search(r">=\s*([0-9]+)\.([0-9]+)", required)
    if not match or tuple(map(int, re.findall(r"\d+", python)[:2])) >= (int(match[1]), int(match[2])):
        return ""
    return f"Python {python}, and clustertune needs {match[1]}.{match[2]} or later"


def judge(stack: Stack, pinned: pins.Pins, image: str) -> tuple[list[Problem], list[str]]:
    """What keeps a job from running in an image, and what to warn of: one line for each difference.

    An image of the reference stack is whole in its own way: it is held against its own pins where these fit better.
    """
    problems, warnings = [], []
    fix = "build it from this checkout (make build-sif), or install it in the image"
    if text := too_old(stack.python):
        problems.append(Problem(text, file=image, key="container.image", fix=fix))
    stack_pins = {**pinned[pins.PY]}
    reference = {**stack_pins, **{name: version for name, version in pinned[pins.REF].items() if name in stack_pins}}
    differences = min((_differences(stack, expected) for expected in (stack_pins, reference)), key=len)
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


def not_built(train: Mapping[str, Any], in_image: Sequence[str] = ()) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for, and that neither an image of this checkout can have nor this
    Python has: what is known before the queue, where the image itself is first asked in the job. ``in_image``: what the
    cluster file says that its own image has."""
    if not (asked := list(kernels.needed(train, gpus=True))):
        return []
    known, here = lock_file.locked_packages().union(name.lower() for name in in_image), own().packages
    problems = []
    for key, value, packages in asked:
        if not any(name.lower() in known or name.lower() in here for name in packages):
            text = f"{value} needs {' or '.join(packages)}, which no lock in containers/ has"
            fix = f"leave {key} out or take another value; or, where an image of your own has {packages[0]}, "
            fix += f"container.packages: [{packages[0]}] in the cluster file"
            problems.append(Problem(text, key=key, fix=fix))
    return problems


def own() -> Stack:
    """What this Python has installed."""
    listed = inventory()
    return Stack(str(listed["python"]), listed["packages"])


def lacking_here(train: Mapping[str, Any], *, gpus: bool) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for and this Python lacks."""
    if not any(kernels.needed(train, gpus=gpus)):
        return []
    return lacking(own(), train, "this Python", gpus=gpus)


def _differences(stack: Stack, pinned: Mapping[str, str]) -> list[str]:
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    return [
        f"the image has {name} {stack.packages[name]}, containers/versions.env {version}"
        for name, version in sorted(pinned.items())
        if name in stack.packages and stack.packages[name].partition("+")[0] != version
    ]


def record(stack: Stack, pinned: pins.Pins) -> dict[str, Any]:
    """For run.json: the Python, and the packages that are pinned."""
    return {"python": stack.python, "packages": {n: v for n, v in sorted(stack.packages.items()) if n in pinned[pins.PY]}}
