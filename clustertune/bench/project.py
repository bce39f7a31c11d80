"""What measured steps mean: utilisation, the whole recipe's hours and price, and how far the planner was off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clustertune.config.cluster_schema import Cluster
from clustertune.config.hardware import peak_flops, price, recognise
from clustertune.config.resolved import Resolved
from clustertune.errors import UserError
from clustertune.plan import schedule
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.lengths import Lengths
from clustertune.plan.predict import GIB, Plan, Work, make_plan


def utilisation(work: Work | None, measured: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """MFU and HFU against the dense bf16 peak of ops/hardware.yaml. MFU counts tokens of conversations, HFU what was computed:
    padding and recomputation too."""
    if device is None:
        return {"mfu": None, "hfu": None, "why": "no GPU: the peak of this CPU is not known"}
    name = recognise(device)
    if name is None:
        return {"mfu": None, "hfu": None, "why": f"{device} is not in ops/hardware.yaml"}
    could = peak_flops(device)
    if work is None or not could:
        return {"mfu": None, "hfu": None, "gpu": name, "why": "the planner cannot count this architecture"}
    peak = could / 1e12
    return {
        "mfu": work.model * measured["tokens_per_s_per_gpu"]["mean"] / could,
        "hfu": work.hardware * measured["computed_tokens_per_s_per_gpu"] / could,
        "gpu": name,
        "peak_tflops": peak,
        "model_tflops": work.model * measured["tokens_per_s_per_gpu"]["mean"] / 1e12,
        "why": f"{work.model / 1e9:.3g} GFLOP a token, {peak:g} TFLOP/s dense peak of {name}",
    }


def steps_of(resolved: Resolved, rows: int | None, plan: Plan | None) -> tuple[int | None, str]:
    """Optimizer steps of the whole recipe, and how they are known. ``rows``: sequences of its own data, where that was read."""
    if rows or plan is None:
        unknown = "how many steps the recipe has is not known here: its data was not read, and data.expect does not say"
        return schedule.steps_of(resolved, schedule.PackedRows(rows or None, None, f"{rows:,} sequences" if rows else unknown))
    return plan.schedule.steps, plan.schedule.steps_why


def whole(
    resolved: Resolved,
    measured: Mapping[str, Any],
    ends: Mapping[str, Any],
    rows: int | None,
    plan: Plan | None,
    gpu: str | None,
) -> dict[str, Any]:
    """Hours, GPU-hours and price of the whole recipe at the measured median step."""
    steps, why = steps_of(resolved, rows, plan)
    if steps is None:
        return {"steps": None, "why": why, "hours": None, "gpu_hours": None, "cost": None}
    args = resolved.train_args
    evaluations = (schedule.times(args, "eval", steps) or 0) + bool(args.get("eval_on_start"))
    saves = schedule.times(args, "save", steps) or 0
    parts = {
        "start": measured["start_s"] or 0.0,
        "steps": steps * measured["step_s"]["median"],
        "evaluations": evaluations * (ends.get("evaluation_s") or 0.0),
        "checkpoints": saves * (ends.get("checkpoint_s") or 0.0),
    }
    hours = math.fsum(parts.values()) / 3600
    money = price(gpu) if gpu else None
    cost = None
    if money is not None:
        cost = {
            "on_demand": None if money.on_demand is None else money.on_demand * hours * measured["ranks"],
            "spot": None if money.spot is None else money.spot * hours * measured["ranks"],
            "currency": money.currency, "date": money.date, "source": money.source,
        }  # fmt: skip
    return {
        "steps": steps, "why": why, "evaluations": evaluations, "checkpoints": saves, "parts_s": parts, "hours": hours,
        "gpu_hours": hours * measured["ranks"] if gpu else None, "cost": cost,
    }  # fmt: skip


def predict(resolved: Resolved, cluster: Cluster, lengths: Lengths | None) -> tuple[Plan | None, str | None]:
    """The plan of what is measured, or why there is none."""
    try:
        where = find_calibrated(cluster)
        return make_plan(resolved, where.machine(resolved.recipe.slurm.nodes), where.constants, lengths=lengths), None
    except UserError as error:
        return None, str(error.problems[0])


def brief(plan: Plan) -> dict[str, Any]:
    """What a dry run says about a plan."""
    return {
        "cluster": plan.machine.name,
        "fits": plan.fits,
        "step_s": plan.step.seconds,
        "needed_gib_per_gpu": plan.needed / GIB,
        "usable_gib_per_gpu": plan.machine.usable_bytes / GIB,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "hours": plan.hours,
    }


def beside_plan(
    plan: Plan | None, why: str | None, measured: Mapping[str, Any], used: Mapping[str, Any], hours: float | None
) -> dict[str, Any]:
    """What the planner predicted, what was measured, and measured over predicted; ``{"unknown": why}`` without a plan."""
    if plan is None:
        return {"unknown": why}
    compared = {
        "step_s": plan.step.seconds,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "peak_gib_per_gpu": plan.peak.bytes / GIB,
        "mfu": plan.utilisation(hardware=False) * plan.useful,
        "hfu": plan.utilisation(hardware=True),
        "exposed_share": plan.step.exposed.value / plan.step.seconds,
        "hours": plan.hours,
    }
    found = {
        "step_s": measured["step_s"]["median"],
        "tokens_per_s_per_gpu": measured["tokens_per_s_per_gpu"]["mean"],
        "peak_gib_per_gpu": measured["peak"]["allocated_gib"],
        "mfu": used["mfu"],
        "hfu": used["hfu"],
        "exposed_share": (measured["communication"] or {}).get("exposed_share"),
        "hours": hours,
    }
    rows = {
        key: {"plan": value, "measured": found[key], "ratio": found[key] / value if found[key] and value else None}
        for key, value in compared.items()
    }
    reach = [plan.step.seconds * plan.low, plan.step.seconds * plan.high]
    return {"cluster": plan.machine.name, "step_s_range": reach, "rows": rows}
