"""The plan of a recipe on a cluster: does it fit, how long, what it costs, what limits it, how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from clustertune.errors import Problem, UserError, raise_if
from clustertune.host.system import GIB
from clustertune.plan import evidence, generation_cost, memory
from clustertune.plan.constants import Constants, Term, total
from clustertune.plan.machine import PlanMachine
from clustertune.plan.memory import COPY_SHARE, host_parts, save_copy
from clustertune.plan.schedule import Lengths, Schedule, known_lengths, schedule
from clustertune.plan.step import LAUNCHING, Step, flops, step
from clustertune.plan.strategy import ModelShape, Strategy, strategy
from clustertune.recipe.native_rules import row_tokens
from clustertune.recipe.parameters import KNOWN, adapted_experts, count, lora_parameter_count
from clustertune.resolve.resolved import Distribution, Resolved

MOST_NODES = 4096


@dataclass(frozen=True)
class Footprint:
    """What a recipe holds in memory. Bytes."""

    resolved: Resolved
    shape: ModelShape
    moments: list[memory.Moment]
    """Of the fullest GPU."""
    beside: list[Term]
    """Memory that is not a tensor: the allocator's gaps, CUDA and NCCL."""
    host: list[Term]
    """RAM of the fullest node."""

    @property
    def strategy(self) -> Strategy:
        return self.shape.strategy

    def moment(self, name: str) -> memory.Moment:
        """One of :func:`clustertune.plan.memory.moments`."""
        return next(moment for moment in self.moments if moment.name == name)

    @property
    def peak(self) -> memory.Moment:
        """The moment with the most memory."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def training_peak(self) -> memory.Moment:
        """The moment of a training step with the most memory."""
        return memory.training_peak(self.moments)

    @property
    def evaluation_peak(self) -> memory.Moment | None:
        """The evaluations between steps; None where there are none."""
        return memory.evaluation_peak(self.moments)

    @property
    def needed(self) -> float:
        """Bytes that a GPU must have free, in training and evaluation."""
        return self.peak.bytes + sum(term.value for term in self.beside)

    @property
    def host_bytes(self) -> float:
        """RAM of the fullest node, bytes."""
        return sum(term.value for term in self.host)


@dataclass(frozen=True)
class Plan(Footprint):
    """One recipe on one machine. Seconds, bytes, parameters."""

    machine: PlanMachine
    constants: Constants
    step: Step
    schedule: Schedule
    lengths: Lengths | None
    low: float
    high: float
    """Factors of the step time: four of five runs are expected between them."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Both memories hold it."""
        left = 1.0 - (self.strategy.rollouts.vllm if self.strategy.rollouts else 0.0)
        return self.needed <= left * self.machine.usable_bytes and self.host_bytes <= self.machine.host_bytes

    @property
    def gpus(self) -> int:
        """That the training's job holds, those of servers included."""
        return self.strategy.gpus

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second, padding left out where the lengths are known."""
        return self.shape.step_tokens * self.useful / self.step.seconds

    @property
    def useful(self) -> float:
        """Share of the computed tokens that are tokens of a conversation."""
        if self.lengths is None or self.strategy.packing:
            return 1.0
        longest = int(row_tokens(self.resolved.train_args))
        return min(1.0, self.lengths.mean(longest) / self.strategy.sequence)

    def utilisation(self, *, hardware: bool) -> float:
        """MFU, or with ``hardware`` HFU: FLOPs of a step over what the GPUs could do in its time at their dense bf16 peak."""
        could = self.step.seconds * self.strategy.world_size * self.machine.peak_flops
        return flops(self.shape, hardware=hardware) / could

    @property
    def hours(self) -> float | None:
        """Wall hours from the start of the ranks to the last step."""
        parts = self.totals()
        return None if parts is None else math.fsum(parts.values()) / 3600

    def parts(self) -> dict[str, float]:
        """Seconds of one optimizer step by part, what comes now and then spread over the steps."""
        one, around = self.step, self.schedule
        seconds = {
            "compute": total(one.compute),
            "exposed_communication": one.exposed.value,
            "pipeline_bubble": one.bubble.value,
            "optimizer": one.optimizer.value,
            **({"generation": one.generation.value} if one.generation else {}),
        }
        if around.steps:
            seconds["evaluation"] = (around.evaluations or 0) * around.evaluation.value / around.steps
            seconds["checkpoint"] = (around.checkpoints or 0) * around.save.value / around.steps
            seconds["load"] = around.start.value / around.steps
        return seconds

    def totals(self) -> dict[str, float] | None:
        """Seconds of the whole training by part; None where the number of steps is unknown."""
        steps = self.schedule.steps
        return None if steps is None else {name: value * steps for name, value in self.parts().items()}


def make_plan(
    resolved: Resolved, machine: PlanMachine, constants: Constants | None = None, *, lengths: Lengths | None = None,
    chosen: Strategy | None = None, sure: bool = True,
) -> Plan:  # fmt: skip
    """Plan a recipe. ``chosen`` replaces the recipe's own strategy; without ``sure`` the range is left out (for searches).

    Raises UserError: an architecture that cannot be counted, or more ranks than the cluster has GPUs.
    """
    constants = constants or Constants()
    lengths = lengths or known_lengths(resolved)
    used = chosen or strategy(resolved)
    check_room(resolved, used, machine)
    room, more = footprint(resolved, constants, lengths=lengths, chosen=used, cudnn=machine.has_cudnn_attention)
    used, shape = room.strategy, room.shape
    one = step(shape, machine, constants)
    low, high = step_range(shape, machine, constants, one) if sure else (1.0, 1.0)
    notes = [*used.notes, *more, *([one.offload.note] if one.offload.note else [])]
    if used.rollouts is not None:
        notes += [
            generation_cost.NOTE.format(lengths=used.rollouts.lengths, prompt=used.rollouts.prompt),
            *([generation_cost.VLLM] if used.rollouts.vllm else []),
        ]
    if used.servers is not None:
        if (text := generation_cost.find_problem(shape, machine)) is not None:
            fix = "a servers.tensor_parallel_size that divides the GPUs of a node, and holds the model"
            raise UserError(text, file=resolved.name, key="servers.tensor_parallel_size", fix=fix)
        if (server := generation_cost.server_of(shape, machine)) is not None:
            notes.append(f"beside the trainer on {used.server_nodes} of the job's nodes {server}")
    copy = save_copy(shape)
    if copy is not None:
        if copy.value <= COPY_SHARE * (machine.host_bytes - room.host_bytes):
            room = replace(room, host=[*room.host, copy])
        else:
            notes.append(f"training waits for each save: a copy takes {copy.value / GIB:,.0f} GiB of a node's RAM more")
            copy = None
    around = schedule(resolved, shape, machine, constants, lengths, one.seconds, copy)
    return Plan(
        **vars(room), machine=machine, constants=constants, step=one, schedule=around, lengths=lengths, low=low, high=high,
        notes=notes,
    )  # fmt: skip


def footprint(
    resolved: Resolved, constants: Constants, *, lengths: Lengths | None = None, chosen: Strategy | None = None,
    cudnn: bool = False, distribution: Distribution | None = None,
) -> tuple[Footprint, list[str]]:  # fmt: skip
    """The memory of a recipe, and notes on the lengths that were taken: the one answer to whether a recipe fits.

    ``distribution`` replaces the recipe's own (more nodes), ``chosen`` the whole strategy. Raises UserError: an architecture
    that cannot be counted, or what the libraries would refuse on the ranks.
    """
    used, notes = real_length(chosen or strategy(resolved, distribution), lengths or known_lengths(resolved))
    return held(resolved, make_shape(resolved, used, cudnn=cudnn), constants), notes


def held(resolved: Resolved, shape: ModelShape, constants: Constants) -> Footprint:
    """The memory of a counted and divided model."""
    moments = memory.moments(shape, constants)
    beside = memory.reserved(max(moment.bytes for moment in moments), constants)
    return Footprint(resolved, shape, moments, beside, host_parts(resolved, shape))


@dataclass(frozen=True)
class Work:
    """FLOPs of one token of a recipe."""

    model: float
    hardware: float
    """With what checkpointing computes again."""


def work_of(resolved: Resolved, lengths: Lengths | None = None) -> Work | None:
    """The count of :mod:`clustertune.plan.step`; None for an architecture that it cannot count."""
    try:
        used, _ = real_length(strategy(resolved), lengths)
        shape = make_shape(resolved, used)
    except UserError:
        return None
    tokens = shape.step_tokens
    return Work(flops(shape, hardware=False) / tokens, flops(shape, hardware=True) / tokens)


def fewest_nodes(resolved: Resolved, constants: Constants, room: float, *, cudnn: bool = False) -> int | None:
    """The fewest nodes, with the recipe's ranks on each, on which a rank needs at most ``room`` bytes; None: on none."""
    each = resolved.distribution.ranks_per_node

    def fits(nodes: int) -> bool:
        tried = resolved.distribution.on(nodes * each, each)
        return footprint(resolved, constants, cudnn=cudnn, distribution=tried)[0].needed <= room

    most = 1
    while not fits(most):
        most *= 2
        if most > MOST_NODES:
            return None
    return next((nodes for nodes in range(most // 2 + 1, most) if fits(nodes)), most)


def make_shape(resolved: Resolved, used: Strategy, *, cudnn: bool = False) -> ModelShape:
    """Count the model and divide it. ``cudnn``: sdpa may take cuDNN's kernel under a mask.

    Raises UserError where the architecture is none that can be counted exactly.
    """
    counted = count(resolved.architecture)
    if counted is None:
        kind = resolved.architecture.get("model_type")
        text = f"parameters of {kind!r} cannot be counted"
        raise UserError(Problem(text, file=f"{resolved.name}/model.json", key="model_type", fix=f"known: {', '.join(KNOWN)}"))
    lora = resolved.lora if used.lora else None
    adapters = 0
    if lora is not None:
        adapter_parameters = lora_parameter_count(resolved.architecture, lora)
        if adapter_parameters is None:
            text = "what LoRA trains here cannot be counted"
            fix = "name plain linear modules in lora.target_modules, such as [q_proj, v_proj]"
            raise UserError(Problem(text, file=f"{resolved.name}/recipe.yaml", key="lora", fix=fix))
        adapters = adapter_parameters
    targets = (lora["target_modules"] if lora else None) or ()
    names = tuple(str(name).split(".")[-1] for name in targets) if not isinstance(targets, str) else _all_linear(counted)
    rank, dropout = (lora["r"], lora["lora_dropout"]) if lora else (0, 0.0)
    wrapped = tuple(sorted({linear.name for _, linear in adapted_experts(resolved.architecture, lora)})) if lora else ()
    trained = adapters if lora is not None else counted.total
    return ModelShape(counted, used, trained, adapters, rank, names, wrapped, dropout, cudnn)


def _all_linear(counted: Any) -> tuple[str, ...]:
    return tuple({linear.name.split(".")[-1] for kind in counted.layers for linear in kind.linears})


def real_length(used: Strategy, lengths: Lengths | None) -> tuple[Strategy, list[str]]:
    """The strategy with its lengths, and a note on them: without packing a micro batch is as long as its longest conversation,
    and of packed rows attention computes conversations."""
    if used.packing:
        return _packed_length(used, lengths) if used.isolated else (used, [])
    if lengths is None:
        return used, [
            f"not packed, lengths unknown: every sequence is taken to be {used.sequence} tokens, the most there can be"
        ]
    batch = used.micro_batch * used.answers
    length = max(1, round(lengths.padded(1 if used.grouped else batch, used.sequence)))
    text = f"not packed: a micro batch of {batch} is padded to {length} tokens on average ({lengths.source})"
    if used.grouped:
        text += "; grouped by length, so that padding within it is left out"
    return replace(used, sequence=length), [text]


def _packed_length(used: Strategy, lengths: Lengths | None) -> tuple[Strategy, list[str]]:
    around = lengths.around_token(used.sequence) if lengths else 0.0
    if used.attention != "flash":
        text = f"packed, with {used.attention}: attention counts the whole square of a micro batch, {used.row:,} x {used.row:,}"
    elif lengths is None:
        text = "packed, lengths unknown: attention counts a row as one conversation, the most there can be"
    else:
        spread = "" if len(lengths.tokens) > 1 else ", spread as chat data are"
        text = f"packed: attention counts the causal half of conversations, {around:,.0f} tokens around a token "
        text += f"({lengths.source}{spread})"
    return replace(used, conversation=around), [text]


def check_room(resolved: Resolved, used: Strategy, machine: PlanMachine) -> None:
    """More ranks than GPUs, and more nodes than the cluster has, are refused."""
    problems = []
    beside = used.server_nodes
    if used.nodes + beside > machine.nodes:
        text = (
            f"{used.nodes}{f' and {beside} of servers' if beside else ''}, and {machine.name} has {machine.nodes} compute nodes"
        )
        left = machine.nodes - beside
        fix = f"{f'slurm.nodes={left}' if left > 0 else 'a smaller servers.nodes'}, or name more in a cluster file"
        problems.append(Problem(text, file=resolved.name, key="slurm.nodes", fix=fix))
    if used.ranks_per_node > machine.gpus_per_node:
        text = f"{used.ranks_per_node}, and a node of {machine.name} has {machine.gpus_per_node} GPUs"
        fix = f"use {machine.gpus_per_node} or fewer"
        problems.append(Problem(text, file=resolved.name, key="slurm.gpus_per_node", fix=fix))
    if used.world_size > machine.domain and machine.inter.bytes_per_s <= 0:
        text = f"{used.nodes} nodes, and {machine.name} says nothing of a network between nodes"
        problems.append(Problem(text, file=machine.name, key="network", fix="write network: {kind: ..., gbit: ...}"))
    raise_if(problems)


SPREAD = {"intra": 0.15, "inter": 0.25, "measured": 0.06, "calibrated": 0.03, "offload": 0.25, "host": 0.20,
          "answers": 0.4}  # fmt: skip
"""Standard deviation of what a link, host memory and the host's launches may be off, as a share: nominal bandwidth, one that
was measured, a factor that a cluster's own runs gave; ``offload`` is assumed, ``host``: two steps of an H200;
``answers``: how long the model's own answers are, and how fast they are made (:mod:`clustertune.plan.decoding`)."""


def step_range(shape: ModelShape, machine: PlanMachine, constants: Constants, one: Step) -> tuple[float, float]:
    """Shares of a step's seconds between which four of five runs are expected. What is like no published run has a wider
    one."""
    share, links = deviations(shape, machine, constants, one)
    kind = evidence.spread(evidence.words(shape, machine))
    if "compute_scale" in constants.calibrated:
        kind = max(SPREAD["calibrated"], constants.deviation.get("compute_scale", 0.0))
    if any(term.name == LAUNCHING for term in one.compute):  # the whole step is the host's then, not what it adds alone
        share, kind = 1.0, math.hypot(kind, SPREAD["host"])
    wide = math.exp(evidence.QUANTILE * math.hypot(share * kind, links))
    return 1 / wide, wide


def deviations(shape: ModelShape, machine: PlanMachine, constants: Constants, one: Step) -> tuple[float, float]:
    """The share of a step that what its kind may be off moves, and the standard deviation that links and host memory add."""
    seconds = one.seconds
    spread = {
        "intra_scale": SPREAD["measured" if machine.intra.source == "measured" else "intra"],
        "inter_scale": SPREAD["measured" if machine.inter.source == "measured" else "inter"],
    }
    for key in spread.keys() & set(constants.calibrated):
        spread[key] = max(SPREAD["calibrated"], constants.deviation.get(key, 0.0))
    parts = [SPREAD["offload"] * _offloading(shape, one) / seconds]
    parts += [SPREAD["answers"] * one.generation.value / seconds] if one.generation is not None else []
    for key, deviation in spread.items():
        slower = replace(constants, **{key: getattr(constants, key) / (1 + deviation)})
        parts.append(math.log(step(shape, machine, slower).seconds / seconds))
    slower = replace(constants, compute_scale=constants.compute_scale * 1.1)
    computing = math.log(step(shape, machine, slower).seconds / seconds) / math.log(1.1)
    return min(1.0, max(0.0, computing) + one.waiting / seconds), math.hypot(*parts)


def _offloading(shape: ModelShape, one: Step) -> float:
    """Seconds of a step that wait for host memory or NVMe."""
    copies = (one.offload.forward_s + one.offload.backward_s) * shape.strategy.accumulation
    return min(copies, one.exposed.value) + (one.offload.optimizer.value if one.offload.optimizer is not None else 0.0)
