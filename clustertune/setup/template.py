"""Fills in the templates below ``ops/``, in which each setting stands with its reason."""

from __future__ import annotations

import shlex

from clustertune.tree import ROOT


def render(name: str, /, **values: object) -> str:
    """The text of ``ops/NAME.j2``, filled in; the filter ``quote`` makes a shell word."""
    import jinja2

    # Not HTML: the schema of the cluster file lets no value hold blanks or line ends.
    environment = jinja2.Environment(  # noqa: S701
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string((ROOT / "ops" / f"{name}.j2").read_text(encoding="utf-8")).render(values)
