"""A recipe that ``resolve`` refuses, as findings: keys of another release, batches that do not divide."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.rule import FAIL, WARN, Finding, Rule, finding
from clustertune.doctor.recipe_context import Context
from clustertune.errors import UserError

REFUSED = Rule(
    "recipe-refused",
    "recipe and distribution against the installed dataclasses",
    "submit and train refuse it: a key of another release, values that exclude each other, a batch that does not divide",
    "https://github.com/huggingface/trl/pull/4983",
)
DOUBTFUL = Rule(
    "recipe-doubtful",
    "what resolving the recipe warns of",
    "it is allowed, and probably not meant",
    "https://huggingface.co/docs/accelerate/usage_guides/fsdp",
)

RULES = (REFUSED, DOUBTFUL)


def refused(error: UserError) -> list[Finding]:
    """A finding for each problem of a recipe that cannot be resolved."""
    found = []
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        found.append(finding(REFUSED, FAIL, problem.message, problem.fix or "fix it: clustertune show RECIPE", where=where))
    return found


def check(context: Context) -> Iterator[Finding]:
    """The warnings of a recipe that could be resolved; a missing input has a rule of its own."""
    for warning in context.resolved.warnings:
        if not warning.startswith("data.input"):
            yield finding(DOUBTFUL, WARN, warning, "look whether it is meant: clustertune show RECIPE", where=context.name)
