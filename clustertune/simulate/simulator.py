"""``plan --simulate``: what can be simulated, the child process that does it, and what it counted beside the plan.

Beside the plan of the same depth it stands term by term, with the least time that its operators and collectives take. The
memory of the step is also a picture: the course of the step, and each moment's parts with the plan's terms below them.
"""

from __future__ import annotations

import html
import json
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.host.system import GIB
from clustertune.plan.machine import PlanMachine
from clustertune.plan.memory import EVALUATION, UPDATE, save_copy
from clustertune.plan.predict import Plan
from clustertune.plan.step import RankGroup, flops, traffic
from clustertune.plan.strategy import ModelShape
from clustertune.process import die_with_parent, end
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.resolve.resolved import Resolved
from clustertune.simulate import guard
from clustertune.simulate.scratch import scratch_folder

CAPABILITY = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
              "blackwell-gddr": (12, 0)}  # fmt: skip
"""By the generation of :class:`PlanMachine`."""
FEW, EACH_NODE = ("first", "last"), "each-node"


def refusals(resolved: Resolved) -> Iterator[Problem]:
    """What fake tensors cannot run, a sentence each."""
    used, file = resolved.distribution, f"{resolved.name}/{resolved.accelerate_file}"
    if used.kind == "Megatron" or used.is_deepspeed:
        engine = "Megatron-Core" if used.kind == "Megatron" else "DeepSpeed"
        yield Problem(f"{engine} allocates behind torch's dispatcher and cannot be simulated", file=file, fix=_INSTEAD)
    elif used.kind not in ("FSDP2", "NO") and used.world_size > 1:
        yield Problem(f"{used.kind} reduces in C++ code that needs data, and cannot be simulated", file=file, fix=_INSTEAD)
    if resolved.is_grpo:
        text = "trainer: grpo: answers cannot be generated without data"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", fix=_INSTEAD)
    if used.compiled:
        fix = f"simulate it uncompiled: accelerate.{acc.COMPILER}=null"
        yield Problem("code that Inductor compiles cannot be simulated", file=file, fix=fix)
    config = quantization.of(resolved.train_args)
    if config is not None:
        key = "train.model_init_kwargs.quantization_config"
        text = f"the kernels of {quantization.method(config)} need data and cannot be simulated"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", key=key, fix="plan it without --simulate")
    if resolved.train_args["use_liger_kernel"]:
        text = "Liger's Triton kernels cannot be simulated"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", key="train.use_liger_kernel", fix="simulate it with false")


_INSTEAD = "plan it without --simulate"


def with_depth(resolved: Resolved, depth: int) -> Resolved:
    """The same recipe with so many layers of its own width. Lists with an entry a layer are cut as well."""
    layers = int(resolved.architecture["num_hidden_layers"])
    if not 1 <= depth <= layers:
        text = f"{depth}: {resolved.name} has {layers} layers, so the depth is a number from 1 to {layers}"
        raise UserError(text, file="command line", key="--depth", fix="leave it out for all layers")
    body = {
        key: value[:depth] if isinstance(value, list) and len(value) == layers else value
        for key, value in resolved.architecture.items()
    }
    return replace(resolved, architecture={**body, "num_hidden_layers": depth})


def read_ranks(text: str | None, resolved: Resolved) -> list[int]:
    """``0,8,15``, or any of ``first``, ``last`` and ``each-node``; the first rank where nothing is said."""
    world, on_node = resolved.world_size, resolved.distribution.ranks_per_node
    ranks: list[int] = []
    for part in (text or "first").split(","):
        word = part.strip()
        if word == EACH_NODE:
            ranks += range(0, world, on_node)
        elif word in FEW:
            ranks.append(0 if word == "first" else world - 1)
        elif word.isdecimal() and int(word) < world:
            ranks.append(int(word))
        else:
            raise UserError(
                f"{word!r} is no rank from 0 to {world - 1}", file="command line", key="--ranks",
                fix=f"write numbers, {', '.join(FEW)} or {EACH_NODE}, joined by commas",
            )  # fmt: skip
    return list(dict.fromkeys(ranks))


@dataclass(frozen=True)
class Simulation:
    """What was counted, by rank."""

    resolved: Resolved
    """As it was simulated: with the depth that was asked for."""
    ranks: dict[int, dict[str, Any]]
    note: str
    """What this machine could not do."""

    @property
    def first(self) -> dict[str, Any]:
        """The rank that is compared with the plan."""
        return next(iter(self.ranks.values()))


