"""The document of a benchmark: what was measured, on what, with what, and what that means for the whole recipe."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.bench import figures, peer, project, published
from clustertune.bench.ask import Asked, Bench
from clustertune.bench.drive import Found, Peer
from clustertune.config.cluster_schema import Cluster
from clustertune.config.distribution import mixed_precision
from clustertune.events import read_events
from clustertune.plan.predict import work_of
from clustertune.tree import ROOT

SCHEMA = "clustertune.bench/2"
CPU_NOTE = "no GPU: ranks are processes on CPUs, so that figures show the program at work, not what a GPU does"
PEER_NOTE = "{word} was distributed as {theirs}, this project as {ours}"
TOKENS_NOTE = "tokens are those of conversations, padding left out; with it they are called computed"


def document(bench: Bench, found: Found, cluster: Cluster) -> dict[str, Any]:
    """Everything that is known after the rounds. Raises UserError where a rank left no whole figures."""
    run = found.run.read()
    schedule = bench.asked.schedule
    shown = str(found.run.path / "attempts")
    ours = figures.measured(found.ours, wanted=schedule.steps, share=bench.share, shown=shown)
    events = list(read_events(found.run.metrics))
    ends, started = ends_of(events, found.attempts), startup_of(events, found.attempts)
    device = found.ours[0][0].get("device")
    lengths = bench.lengths
    plan, why = project.predict(bench.whole, cluster, lengths)
    used = project.utilisation(work_of(bench.measured, lengths), ours, device)
    own_data = not bench.asked.synthetic
    rows = found.ours[0][0].get("rows") if own_data else None
    ahead = project.whole(bench.whole, ours, ends, rows, plan, used.get("gpu"))
    body = {
        "schema": SCHEMA,
        "recipe": bench.whole.name,
        "model": bench.whole.recipe.model.name,
        "dataset": bench.whole.recipe.data.name if not bench.asked.synthetic else "made up",
        "bf16": mixed_precision(bench.measured.train_args) == "bf16",
        "overrides": changed(bench.asked),
        "tiny": bench.asked.tiny,
        "synthetic": bench.asked.synthetic,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": run.get("command"),
        "hardware": _hardware(found),
        "distributed": run.get("distributed"),
        "versions": {**(run.get("versions") or {}), "torch": found.ours[0][0].get("torch")},
        "image": run.get("container"),
        "commit": run.get("git"),
        "resolved": {"sha256": recipe_sum(bench), "fingerprint": bench.measured.fingerprint()},
        "course": {
            "warmup": schedule.warmup,
            "steps": schedule.steps,
            "profiled": schedule.profiled,
            "rounds": bench.asked.rounds,
        },
        "ours": ours,
        "ends": ends,
        "startup_s": started,
        "utilisation": used,
        "plan": project.beside_plan(plan, why, ours, used, ahead["hours"]),
        "projection": ahead,
        "peers": [_against(bench, found, one) for one in found.peers],
    }
    body["notes"] = list(_notes(bench, found, body))
    told: dict[str, Any] = relative(body)
    return told


def changed(asked: Asked) -> list[str]:
    """What the recipe was changed by, with paths as seen from here."""
    found: list[str] = relative(published.changes(asked.overrides))
    return found


def resolved_recipe(bench: Bench) -> dict[str, Any]:
    """What the ranks trained, with paths as seen from here."""
    found: dict[str, Any] = relative(bench.measured.as_dict())
    return found


def recipe_sum(bench: Bench) -> str:
    """SHA-256 (hex) of :func:`recipe_text`."""
    return hashlib.sha256(recipe_text(bench).encode()).hexdigest()


def recipe_text(bench: Bench) -> str:
    """The resolved recipe as its file holds it."""
    return json.dumps(resolved_recipe(bench), indent=1) + "\n"


def relative(value: Any) -> Any:
    """A document without this machine's places: paths from the checkout and from the working folder."""
    if isinstance(value, Mapping):
        return {key: relative(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [relative(inner) for inner in value]
    if isinstance(value, str):
        for folder in (str(ROOT), str(Path.cwd())):
            value = value.replace(folder + os.sep, "")
    return value


def _hardware(found: Found) -> dict[str, Any]:
    """Of the node that this runs on: all of a benchmark's are taken to be alike."""
    first = found.ours[0][0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    size = first.get("device_bytes")
    return {
        "gpu": first.get("device"),
        "gpu_gib": size / 2**30 if size else None,
        "ranks": len(found.ours[0]),
        "nodes": found.nodes,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": first.get("threads"),
        "memory_gib": memory,
    }


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), None)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def ends_of(events: list[dict[str, Any]], attempts: list[int]) -> dict[str, float | None]:
    """Seconds of one evaluation and of one checkpoint, and its size: medians over the rounds. Not part of any step."""

    def of(kind: str, key: str) -> list[float]:
        return [
            float(e[key])
            for e in events
            if e.get("event") == kind and e.get("attempt") in attempts and isinstance(e.get(key), int | float)
        ]

    size = _median(of("checkpoint", "bytes"))
    return {
        "evaluation_s": _median(of("eval", "seconds")),
        "checkpoint_s": _median(of("checkpoint", "seconds")),
        "checkpoint_gb": size / 1e9 if size else None,
    }


def startup_of(events: list[dict[str, Any]], attempts: list[int]) -> dict[str, float]:
    """Seconds of each part of the start-up, medians over the rounds, in the order in which they were told; empty: not told."""
    parts: dict[str, list[float]] = {}
    for event in events:
        name, seconds = event.get("part"), event.get("seconds")
        known = event.get("event") == "startup" and event.get("attempt") in attempts
        if known and isinstance(name, str) and isinstance(seconds, int | float):
            parts.setdefault(name, []).append(float(seconds))
    return {name: statistics.median(values) for name, values in parts.items()}


def _against(bench: Bench, found: Found, one: Peer) -> dict[str, Any]:
    told: dict[str, Any] = {
        "peer": peer.title(one.word) if one.word not in peer.NAMES else one.word,
        "what": peer.title(one.word),
    }
    if one.failed is not None or not one.theirs:
        return {**told, "failed": one.failed, "measured": None, "ratio": None, "pairs": None}
    kind = one.theirs[0][0].get("distributed")
    # It has the recipe's distribution file. On CPUs accelerate makes data parallelism of it for trl-defaults.
    share = 1.0 if kind == "MULTI_CPU" else bench.share
    wanted, shown = bench.asked.schedule.steps, str(found.run.path / "peer")
    theirs = figures.measured(one.theirs, wanted=wanted, share=share, shown=shown)
    ours = figures.measured(one.paired, wanted=wanted, share=bench.share, shown=str(found.run.path / "attempts"))
    return {
        **told,
        "failed": None,
        "distributed": kind,
        "measured": theirs,
        "ratio": figures.ratio(ours, theirs),
        "pairs": figures.paired(one.paired, one.theirs, interleaved=bench.asked.interleave),
        "same_tokens": ours["tokens_per_step"] == theirs["tokens_per_step"],
    }


def _notes(bench: Bench, found: Found, body: Mapping[str, Any]) -> Iterator[str]:
    yield TOKENS_NOTE
    if body["hardware"]["gpu"] is None:
        yield CPU_NOTE
    if bench.asked.tiny:
        yield "--tiny: the architecture is scaled down and its weights are random"
    if bench.asked.synthetic:
        yield "random weights at full size and made-up conversations: speed and memory count, loss does not"
    ours = (body["distributed"] or {}).get("type")
    for one in body["peers"]:
        if one.get("distributed") and ours and one["distributed"] != ours:
            yield PEER_NOTE.format(word=one["peer"], theirs=one["distributed"], ours=ours)
        if one["failed"]:
            yield f"the peer ended without a result: {one['failed']}"
        elif one["peer"] == peer.TRL and not one["same_tokens"]:
            yield f"{one['peer']} trained on another number of tokens a step: its steps are not the same work"
    spread = body["ours"]["step_s"]
    if spread["median"] and spread["stdev"] > 0.1 * spread["median"]:
        share = spread["stdev"] / spread["median"]
        yield f"steps differ by {share:.0%} (standard deviation over median): more --steps, or a machine of its own"
    rows, schedule = found.ours[0][0].get("rows"), bench.asked.schedule
    batch = int(bench.measured.recipe.train["global_batch_size"])
    if rows and rows < schedule.total * batch and rows % batch:
        yield f"{rows:,} sequences are fewer than the steps take: the last step of each epoch is smaller than the others"
