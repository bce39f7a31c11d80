"""``docs/results/planner.md``: the grade of the planner as a page, written by ``make planner-grade``."""

from __future__ import annotations

import sys
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from clustertune.plan.constants import Constants, number
from tools.planner_grade.data import case, published_runs
from tools.planner_grade.grade import RUN, alternatives, floors, flows
from tools.planner_grade.held_out import GROUPS, coverage, fitted_values, shipped

_TEMPLATE = Path(__file__).with_name("page.md.jinja")


def page() -> str:
    """The whole page as Markdown."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701 - it makes Markdown
    environment.filters["number"] = number
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        flows=flows(), floor=floors(), options=alternatives(),
        step_s=case(published_runs()[RUN]).step(Constants()).seconds,
        groups=list(GROUPS), coverage=coverage(), shipped=shipped(), fitted=fitted_values(), constants=Constants(),
    )  # fmt: skip


def main() -> None:
    """Print the page, and write it where the first argument says."""
    text = page()
    sys.stdout.write(text)
    for file in sys.argv[1:]:
        Path(file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
