"""Runs side by side, as the published FSDP validation puts one node beside two: run folders and metrics JSON.

A column for each, a row for each figure. What one lacks is left empty, and what makes two of them differ is named: another
model, other data, other hardware, a run that was killed.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.console import make_table
from clustertune.errors import Problem, UserError, collect_problems, raise_if, storing
from clustertune.manifest import read_whole
from clustertune.report import cost, plots
from clustertune.report.content import dataset_of, get, is_number, model_of, recipe_of
from clustertune.report.metrics import TELEMETRY, Metrics, TelemetryReader, read_metrics
from clustertune.report.page import render
from clustertune.report.source import FIELDS, STEADY, describe, nodes_of
from clustertune.report.state import RunState, read_stages, state_of
from clustertune.resolve.resolved import Resolved, format_distribution
from clustertune.rundir import RunDir

if TYPE_CHECKING:
    from rich.table import Table

GIVE = "give a run folder, or a metrics.json"
LARGEST = 64 << 20
"""Bytes of a JSON file that is read."""
NONE, NO_GPU = "-", "no GPU"
MARK, PAGE_MARK = "| Metric |", '<meta name="generator" content="clustertune compare">'
"""Near the beginning of each table in Markdown, and of each page."""
OF_THE_SOURCE = (
    "holds a mean over all steps, the first ones among them: no steady rate, so that it cannot be split into warm-up and speed"
)


@dataclass
class ComparedRun:
    """One run. None: not known."""

    name: str
    kind: str
    """``run`` or ``metrics``."""
    values: dict[str, Any] = field(default_factory=dict)
    """By the keys of :data:`ROWS`."""
    notes: list[str] = field(default_factory=list)

    @property
    def has_figures(self) -> bool:
        """Whether there is anything to compare."""
        return any(self.values.get(key) is not None for key in (*_RATES, "wall_time_s", "step_s"))


_RATES = ("approx_tokens_per_s_per_rank", STEADY)


@dataclass(frozen=True)
class Comparison:
    """The columns in the order in which they were given."""

    entries: list[ComparedRun]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The document of ``compare --json``; numbers as they were read, not rounded for the table."""
        return {
            "runs": [{"name": e.name, "kind": e.kind, **{key: e.values.get(key) for key in ROWS}} for e in self.entries],
            "notes": self.notes,
        }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "world_size": ("World size", str),
    "nodes": ("Nodes", str),
    "gpu0": ("GPU", str),
    "interconnect": ("Interconnect", str),
    "hours": ("Hours of training, lost work too", _number),
    "gpu_hours": ("GPU-hours of training", _number),
    "usd": ("US dollars of training", _number),
    "kwh": ("kWh of training", _number),
    "wall_time_s": ("Wall time of all steps", lambda v: f"{_number(v)} s"),
    "approx_tokens_per_rank": ("Tokens / rank (padding too)", lambda v: f"{v:,.0f}"),
    "approx_tokens_per_s_per_rank": ("Tokens / sec / rank, warm-up too", _number),
    STEADY: ("Tokens / sec / rank, steady", _number),
    "steady_tokens_per_s": ("Tokens / sec, all ranks, steady", _number),
    "scaling": ("Rate of a rank against the first", lambda v: f"{v:.0%}"),
    "step_s": ("Seconds of a step, median", _number),
    "warm_up_share": ("Share of wall time above steady steps", lambda v: f"{v:.0%}"),
    "peak_gib": ("Peak memory of a rank, GiB", _number),
    "loss": ("Loss, last step", _number),
    "steps": ("Steps", str),
    "recipe": ("Recipe", str),
    "cluster": ("Cluster", str),
    "model": ("Model", str),
    "dataset": ("Data", str),
    "distribution": ("Distribution", str),
    "fsdp": ("FSDP", _yes),
    "bf16": ("bf16", _yes),
    "torch": ("torch", str),
    "status": ("State", str),
}
"""Figures of a column: title and form."""
MUST_AGREE = ("recipe", "model", "dataset", "gpu0", "torch", "bf16")
"""What, where it differs, a reader must know before he compares rates."""


