"""``report.html``: one self-contained page of a run, finished or not."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.console import duration, escape, say
from clustertune.errors import ExitCode, Problem, UserError, storing
from clustertune.evaluate.scores import BETTER, FEW, SAME, WORSE, read_result, shown
from clustertune.manifest import MANIFEST, plain_path, read_object, read_whole, require_whole, write_durably
from clustertune.nccl_check.link_check import FOLDER, RESULT
from clustertune.nccl_check.link_measure import SCHEMA
from clustertune.report import content, cost, plots
from clustertune.report.content import UNKNOWN, get, is_number, moment, number, percent, plain, size
from clustertune.report.cost import AttemptCost, Cost, Expense
from clustertune.report.metrics import TELEMETRY, History, Metrics, TelemetryReader, read_metrics
from clustertune.report.state import read_stages, state_of
from clustertune.rundir import RunDir

MARK = '<meta name="generator" content="clustertune report">'
"""In the head of each page."""
SCHEMA_OF_JSON = "clustertune.report/1"
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_OWN_STAGE = "report"
BAD = ("failed", "stopped", "lost")


def build(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of ``run_dir`` to ``out`` (its own ``report.html`` by default) and return the path.

    Beside it comes the same name with ``.json``: what the page answers, for programs. Whatever is missing or unreadable but
    ``run.json`` is left out or named on the page: a run that failed is the one that a person wants to look at. The same run
    gives the same bytes. Raises UserError where ``run_dir`` is not a run folder, and with exit code 73 where the page cannot be
    written.
    """
    run = RunDir(run_dir)
    document = run.read()
    if not isinstance(document, dict):
        raise UserError(f"{run.run_json}: contains no run")
    page = run.report if out is None else out
    if page.suffix == ".json":
        raise UserError(Problem("is the name of the document beside the page", key="--out", fix="give it the ending .html"))
    with storing("writing the report", page):
        reported = _ReportedRun(run, document)
        html = render(_TEMPLATE, reported.page())
        if out is not None:
            manifest.require_replaceable(page, MARK)
            manifest.require_replaceable(page.with_suffix(".json"), SCHEMA_OF_JSON)
        page.parent.mkdir(parents=True, exist_ok=True)
        write_durably(page.with_suffix(".json"), json.dumps(reported.as_dict(), indent=1) + "\n")
        write_durably(page, html + "\n")
    return page


