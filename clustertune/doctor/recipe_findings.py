"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clustertune.check import report
from clustertune.check.rule import (
    FAIL,
    MACHINE,
    NODES,
    RECIPE,
    REFUSED,
    RULE_ERRORS,
    SCRIPT,
    WARN,
    Finding,
    Rule,
    Rules,
    Seen,
    checks,
)
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.errors import UserError

RULES = Rules(RECIPE, __file__)


def recipe_findings(context: RecipeContext) -> list[Finding]:
    """What the rules of recipe, stack, data and run folder find. Reads headers and small files only; imports no torch."""
    return list(report.run(checks(RECIPE), context, context.resolved.name))


def all_rules() -> tuple[Rule, ...]:
    """Every rule of the doctor; imports what the recipe's rules need."""
    return tuple(one.rule for one in checks(MACHINE, NODES, RULE_ERRORS, RECIPE, REFUSED, SCRIPT))


@RULES("recipe-refused", REFUSED)
def recipe_refused(error: UserError) -> Iterator[Seen]:
    """A recipe that ``resolve`` refuses: keys of another release, batches that do not divide."""
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        yield Seen(FAIL, problem.message, problem.fix or "", where)


@RULES("recipe-warning")
def recipe_warning(context: RecipeContext) -> Iterator[Seen]:
    """Warnings from resolving the recipe."""
    for warning in context.resolved.warnings:
        if not warning.startswith("data."):  # a missing input has a rule of its own
            yield Seen(WARN, warning)


def render() -> str:
    """The text of docs/doctor.md, which lists the rules. Imports what the recipe's rules need."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 - no HTML
    template = environment.from_string(Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"))
    sections = {
        "Each machine": (MACHINE,),
        "Between the nodes of a job": (NODES, RULE_ERRORS),
        "Recipe, stack, data and runs": (RECIPE, REFUSED),
        "Batch scripts": (SCRIPT,),
    }
    return template.render(sections=[(title, [one.rule for one in checks(*kinds)]) for title, kinds in sections.items()])
