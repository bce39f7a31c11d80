"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clustertune.check import report
from clustertune.check.rule import FAIL, LOOKS, MACHINE, NODES, RECIPE, REFUSED, SCRIPT, WARN, Finding, Rule, Seen, checks, rule
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.errors import UserError


def recipe_findings(context: RecipeContext) -> list[Finding]:
    """What the rules of recipe, stack, data and run folder find. Reads headers and small files only; imports no torch."""
    return list(report.run(checks(RECIPE), context, context.resolved.name))


def recipe_rules() -> tuple[Rule, ...]:
    """The rules of recipe, stack, data and run folder."""
    return tuple(one.rule for one in checks(RECIPE, REFUSED))


def all_rules() -> tuple[Rule, ...]:
    """Every rule of the doctor; imports what the recipe's rules need."""
    return (*report.machine_rules(), *recipe_rules(), *script_rules())


def script_rules() -> tuple[Rule, ...]:
    """The rules of ``doctor sbatch``."""
    return tuple(one.rule for one in checks(SCRIPT))


# --- recipe refused -------------------------------------------------------------------------------------------------------

# A recipe that ``resolve`` refuses, as findings: keys of another release, batches that do not divide.


@rule
def recipe_refused(error: UserError) -> Iterator[Seen]:
    """Looks at: recipe and distribution against the installed dataclasses

    Why: submit and train refuse it: a key of another release, values that exclude each other, a batch that does not divide
    Fix: fix it: clustertune show RECIPE
    See: https://github.com/huggingface/trl/pull/4983
    """
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        yield Seen(FAIL, problem.message, problem.fix or "", where)


def recipe_doubtful(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: warnings from resolving the recipe

    Why: it is allowed, but probably unintended
    Fix: change it, or ignore the rule if it is intended; clustertune show RECIPE lists every value
    See: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    for warning in context.resolved.warnings:
        if not warning.startswith("data."):  # a missing input has a rule of its own
            yield Seen(WARN, warning)


# --- page -----------------------------------------------------------------------------------------------------------------


def render() -> str:
    """The text of docs/doctor.md, which lists the rules. Imports what the recipe's rules need."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 - no HTML
    template = environment.from_string(Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8"))
    machine, nodes = ([one.rule for one in checks(*subjects)] for subjects in ((MACHINE,), (NODES, LOOKS)))
    titles = ("Each machine", "Between the nodes of a job", "Recipe, stack, data and runs", "Batch scripts")
    return template.render(sections=zip(titles, (machine, nodes, recipe_rules(), script_rules()), strict=True))
