"""The tables of ``plan`` that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustertune.cluster.schema import Cluster
from clustertune.console import make_table
from clustertune.host.system import GIB
from clustertune.plan import explanation
from clustertune.plan.advise import ALIKE, Advice, CostedCandidate, reasons
from clustertune.plan.calibration import Fit, unexplained
from clustertune.plan.constants import quantity
from clustertune.plan.explanation import memory_parts
from clustertune.plan.predict import Plan

BAR = 40
"""Characters of the bar of a step."""
MARKS = {
    "compute": "#",
    "exposed_communication": "~",
    "pipeline_bubble": ".",
    "optimizer": "o",
    "evaluation": "e",
    "checkpoint": "c",
    "load": "l",
    "generation": "g",
}


def render(plan: Plan, headline: str, bill: Mapping[str, str], console: Console) -> None:
    """Print a plan: answers, the bar of a step, memory by part, the bottleneck, the assumptions.

    ``headline``: what the whole run takes, in a few words; ``bill``: the rows that say it with its parts.
    """
    console.print(_answers(plan, headline, bill))
    _bar(plan, console)
    console.print(_memory(plan))
    console.print(Text(explanation.bottleneck(plan), style="bold"), soft_wrap=True)
    console.print()
    for line in explanation.assumptions(plan):
        console.print(Text(f"- {line}"), soft_wrap=True)


def _answers(plan: Plan, headline: str, bill: Mapping[str, str]) -> Table:
    title = f"{plan.resolved.name} on {plan.machine.name}" + (f": {headline}" if headline else "")
    table = make_table("", "", title=title, text_columns=2)
    for name, value in _rows(plan, bill).items():
        table.add_row(Text(name), Text(value, style="red" if name == "fits" and not plan.fits else ""))
    return table


def _rows(plan: Plan, bill: Mapping[str, str]) -> dict[str, str]:
    used, seconds, low, high = plan.strategy, plan.step.seconds, plan.low, plan.high
    needed, tensors, usable = (size / GIB for size in (plan.needed, plan.peak.bytes, plan.machine.usable_bytes))
    training, evaluation = plan.training_peak, plan.evaluation_peak
    peaks = f"training {training.bytes / GIB:.1f} GiB of tensors ({training.name})"
    peaks += f", evaluation {evaluation.bytes / GIB:.1f} GiB" if evaluation else ", no evaluation"
    parts = f"{tensors:.1f} tensors + {needed - tensors:.1f} CUDA and fragmentation"
    around = f"80 % range {quantity(seconds * low, 's')} to {quantity(seconds * high, 's')}"
    rows = {
        "fits": f"{'yes' if plan.fits else 'NO'}: {needed:.1f} of {usable:.1f} GiB per GPU ({parts})",
        "memory": peaks,
        "step": f"{quantity(seconds, 's')} per step ({around}), {plan.shape.step_tokens:,} tokens per step",
        "throughput": f"{plan.tokens_per_s:,.0f} tokens/s, {plan.tokens_per_s / used.world_size:,.0f} per GPU",
        "utilisation": f"MFU {plan.utilisation(hardware=False):.1%}, HFU {plan.utilisation(hardware=True):.1%}",
        "training": f"unknown: {plan.schedule.steps_why}",
    }
    if plan.hours is not None:
        hours = f"{plan.hours:.2f} h ({plan.hours * low:.2f} to {plan.hours * high:.2f})"
        rows["training"] = f"{hours}, {plan.schedule.steps:,} steps, on {plan.gpus} x {plan.machine.gpu}"
    rows |= bill
    rows["host memory"] = f"{plan.host_bytes / GIB:,.0f} of {plan.machine.host_bytes / GIB:,.0f} GiB per node"
    disk = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in plan.schedule.disk.items())
    if saves := plan.schedule.checkpoints:
        disk += f"; {saves} save{'s' * (saves > 1)}: {saves * plan.schedule.checkpoint_bytes / 1e9:,.1f} GB"
        if plan.hours:
            disk += f", {saves * plan.schedule.save.value / 36 / plan.hours:.1f} % of the time"
        if plan.schedule.interval is not None:
            disk += f", one every {plan.schedule.interval.value:,.0f} s ({plan.schedule.save_steps:,} steps)"
    return rows | {"storage": disk}


def _bar(plan: Plan, console: Console) -> None:
    seconds = {name: value for name, value in plan.parts().items() if value > 0}
    total = sum(seconds.values())
    shares = {name: value / total for name, value in seconds.items()}
    line = "".join(MARKS[name] * round(share * BAR) for name, share in shares.items())
    console.print(Text(f"share of time  [{line[:BAR]:<{BAR}}]"))
    legend = ", ".join(
        f"{MARKS[n]} {n.replace('_', ' ')} {seconds[n]:.3g} s ({shares[n]:.0%})" for n in seconds if shares[n] >= 0.005
    )
    console.print(Text(f"per step       {legend}"), soft_wrap=True)


def _memory(plan: Plan) -> Table:
    table = make_table("part", "GiB", title=f"GPU memory at its peak: {plan.peak.name}")
    for name, value in memory_parts(plan).items():
        if value >= 0.005:
            table.add_row(name, f"{value:.2f}")
    return table


def compare(one: Plan, other: Plan, bills: Sequence[Mapping[str, str]], console: Console) -> None:
    """Two plans side by side, and what makes the difference."""
    table = make_table("", one.resolved.name, other.resolved.name, text_columns=3)
    rows = [_rows(plan, bill) for plan, bill in zip((one, other), bills, strict=True)]
    for name in rows[0] | rows[1]:
        table.add_row(*map(Text, (name, rows[0].get(name, ""), rows[1].get(name, ""))))
    before, after = one.parts(), other.parts()
    for name in before | after:
        seconds = (f"{parts.get(name, 0.0):.3g}" for parts in (before, after))
        table.add_row(f"{name.replace('_', ' ')}, s per step", *seconds)
    console.print(table)
    ratio = one.step.seconds / other.step.seconds
    faster = other if ratio > 1 else one
    # A step of two recipes may hold different numbers of tokens: the rate decides.
    rate = other.tokens_per_s / one.tokens_per_s
    text = f"{faster.resolved.name}: a step takes {min(ratio, 1 / ratio):.0%} of the time"
    text += f"; {other.resolved.name} has {rate:.2f} x the tokens per second of {one.resolved.name}"
    console.print(Text(text), soft_wrap=True)


def clusters(recipe: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """A recipe on several clusters, a row each; what keeps it from one below the table."""
    fitting, others = ([row for row in rows if (row[2] == "yes") == fits] for fits in (True, False))
    if fitting:
        table = make_table(*columns, title=f"{recipe}, the cheapest first", text_columns=3)
        for row in fitting:
            table.add_row(*map(Text, row))
        console.print(table)
    for row in others:
        console.print(Text(f"does not fit: {row[0]} ({row[1]}): {row[-1]}"), soft_wrap=True)


ROWS = 5
"""Strategies that the table of ``--advise`` shows; ``--json`` has all."""


def advice(
    advised: Advice, overrides: Mapping[str, Sequence[str]], plan: Plan, console: Console, *, recipe: str, cluster: Cluster,
    money: Callable[[float | None], float | None], currency: str,
) -> None:  # fmt: skip
    """The winner with what it saves, the best of the others, what cannot be started here, and what nearly fits.

    ``money``: of a training's GPU-hours, what the whole run costs in ``currency``; None where that is not known.
    """
    local = [option for option in advised.fitting if option.starts(cluster)]
    elsewhere = [option for option in advised.fitting if not option.starts(cluster)]
    why = {option.candidate.family: text for option, text in reasons(replace(advised, fitting=[*local, *elsewhere]))}
    if local:
        winner = local[0]
        console.print(Text(f"{winner.candidate.family}: {_worth(winner, plan, money, currency)}", style="bold"), soft_wrap=True)
        console.print(Text(" ".join(["clustertune plan", recipe, *overrides[winner.candidate.family]])), soft_wrap=True)
        console.print()
        why[winner.candidate.family] = winner.why
    title = f"{advised.searched:,} strategies searched, by {advised.goal}"
    table = make_table(
        "strategy", "nodes", "micro batch", "recomputed", "s per step", "hours", currency or "cost", "GiB", title=title
    )
    shown = [*local[:ROWS], *elsewhere[:1]]
    for index, option in enumerate(shown):
        if index == len(local[:ROWS]):
            table.add_section()
        used, spent = option.strategy, money(_gpu_hours(option))
        hours = "" if option.hours is None else _hours(option.hours)
        name = option.candidate.family if option.starts(cluster) else f"needs Megatron image: {option.candidate.family}"
        table.add_row(
            name, str(used.nodes), f"{used.micro_batch} x {used.accumulation}", f"{used.recompute.share:.0%}",
            f"{option.step_s:.3g}", hours, "" if spent is None else f"{spent:,.2f}",
            f"{option.needed / GIB:.1f}",
        )  # fmt: skip
    if advised.fitting:
        console.print(table)
    for option in shown:
        console.print(Text(f"- {option.candidate.family}: {why[option.candidate.family]}"), soft_wrap=True)
    for text in dict.fromkeys(option.quality for option in shown if option.quality):
        console.print(Text(f"Quality: {text}."), soft_wrap=True)
    if elsewhere:
        text = f"Megatron-Core runs in NVIDIA's image, which {cluster.name} does not name (container.megatron)."
        console.print(Text(text), soft_wrap=True)
    for option in advised.losing[: 1 if local else ROWS]:
        console.print(Text(f"does not fit: {option.candidate.family}: {option.why}"), soft_wrap=True)
    if left := len(local[ROWS:]) + len(elsewhere[1:]) + len(advised.losing[1 if local else ROWS :]):
        console.print(Text(f"and {left} more: --json lists all"))
    if not local:
        console.print(Text("No strategy that this cluster can start fits: try more nodes (--nodes), or another GPU."))


def _gpu_hours(option: CostedCandidate) -> float | None:
    return None if option.hours is None else option.hours * option.strategy.gpus


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _worth(option: CostedCandidate, plan: Plan, money: Callable[[float | None], float | None], currency: str) -> str:
    """An option's hours and money, and what it saves of the recipe's."""
    seconds, spent = option.step_s, money(_gpu_hours(option))
    paid = money(None if plan.hours is None else plan.hours * plan.gpus)
    worth = f"{quantity(seconds, 's')} a step" if option.hours is None else f"{_hours(option.hours)} h"
    worth += f" of training; the whole run costs {spent:,.2f} {currency}" if spent is not None else " of training"
    if not plan.fits:
        return f"{worth}; the recipe itself does not fit"
    ratio = (plan.step.seconds if plan.hours is None or option.hours is None else plan.hours) / (option.hours or seconds)
    if plan.hours is None and option.hours is not None:
        return worth
    if abs(ratio - 1) < ALIKE - 1:
        return f"{worth}; as fast as the recipe"
    if ratio < 1:
        return f"{worth}; {1 / ratio:.2f} times the recipe's time"
    if option.hours is None or plan.hours is None:
        return f"{worth}; {ratio:.2f} x as fast as the recipe"
    saved = f" and {paid - spent:,.2f} {currency}" if paid is not None and spent is not None and paid > spent else ""
    saved = f"saves {_hours(plan.hours - option.hours)} h{saved} of the recipe's {_hours(plan.hours)} h"
    return f"{worth}; {saved} ({ratio:.2f} x as fast)"


def calibration(fitted: Fit, console: Console) -> None:
    """What runs taught: errors before and after, and what they say nothing of."""
    table = make_table("run", "measured s", "before s", "error", "after s", "error")
    for run in fitted.runs:
        both = ((f"{at:.3g}", f"{at / run.measured_s - 1:+.1%}") for at in (run.before_s, run.after_s))
        table.add_row(Text(run.name), f"{run.measured_s:.3g}", *(cell for pair in both for cell in pair))
    console.print(table)
    for name, value in fitted.values.items():
        console.print(Text(f"{name.replace('_', ' ')}: {value:.3f} (+- {fitted.deviation[name]:.0%})"))
    far = unexplained(fitted)
    if far:
        named = ", ".join(f"{name} ({error:+.0%})" for name, error in far.items())
        text = f"not explained: {named}. These runs contradict each other or the cluster file: plans are no surer than that"
        console.print(Text(text), soft_wrap=True)
    if fitted.left:
        names = ", ".join(name.replace("_", " ") for name in fitted.left)
        console.print(Text(f"not identified by these runs, left as they were: {names}"), soft_wrap=True)
