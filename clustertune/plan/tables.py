"""The tables of ``plan`` that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustertune.config.hardware import Price
from clustertune.plan import words
from clustertune.plan.advise import Advice, best_started, reasons
from clustertune.plan.calibration import Fit, unexplained
from clustertune.plan.document import cost, memory_parts
from clustertune.plan.predict import GIB, Plan
from clustertune.plan.term import quantity

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
}


def render(plan: Plan, price: Price | None, console: Console) -> None:
    """Print a plan: answers, the bar of a step, memory by part, the bottleneck, the assumptions."""
    console.print(_answers(plan, price))
    _bar(plan, console)
    console.print(_memory(plan))
    console.print(Text(words.bottleneck(plan), style="bold"), soft_wrap=True)
    console.print()
    for line in words.assumptions(plan):
        console.print(Text(f"- {line}"), soft_wrap=True)


def _table(*columns: str, title: str | None = None, words: int = 1) -> Table:
    """A plain table, whose first columns hold ``words`` and the others numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < words else "right", overflow="fold")
    return table


def _answers(plan: Plan, price: Price | None) -> Table:
    table = _table("", "", title=f"{plan.resolved.name} on {plan.machine.name}", words=2)
    for name, value in _rows(plan, price).items():
        table.add_row(Text(name), Text(value, style="red" if name == "fits" and not plan.fits else ""))
    return table


def _rows(plan: Plan, price: Price | None) -> dict[str, str]:
    used, seconds, low, high = plan.strategy, plan.step.seconds, plan.low, plan.high
    tensors, usable = plan.peak.bytes / GIB, plan.machine.usable_bytes / GIB
    around = f"four of five runs: {seconds * low:.3g} to {seconds * high:.3g}"
    found = {
        "fits": f"{'yes' if plan.fits else 'NO'}: {plan.needed / GIB:.1f} of {usable:.1f} GiB per GPU (tensors {tensors:.1f})",
        "step": f"{quantity(seconds, 's')} ({around}), {plan.shape.step_tokens:,} tokens",
        "throughput": f"{plan.tokens_per_s:,.0f} tokens/s, {plan.tokens_per_s / used.world_size:,.0f} per GPU",
        "utilisation": f"MFU {plan.utilisation(hardware=False):.1%}, HFU {plan.utilisation(hardware=True):.1%}",
        "time": f"unknown: {plan.schedule.steps_why}",
    }
    if plan.hours is not None:
        hours = f"{plan.hours:.2f} h ({plan.hours * low:.2f} to {plan.hours * high:.2f})"
        found["time"] = f"{hours}, {plan.schedule.steps:,} steps"
        found["GPU-hours"] = f"{plan.hours * used.world_size:,.1f} on {used.world_size} x {plan.machine.gpu}"
    found["cost"] = _money(plan, price)
    found["host memory"] = f"{plan.host_bytes / GIB:,.0f} of {plan.machine.host_bytes / GIB:,.0f} GiB per node"
    disk = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in plan.schedule.disk.items())
    if saves := plan.schedule.checkpoints:
        disk += f"; {saves} save{'s' * (saves > 1)}: {saves * plan.schedule.checkpoint_bytes / 1e12:,.2f} TB"
        if plan.hours:
            disk += f", {saves * plan.schedule.checkpoint.value / 36 / plan.hours:.1f} % of the time"
    return found | {"storage": disk}


def _money(plan: Plan, price: Price | None) -> str:
    money = cost(plan, price)
    if price is None:
        return f"no price of {plan.machine.gpu} in ops/prices.yaml"
    if money is None:
        return "unknown, as the time is"
    words_ = [
        f"{money[key]:,.2f} {price.currency} {key.replace('_', ' ')}" for key in ("on_demand", "spot") if money[key] is not None
    ]
    return f"{', '.join(words_)} (prices of {price.date})"


def _bar(plan: Plan, console: Console) -> None:
    found = {name: value for name, value in plan.parts().items() if value > 0}
    whole = sum(found.values())
    shares = {name: value / whole for name, value in found.items()}
    line = "".join(MARKS[name] * round(share * BAR) for name, share in shares.items())
    console.print(Text(f"a step  [{line[:BAR]:<{BAR}}]"))
    legend = ", ".join(
        f"{MARKS[n]} {n.replace('_', ' ')} {found[n]:.3g} s ({shares[n]:.0%})" for n in found if shares[n] >= 0.005
    )
    console.print(Text(f"        {legend}"), soft_wrap=True)


