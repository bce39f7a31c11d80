"""A plan explained: the bottleneck, every assumption, the arithmetic of one part; and the documents of --json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from clustertune.cluster.hardware import Price
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.host.system import GIB
from clustertune.plan import evidence, generation_cost
from clustertune.plan.advise import Advice, reasons
from clustertune.plan.constants import Term, number, quantity
from clustertune.plan.machine import Link
from clustertune.plan.memory import smaller_evaluation
from clustertune.plan.predict import Plan
from clustertune.plan.schedule import TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.plan.step import flops
from clustertune.recipe.layers import did_you_mean

RANGE = (
    "range: made for 80 % of runs, and of published ones at least as many fell inside it where nothing like them was known "
    "(docs/results/planner.md). It covers the step time only, not loading, evaluations or checkpoints, and "
    "assumes the bandwidth above: a slower link or other jobs' traffic can exceed it"
)


def links(plan: Plan) -> Iterator[tuple[str, Link]]:
    """The links that the plan's collectives use."""
    groups = [wire.collective.group for wire in plan.step.wires]
    if any(group.inside(plan.machine) or group.stride < plan.machine.domain for group in groups):
        yield "inside a node", plan.machine.intra
    if any(not group.inside(plan.machine) for group in groups):
        yield "between nodes", plan.machine.inter


def bandwidth_source(plan: Plan) -> str:
    """``measured`` where the slowest link that is used was measured, else ``nominal``; ``none`` where nothing is sent."""
    used = dict(links(plan))
    slowest = used.get("between nodes") or used.get("inside a node")
    return slowest.source if slowest else "none"


def bottleneck(plan: Plan) -> str:
    """One sentence: what the time goes into, and why."""
    parts = plan.parts()
    total = sum(parts.values())
    name = max(parts, key=lambda key: parts[key])
    share = parts[name] / total
    if plan.host_bytes > plan.machine.host_bytes:
        return (
            f"It does not fit into a node's RAM: {plan.host_bytes / GIB:,.0f} GiB of {plan.machine.host_bytes / GIB:,.0f} GiB."
        )
    if not plan.fits:
        largest = max(plan.peak.parts, key=lambda term: term.value)
        return (
            f"It does not fit: {plan.needed / GIB:.1f} GiB of {plan.machine.usable_bytes / GIB:.1f} GiB are needed at the "
            f"{plan.peak.name}, {quantity(largest.value, 'B')} of it {largest.name}."
        )
    if name == "exposed_communication":
        copies = plan.step.offload
        if (copies.forward_s + copies.backward_s) * plan.strategy.accumulation > plan.step.communication:
            return (
                f"Offloading: {share:.0%} of the time the GPUs wait for weights and gradients between {copies.source} and GPU."
            )
        wire = max(plan.step.wires, key=lambda w: w.term.value)
        inside = wire.collective.group.inside(plan.machine)
        link = plan.machine.intra if inside else plan.machine.inter
        where = "inside a node" if inside else "between nodes"
        speed = link.bytes_per_s / 1e9
        slow = f", {link.bytes_per_s / link.nominal_bytes_per_s:.0%} of nominal" if link.nominal_bytes_per_s > 0 else ""
        return (
            f"The network {where}: {share:.0%} of the time the GPUs wait for the {wire.collective.name} "
            f"({speed:.3g} GB/s{slow}{'' if slow.endswith(link.source) else f', {link.source}'})."
        )
    if name == "compute":
        return f"Computing: {share:.0%} of the time, {_kinds(plan)}."
    phrases = {
        "pipeline_bubble": "The pipeline: a stage idles {share} of the time; more micro batches or virtual stages fill it.",
        "optimizer": "The optimizer: {share} of the time; a larger batch or more ranks spread it.",
        "evaluation": "Evaluation: {share} of the time; evaluate less often or fewer sequences.",
        "checkpoint": "Checkpoints: {share} of the time; save less often or to faster storage.",
        "generation": "Generating the answers: {share} of the time; shorter ones take less, so does vLLM.",
        "load": "Start-up and loading: {share} of the time; the training itself is short.",
    }
    return phrases[name].format(share=f"{share:.0%}")


