"""A run's status in OpenMetrics' text format, for node_exporter's textfile collector, which reads the ``*.prom`` of a folder:
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from clustertune.manifest import require_replaceable, write_durably
from clustertune.monitor.sampler import COLUMNS, GPU_COLUMNS
from clustertune.monitor.status import RunStatus

PREFIX = "clustertune"
_RUN = {
    "step": "Optimizer steps taken.", "steps": "Optimizer steps of the whole training.",
    "step_seconds": "Median seconds of the recent steps.", "planned_step_seconds": "Seconds of a step that the plan predicts.",
    "tokens_per_second": "Tokens per second over all ranks.", "mfu": "Model FLOPs utilisation, 0 to 1.",
    "loss": "Training loss, nats per token.", "grad_norm": "Gradient norm before clipping.",
    "eta_seconds": "Seconds to the last step.",
    "gpu_seconds": "GPU-seconds of all attempts.", "cost_usd": "US dollars of all attempts.",
    "energy_kwh": "kWh of all attempts.",
    "budget_used": "Share of the budget, 0 to 1.", "alerts": "Alerts that hold now.", "training": "1 while ranks train.",
}  # fmt: skip


def _values(status: RunStatus) -> Mapping[str, float | None]:
    cost, latest = status.cost.training, status.latest
    return {
        "step": status.step, "steps": status.steps, "step_seconds": status.step_s,
        "planned_step_seconds": status.planned_step_s, "tokens_per_second": status.tokens_per_s, "mfu": status.mfu,
        "loss": latest.get("loss"), "grad_norm": latest.get("grad_norm"),
        "eta_seconds": status.eta_s, "gpu_seconds": 3600 * (cost.gpu_hours or 0.0), "cost_usd": cost.usd,
        "energy_kwh": cost.kwh,
        "budget_used": status.budget_used, "alerts": len(status.alerts), "training": float(status.state == "training"),
    }  # fmt: skip


def _samples(status: RunStatus) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Name, help, labels and value; those of one name stand together."""
    run = {"recipe": status.recipe or "", "run": status.title}
    values = _values(status)
    for name, help_text in _RUN.items():
        if (value := values[name]) is not None:
            yield name, help_text, run, float(value)
    measured = [(node.name, node.row) for node in status.nodes if node.row]
    for column in COLUMNS:
        for host, row in measured:
            if (value := row.node.get(column)) is not None:
                yield f"node_{column}", f"Telemetry of a node: {column}.", {**run, "node": host}, float(value)
    for column in GPU_COLUMNS:
        for host, row in measured:
            for index, gpu in enumerate(row.gpus):
                if (value := gpu.get(column)) is not None:
                    labels = {**run, "node": host, "gpu": str(index)}
                    yield f"gpu_{column}", f"Telemetry of a GPU: {column}.", labels, float(value)


def openmetrics(status: RunStatus) -> str:
    """The whole file: gauges only, as each shows the present."""
    lines, before = [], ""
    for name, help_text, labels, value in _samples(status):
        full = f"{PREFIX}_{name}"
        if full != before:
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} gauge"]
            before = full
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{full}{{{shown}}} {value:.10g}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_openmetrics(path: Path, status: RunStatus) -> None:
    """Write all of the file, readable for the collector's user. Raises OSError, and UserError where another file is there."""
    require_replaceable(path, f"# HELP {PREFIX}_", "--openmetrics")
    write_durably(path, openmetrics(status), mode=0o644)