def render(template: Path, values: Mapping[str, Any]) -> str:
    """A page of a template, which finds the style sheet and the macros of all pages in ``parts.html.jinja``.

    Characters that steer a terminal or turn the reading direction are written out, whatever text brought them.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([template.parent, _TEMPLATE.parent])
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader,
        finalize=lambda value: escape(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )  # fmt: skip
    return environment.get_template(template.name).render(values)


class _ReportedRun:
    """A run's documents, read once."""

    def __init__(self, run: RunDir, document: dict[str, Any]) -> None:
        self.run, self.document, self.resolved = run, document, content.recipe_of(document)
        with storing("cannot be read", run.metrics):
            self.metrics = read_metrics(run.metrics)
        self.history = History()
        nodes = TelemetryReader(run.path / TELEMETRY, self.history).read()
        now = time.time()
        self.cost = cost.of_run(run.path, document, self.metrics, nodes, now)
        self.stages = read_stages(run, self.metrics)
        self.stages.pop(_OWN_STAGE, None)  # it cannot be finished while its page is written
        self.state = state_of(run, self.stages, self.metrics, self.cost.attempts, now)
        require_whole(run.eval)
        self.scores = _read(read_result, run.eval)
        self.saves = cost.saves_as_dict(self.resolved, self.metrics, self.cost.attempts)
        self.adapter = _read_json(run.adapter / MANIFEST)
        self.data = get(_read_json(run.data / MANIFEST), "meta") or {}
        parameters = get(self.adapter, "meta", "parameters")
        self.trained = parameters or get(document, "distributed", "trainable_parameters")
        self.answer = [self._what() + _better(self.metrics, self.scores), self._took()]

    def as_dict(self) -> dict[str, Any]:
        """``report.json``; null: not known."""
        evals, steps = self.metrics.evals, self.metrics.steps
        return {
            "schema": SCHEMA_OF_JSON,
            "run": self.run.path.resolve().name,
            "recipe": self.resolved and self.resolved.name,
            "model": content.model_of(self.resolved),
            "dataset": content.dataset_of(self.resolved),
            "state": str(self.state),
            "answer": self.answer,
            "step": steps[-1].step if steps else None,
            "loss": _finite(steps[-1].loss) if steps else None,
            "eval_loss": [_finite(record.eval_loss) for record in (evals[0], evals[-1])] if evals else None,
            "planned": {name: {"planned": planned, "actual": is_} for name, planned, is_ in self._forecast()},
            "scores": [
                {"task": task, "score": key, **row}
                for task, rows in (get(self.scores, "paired") or {}).items()
                for key, row in rows.items()
            ],
            "cost": self.cost.as_dict(),
            "saves": self.saves,
        }

    def _seconds_of(self, name: str, record: Mapping[str, Any]) -> float | None:
        """What the table of costs says that a stage took; of a stage that it leaves out, its record's."""
        spent = self.cost.stages.get(name)
        return record.get("seconds") if spent is None or spent.seconds is None else spent.seconds

    def _forecast(self) -> list[tuple[str, float, float | None]]:
        return content.forecast(self.document.get("forecast"), self.metrics, self.stages)

    def page(self) -> dict[str, Any]:
        """Everything that the template shows."""
        run, document, metrics, resolved = self.run, self.document, self.metrics, self.resolved
        # One figure for one duration: of the training that of its ranks, without what starts them.
        stages = {name: {**record, "seconds": self._seconds_of(name, record)} for name, record in self.stages.items()}
        restarts = [a.start_step for a in metrics.attempts[1:] if a.start_step is not None]
        torn, folder = metrics.unreadable_lines, run.checkpoints
        present = {f"{folder.name}/{path.name}" for path in folder.iterdir()} if folder.is_dir() else set()
        return {
            "title": resolved.name if resolved is not None else run.path.resolve().name,
            "subtitle": content.subtitle(document, resolved),
            "status": {"text": str(self.state), "tone": tone_of(self.state.word)},
            "answer": self.answer,
            "notes": content.warnings_of(resolved, metrics, self.adapter),
            "tiles": content.tiles(metrics, stages, self.scores, self.trained),
            "planned": self._planned(),
            "expected": content.expected_rows(resolved, metrics, stages, self.scores, self.trained),
            "plots": [plot for plot in (*training_plots(metrics, restarts), *_machine_plots(self.history)) if plot],
            "restarts": restarts,
            "answers": [
                {**vars(one), "title": ", ".join(f"{name} {number(value, 3)}" for name, value in one.rewards.items())}
                for one in metrics.answers
            ],
            "scored": self._scored(),
            "data": _data(run, self.data),
            "cost": {**cost_table(self.cost), "note": cost_note(self.cost)},
            "axis": time_axis(metrics, self.cost.attempts),
            "nccl": section(run.path),
            "stages": content.stage_rows(stages),
            "attempts": content.attempt_rows(metrics),
            "startups": content.startup_rows(metrics),
            "saves": cost.saves_rows(self.saves),
            "checkpoints": content.checkpoint_rows(metrics, present),
            "details": [
                part for part in (
                    ("Recipe", ["key", "value", "from"], content.recipe_rows(resolved) if resolved else []),
                    ("Derived", ["key", "value", "from what"], content.derived_rows(resolved) if resolved else []),
                    ("Environment", ["what", "value"], content.environment_rows(document)),
                    ("Architecture", ["key", "value"], [
                        [key, plain(value)] for key, value in content.flatten(resolved and resolved.architecture)
                    ]),
                ) if part[2] or part[0] == "Recipe"
            ],
            "footer": f"From run.json and metrics.jsonl of {run.path.resolve().name}."
            + (f" {torn} lines of metrics.jsonl are not events and were skipped." if torn else ""),
        }  # fmt: skip

    def _what(self) -> str:
        """What was trained: model, share of its parameters, conversations, steps."""
        run = self.document
        every = get(run, "distributed", "total_parameters")
        share = f" ({percent(self.trained / every)} of its parameters)" if self.trained and every else ""
        how = f"with LoRA{share}" if self.resolved is not None and self.resolved.lora else "in all its parameters"
        many = get(self.data, "train", "conversations")
        rows = f"{number(many)} conversations of " if many is not None else ""
        steps = self.metrics.steps[-1].step if self.metrics.steps else 0
        planned_steps = get(run, "distributed", "steps")
        is_complete = self.state.is_trained or steps == planned_steps
        of_all = f" of {number(planned_steps)}" if planned_steps else ""
        took = f"{number(steps)} steps" if is_complete else f"{number(steps)}{of_all} steps so far ({self.state})"
        name, source = content.model_of(self.resolved) or "A model", content.dataset_of(self.resolved) or "its data"
        return f"{name} was fine-tuned {how} on {rows}{source} for {took}"

    def _took(self) -> str:
        """What the run took: time, GPUs, money, energy, and what was lost."""
        run, cost, total = self.document, self.cost, self.cost.total
        if total.seconds is None:
            return "What it took is not known yet."
        ranks = cost.attempts[-1].ranks if cost.attempts else None
        gpu = get(run, "distributed", "gpu0")
        hours = total.gpu_hours
        if cost.on_cpu:
            where = f" on {ranks} process{'es' if ranks != 1 else ''} without a GPU" if ranks else ""
        else:
            where = f" on {ranks} GPU{'s' if ranks != 1 else ''}{f' ({gpu})' if gpu else ''}" if ranks else ""
        parts = [f"{_hours(hours)} {cost.hours_of}-hours"] if hours is not None else []
        least = "" if cost.all_energy else "at least "
        parts.append("no price is known" if total.usd is None else f"{total.usd:,.2f} US dollars")
        parts.append("its energy was not measured" if total.kwh is None else f"{least}{total.kwh:,.3g} kWh")
        parts += [f"{least}{total.co2_kg:,.3g} kg of CO2"] if total.co2_kg is not None else []
        attempts = len(cost.attempts)
        lost = f"; {attempts - 1} restart{'s' if attempts > 2 else ''}" if attempts > 1 else ""
        if cost.lost.gpu_hours and hours:
            lost += f" and {percent(cost.lost.gpu_hours / hours)} of the hours went to work that was lost"
        it = "It" if self.state.is_trained else "So far it"
        return f"{it} took {duration(total.seconds)}{where}: {', '.join(parts)}{lost}."

    def _scored(self) -> dict[str, Any] | None:
        scored = content.eval_content(self.scores)
        if scored is None or not scored["bars"]:
            return scored and {**scored, "plot": None}
        labels, base, tuned, base_errors, errors, marks = ([bar[i] for bar in scored["bars"]] for i in range(6))
        groups = {"base": base, "tuned": tuned} if any(value is not None for value in base) else {"score": tuned}
        whiskers = {"base": base_errors, "tuned": errors} if "base" in groups else {"score": errors}
        ends = [
            (value or 0.0) + (error or 0.0)
            for values, these in ((tuned, errors), (base, base_errors))
            for value, error in zip(values, these, strict=True)
        ]
        has_marks = any(mark is not None for mark in marks)
        return {**scored, "plot": plots.bars(
            "Base and tuned" if len(groups) > 1 else "Scores", labels, groups, form=percent, errors=whiskers,
            marks=marks if has_marks else (), limit=max(0.05, *ends, *(mark or 0.0 for mark in marks)), head="score",
        )}  # fmt: skip

    def _planned(self) -> dict[str, Any] | None:
        forecast = self.document.get("forecast")
        if not forecast:
            return None
        return {
            "note": content.forecast_note(forecast),
            "rows": content.forecast_rows(forecast, self.metrics, self.stages),
        }


