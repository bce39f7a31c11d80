"""What the page shows: plain values, tables and sentences, from a run's documents and metrics. No drawing, no files."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from clustertune.console import duration
from clustertune.errors import ExitCode
from clustertune.evaluate import scores as evaluation
from clustertune.recipe.sections import OWN_PROMPTS
from clustertune.report.metrics import Metrics, ScoresRecord
from clustertune.report.steps import WARM_UP, median
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import SCORES

Row = list[str]

FORECAST = {
    "step_s": "seconds of a step",
    "tokens_per_s": "tokens per second",
    "peak_gib_per_gpu": "GiB per GPU, peak",
    "hours": "hours of training",
}
"""What the report compares of a plan, with its name there."""

_ENDS = {
    int(ExitCode.OK): "finished",
    int(ExitCode.FAILED): "failed",
    int(ExitCode.CONFIG): "refused: recipe, data or checkpoint",
    int(ExitCode.STORAGE): "stopped: storage",
    int(ExitCode.AGAIN): "interrupted, saved, continues with the same command",
    int(ExitCode.STOP): "stopped: loss or gradient norm not finite",
}


def get(value: Any, *keys: str) -> Any:
    """A value deep in nested mappings, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted paths; what is None or empty is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None and value != []:
        yield prefix, value