def simulate(
    resolved: Resolved, machine: PlanMachine, *, ranks: Sequence[int] = (0,), tell: Callable[[dict[str, Any]], None]
) -> Simulation:
    """Simulate ranks of a recipe in a child process, one after the other. ``tell`` gets the child's lines of progress.

    Raises UserError: what cannot be simulated, and what failed, with the line of the project that is nearest to it.
    """
    raise_if(refusals(resolved))
    library, why = guard.build()
    with scratch_folder() as folder:
        results = _run(folder, specification(resolved, machine, ranks, library), tell)
    note = "" if library is not None else f"{why}: tensors are called cpu, and a wrong device is not found"
    return Simulation(resolved, results, note)


def specification(resolved: Resolved, machine: PlanMachine, ranks: Sequence[int], library: Path | None) -> dict[str, Any]:
    """What the child process reads. ``library``: the guard's; None: tensors are called cpu."""
    on_node = min(resolved.world_size, resolved.distribution.ranks_per_node)
    return {
        "resolved": resolved.as_dict(),
        "library": None if library is None else str(library),
        "world": resolved.world_size,
        "ranks": [{"rank": rank, "local": rank % on_node, "on_node": on_node} for rank in ranks],
        "gpu": {
            "name": machine.gpu,
            "memory": machine.usable_bytes,
            "capability": CAPABILITY[machine.generation],
            "flops_per_s": machine.peak_flops,
            "bytes_per_s": machine.hbm_bytes_per_s,
        },
    }


END_SECONDS = 20.0
"""Until the child has ended its rank and removed its folder."""


def progress(body: dict[str, Any]) -> str:
    """One line of progress for a person."""
    if "layer" in body:
        return f"rank {body['rank']}: step {body['step']}, {body['moment']}: layer {body['layer']} of {body['layers']}"
    return f"rank {body['rank']}: {body['progress']}"


def _run(folder: Path, spec: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[int, dict[str, Any]]:
    file, log = folder / "spec.json", folder / "log"
    file.write_text(json.dumps(spec))
    results: dict[int, dict[str, Any]] = {}
    problems: list[Problem] = []
    command = [sys.executable, "-m", "clustertune.simulate.child", str(file)]
    dies = partial(die_with_parent, signal.SIGTERM)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=dies) as process,  # noqa: PLW1509
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                body = json.loads(line)
                if "found" in body:
                    results[int(body["rank"])] = body["found"]
                elif "resumed" in body:
                    results[int(body["rank"])]["resume"] = body["resumed"]
                elif "error" in body or "signal" in body:
                    problems.append(_failed(body))
                else:
                    tell(body)
        except BaseException:
            end(process, END_SECONDS)
            raise
    if not problems and len(results) < len(spec["ranks"]):
        last = [line for line in log.read_text().splitlines() if line.strip()]
        problems.append(Problem(f"the simulation ended: {last[-1] if last else process.returncode}", file="--simulate"))
    raise_if(problems, ExitCode.FAILED)
    return results


def _failed(body: dict[str, Any]) -> Problem:
    rank = body["rank"]
    if "signal" in body:
        return Problem(f"rank {rank} was ended by signal {body['signal']}", file="--simulate", fix="is there memory for it?")
    return Problem(f"rank {rank} fails ({body['during']}): {body['error']}", file=body["where"] or "--simulate")


# --- what was counted, beside the plan -----------------------------------------------------------------------------------

LAST_STEP = "step 2"
RESTING = ("weights", "adapters", "optimizer", "reference model")
"""The plan's terms of what lies on a GPU between steps."""


@dataclass(frozen=True)
class Compared:
    """One term of the plan and what was counted."""

    term: str
    planned: float | None
    """None: the plan has no such term."""
    counted: float
    unit: Literal["B", "FLOP"] = "B"

    @property
    def difference(self) -> float | None:
        """As a share of what was counted: below 0 the plan is too low."""
        if self.planned is None or not self.counted:
            return None
        return self.planned / self.counted - 1

    def as_json(self) -> dict[str, Any]:
        body = {"term": self.term, "planned": self.planned, "counted": self.counted, "difference": self.difference}
        return body | {"unit": self.unit}


