"""A run's stages, attempts, saves and faults on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clustertune.errors import ExitCode
from clustertune.report.content import duration, moment, number, size
from clustertune.report.cost import AttemptCost
from clustertune.report.metrics import Metrics

SAVES = 200
"""The newest ones that are drawn."""


def time_axis(metrics: Metrics, attempts: Sequence[AttemptCost], now: float | None = None) -> dict[str, Any] | None:
    """A lane of each stage with its tries as bars, attempts as the training's; saves and faults as marks; the same as rows.

    Places are in per cent of the time from the first begin to the last end. ``now``, Unix seconds: what has no end still runs;
    None: it was killed. Returns None where nothing has begun.
    """
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    faults: list[tuple[float, str]] = []
    for stage in metrics.stages:
        if stage.stage != "report":
            tries = [
                (begun, ended or now or begun, f"{stage.stage}, try {n}") for n, (begun, ended) in enumerate(stage.spans, 1)
            ]
            lanes[stage.stage] = tries
            if stage.status == "failed" and tries and not (stage.stage == "train" and attempts):
                faults.append((tries[-1][1], f"{stage.stage} failed"))
    if attempts:
        lanes["train"] = []
    for attempt in attempts:
        runs = now is not None and attempt is attempts[-1] and attempt.ended is None
        ended = now if runs and now is not None else attempt.ended or attempt.seen
        lanes["train"].append((attempt.begun, ended, f"attempt {attempt.attempt}"))
        if not runs and attempt.code != ExitCode.OK:
            what = "no outcome: killed, or still running" if attempt.code is None else f"exit code {attempt.code}"
            faults.append((ended, f"attempt {attempt.attempt} ended with {what}"))
    lanes = {name: tries for name, tries in lanes.items() if tries}
    if not lanes:
        return None
    first = min(begun for tries in lanes.values() for begun, _, _ in tries)
    last = max(ended for tries in lanes.values() for _, ended, _ in tries)
    whole = max(1e-9, last - first)

    def place(value: float) -> float:
        return round(min(100.0, max(0.0, 100 * (value - first) / whole)), 3)

    saves = [record for record in metrics.checkpoints if record.status == "saved"]
    marks = [
        (place(record.time), "save", f"step {number(record.step)} saved, {size(record.bytes)}, {moment(record.time)}")
        for record in saves[-SAVES:]
        if record.time
    ]
    marks += [(place(at), "fault", f"{text}, {moment(at)}") for at, text in faults]
    events = [(begun, ended, text) for tries in lanes.values() for begun, ended, text in tries]
    return {
        "lanes": [
            {
                "name": name,
                "bars": [(place(begun), max(0.3, round(place(end) - place(begun), 3)), text) for begun, end, text in tries],
                "marks": marks if name == "train" or "train" not in lanes else [],
            }
            for name, tries in lanes.items()
        ],
        "from": moment(first),
        "to": moment(last),
        "columns": ["what", "begin", "#took"],
        "rows": [[text, moment(begun), duration(end - begun)] for begun, end, text in sorted(events)],
        "faults": [f"{text}, {moment(at)}" for at, text in sorted(faults)],
        "saves": len(saves),
    }