def _finite(value: float | None) -> float | None:
    return value if is_number(value) else None


def _data(run: RunDir, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was trained on: how many conversations, how long, and what was left out; None where nothing says."""
    import numpy as np

    made = get(_read_json(run.tokens / MANIFEST), "meta") or {}
    limit, rows, plot = get(made, "made_from", "rows", "max_length"), [], None
    for split in ("train", "eval"):
        facts = {**(get(meta, split) or {}), **(get(made, "summary", "splits", split) or {})}
        if facts:
            keys = ("conversations", "messages", "tokens", "labelled", "sequences", "cut", "dropped")
            rows.append([split, *(number(facts.get(key)) for key in keys)])
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lengths = np.load(plain_path(run.tokens / "train.index.npy"), mmap_mode="r", allow_pickle=False)["length"]
        most, edges = int(lengths.max()), [0, *(2**n for n in range(3, 32))]
        places = [at for at in range(len(edges) - 1) if edges[at] <= most]
        counts = np.histogram(lengths, edges)[0]
        first = next(at for at in places if counts[at])
        names = [f"{number(edges[at])} to {number(edges[at + 1] - 1)} tokens" for at in places[first:]]
        plot = plots.bars(
            "Lengths of the conversations to train on",
            names,
            {"conversations": [int(counts[at]) for at in places[first:]]},
            head="length",
        )
    out = {f"{kind}: {reason}": count for kind, name in (("rejected", "rejected"), ("by rule", "dropped"))
           for reason, count in (get(meta, name) or {}).items()}  # fmt: skip
    if not rows and plot is None:
        return None
    return {
        "columns": ["split", "#conversations", "#messages", "#tokens", "#trained on", "#sequences", "#cut", "#dropped"],
        "rows": rows,
        "note": f"A sequence holds at most {number(limit)} tokens." if limit else "",
        "plot": plot,
        "out": [[reason, number(count)] for reason, count in sorted(out.items(), key=lambda pair: -pair[1])],
        "read": number(meta.get("rows")),
    }


def tone_of(word: str) -> str:
    """How a page shows the word of a :class:`RunState`: ``good``, ``warn`` or ``plain``."""
    return "warn" if word in BAD else "good" if word in ("training", "trained", "evaluating", "finished") else "plain"


def training_plots(
    metrics: Metrics, restarts: Sequence[int], band: tuple[float, float] | None = None
) -> Iterator[plots.Plot | None]:
    """The plots over steps, one after the other: a line of a long run is large. ``band``: tokens/s that were planned."""
    steps, at = metrics.steps.numbers, [record.step for record in metrics.evals]

    def trained(label: str, name: str, evaluated: str, factor: float) -> Iterator[plots.Line]:
        yield plots.Line(label, steps, metrics.steps.column(name, factor))
        if evaluated:
            values = [getattr(record, evaluated) for record in metrics.evals]
            scaled = [None if value is None else value * factor for value in values]
            yield plots.Line("eval", at, scaled, plots.SECOND, marked=True)

    def scores() -> Iterator[plots.Line]:
        scored_at = [one.step for one in metrics.scores]
        for task in dict.fromkeys(task for one in metrics.scores for task in one.tasks):
            values, base = [one.tasks.get(task) for one in metrics.scores], [one.base(task) for one in metrics.scores]
            yield plots.Line(task, scored_at, values, plots.SECOND, marked=True)
            yield plots.Line(f"{task}, base", scored_at, base)

    per = "pair" if metrics.steps.known("reward_margin") else "token"
    curves: list[tuple[str, Iterator[plots.Line], str, bool]] = [
        ("Loss", trained("train", "loss", "eval_loss", 1), f"nats per {per}", False),
        ("Scores while training", scores(), "headline of each task", False),
        ("Reward accuracy", trained("train", "reward_accuracy", "eval_reward_accuracy", 100), "% of the pairs", False),
        ("Reward margin", trained("train", "reward_margin", "eval_reward_margin", 1), "chosen less rejected", False),
        ("Reward", trained("train", "reward", "eval_reward", 1), "mean of the answers", False),
        ("Divergence", trained("train", "kl", "", 1), "nats per token from the reference", True),
        ("Length of answers", trained("train", "completion_length", "eval_completion_length", 1), "tokens", True),
        ("Token accuracy", trained("train", "token_accuracy", "eval_token_accuracy", 100), "%", False),
        ("Throughput", trained("tokens/s", "tokens_per_second", "", 1), "tokens/s over all ranks", True),
        ("MFU", trained("MFU", "mfu", "", 100), "% of the GPUs' peak", True),
        ("Peak memory", trained("memory", "memory_bytes", "", 2**-30), "GiB, largest of all ranks", True),
        ("Step time", trained("step time", "seconds", "", 1), "s", True),
        ("Learning rate", trained("learning rate", "learning_rate", "", 1), "", True),
        ("Gradient norm", trained("gradient norm", "grad_norm", "", 1), "before clipping", True),
    ]
    for title, lines, unit, zero in curves:  # each line is made where it is drawn: all of a long run would fill memory
        yield plots.lines(
            title, list(lines), unit=unit, zero=zero, restarts=restarts, band=band if title == "Throughput" else None
        )  # fmt: skip


def _machine_plots(history: History) -> Iterator[plots.Plot | None]:
    """What the nodes measured, over hours since the first sample; without GPUs their processors."""
    first = min((points[0][0] for name in history.COLUMNS if (points := history.column(name))), default=0.0)

    def line(label: str, name: str, colour: str = plots.FIRST, factor: float = 1.0, most: bool = False) -> plots.Line:
        points = history.column(name, most=most)
        return plots.Line(label, [(at - first) / 3600 for at, _ in points], [value * factor for _, value in points], colour)

    over = "hours"
    yield plots.lines("GPU utilisation", [line("mean of all GPUs", "utilisation")], unit="%", over=over, zero=True)
    memory = [line("mean", "memory_gib"), line("fullest GPU", "memory_gib", plots.SECOND, most=True)]
    yield plots.lines("GPU memory", memory, unit="GiB", over=over, zero=True)
    yield plots.lines("GPU power", [line("mean of all GPUs", "power_w")], unit="W", over=over, zero=True)
    if not history.column("utilisation"):
        yield plots.lines("CPU use", [line("mean of all nodes", "cpu", factor=100)], unit="%", over=over, zero=True)


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    """What is read there, or None where there is nothing or it cannot be read (then named on stderr)."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        say(f"warning: {path} is left out of the report: {error}")
        return None


def _read_json(path: Path) -> Any:
    if path.exists() and not path.is_file():
        say(f"warning: {path} is left out of the report: it is not a plain file")
        return None
    return _read(lambda file: json.loads(read_whole(file)), path)


# --- nccl -----------------------------------------------------------------------------------------------------------------

TONES = {"pass": "good", "warn": "warn", "fail": "warn"}


def section(run: Path) -> dict[str, Any] | None:
    """The headline of the newest nccl-check below a run's folder, and where the whole result is; None where there is none."""
    documents = {path: read_object(path) for path in (run / FOLDER).glob(f"*/{RESULT}")}
    readable = [path for path, document in documents.items() if document.get("schema") == SCHEMA]
    if not readable:
        return None
    newest = max(readable, key=lambda path: path.stat().st_mtime)
    verdict = documents[newest].get("verdict")
    return {
        "headline": str(get(verdict, "headline") or ""),
        "tone": TONES.get(str(get(verdict, "status")), "plain"),
        "file": str(newest.relative_to(run)),
    }


# --- axis: a run's stages, attempts, saves and faults over time -----------------------------------------------------

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
    scored = {record.attempt for record in metrics.scores if not record.beside}  # these ended for it
    for attempt in attempts:
        runs = now is not None and attempt is attempts[-1] and attempt.ended is None
        ended = now if runs and now is not None else attempt.ended or attempt.seen
        lanes["train"].append((attempt.begun, ended, f"attempt {attempt.attempt}"))
        if not runs and attempt.code != ExitCode.OK and not (attempt.code == ExitCode.AGAIN and attempt.attempt in scored):
            what = "no outcome: killed, or still running" if attempt.code is None else f"exit code {attempt.code}"
            faults.append((ended, f"attempt {attempt.attempt} ended with {what}"))
    lanes = {name: tries for name, tries in lanes.items() if tries}
    if not lanes:
        return None
    first = min(begun for tries in lanes.values() for begun, _, _ in tries)
    last = max(ended for tries in lanes.values() for _, ended, _ in tries)
    span = max(1e-9, last - first)

    def place(value: float) -> float:
        return round(min(100.0, max(0.0, 100 * (value - first) / span)), 3)

    saves = [record for record in metrics.checkpoints if record.status == "saved"]
    marks = [
        (place(record.time), "save", f"step {number(record.step)} saved, {size(record.bytes)}, {moment(record.time)}")
        for record in saves[-SAVES:]
        if record.time
    ]
    marks += [
        (place(one.time), "score", f"step {number(one.step)} scored: {content.in_words(one)}, {moment(one.time)}")
        for one in metrics.scores
        if one.time
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
        "scores": [text for _, kind, text in marks if kind == "score"],
    }


# --- what somebody who pays asks first: did it get better, and what did it take -------------------------------------


def _better(metrics: Metrics, scored: Any) -> str:
    rows = [(task, key, row) for task, paired in (get(scored, "paired") or {}).items() for key, row in paired.items()]
    last = metrics.evals[-1] if metrics.evals else None
    if not rows and last is not None and last.eval_reward_difference is not None:
        change = f"changed by {last.eval_reward_difference:+.3f} ± {number(last.eval_reward_difference_error, 2)}"
        text = f"; the reward of its answers to held-out prompts {change}, prompt by prompt, to {number(last.eval_reward, 3)}"
        return f"{text}. Whether its answers got better than the base's by another measure was not measured."
    if not rows:
        loss = content.eval_losses(metrics)
        if loss is None or len(loss[1]) < 2:
            return "; whether it got better was not measured."
        when, (before, after) = loss
        change = "fell" if after < before else "did not fall"
        text = f"; its loss on conversations held out {change} from {number(before, 3)} to {number(after, 3)} ({when})"
        return f"{text}. Whether its answers got better than the base's was not measured."
    task, key, row = rows[0]
    low, high = (f"{100 * edge:+.1f}" for edge in row["ci95"])
    change = f"{task} {shown(key)} went from {content.score(row['base'])} to {content.score(row['tuned'])}"
    change += f", a difference of {100 * row['difference']:+.1f} points with a 95 % interval from {low} to {high}"
    sentence = {BETTER: "; it got better than its base", WORSE: "; it got worse than its base"}
    text = sentence.get(row["verdict"], "; that it got better than its base is not shown")
    verdicts = [r["verdict"] for _, _, r in rows]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in (BETTER, WORSE, SAME, FEW) if verdict in verdicts]
    others = f" (of {len(rows)} scores: {', '.join(counts)})" if len(rows) > 1 else ""
    return f"{text}: {change}{others}."