def recipe_of(document: Mapping[str, Any]) -> Resolved | None:
    """The recipe of a ``run.json``, as the run resolved it; None where there is none that can be read."""
    try:
        return Resolved.from_dict(document["recipe"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def model_of(resolved: Resolved | None) -> str | None:
    """The model that was trained, in words; None where the run does not say.

    The recipe's name of it stands for its published weights. A model with random weights, or one scaled down by ``--tiny``, is
    called so, and weights from a folder are named by the folder.
    """
    if resolved is None:
        return None
    model = resolved.recipe.model
    made = " with random weights" if model.weights == "random" else ""
    if resolved.tiny:
        return f"A scaled-down {model.name}{made}"
    return f"{model.name} (weights from {model.path})" if model.path and not made else f"{model.name}{made}"


def dataset_of(resolved: Resolved | None) -> str | None:
    """The data that was trained on; None where the run does not say.

    The recipe's name of it stands for rows that the same layer of the recipe names. Where a later layer brings other rows (a
    file on the command line), they are named instead.
    """
    if resolved is None:
        return None
    data, origins = resolved.recipe.data, resolved.origins
    inputs: dict[str, list[str | None]] = {
        "input": [data.input],
        "sources": [part.input or part.name for part in data.sources or ()],
    }
    for key, names in inputs.items():
        origin = origins.get(f"data.{key}")
        if any(names) and origin is not None and origin != origins.get("data.name"):
            return ", ".join(filter(None, names))
    return data.name


def on_cpu(document: Mapping[str, Any]) -> bool:
    """Whether the ranks trained on processors: as the first rank recorded, whatever GPUs the cluster file or Slurm counts."""
    device = get(document, "distributed", "device")
    if device is not None:
        return bool(device == "cpu")
    gpus = ("distributed", "gpu0"), ("host", "gpus"), ("cluster", "compute", "gpu")
    return not any(get(document, *keys) for keys in gpus)


def tiles(metrics: Metrics, stages: Mapping[str, Mapping[str, Any]], scored: Any, trained: Any) -> list[dict[str, str]]:
    """The figures that come first; ``trained`` is the number of trainable parameters, ``stages`` what each stage took."""
    shown = []

    def add(name: str, value: str, note: str = "") -> None:
        if value != UNKNOWN:
            shown.append({"name": name, "value": value, "note": note})

    steps, evals = metrics.steps, metrics.evals
    if steps:
        add("Training loss", number(steps[-1].loss), f"step {steps[-1].step}, {number(steps[0].loss)} at step {steps[0].step}")
    if evals and evals[-1].eval_reward is None:
        first, last = evals[0], evals[-1]
        if len(evals) > 1:
            add("Eval loss", f"{number(first.eval_loss, 3)} → {number(last.eval_loss, 3)}", f"step {first.step} → {last.step}")
        else:
            add("Eval loss", number(last.eval_loss), f"step {last.step}")
        note = f"eval, {percent(first.eval_token_accuracy)} at step {first.step}" if len(evals) > 1 else "eval"
        add("Token accuracy", percent(last.eval_token_accuracy), note)
    elif steps:
        add("Token accuracy", percent(steps[-1].token_accuracy), "train")
    for name, value, note in _rewards(metrics):
        add(name, value, note)
    rate = median(steps.known("tokens_per_second"))
    if rate is not None and math.isfinite(rate):
        add("Tokens/s", number(float(round(rate))), f"median, {number(steps[-1].tokens)} tokens in all")
    memory = steps.known("memory_bytes")
    if memory:
        add("Peak memory", size(max(memory)), "largest of all ranks")
    apart = (record for name, record in stages.items() if name != SCORES)  # those lie within the training
    seconds = [record["seconds"] for record in apart if isinstance(record.get("seconds"), int | float)]
    if seconds:
        add("Wall time", duration(sum(seconds)), f"training {duration(get(stages, 'train', 'seconds'))}")
    add("Trainable parameters", number(trained))
    for name, row in (get(scored, "tasks") or {}).items():
        key, value = evaluation.headline(name, row)
        if not _is_part(scored, name):
            is_known = name == OWN_PROMPTS or get(scored, "details", name, "comparable")
            add(name, score(value), evaluation.shown(key) + ("" if is_known else ", not the benchmark"))
    return shown


def _rewards(metrics: Metrics) -> Iterator[tuple[str, str, str]]:
    """Tiles of pairs of answers, and of the model's own answers."""
    last, steps = metrics.evals[-1] if metrics.evals else None, metrics.steps
    if last is not None and last.eval_reward_accuracy is not None:
        note = f"eval pairs won by the chosen answer; margin {number(last.eval_reward_margin)}"
        yield "Reward accuracy", percent(last.eval_reward_accuracy), note
    elif last is not None and last.eval_reward is not None:
        note = f"held-out prompts, step {last.step}"
        if last.eval_reward_difference is not None:
            error = number(last.eval_reward_difference_error, 2)
            note += f": {last.eval_reward_difference:+.3f} ± {error} to the first"
        yield "Reward", number(last.eval_reward, 3), note
    elif steps and steps[-1].reward_accuracy is not None:
        yield "Reward accuracy", percent(steps[-1].reward_accuracy), f"train; margin {number(steps[-1].reward_margin)}"


def _is_part(scored: Any, name: str) -> bool:
    """A task or group that a larger group of the same evaluation sums up."""
    members = {other: set(get(detail, "members") or [other]) for other, detail in (get(scored, "details") or {}).items()}
    mine = members.get(name, {name})
    return any(mine < theirs or (mine == theirs and name in theirs and other != name) for other, theirs in members.items())


def score(value: Any) -> str:
    """A share in per cent; what is none as a number."""
    return percent(value) if isinstance(value, int | float) and 0 <= value <= 1 else number(value)


def eval_losses(metrics: Metrics) -> tuple[str, list[float]] | None:
    """The first and the last eval loss, behind when they were taken; None where nothing was evaluated, and of answers that the
    model draws anew, whose loss says nothing.

    Few recipes evaluate before the first step (``eval_on_start``): without that the first one is not a loss before training.
    """
    records = (record for record in metrics.evals if record.eval_reward is None)
    losses = [(record.step, record.eval_loss) for record in records if record.eval_loss is not None]
    return _between(losses) if losses else None


def held_out_rewards(metrics: Metrics) -> tuple[str, list[float]] | None:
    """The same of the reward of held-out prompts."""
    rewards = [(record.step, record.eval_reward) for record in metrics.evals if record.eval_reward is not None]
    return _between(rewards) if rewards else None


def train_losses(metrics: Metrics) -> tuple[str, list[float]] | None:
    """The same of the training loss, which is logged behind a step."""
    losses = zip(metrics.steps.numbers, metrics.steps.column("loss"), strict=True)
    known = ((step, loss) for step, loss in losses if loss is not None)
    ends = [*islice(known, 1), *deque(known, maxlen=1)]
    return _between(ends) if ends else None


def _between(losses: list[tuple[int, float]]) -> tuple[str, list[float]]:
    (first, before), (last, after) = losses[0], losses[-1]
    if len(losses) == 1:
        return ("before training" if first == 0 else f"after step {first}"), [before]
    when = f"before training and after step {last}" if first == 0 else f"after steps {first} and {last}"
    return when, [before, after]


def expected_rows(
    resolved: Resolved | None, metrics: Metrics, stages: Mapping[str, Any], scored: Any, trained: Any
) -> list[Row]:
    """The recipe's ``expect`` beside what the run reached; ``trained`` is the number of trainable parameters."""
    last_step = metrics.steps[-1] if metrics.steps else None
    last_eval = metrics.evals[-1] if metrics.evals else None
    train_seconds = get(stages, "train", "seconds")
    reached: dict[str, Any] = {
        "train_loss": last_step and last_step.loss,
        "eval_loss": last_eval and last_eval.eval_loss,
        "token_accuracy": last_eval and last_eval.eval_token_accuracy,
        "hours": train_seconds / 3600 if isinstance(train_seconds, int | float) else None,
        "steps": last_step and last_step.step,
        "trainable_parameters": trained,
    }
    rows = []
    expect = resolved.recipe.expect.model_dump(mode="json") if resolved is not None and resolved.recipe.expect else {}
    scores = []
    for name, by_metric in (expect.get("tasks") or {}).items():
        row, comparable = get(scored, "tasks", name) or {}, get(scored, "details", name, "comparable")
        for metric, expected in by_metric.items():
            scores.append((f"{name}.{metric}", expected))
            reached[f"{name}.{metric}"] = row.get(evaluation.find_metric(row, metric)) if comparable else None
    for key, expected in [*flatten({key: value for key, value in expect.items() if key != "tasks"}), *scores]:
        actual = reached.get(key)
        both = isinstance(expected, int | float) and isinstance(actual, int | float)
        difference = f"{actual - expected:+,.4g}" if both else UNKNOWN
        rows.append([key, number(expected), number(actual), difference])
    return rows


def forecast(planned: Any, metrics: Metrics, stages: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, float | None]]:
    """What ``plan`` predicted before the first step, by name, and what happened.

    Of steps the median behind the first two, which hold warm-up; None where nothing happened yet.
    """
    steps, peak = metrics.steps, max(metrics.steps.known("memory_bytes"), default=None)
    rate = median(steps.known("tokens_per_second", WARM_UP))
    train_seconds = get(stages, "train", "seconds")
    reached = {
        "step_s": steps.step_seconds() or median(steps.known("seconds")),
        "tokens_per_s": median(steps.known("tokens_per_second")) if rate is None else rate,
        "peak_gib_per_gpu": None if peak is None else peak / 2**30,
        "hours": train_seconds / 3600 if isinstance(train_seconds, int | float) else None,
    }
    rows = [(name, get(planned, key), reached[key]) for key, name in FORECAST.items()]
    return [row for row in rows if is_number(row[1]) and row[1] > 0]


def forecast_rows(planned: Any, metrics: Metrics, stages: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The same as a sentence, with the error of the plan."""
    rows = []
    for name, predicted, measured in forecast(planned, metrics, stages):
        error = f"{predicted / measured - 1:+.0%}" if measured else UNKNOWN
        rows.append([name, number(predicted), number(measured, 1 if measured and measured > 1000 else 4), error])
    return rows


def forecast_note(planned: Any) -> str:
    """How the plan knew the network, or why there is none."""
    if unknown := get(planned, "unknown"):
        return f"No plan could be made: {unknown}"
    calibrated = get(planned, "calibrated")
    how = "calibrated with earlier runs" if calibrated else "not calibrated: clustertune plan --calibrate learns from this run"
    return f"Bandwidth {get(planned, 'bandwidth_source')}; {how}."


def in_words(scored: ScoresRecord) -> str:
    """``ifeval 0.4063, +0.0312 to the base``, task by task."""
    parts = []
    for task, value in scored.tasks.items():
        difference = scored.differences.get(task)
        parts.append(f"{task} {score(value)}" + ("" if difference is None else f", {difference:+.4f} to the base"))
    return "; ".join(parts)


def stage_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Name, status, tries, time of all tries."""
    return [
        [name, str(record.get("status", UNKNOWN)), number(record.get("tries", 1)), duration(record.get("seconds"))]
        for name, record in stages.items()
    ]


def attempt_rows(metrics: Metrics) -> list[Row]:
    """Where each attempt began, how far it came, what it had to repeat, how it ended."""
    rows = []
    for attempt in metrics.attempts:
        end = "killed, or still running" if attempt.exit_code is None else _ENDS.get(attempt.exit_code, "ended")
        end += f" ({attempt.reason})" if attempt.reason and attempt.reason != end else ""
        end += f", exit {attempt.exit_code}" if attempt.exit_code else ""
        rows.append([str(attempt.attempt), *map(number, (attempt.start_step, attempt.last_step, attempt.repeated)), end])
    return rows


def startup_rows(metrics: Metrics) -> list[Row]:
    """Of each attempt that took a step: its start-up, weights read, peak memory, and its parts, the longest first."""
    rows = []
    for record in metrics.startups:
        parts = sorted(record.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts)
        rows.append([str(record.attempt), duration(record.seconds), size(record.read_bytes), size(record.host_bytes), shown])
    return rows


def checkpoint_rows(metrics: Metrics, present: Collection[str]) -> list[Row]:
    """Every checkpoint that was saved; ``present`` are the paths, relative to the run, that are still there."""
    rows = []
    for record in metrics.checkpoints:
        if record.status == "saved":
            name, state = (record.path or UNKNOWN).rpartition("/")[2], "kept" if record.path in present else "removed"
            rows.append([name, number(record.step), size(record.bytes), duration(record.seconds), state])
    return rows


def recipe_rows(resolved: Resolved) -> list[Row]:
    """Key, value and origin of everything that the recipe sets."""
    rows = []
    train = {"global_batch_size": resolved.global_batch_size, **resolved.train_args}
    for key, value in flatten({**resolved.recipe.model_dump(mode="json"), "train": train, "lora": resolved.lora}):
        # A value inside a mapping that was set as a whole has the mapping's origin.
        around = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        origin = next((resolved.origins[name] for name in around if resolved.origins.get(name)), "default")
        if origin != "default":  # TRL's and PEFT's own have none
            rows.append([key, plain(value), origin])
    return rows


def derived_rows(resolved: Resolved) -> list[Row]:
    """Key, value and formula."""
    return [[item.key, plain(item.value), item.reason] for item in resolved.derived]


def environment_rows(run: Mapping[str, Any]) -> list[Row]:
    """Distribution, hardware, versions, image, commit and command."""
    rows = [[f"distributed {key}", plain(value)] for key, value in flatten(run.get("distributed"))]
    rows += [[f"accelerate {key}", plain(value)] for key, value in flatten(get(run, "recipe", "accelerate"))]
    rows += [[f"host {key}", plain(value)] for key, value in flatten(run.get("host"))]
    commit = get(run, "git", "commit")
    if commit:
        rows.append(["git commit", f"{commit}{' with uncommitted changes' if get(run, 'git', 'dirty') else ''}"])
    rows += [[name, plain(value)] for name, value in flatten(run.get("versions"))]
    rows += [[f"container {key}", plain(value)] for key, value in flatten(run.get("container"))]
    command = run.get("command")
    if isinstance(command, list):
        rows.append(["command", " ".join(map(str, command))])
    rows += [[key, plain(value)] for key, value in flatten({"fingerprint": run.get("fingerprint")})]
    return rows


def eval_content(scored: Any) -> dict[str, Any] | None:
    """Rows, numbers for the bars and the notes beside them; None where nothing was scored."""
    tasks, marks = get(scored, "tasks"), get(scored, "pass", "marks") or {}
    if not isinstance(tasks, Mapping) or not all(isinstance(row, Mapping) for row in tasks.values()):
        return None
    rows, bars = [], []
    for name, task in tasks.items():
        named = {evaluation.find_metric(task, metric): mark for metric, mark in (get(marks, name) or {}).items()}
        for key, value, error in evaluation.metrics(task):
            mark = named.get(key)
            lower = key.partition(",")[0] in (get(scored, "details", name, "lower_is_better") or ())
            form = number if lower else score
            cells = [name, evaluation.shown(key), form(value), form(error)]
            rows.append([*cells, *([percent(mark)] if marks else [])])
            if isinstance(value, int | float) and 0 <= value <= 1 and not lower and not _is_part(scored, name):
                label = evaluation.shown(key) if len(tasks) == 1 else f"{name} {evaluation.shown(key)}"
                base = get(scored, "paired", name, key, "base")
                metric, _, kept = key.partition(",")
                beside = get(scored, "base", "tasks", name, f"{metric}_stderr,{kept}")
                both = [one if isinstance(one, int | float) else None for one in (beside, error)]
                bars.append((label, base, float(value), *both, mark))
    notes = ["Below the recipe's pass mark."] if get(scored, "pass", "passed") is False else []
    notes += [str(note) for note in get(scored, "notes") or []]
    decoding = ", ".join(f"{key} {plain(value)}" for key, value in flatten(get(scored, "decoding")) if "." not in key)
    about = "; ".join(evaluation.title(name, scored) for name in tasks if not _is_part(scored, name))
    paired = evaluation.paired_rows(scored) if get(scored, "paired") else []
    return {
        "subtitle": f"{about}. {decoding}",
        "columns": ["task", "score", "#value", "#± standard error", *(["#pass mark"] if marks else [])],
        "rows": rows,
        "notes": notes,
        "bars": bars,
        "paired": paired,
        "paired_columns": ["task", "score", "#base", "#tuned", "#difference", "#95 % interval", "verdict"],
        "paired_about": f"{get(scored, 'base', 'model')}, {get(scored, 'paired_method')}." if paired else "",
        "changed": [
            {"title": f"{name}, document {row['doc']}: {side}", **row}
            for name, sides in (get(scored, "changed") or {}).items()
            for side, documents in sides.items()
            for row in documents
        ],
        "answers": [_own_answer(row) for row in get(scored, "answers", "first") or []],
        "more_answers": (get(scored, "answers", "count") or 0) - len(get(scored, "answers", "first") or []),
    }


def _own_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """One of one's own prompts with its answers, and behind each what it reached."""
    sides = []
    for side in ("base", "tuned"):
        reached = [
            f"{metric} {number(value, 3)}" if metric == "loss" else f"{metric} {'kept' if value else 'not kept'}"
            for metric, value in (row.get(f"{side}_scores") or {}).items()
        ]
        if side in row:
            sides.append({"title": " · ".join([side.capitalize(), *reached]), "text": row[side]})
    return {"title": f"row {row['line']}", "prompt": row["prompt"], "answer": row.get("answer"), "sides": sides}


def subtitle(run: Mapping[str, Any], resolved: Resolved | None) -> str:
    """Model, data, date and commit in one line."""
    parts = [model_of(resolved), dataset_of(resolved)]
    created = moment(run.get("created"))
    parts += [created if created != UNKNOWN else None, (get(run, "git", "commit") or "")[:12] or None]
    return " · ".join(str(part) for part in parts if part)


def warnings_of(resolved: Resolved | None, metrics: Metrics, adapter: Any) -> list[str]:
    """What a reader must not miss."""
    warnings = [] if resolved is not None else ["run.json contains no recipe that can be read."]
    if resolved is not None and resolved.tiny:
        warnings.append("Run with --tiny: the architecture is scaled down and its weights are random.")
    losses = zip(metrics.steps.numbers, metrics.steps.column("loss"), strict=True)
    bad = next((step for step, loss in losses if loss is not None and not math.isfinite(loss)), None)
    if bad is not None:
        warnings.append(f"The loss is not finite at step {bad}.")
    warnings += [f"Alarm at {metrics.alarm}."] if metrics.alarm else []
    of_the_adapter = get(adapter, "meta", "warnings")
    warnings += resolved.warnings if resolved is not None else []
    return warnings + ([str(item) for item in of_the_adapter] if isinstance(of_the_adapter, list) else [])


# --- format ---------------------------------------------------------------------------------------------------------------

# Numbers and times as a person reads them; ``-`` for what is not known.

UNKNOWN = "-"


def is_number(value: Any) -> bool:
    """A finite number that a float holds: JSON knows longer ones, and Python reads NaN."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def number(value: Any, digits: int = 4) -> str:
    """A plain number with so many decimals, less for whole ones: ``1.139``, ``5e-05``, ``12,345``."""
    if not is_number(value):
        return str(value) if isinstance(value, float) else UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 10**-digits * 10:
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def percent(value: Any) -> str:
    """A share as a percentage with two decimals."""
    return f"{value * 100:.2f} %" if is_number(value) else UNKNOWN


def size(value: Any) -> str:
    """Bytes in the binary unit that fits: ``1.61 GiB``."""
    if not is_number(value):
        return UNKNOWN
    left = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(left) < 1024 or unit == "TiB":
            return f"{left:.0f} {unit}" if unit == "B" else f"{left:.2f} {unit}"
        left /= 1024
    raise AssertionError("the last unit takes everything")


def moment(seconds: Any) -> str:
    """Unix seconds as a UTC date and time."""
    if not is_number(seconds) or not 0 <= seconds < 1e11:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plain(value: Any) -> str:
    """Any JSON value on one line, as YAML would write the simple ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