def terms(plan: Plan, simulation: Simulation) -> list[Compared]:
    """Each moment's memory, the operations of a step, and the bytes of each kind of collective in it."""
    one = simulation.first
    rest = sum(term.value for term in plan.moment(UPDATE).parts if term.name in RESTING)
    planned = {moment.name: moment.bytes for moment in plan.moments}
    compared = [Compared("at rest", rest, one["rest_bytes"])]
    counted = {name: peak["bytes"] for name, peak in one["moments"].items() if name not in BESIDE}
    if EVALUATION not in planned:  # the recipe has none
        counted.pop(EVALUATION, None)
    compared += [Compared(name, planned.get(name), size) for name, size in counted.items()]
    compared.append(Compared("peak", plan.peak.bytes, max(counted.values())))
    # Tensors that are called cpu go through TRL's loss for CPUs, which does not compute the head twice
    # (trl/trainer/utils.py, _use_triton).
    work = Compared(PRODUCTS, None if simulation.note else product_flops(plan.shape), one["product_flops"], "FLOP")
    return [*compared, work, *_traffic(plan, simulation), *_saved(plan, one)]


PRODUCTS = "matrix products of this rank in a step"


def product_flops(shape: ModelShape) -> float:
    """FLOPs of the matrix products of one rank in a step, with what recomputation repeats; TRL's tiles take the head whole on
    every rank of tensor parallelism (trl/trainer/utils.py, full_tensor)."""
    plan = shape.strategy
    shared = flops(shape, hardware=True, attention=False) / plan.world_size
    whole = 2 * ((2 if plan.lora else 3) + plan.head_again) * shape.head_weights * shape.step_tokens / plan.world_size
    return shared + (plan.tp - 1) * (whole if plan.fused_loss and plan.tiled_loss else 0.0)


def _saved(plan: Plan, one: dict[str, Any]) -> Iterator[Compared]:
    """What one rank writes at a save, reads when it resumes, and copies to host memory meanwhile."""
    strategy, saved = plan.strategy, one["save"]
    share = plan.schedule.checkpoint_bytes / (strategy.state_shards * strategy.tp if strategy.kind.startswith("FSDP") else 1)
    share *= plan.shape.split_trained / plan.shape.local_trained
    yield Compared("checkpoint, written by this rank", share, saved["bytes"])
    if "resume" in one and one["resume"]["checkpoint_bytes"]:
        yield Compared("checkpoint, read by this rank", share, one["resume"]["checkpoint_bytes"])
    if (copy := save_copy(plan.shape)) is not None:
        ranks = strategy.ranks_per_node if strategy.kind.startswith("FSDP") else 1
        yield Compared("copy for saves in host memory", copy.value / ranks, saved["pinned_bytes"] + saved["pageable_bytes"])


def phases(one: dict[str, Any]) -> list[str]:
    """The moments in the order in which they come, but for loading."""
    return [name for name in one["moments"] if name not in (SAVE, EVALUATION, "loading")] + [
        name for name in (SAVE, EVALUATION) if name in one["moments"]
    ]


def faults(simulation: Simulation) -> list[Problem]:
    """What would go wrong on GPUs beside the sequence of collectives: threads, streams, and random numbers."""
    problems = []
    for rank, one in simulation.ranks.items():
        own = rank % simulation.resolved.distribution.ranks_per_node
        for thread, devices in one["save"]["devices"].items():
            if other := [device for device in devices if device != own]:
                text = f"rank {rank}: thread {thread} makes a context on cuda:{other[0]}, its own device is cuda:{own}"
                problems.append(Problem(text, file=SAVE, fix="put the thread on its device before it does anything else"))
        problems += [
            Problem(
                f"rank {rank}: {text} ({count} times)", file=SAVE, fix="have the stream wait for an event, or the host for it"
            )
            for text, count in one["save"]["faults"].items()
        ]
        if "resume" in one:
            problems += _random(rank, one["resume"])
    return problems


def _random(rank: int, resumed: dict[str, Any]) -> Iterator[Problem]:
    device = resumed["device"]
    states = [one for one in resumed["random"] if one["device"] == device]
    if resumed["reseeded"] or not states or states[-1]["of"][:1] != [rank]:
        text = f"rank {rank}, resumed on cuda:{device}, does not draw on from the random state that it saved"
        yield Problem(text, file="resume", fix="save the state of the rank's own device, and set it on the device that it has")


SAVE = "save"
BESIDE = ("loading", "at rest", SAVE)
"""Moments that are none of a step: the plan has a term for what rests, and bytes for a save."""
KINDS = {"gather": ("all-gather", "reduce-scatter"), "reduce": ("all-reduce",), "exchange": ("all-to-all",), "send": ("send",)}
"""The plan's kinds of collective by what they may be called."""