def compare(paths: Sequence[Path]) -> Comparison:
    """Read all of them. Raises UserError for what is none of the kinds, and where no two have a figure."""
    entries, problems = list[ComparedRun](), list[Problem]()
    if len(paths) < 2:
        fix = "clustertune compare RUN RUN..."
        raise UserError(Problem(f"{len(paths)} given, two or more are needed", file="command line", key="RUN_OR_JSON", fix=fix))
    for path in paths:
        with collect_problems(problems):
            entries.append(read(path))
    raise_if(problems)
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.name] += 1
        if (number := seen[entry.name]) > 1:
            entry.name = f"{entry.name} ({number})"
    if sum(entry.has_figures for entry in entries) < 2:
        lacking = [e for e in entries if not e.has_figures]
        fix = "let them take a step, or give others"
        reasons = [Problem("; ".join(e.notes) or "has no figure", file=e.name, fix=fix) for e in lacking]
        raise UserError([Problem("nothing can be compared: fewer than two have a figure", file="command line"), *reasons])
    _against_the_first(entries)
    return Comparison(entries, [*(f"{e.name}: {note}" for e in entries for note in e.notes), *_differences(entries)])


def _against_the_first(entries: list[ComparedRun]) -> None:
    """Rates relative to the first column that has one, of the same kind."""
    for key in (STEADY, "approx_tokens_per_s_per_rank"):
        have = [e for e in entries if e.values.get(key)]
        if len(have) == len(entries) or (key != STEADY and len(have) > 1):
            for entry in have:
                entry.values["scaling"] = entry.values[key] / have[0].values[key]
            return


def _differences(entries: Sequence[ComparedRun]) -> Iterator[str]:
    for key in MUST_AGREE:
        values = {str(e.values[key]): e.name for e in entries if e.values.get(key) is not None}
        if len(values) > 1:
            text = ", ".join(f"{value} in {name}" for value, name in values.items())
            yield f"{ROWS[key][0]} differs ({text}): the rates are not of the same work or machine"
    kinds = {e.kind for e in entries if e.has_figures}
    if "metrics" in kinds and len(kinds) > 1:
        yield "a metrics JSON counts padding as tokens; so do all rates of this table"


# --- one of them -------------------------------------------------------------------------------------------------------


def read(path: Path) -> ComparedRun:
    """A run folder or a metrics JSON. Raises UserError."""
    if path.is_dir():
        return _run(path)
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(Problem(f"is larger than {LARGEST >> 20} MiB", file=str(path), fix=GIVE))
        body = json.loads(read_whole(path))
    except FileNotFoundError:
        raise UserError(Problem("no such file or folder", file=str(path), fix=GIVE)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(f"unreadable: {str(error).splitlines()[0]}", file=str(path), fix=GIVE)) from None
    if isinstance(body, dict) and all(key in body for key in FIELDS[:4]):
        return _metrics(path, body)
    missing = [key for key in FIELDS[:4] if not isinstance(body, dict) or key not in body]
    raise UserError(Problem(f"is no metrics.json: it lacks {', '.join(missing)}", file=str(path), fix=GIVE))


def _shown(path: Path) -> str:
    """A name for the head of a column: the last two parts of a run's path say recipe and run."""
    parts = [part for part in path.absolute().parts if part != "/"]
    if path.is_dir():
        return "/".join(parts[-2:])
    return "/".join([*parts[-2:-1], path.stem]) if path.stem == "metrics" else path.stem


def _figure(value: Any) -> float | None:
    return float(value) if is_number(value) and value > 0 else None