def _memory(plan: Plan) -> Table:
    table = _table("part", "GiB", title=f"memory of a GPU at the {plan.peak.name}")
    for name, value in memory_parts(plan).items():
        if value >= 0.005:
            table.add_row(name, f"{value:.2f}")
    return table


def compare(one: Plan, other: Plan, prices: Sequence[Price | None], console: Console) -> None:
    """Two plans side by side, and what makes the difference."""
    table = _table("", one.resolved.name, other.resolved.name, words=3)
    rows = [_rows(plan, price) for plan, price in zip((one, other), prices, strict=True)]
    for name in rows[0]:
        table.add_row(*map(Text, (name, rows[0][name], rows[1].get(name, ""))))
    before, after = one.parts(), other.parts()
    for name in before:
        table.add_row(f"s of {name.replace('_', ' ')}", f"{before[name]:.3g}", f"{after.get(name, 0.0):.3g}")
    console.print(table)
    ratio = one.step.seconds / other.step.seconds
    faster = other if ratio > 1 else one
    # A step of two recipes may hold different numbers of tokens: the rate decides.
    rate = other.tokens_per_s / one.tokens_per_s
    text = f"{faster.resolved.name}: a step in {min(ratio, 1 / ratio):.0%} of the time"
    text += f"; {other.resolved.name} has {rate:.2f} x the tokens per second of {one.resolved.name}"
    console.print(Text(text), soft_wrap=True)


def advice(found: Advice, overrides: Mapping[str, Sequence[str]], plan: Plan, console: Console, *, recipe: str) -> None:
    """The ranking, the winner's overrides, and why the others lose."""
    title = f"{found.searched:,} strategies searched, by {found.goal}"
    table = _table("strategy", "nodes", "micro batch", "layers redone", "s a step", "GiB", title=title)
    table.columns[0].no_wrap = True
    for option in found.fitting:
        used = option.strategy
        table.add_row(
            option.candidate.family, str(used.nodes), f"{used.micro_batch} x {used.accumulation}",
            f"{used.recompute.share:.0%}", f"{option.step_s:.3g}", f"{option.needed / GIB:.1f}",
        )  # fmt: skip
    if found.fitting:
        console.print(table)
    for option, text in reasons(found):
        console.print(Text(f"- {option.candidate.family}: {text}"), soft_wrap=True)
    if not found.fitting:
        console.print(Text("Nothing fits: try more nodes (--nodes), or another GPU."))
        return
    winner = found.fitting[0]
    started = best_started(found)
    if started is not None:
        text = f"\n{winner.candidate.family} is for Megatron-Bridge, which this program plans and does not start."
        text += f" The best that it starts is {started.candidate.family}, {started.step_s / winner.step_s:.2f} x slower:"
        console.print(Text(text), soft_wrap=True)
        console.print(Text(" ".join(["clustertune plan", recipe, *overrides[started.candidate.family]])), soft_wrap=True)
    ratio = plan.step.seconds / winner.step_s
    text = f"\n{winner.candidate.family}: {winner.why}; {ratio:.2f} x as fast as the recipe. To plan it:"
    console.print(Text(text, style="bold"), soft_wrap=True)
    console.print(Text(" ".join(["clustertune plan", recipe, *overrides[winner.candidate.family]])), soft_wrap=True)


def calibration(found: Fit, console: Console) -> None:
    """What runs taught: errors before and after, and what they say nothing of."""
    table = _table("run", "measured s", "before s", "error", "after s", "error")
    for (name, measured, before), after in zip(found.before, found.after, strict=True):
        figures = (f"{measured:.3g}", f"{before:.3g}", f"{before / measured - 1:+.1%}")
        table.add_row(Text(name), *figures, f"{after:.3g}", f"{after / measured - 1:+.1%}")
    console.print(table)
    for name, value in found.values.items():
        console.print(Text(f"{name.replace('_', ' ')}: {value:.3f} (+- {found.deviation[name]:.0%})"))
    far = unexplained(found)
    if far:
        named = ", ".join(f"{name} ({error:+.0%})" for name, error in far.items())
        text = f"not explained: {named}. These runs contradict each other or the cluster file: plans are no surer than that"
        console.print(Text(text), soft_wrap=True)
    if found.left:
        names = ", ".join(name.replace("_", " ") for name in found.left)
        console.print(Text(f"not identified by these runs, left as they were: {names}"), soft_wrap=True)