def _traffic(plan: Plan, simulation: Simulation) -> Iterator[Compared]:
    sizes = traffic(plan.shape)
    micro = plan.strategy.accumulation
    planned: dict[tuple[str, int], float] = defaultdict(float)
    for part, times in ((sizes.forward, micro), (sizes.backward, micro), (sizes.exposed, micro), (sizes.last, 1)):
        for one in part:
            kind = "reduce-scatter" if one.name.startswith("reduce-scatter") else KINDS[one.kind][0]
            planned[kind, one.group.size] += one.size * times
    counted: Counter[tuple[str, int]] = Counter()
    for row in simulation.first["traffic"].get(LAST_STEP, []):
        if row["ranks"] > 1:
            counted[row["kind"], row["ranks"]] += row["bytes"]
    for kind, ranks in sorted({*planned, *(key for key, size in counted.items() if size > SMALL)}):
        known = planned.get((kind, ranks))
        yield Compared(f"{kind}, {ranks} ranks", known, counted[kind, ranks])


SMALL = 2**20
"""Bytes of a step that are not worth a line: the loss, the norm, counts of tokens."""


@dataclass(frozen=True)
class LeastTime:
    """What a step takes at the very least: every operator at the GPU's peak and every link at its nominal speed. Seconds."""

    device: float
    link: float

    @property
    def seconds(self) -> float:
        """Computing and communicating at once, perfectly."""
        return max(self.device, self.link)


def least_time(plan: Plan, simulation: Simulation) -> LeastTime:
    """Of the rank that was simulated. Operators below the GPU's cache in size count by their FLOPs alone."""
    machine, one = plan.machine, simulation.first
    seconds = 0.0
    for row in one["traffic"].get(LAST_STEP, []):
        members = row["ranks"]
        if members == 1:
            continue
        share = (members - 1) / members * (2 if row["kind"] == "all-reduce" else 1)
        seconds += row["bytes"] * share / RankGroup(members, row["stride"]).nominal(machine)
    return LeastTime(one["device_seconds"], seconds)


def mismatches(simulation: Simulation) -> list[Problem]:
    """Collectives that two ranks make in another order, or with other bytes: ranks would wait for each other for ever."""
    problems = []
    (first, one), *others = simulation.ranks.items()
    for rank, other in others:
        for stage in {**one["sequence"], **other["sequence"]}:
            mine, theirs = one["sequence"].get(stage, []), other["sequence"].get(stage, [])
            at = next((at for at, calls in enumerate(zip_longest(mine, theirs)) if calls[0] != calls[1]), None)
            if at is None:
                continue
            described = [_describe(calls[at]) if at < len(calls) else "nothing more" for calls in (mine, theirs)]
            text = f"{stage}, collective {at + 1}: rank {first} makes {described[0]}, rank {rank} {described[1]}"
            problems.append(Problem(text, file="--ranks", fix="ranks of one group must make the same collectives in one order"))
            break
    return problems


def _describe(call: Sequence[Any]) -> str:
    kind, ranks, stride, size = call
    return f"{kind} of {size:,} B over {ranks} ranks" + (f", {stride} apart" if stride != 1 else "")