def _metrics(path: Path, body: Mapping[str, Any]) -> ComparedRun:
    """The source's own object, or a run's."""
    entry = ComparedRun(_shown(path), "metrics")
    entry.values = {key: body.get(key) for key in (*FIELDS, STEADY)}
    for key in (*FIELDS[:4], STEADY):
        entry.values[key] = _figure(body.get(key))
        if entry.values[key] is None and key != STEADY:
            entry.notes.append(f"{key} is {body.get(key)!r}: left out")
    world = entry.values["world_size"]
    entry.values["world_size"] = int(world) if world else None
    if entry.values[STEADY] is None:
        entry.notes.append(OF_THE_SOURCE)
    _all_ranks(entry)
    return entry


def _all_ranks(entry: ComparedRun) -> None:
    rate, world, wall = (entry.values.get(key) for key in (STEADY, "world_size", "wall_time_s"))
    if wall and world and "hours" not in entry.values:
        entry.values |= {"hours": wall / 3600, "gpu_hours": wall / 3600 * world}
    if rate and world:
        entry.values["steady_tokens_per_s"] = rate * world
    tokens = entry.values.get("approx_tokens_per_rank")
    if rate and wall and tokens:
        entry.values["warm_up_share"] = max(0.0, 1 - tokens / rate / wall)


def _run(path: Path) -> ComparedRun:
    """A run folder, whole or not."""
    entry = ComparedRun(_shown(path), "run")
    file = path / "run.json"
    try:
        run = json.loads(read_whole(file))
    except (OSError, ValueError, RecursionError) as error:
        what = "is not a run folder: it has no run.json" if isinstance(error, FileNotFoundError) else f"unreadable: {error}"
        raise UserError(Problem(what, file=str(path), fix=GIVE)) from None
    if not isinstance(run, dict) or (resolved := recipe_of(run)) is None:
        fix = "leave it out: it is damaged, or no run of clustertune"
        raise UserError(Problem("contains no recipe that can be read", file=str(file), key="recipe", fix=fix))
    with storing("cannot be read", path / "metrics.jsonl"):
        metrics = read_metrics(path / "metrics.jsonl")
    nodes = nodes_of(path, run) or 1
    entry.values = dict(describe(run, metrics) or {})
    entry.values |= {
        "world_size": entry.values.get("world_size") or resolved.world_size,
        "recipe": resolved.name,
        "gpu0": get(run, "distributed", "gpu0") or (NO_GPU if get(run, "distributed", "device") == "cpu" else None),
        "model": model_of(resolved),
        "dataset": dataset_of(resolved),
        "nodes": nodes,
        "interconnect": _interconnect(run, nodes),
        "distribution": format_distribution(run.get("distributed")),
    }
    if metrics.steps:
        last = metrics.steps[-1]
        peaks = metrics.steps.known("memory_bytes")
        entry.values |= {
            "step_s": metrics.steps.step_seconds(), "steps": last.step, "loss": last.loss,
            "peak_gib": max(peaks) / 2**30 if peaks else None,
        }  # fmt: skip
    nodes_measured = TelemetryReader(path / TELEMETRY).read()
    now = time.time()
    counted = cost.of_run(path, run, metrics, nodes_measured, now)
    folder = RunDir(path)
    state = state_of(folder, read_stages(folder, metrics), metrics, counted.attempts, now)
    entry.values["status"] = str(state)
    spent, gpu_hours = counted.training, None if counted.on_cpu else counted.training.gpu_hours
    if spent.seconds:
        entry.values |= {"hours": spent.seconds / 3600, "gpu_hours": gpu_hours, "usd": spent.usd, "kwh": spent.kwh}
    entry.values["cluster"] = get(run, "cluster", "name")
    entry.notes += _of_a_run(resolved, metrics, entry, state)
    _all_ranks(entry)
    return entry


