"""A recipe that ``resolve`` refuses, as findings: keys of another release, batches that do not divide."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.rule import FAIL, RECIPE, REFUSED, WARN, Seen, rule
from clustertune.doctor.recipe_context import Context
from clustertune.errors import UserError


@rule("recipe-refused", REFUSED)
def refused(error: UserError) -> Iterator[Seen]:
    """Looks at: recipe and distribution against the installed dataclasses

    Why: submit and train refuse it: a key of another release, values that exclude each other, a batch that does not divide
    Fix: fix it: clustertune show RECIPE
    See: https://github.com/huggingface/trl/pull/4983
    """
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        yield Seen(FAIL, problem.message, problem.fix or "", where)


@rule("recipe-doubtful", RECIPE)
def doubtful(context: Context) -> Iterator[Seen]:
    """Looks at: what resolving the recipe warns of

    Why: it is allowed, and probably not meant
    Fix: look whether it is meant: clustertune show RECIPE
    See: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    for warning in context.resolved.warnings:
        if not warning.startswith("data."):  # a missing input has a rule of its own
            yield Seen(WARN, warning)
