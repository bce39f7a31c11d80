"""A benchmark's document as Markdown, in the form of docs/results."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.config.distribution import format_distribution

NONE = "-"


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


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(' --- ' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def render(body: Mapping[str, Any], recipe_file: str) -> str:
    """The page. ``recipe_file``: the resolved recipe beside it."""
    lines = [f"# {body['recipe']}{' --tiny' if body['tiny'] else ''}: speed and memory", ""]
    lines += [f"**{headline(body)}**", ""] if body["peers"] else []
    lines += [*_head(body, recipe_file), ""]
    for title, part in (
        ("Steps", _steps(body)),
        ("Against", _against(body)),
        ("The planner", _plan(body)),
        ("Communication", _communication(body)),
        ("Start and ends", _around(body)),
        ("The whole recipe", _whole(body)),
    ):
        rows = list(part)
        if rows:
            lines += [f"## {title}", "", *rows, ""]
    lines += ["## Notes", "", *(f"- {note}" for note in body["notes"]), ""]
    return "\n".join(lines)


def _head(body: Mapping[str, Any], recipe_file: str) -> Iterator[str]:
    hardware, schedule = body["hardware"], body["course"]
    commit = body["commit"] or {}
    where = f"{hardware['nodes']} node{'s' if hardware['nodes'] > 1 else ''}, {hardware['ranks']} ranks"
    gpu = f"{hardware['gpu']}, " if hardware["gpu"] else ""
    yield (
        f"{schedule['steps']} steps behind {schedule['warmup']} of warm-up, "
        f"{schedule['rounds']} round{'s' if schedule['rounds'] > 1 else ''}."
    )
    yield ""
    yield f"- date: {body['date']}"
    yield f"- hardware: {gpu}{where}; {hardware['cpu']}, {hardware['cores']} cores, {number(hardware['memory_gib'])} GiB"
    yield f"- commit: {(commit.get('commit') or 'unknown')[:12]}{' with changes' if commit.get('dirty') else ''}"
    yield "- versions: " + ", ".join(f"{name} {version}" for name, version in body["versions"].items() if version != "absent")
    image = body["image"] or {}
    yield f"- image: {image.get('image', 'none')}" + (f", sha256 {image['sha256']}" if image.get("sha256") else "")
    yield f"- recipe: [{recipe_file}]({recipe_file}), sha256 {body['resolved']['sha256'][:16]}"
    if changed := body.get("overrides"):
        yield f"- overrides: `{shlex.join(changed)}`"
    yield f"- distribution: {format_distribution(body['distributed']) or 'unknown'}"
    if body["command"]:
        yield f"- command: `{shlex.join(map(str, body['command']))}`"


def _steps(body: Mapping[str, Any]) -> Iterator[str]:
    ours, used = body["ours"], body["utilisation"]
    peak = ours["peak"]
    rate, step = ours["tokens_per_s_per_gpu"], ours["step_s"]
    rows = [
        [name, *(number(found[key]) for key in ("median", "mean", "stdev", "min", "max"))]
        for name, found in (("seconds of a step", step), ("tokens/s per rank", rate))
    ]
    yield from table(["figure", "median", "mean", "std. dev.", "min", "max"], rows)
    yield ""
    rows = [
        ["computed tokens/s per rank (padding too)", number(ours["computed_tokens_per_s_per_gpu"])],
        ["labelled tokens/s per rank", number(ours["labelled_tokens_per_s_per_gpu"])],
        ["padding", percent(ours["padding_share"])],
        ["MFU", percent(used["mfu"])],
        ["HFU", percent(used["hfu"])],
        ["peak memory of tensors, GPU", gib(peak["allocated_gib"])],
        ["peak of the allocator, GPU", gib(peak["reserved_gib"])],
        ["peak resident set of a rank", gib(peak["rss_gib"])],
        ["of all ranks", gib(peak["rss_all_ranks_gib"])],
    ]
    yield from table(["figure", "value"], rows)
    yield ""
    yield f"MFU and HFU: {used['why']}."


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


def _against(body: Mapping[str, Any]) -> Iterator[str]:
    for one in body["peers"]:
        yield from _one_peer(body, one)
        yield ""


def _one_peer(body: Mapping[str, Any], against: Mapping[str, Any]) -> Iterator[str]:
    if against["measured"] is None:
        yield f"`{against['peer']}`, {against['what']}: no result. {against['failed'] or ''}"
        return
    ours, theirs, ratio = body["ours"], against["measured"], against["ratio"]
    kind = "allocated_gib" if ours["peak"]["allocated_gib"] else "rss_gib"
    rows = [
        [
            "tokens/s per rank",
            *(number(o["tokens_per_s_per_gpu"]["mean"]) for o in (ours, theirs)),
            number(ratio["tokens_per_s"]),
        ],
        [
            "computed tokens/s per rank",
            *(number(o["computed_tokens_per_s_per_gpu"]) for o in (ours, theirs)),
            number(ratio["computed_tokens_per_s"]),
        ],
        ["seconds of a step, median", *(number(o["step_s"]["median"]) for o in (ours, theirs)), number(ratio["step_s"])],
        ["standard deviation", *(number(o["step_s"]["stdev"]) for o in (ours, theirs)), NONE],
        ["tokens a step", *(number(o["tokens_per_step"]) for o in (ours, theirs)), NONE],
        ["padding", *(percent(o["padding_share"]) for o in (ours, theirs)), NONE],
        ["peak memory, GiB", *(number(o["peak"][kind]) for o in (ours, theirs)), number(ratio["peak_memory"])],
    ]
    pairs = against["pairs"]
    how = "both alive, a step each in turn" if pairs["interleaved"] else "whole trainings in turn"
    yield f"Against `{against['peer']}`, {against['what']}: {how} ({body['course']['rounds']} of each)."
    yield f"Ratio of step times by pairs: {interval(pairs['wall'])}; of CPU time: {interval(pairs['cpu'])}."
    yield ""
    yield from table(["figure", "clustertune", "peer", "ratio"], rows)


def _plan(body: Mapping[str, Any]) -> Iterator[str]:
    plan = body["plan"]
    if "unknown" in plan:
        yield f"No plan: {plan['unknown']}"
        return
    yield f"`clustertune plan` for {plan['cluster']}, made before it learnt from this run."
    yield ""
    rows = [[key, number(row["plan"]), number(row["measured"]), number(row["ratio"])] for key, row in plan["rows"].items()]
    yield from table(["figure", "planned", "measured", "measured / planned"], rows)


def _communication(body: Mapping[str, Any]) -> Iterator[str]:
    seen = body["ours"]["communication"]
    if not seen:
        return
    hidden, whole, busy = (percent(seen[key]) for key in ("exposed_share", "communication_share", "busy_share"))
    more = f"{seen['steps']} more step{'s' if seen['steps'] > 1 else ''}"
    yield f"Not hidden: {hidden} of a step; communication in all {whole}, computing {busy}."
    yield f"Method: {seen['method']}; measured on {more}."
    yield ""
    rows = [[f"`{row['name']}`", number(row["seconds"]), number(row["calls"])] for row in seen["top"][:10]]
    yield from table(["operation", "seconds a step", "calls a step"], rows)


def _around(body: Mapping[str, Any]) -> Iterator[str]:
    ends, parts = body["ends"], body["startup_s"]
    rows = [[f"start-up: {name}", f"{number(seconds)} s"] for name, seconds in parts.items()]
    rows += [["process start to first step", f"{number(body['ours']['start_s'])} s"]]
    rows += [["steps of warm-up", ", ".join(number(s) for s in body["ours"]["warmup_s"]) + " s"]]
    if ends["evaluation_s"] is not None:
        rows += [["one evaluation", f"{number(ends['evaluation_s'])} s"]]
    if ends["checkpoint_s"] is not None:
        rows += [["one checkpoint", f"{number(ends['checkpoint_s'])} s, {number(ends['checkpoint_gb'])} GB"]]
    yield from table(["part", "time"], rows)


def _whole(body: Mapping[str, Any]) -> Iterator[str]:
    ahead = body["projection"]
    if ahead["hours"] is None:
        yield f"Not known: {ahead['why']}."
        return
    yield f"{ahead['steps']:,} steps ({ahead['why']}) take {number(ahead['hours'])} h at the median step."
    if ahead["gpu_hours"] is not None:
        yield f"GPU-hours: {number(ahead['gpu_hours'])}."
    if cost := ahead["cost"]:
        kinds = [
            f"{number(cost[kind])} {cost['currency']} {kind.replace('_', ' ')}" for kind in ("on_demand", "spot") if cost[kind]
        ]
        yield f"Price: {', '.join(kinds)} ({cost['source']}, {cost['date']})."