def _of_a_run(resolved: Resolved, metrics: Metrics, entry: ComparedRun, state: RunState) -> Iterator[str]:
    if not metrics.steps:
        yield "has no step in metrics.jsonl: nothing was trained, or the file is gone"
    elif entry.values.get(STEADY) is None:
        yield "has too few timed steps for a steady rate"
    if metrics.unreadable_lines:
        yield f"{metrics.unreadable_lines} unreadable lines in metrics.jsonl were skipped"
    if metrics.steps and not state.is_trained:
        yield f"is not finished ({state}): its figures are of the steps that it took"
    if resolved.tiny:
        yield "was run with --tiny: a scaled-down model with random weights"


def _interconnect(run: Mapping[str, Any], nodes: int) -> str | None:
    """What joins GPUs, of the cluster file: inside a node, and between nodes where there are several."""
    inside, between = get(run, "cluster", "compute", "interconnect"), get(run, "cluster", "network", "kind")
    parts = [str(part) for part in (inside, between if nodes > 1 else None) if part]
    return ", ".join(parts) or None


# --- how it is shown ---------------------------------------------------------------------------------------------------


def cells(comparison: Comparison) -> list[list[str]]:
    """Rows of the table: title, then a cell for each run; a row without a value in any run is left out."""
    rows = []
    for key, (title, form) in ROWS.items():
        values = [entry.values.get(key) for entry in comparison.entries]
        if any(value is not None for value in values):
            rows.append([title, *(NONE if value is None else form(value) for value in values)])
    return rows


def table(comparison: Comparison) -> Table:
    """For a terminal."""
    from rich.text import Text

    made = make_table("", *(entry.name for entry in comparison.entries), text_columns=1 + len(comparison.entries))
    for row in cells(comparison):
        made.add_row(*(Text(cell) for cell in row))
    return made


def drawings(comparison: Comparison) -> list[plots.Plot]:
    """Hours and GPU-hours, of a cluster and a model together, those of each way to distribute side by side."""
    strategies = list(dict.fromkeys(_strategy(entry) for entry in comparison.entries))
    made = []
    for key, title in (("hours", "Hours of training"), ("gpu_hours", "GPU-hours of training")):
        bars: dict[str, dict[str, float | None]] = {}
        for entry in comparison.entries:
            where, strategy = entry.values.get("cluster") or entry.values.get("gpu0"), _strategy(entry)
            label = ", ".join(str(part) for part in (entry.values.get("model"), where) if part) or entry.name
            if strategy in bars.get(label, {}):  # the same once more
                label = f"{label}: {entry.name}"
            bars.setdefault(label, {})[strategy] = entry.values.get(key)
        groups = {name: [values.get(name) for values in bars.values()] for name in strategies}
        if plot := plots.bars(
            title, list(bars), groups, form=lambda v: NONE if v is None else _number(v), head="model, cluster"
        ):
            made.append(plot)
    return made


def _strategy(entry: ComparedRun) -> str:
    kind = entry.values.get("distribution") or ("FSDP" if entry.values.get("fsdp") else None)
    world = entry.values.get("world_size")
    return " on ".join(part for part in (kind, f"{world} rank{'s' if world != 1 else ''}" if world else None) if part) or "run"


def page(comparison: Comparison) -> str:
    """The drawings and the table as one self-contained page."""
    head = ["", *(entry.name for entry in comparison.entries)]
    return table_page("Runs side by side", head, cells(comparison), comparison.notes, drawings(comparison))


def table_page(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], plots: Sequence[Any] = ()
) -> str:
    """A table as a self-contained page, with drawings above it and notes below."""
    values = {"title": title, "plots": plots, "columns": columns, "rows": rows, "notes": notes}
    return render(Path(__file__).with_name("compare.html.jinja"), values) + "\n"


def markdown(comparison: Comparison) -> str:
    """For a page."""

    def line(row: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"

    head = ["Metric", *(entry.name for entry in comparison.entries)]
    lines = [line(head), line(["---"] * len(head)), *map(line, cells(comparison))]
    notes = [f"- {note}" for note in comparison.notes]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"