def _kinds(plan: Plan) -> str:
    """The three largest parts of computing."""
    kinds: dict[str, float] = {}
    for term in plan.step.compute:
        kind = term.name.partition(",")[0]
        kinds[kind] = kinds.get(kind, 0.0) + term.value
    total = sum(kinds.values())
    first = sorted(kinds.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {value / total:.0%} of it" for name, value in first)


def assumptions(plan: Plan) -> list[str]:
    """Everything that was taken to be so, one sentence each."""
    machine, constants = plan.machine, plan.constants
    texts = [f"{location}: {link.note}" for location, link in links(plan)]
    share = constants.gemm(machine.generation) / constants.compute_scale
    known = ", calibrated" if "compute_scale" in constants.calibrated else ""
    texts.append(f"matrix products reach {share:.0%} of {machine.peak_flops / 1e12:,.0f} TFLOP/s ({machine.generation}{known})")
    if not plan.schedule.steps:
        texts.append(f"the number of steps is unknown: {plan.schedule.steps_why}")
    else:
        texts.append(f"{plan.schedule.steps:,} steps: {plan.schedule.steps_why}")
    texts.append(f"storage: {machine.storage_note}")
    kind = evidence.words(plan.shape, machine)
    is_calibrated = "compute_scale" in constants.calibrated
    texts.append("range: this cluster's own runs, for runs of their kind" if is_calibrated else evidence.sentence(kind))
    texts += [text] if (text := evaluation_memory(plan)) else []
    return list(dict.fromkeys([*texts, _recomputed(plan), RANGE, *machine.notes, *plan.notes]))


def evaluation_memory(plan: Plan) -> str:
    """Which key lowers the memory of an evaluation, where that is the largest; empty where training takes more."""
    one = plan.evaluation_peak
    if one is None or plan.peak is not one:
        return ""
    text = f"evaluations take {(one.bytes - plan.training_peak.bytes) / GIB:.1f} GiB more than training"
    if rows := smaller_evaluation(plan.shape, plan.constants):
        now = plan.strategy.eval_batch
        return f"{text}: train.per_device_eval_batch_size={rows} instead of {now} makes it no more than that"
    return f"{text}: train.per_device_eval_batch_size=1 lowers it, train.eval_strategy=no leaves them out"


def _recomputed(plan: Plan) -> str:
    """A third of the time and most of the memory hang on it, and TRL turns it on where a recipe says nothing."""
    again, recipe = plan.strategy.recompute, plan.resolved.recipe
    share = again.share
    text = f"layers recomputed in the backward pass: {'none' if not share else 'all' if share == 1 else f'{share:.0%}'}"
    if share and again.save:
        text += f"; of them {' and '.join(again.save)} kept".replace("every_second_matmul", "every second product")
    if share and recipe.activation_checkpointing is None and recipe.megatron is None:
        text += ", TRL's default; activation_checkpointing.ratio=0 turns it off"
    return text


def topics(plan: Plan) -> dict[str, list[Term]]:
    """What ``--why`` can be asked, with the terms that answer it."""
    terms: dict[str, list[Term]] = {
        "compute": plan.step.compute,
        "communication": [*(wire.term for wire in plan.step.wires), *_copies(plan), plan.step.exposed],
        "pipeline": [plan.step.bubble],
        "optimizer": [plan.step.optimizer],
        "evaluation": [plan.schedule.evaluation],
        "checkpoint": [plan.schedule.checkpoint, plan.schedule.save],
        "load": [plan.schedule.start],
        "memory": [*plan.peak.parts, *plan.beside],
        "training-memory": [*plan.training_peak.parts],
        "evaluation-memory": [*plan.evaluation_peak.parts] if plan.evaluation_peak else [],
        "host": plan.host,
        "step": [*plan.step.compute, plan.step.exposed, plan.step.bubble, plan.step.optimizer],
    }
    if plan.step.generation is not None:
        terms["generation"] = generation_cost.explained(plan.shape, plan.machine)
        terms["step"].append(plan.step.generation)
    for moment in plan.moments:
        for term in moment.parts:
            terms.setdefault(term.name.replace(" ", "-"), []).append(term)
    return terms


def _copies(plan: Plan) -> list[Term]:
    return [plan.step.offload.transfer] if plan.step.offload.transfer is not None else []


def why(plan: Plan, topic: str, *, more: Sequence[str] = ()) -> list[str]:
    """The arithmetic of one part, a line each. ``more``: parts that others explain, for the list of names.

    Raises UserError with the nearest name where there is no such part.
    """
    known = topics(plan)
    named = topic.strip().lower().replace(" ", "-").replace("_", "-")
    if named in ("exposed-communication", "network"):
        named = "communication"
    if named in ("hours", "steps"):
        return _hours(plan)
    if named in ("mfu", "hfu"):
        return _mfu(plan)
    if named not in known:
        names = [*known, "hours", "mfu", *more]
        fix = did_you_mean(named, names) or f"parts of this plan: {', '.join(names)}"
        raise UserError(Problem(f"the plan has no part {topic!r}", file="command line", key="--why", fix=fix))
    lines = list(dict.fromkeys(f"{term.name}: {term.arithmetic()}" for term in known[named] if term.value))
    if not lines:
        lines = [f"{named}: 0, this plan has none"]
    if named == "memory":
        lines.insert(0, f"peak: {plan.peak.name}; at other moments: {_others(plan)}")
    return lines


def _others(plan: Plan) -> str:
    return ", ".join(f"{m.name} {m.bytes / GIB:.1f} GiB" for m in plan.moments if m is not plan.peak)


def _hours(plan: Plan) -> list[str]:
    totals = plan.totals()
    if totals is None:
        return [f"the number of steps is unknown: {plan.schedule.steps_why}"]
    around = plan.schedule
    times = {"evaluation": around.evaluations, "checkpoint": around.checkpoints, "load": 1}
    lines = [f"steps: {around.steps:,}: {around.steps_why}"]
    for name, value in totals.items():
        count = times.get(name, around.steps)
        if value and count:
            lines.append(f"{name.replace('_', ' ')}: {count:,} x {quantity(value / count, 's')} = {value:,.0f} s")
    return [*lines, f"total {sum(totals.values()):,.0f} s = {plan.hours:.2f} h"]


def _mfu(plan: Plan) -> list[str]:
    lines = []
    for name, hardware in (("MFU", False), ("HFU", True)):
        work = flops(plan.shape, hardware=hardware)
        lines.append(
            f"{name}: {number(work)} FLOPs a step / ({number(plan.step.seconds)} s x {plan.strategy.world_size} GPUs x "
            f"{number(plan.machine.peak_flops)} FLOP/s) = {plan.utilisation(hardware=hardware):.1%}"
        )
    return lines


def money(prices: Mapping[str, Any] | None) -> str:
    """What something costs: ``35.67 USD on demand, 9.84 USD spot``; empty where that is not known."""
    known = [(prices[key], key.replace("_", " ")) for key in ("on_demand", "spot") if prices[key] is not None] if prices else []
    return ", ".join(f"{value:,.2f} {prices['currency']} {name}" for value, name in known) if prices else ""


# --- the documents of --json ------------------------------------------------------------------------------------------


def spent(gpu_hours: float | None, price: Price | None) -> dict[str, Any] | None:
    """Money of so many GPU-hours; None where they or the price are unknown."""
    if price is None or gpu_hours is None:
        return None
    return {
        "on_demand": None if price.on_demand is None else gpu_hours * price.on_demand,
        "spot": None if price.spot is None else gpu_hours * price.spot,
        "currency": price.currency,
        "per_gpu_hour": {"on_demand": price.on_demand, "spot": price.spot},
        "date": price.date,
        "source": price.source,
    }


def memory_parts(plan: Plan) -> dict[str, float]:
    """GiB by part at the peak; ``fragmentation`` and ``buffers`` come on top of the tensors' peak."""
    names = {
        "gathered layers": "gathered",
        "gathered embedding and head": "gathered",
        "saved layer inputs": "activations",
        "one recomputed layer": "activations",
        "adapters": "weights",
        "reference model": "reference",
    }
    parts = ("weights", *(["reference"] if plan.strategy.reference_bytes else []), "gradients", "optimizer", "activations")
    sizes = dict.fromkeys((*parts, "logits", "gathered", "buffers", "fragmentation"), 0.0)
    for term in [*plan.peak.parts, *plan.beside]:
        name = names.get(term.name, term.name)
        sizes[name] = sizes.get(name, 0.0) + term.value / GIB
    return sizes


def as_json(plan: Plan) -> dict[str, Any]:
    """The training in the document of ``plan --json``. Seconds, GiB (2**30 bytes), tokens per second over all ranks, hours."""
    hours = plan.hours
    return {
        "recipe": plan.resolved.name,
        "cluster": plan.machine.name,
        "fits": plan.fits,
        "step_s": plan.step.seconds,
        "step_s_range": [plan.step.seconds * plan.low, plan.step.seconds * plan.high],
        "step_parts_s": plan.parts(),
        "steps": plan.schedule.steps,
        "peak_gib_per_gpu": plan.training_peak.bytes / GIB,
        "evaluation_gib_per_gpu": plan.evaluation_peak.bytes / GIB if plan.evaluation_peak else None,
        "needed_gib_per_gpu": plan.needed / GIB,
        "usable_gib_per_gpu": plan.machine.usable_bytes / GIB,
        "peak_moment": plan.peak.name,
        "memory_parts_gib": memory_parts(plan),
        "host_gib_per_node": plan.host_bytes / GIB,
        "prepare_tokens": (made := tokens_to_prepare(plan.resolved)),
        "prepare_cpu_s": None if made is None else made / TOKENS_PER_CPU_S,
        "storage_gb": {name: size / 1e9 for name, size in plan.schedule.disk.items()},
        "parameters": plan.shape.counted.total,
        "trainable_parameters": plan.shape.trained,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "mfu": plan.utilisation(hardware=False),
        "hfu": plan.utilisation(hardware=True),
        "hours": hours,
        "hours_range": None if hours is None else [hours * plan.low, hours * plan.high],
        "gpu_hours": None if hours is None else hours * plan.gpus,
        "bottleneck": bottleneck(plan),
        "bandwidth_source": bandwidth_source(plan),
        "communication": [
            {
                "name": w.collective.name,
                "seconds": w.term.value,
                "ranks": w.collective.group.size,
                "arithmetic": w.term.arithmetic(),
            }
            for w in plan.step.wires
        ],
        "calibrated": list(plan.constants.calibrated),
        "evidence": {
            "kind": list(kind := evidence.words(plan.shape, plan.machine)),
            "published_runs": evidence.KINDS.get(evidence.key(kind), 0),
        },
        "assumptions": assumptions(plan),
    }


def advice_json(
    advice: Advice, overrides: Mapping[str, Sequence[str]], cluster: Cluster,
    money: Callable[[float | None], float | None], currency: str,
) -> dict[str, Any]:  # fmt: skip
    """The document of ``plan --advise --json``. ``money``: of a training's GPU-hours, what the whole run costs."""
    why = {option.candidate.family: text for option, text in reasons(advice)}
    return {
        "goal": advice.goal,
        "currency": currency,
        "searched": advice.searched,
        "refused": advice.refused,
        "options": [
            {
                "strategy": o.candidate.family,
                "fits": o.fits,
                "engine": "megatron" if o.strategy.is_megatron else "trl",
                "starts_here": o.starts(cluster),
                "step_s": o.step_s if o.fits else None,
                "hours": o.hours,
                "cost": money(None if o.hours is None else o.hours * o.strategy.gpus),
                "needed_gib_per_gpu": o.needed / GIB,
                "nodes": o.strategy.nodes,
                "micro_batch": o.strategy.micro_batch,
                "accumulation": o.strategy.accumulation,
                "checkpointed": o.strategy.recompute.share,
                "why": why.get(o.candidate.family, o.why),
                "quality": o.quality,
                "overrides": overrides.get(o.candidate.family),
            }
            for o in [*advice.fitting, *advice.losing]
        ],
    }