def as_json(plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """``simulation`` of the plan's document. Bytes and seconds."""
    least = least_time(plan, simulation)
    ranks = {
        str(rank): {key: value for key, value in one.items() if key != "sequence"} for rank, one in simulation.ranks.items()
    }
    return {
        "layers": int(simulation.resolved.architecture["num_hidden_layers"]),
        "note": simulation.note,
        "terms": [one.as_json() for one in terms(plan, simulation)],
        "least_step_s": {"device": least.device, "links": least.link},
        "planned_step_s": plan.step.seconds,
        "ranks": ranks,
        "mismatches": [str(problem) for problem in mismatches(simulation)],
        "faults": [str(problem) for problem in faults(simulation)],
    }


# --- the picture -------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, CURVE, ROW, HEIGHT = 1040, 250, 120, 220, 46, 15
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#72b7b2",
    "#9d755d",
    "#eeca3b",
    "#bab0ac",
    "#ff9da6",
    "#2d6a6a",
    "#7a5195",
    "#c0a060",
    "#708090",
    "#a05050",
    "#5f9e6e",
)
MARK = 'data-made-by="clustertune plan --simulate"'
"""What this command wrote before, it may write over."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.faint{fill:#888}.curve{fill:#9ecae9;stroke:#4c78a8}"
    ".limit{stroke:#e45756;stroke-dasharray:5 4}.plan{stroke:#54a24b;stroke-dasharray:5 4}.mark{stroke:#ccc}"
    "rect.ground{fill:#fff}"
)


def svg(plan: Plan, simulation: Simulation) -> str:
    """One picture, without scripts and fonts from elsewhere. Each part names itself and its size where the pointer rests."""
    one = simulation.first
    limit = plan.machine.usable_bytes
    planned = {moment.name: {term.name: 0.0 for term in moment.parts} for moment in plan.moments}
    for moment in plan.moments:
        for term in moment.parts:
            planned[moment.name][term.name] += term.value
    most = 1.05 * max(plan.peak.bytes, *(peak["bytes"] for peak in one["moments"].values()))
    most = max(most, 1.02 * limit) if limit < 2 * most else most  # few layers would be a line at the bottom
    names = dict.fromkeys(
        part for rows in (*(peak["parts"] for peak in one["moments"].values()), *planned.values()) for part in rows
    )
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    layers = simulation.resolved.architecture["num_hidden_layers"]
    rank = next(iter(simulation.ranks))
    title = f"{simulation.resolved.name}: memory of rank {rank} in a step, {layers} layers, simulated"
    rows = phases(one)
    height = 50 + CURVE + 60 + ROW * len(rows) + 20
    body = [
        f'<text x="14" y="24" style="font-weight:600">{html.escape(title)}</text>',
        *_course(one, most, limit, plan.peak.bytes),
        *(line for at, name in enumerate(rows) for line in _moment(
            name, one["moments"][name]["parts"], planned.get(name), 50 + CURVE + 60 + ROW * at, most, colours)),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {MARK} viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{html.escape(title)}</title>"
        f'<style>{_STYLE}</style><rect class="ground" width="{WIDTH}" height="{height}"/>{"".join(body)}</svg>\n'
    )


def _course(one: Mapping[str, Any], most: float, limit: float, planned: float) -> Iterator[str]:
    """Bytes over the step, allocation by allocation; where its moments begin; the plan's peak and the GPU's memory."""
    top, bottom, right = 50, 50 + CURVE, WIDTH - RIGHT
    values = one["curve"]["bytes"]
    across = (right - LEFT) / max(1, len(values))

    def level(size: float) -> float:
        return bottom - CURVE * size / most

    points = [f"{LEFT + at * across:.1f},{level(size):.1f}" for at, size in enumerate(values)]
    yield f'<polygon class="curve" points="{LEFT},{bottom} {" ".join(points)} {right:.1f},{bottom}"/>'
    for at, name in _first_of_each(one["curve"]["marks"][1:]):
        x = LEFT + at * across / one["curve"]["every"]
        yield f'<line class="mark" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
        turned = f'transform="rotate(12 {x + 3:.1f} {bottom + 14})"'
        yield f'<text class="faint" x="{x + 3:.1f}" y="{bottom + 14}" {turned}>{html.escape(name)}</text>'
    for size, kind, text in ((limit, "limit", "GPU"), (planned, "plan", "plan's peak")):
        y = level(size)
        if y < top - 10:
            continue
        yield f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{right + 4}" y="{y + 4:.1f}">{text} {size / GIB:.1f}</text>'
    yield f'<text class="faint" x="14" y="{top + 12}">GiB over a step</text>'


def _first_of_each(marks: Iterable[list[Any]]) -> list[tuple[int, str]]:
    first: dict[str, int] = {}
    for at, name in marks:
        first.setdefault(name, at)
    return [(at, name) for name, at in first.items()]


def _moment(
    name: str,
    parts: Mapping[str, float],
    planned: Mapping[str, float] | None,
    y: float,
    most: float,
    colours: Mapping[str, str],
) -> Iterator[str]:
    """Two bars: what was counted, and the plan's terms."""
    yield f'<text x="14" y="{y + 14}">{html.escape(name)}</text>'
    for at, (what, bar) in enumerate((("simulated", parts), ("plan", planned))):
        top = y + at * (HEIGHT + 2)
        if bar is None:
            continue
        x = float(LEFT)
        for part, size in sorted(bar.items(), key=lambda item: -item[1]):
            width = (WIDTH - RIGHT - LEFT) * size / most
            label = html.escape(f"{what}: {part} {size / GIB:.2f} GiB")
            place = f'x="{x:.1f}" y="{top}" width="{width:.2f}" height="{HEIGHT}"'
            yield f'<rect {place} fill="{colours[part]}"><title>{label}</title></rect>'
            if width > 7 * len(part):
                yield f'<text x="{x + 3:.1f}" y="{top + 12}" style="fill:#fff;font-size:11px">{html.escape(part)}</text>'
            x += width
        yield f'<text x="{x + 4:.1f}" y="{top + 12}" class="faint">{what} {sum(bar.values()) / GIB:.2f}</text>'
