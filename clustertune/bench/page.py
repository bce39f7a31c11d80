"""A benchmark's document as Markdown, in the form of docs/results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertune.resolve.distribution import format_distribution

NONE = "-"
_TEMPLATE = Path(__file__).with_name("page.md.jinja")


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table; ``-`` where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def gib(value: Any) -> str:
    """A size in GiB."""
    return f"{number(value)} GiB" if value is not None else NONE


def percent(value: Any) -> str:
    """A share."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else NONE


def interval(found: Mapping[str, Any] | None) -> str:
    """A median with its 95 % interval."""
    if not found or found["median"] is None:
        return NONE
    around = "too few pairs for an interval" if found["low"] is None else f"95 % {found['low']:.3f} to {found['high']:.3f}"
    return f"{found['median']:.3f} ({around}, {found['n']} pairs)"


def headline(body: Mapping[str, Any]) -> str:
    """Each peer, and the median ratio of step times, ours over theirs."""
    lines = []
    for one in body["peers"]:
        lines.append(f"{one['peer']}: {interval(one['pairs']['wall'])}" if one["pairs"] else f"{one['peer']}: no result")
    return f"Seconds of a step, clustertune over {'; over '.join(lines)}."


def render(body: Mapping[str, Any], recipe_file: str) -> str:
    """The page. ``recipe_file``: the resolved recipe beside it."""
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 - it makes Markdown
    filters: dict[str, Callable[[Any], Any]] = {"number": number, "gib": gib, "percent": percent, "interval": interval}
    filters |= {"distribution": format_distribution, "command": lambda words: shlex.join(map(str, words))}
    environment.filters |= filters
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(body, headline=headline(body), recipe_file=recipe_file)