def cost_table(cost: Cost) -> dict[str, Any]:
    """Columns and rows of :func:`cost_rows`, without columns of which no row has a value."""
    rows = cost_rows(cost)
    columns = ["", "#time", f"#{cost.hours_of}-hours", "#US dollars", "#kWh", "#kg CO2"]
    kept = [at for at in range(len(columns)) if at < 2 or any(row[at] != UNKNOWN for row in rows)]
    return {"columns": [columns[at] for at in kept], "rows": [[row[at] for at in kept] for row in rows]}


def cost_rows(cost: Cost) -> list[list[str]]:
    """Of each stage, each attempt at training, and of all; what was lost last."""

    def row(name: str, spent: Expense) -> list[str]:
        values = (_hours(spent.gpu_hours), _money(spent.usd), number(spent.kwh, 3), number(spent.co2_kg, 3))
        return [name, duration(spent.seconds), *values]

    rows = []
    for name, spent in cost.stages.items():
        rows.append(row(name, spent))
        if name == "train" and len(cost.attempts) > 1:
            parts = zip(cost.attempts, cost.by_attempt, strict=True)
            rows += [row(f"- attempt {one.attempt}, {one.ranks} ranks", part) for one, part in parts]
    rows.append(row("all stages", cost.total))
    return [*rows, row("of it lost: steps done again", cost.lost)] if cost.lost.seconds else rows


def cost_note(cost: Cost) -> str:
    """What the figures rest on."""
    price, co2 = cost.rates.price, cost.rates.co2
    text = "No price of this GPU stands in ops/prices.yaml"
    if cost.on_cpu:
        text = "Trained without a GPU: each process counts as one, and has no price"
    if cost.rates.usd is not None and price is not None:
        text = f"{cost.rates.usd:g} US dollars for a GPU-hour on demand (ops/prices.yaml, {price.date})"
    by = {"counter": "the GPUs' energy counters", "power samples": "samples of the GPUs' power"}.get(str(cost.energy_from))
    part = "" if cost.all_energy else "; some of it was not measured"
    energy = f"energy by {by}, of training and evaluation, without CPUs, network and cooling{part}" if by else ""
    if not energy:
        return f"{text}; no energy was measured."
    factor = f"{co2:g} kg CO2 a kWh" if co2 else "no CO2 factor in the cluster file"
    return f"{text}; {energy}; {factor}. {UNKNOWN}: not known."


def _hours(value: float | None) -> str:
    return UNKNOWN if value is None else "< 0.01" if 0 < value < 0.005 else f"{value:,.2f}"


def _money(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}"
