"""The time of one optimizer step by part: computing, communication that nothing hides, the pipeline's bubble, the optimizer.

Communication runs beside computing as FSDP prefetches: of each pass the longer one counts, and a small share of the shorter.
What the next product waits for (tensor, expert and pipeline parallelism) counts whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.plan.compute import ComputeTime, micro_batch
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine
from clustertune.plan.shape import ModelShape
from clustertune.plan.term import SECONDS, Term, total
from clustertune.plan.traffic import Collective, Traffic, traffic

# --- host memory and NVMe ----------------------------------------------------------------------------------------------


HOST_ADAM_BYTES_PER_S = 150e9
"""Bytes per second that AdamW on all cores of a node reads and writes: about half of what two sockets of DDR5 copy. Assumed."""
NVME_BYTES_PER_S = 6e9
"""Sequential read or write of a node's local NVMe, bytes per second: one PCIe 4.0 x4 drive. Assumed."""
ADAM_BYTES = 28
"""Read: weight, gradient, two moments; written: weight and moments; float32."""


@dataclass(frozen=True)
class Offload:
    """Weights and optimizer states in host memory or on NVMe: what their way to the GPU and the update on the CPU take.

    Transfers beside the passes of one micro batch, and the optimizer step where it runs on the CPU.
    """

    forward_s: float
    backward_s: float
    optimizer: Term | None
    note: str | None
    transfer: Term | None = None
    """The weights' way of one micro batch."""
    source: str = ""
    """Where the weights come from, as a phrase."""


def offload(shape: ModelShape, machine: PlanMachine) -> Offload:
    """Times of one rank; zeros where nothing is offloaded."""
    plan = shape.strategy
    link = machine.host_link_bytes_per_s
    forward = backward = 0.0
    transfer, where, notes = None, "", []
    if "nvme" in (plan.offload_params, plan.offload_optimizer):
        notes.append(f"a node's NVMe is assumed to read and write {NVME_BYTES_PER_S / 1e9:g} GB/s")
    if plan.offload_params != "none":
        # The shard goes as it is stored, and is cast on the GPU (torch, FSDPParam.all_gather_inputs).
        share = shape.stored / plan.weight_shards
        if plan.offload_params == "nvme":
            link = min(link, NVME_BYTES_PER_S / machine.gpus_per_node)
        back = share * (1 if plan.reshard else 0) + shape.local_trained * plan.gradient_bytes / plan.gradient_shards
        forward, backward = share / link, back / link
        where = "NVMe" if plan.offload_params == "nvme" else "host memory"
        parts: dict[str, float | int | str] = {"forward": share, "backward": back, "link": link}
        text = "({forward} B + {backward} B) / {link} B/s, a micro batch forward and backward"
        transfer = Term(f"weights and gradients between {where} and GPU", forward + backward, SECONDS, text, parts)
    if plan.offload_optimizer == "none":
        return Offload(forward, backward, None, "; ".join(notes) or None, transfer, where)
    count = shape.local_trained / plan.state_shards
    speed = HOST_ADAM_BYTES_PER_S / plan.ranks_per_node
    if plan.offload_optimizer == "nvme":
        speed = min(speed, NVME_BYTES_PER_S / plan.ranks_per_node)
    to_host = count * (plan.gradient_bytes + 2)  # the gradient goes, the updated weight comes back in bfloat16
    value = count * ADAM_BYTES / speed + to_host / machine.host_link_bytes_per_s
    values = {"count": count, "bytes": ADAM_BYTES, "speed": speed, "moved": to_host, "link": machine.host_link_bytes_per_s}
    text = "{count} trained parameters x {bytes} B / {speed} B/s on the CPU + {moved} B / {link} B/s to and fro"
    if plan.offload_optimizer == "cpu":
        notes.append(f"the optimizer on the CPU is assumed to move {HOST_ADAM_BYTES_PER_S / 1e9:g} GB/s per node")
    return Offload(forward, backward, Term("optimizer", value, SECONDS, text, values), "; ".join(notes), transfer, where)


@dataclass(frozen=True)
class TimedCollective:
    """A collective with its time."""

    collective: Collective
    term: Term


@dataclass(frozen=True)
class Step:
    """One optimizer step of the slowest rank. All times in seconds."""

    compute: list[Term]
    """What the rank computes in all micro batches."""
    exposed: Term
    """Communication that is not hidden behind computing."""
    bubble: Term
    optimizer: Term
    wires: list[TimedCollective]
    """Every collective of the step, hidden or not."""
    offload: Offload

    @property
    def seconds(self) -> float:
        parts = [self.exposed, self.bubble, self.optimizer]
        return total(self.compute) + total(parts)

    @property
    def communication(self) -> float:
        """Seconds that the network is busy, hidden or not."""
        return sum(wire.term.value for wire in self.wires)


def step(shape: ModelShape, machine: PlanMachine, constants: Constants) -> Step:
    """Predict one optimizer step."""
    plan = shape.strategy
    compute = micro_batch(shape, machine, constants)
    moved = traffic(shape)
    copies = offload(shape, machine)
    timer = _Timer(machine, constants)
    micro, last = _passes(compute, moved, copies, timer, constants)
    count = plan.accumulation
    exposed = micro * (count - 1) + last + timer.all(moved.after)
    busy = compute.seconds * count
    idle = _bubble(shape, compute.seconds + timer.all(moved.exposed))
    parts = [
        Term(t.name, t.value * count, SECONDS, "{n} x (" + t.formula + ")", {"n": count, **t.values})
        for t in _together(compute)
    ]
    values = {"n": count, "micro": micro, "last": last, "after": timer.all(moved.after), "busy": busy}
    text = "({n} - 1) micro batches x {micro} s + the last {last} s + {after} s after the optimizer; computing takes {busy} s"
    exposed_term = Term("exposed communication", exposed, SECONDS, text, values)
    return Step(
        parts,
        exposed_term,
        idle,
        copies.optimizer or _optimizer(shape, machine, constants),
        timer.wires(moved, count),
        copies,
    )


def _passes(compute: ComputeTime, moved: Traffic, copies: Offload, timer: _Timer, constants: Constants) -> tuple[float, float]:
    """Seconds beyond computing of a micro batch, and of the last one of a step."""
    forward, backward = total(compute.forward), total(compute.backward)
    wire_forward = max(timer.all(moved.forward), copies.forward_s)
    wire_backward = max(timer.all(moved.backward), copies.backward_s)
    wire_last = max(timer.all(moved.backward) + timer.all(moved.last), copies.backward_s)
    waiting = timer.all(moved.exposed)
    first = _beyond(forward, wire_forward, constants) + waiting
    return first + _beyond(backward, wire_backward, constants), first + _beyond(backward, wire_last, constants)


def _beyond(busy: float, wire: float, constants: Constants) -> float:
    """What a transfer beside ``busy`` seconds of computing adds to them."""
    return max(0.0, wire - busy) + constants.overlap_loss * min(busy, wire)


def _together(compute: ComputeTime) -> list[Term]:
    """Forward and backward parts that have one name, such as the cross-entropy, as one."""
    found: dict[str, Term] = {}
    for term in [*compute.forward, *compute.backward]:
        known = found.get(term.name)
        if known is None:
            found[term.name] = term
            continue
        # The values differ in the number of passes only.
        passes = float(known.values["passes"]) + float(term.values["passes"])
        found[term.name] = Term(term.name, known.value + term.value, SECONDS, term.formula, {**term.values, "passes": passes})
    return list(found.values())


def _bubble(shape: ModelShape, micro: float) -> Term:
    """Idle time of a stage while the pipeline fills and drains: (pp - 1) / virtual micro batches (1F1B and its interleaved
    form, https://arxiv.org/abs/2104.04473, 2.2)."""
    plan = shape.strategy
    values = {"pp": plan.pp, "virtual": plan.virtual, "micro": micro}
    value = (plan.pp - 1) / plan.virtual * micro
    return Term("pipeline bubble", value, SECONDS, "({pp} - 1) / {virtual} x {micro} s of a micro batch", values)


def _optimizer(shape: ModelShape, machine: PlanMachine, constants: Constants) -> Term:
    """Clipping and AdamW on the rank's share: bytes over memory bandwidth."""
    plan = shape.strategy
    count = shape.local_trained / plan.state_shards
    size = constants.fused_optimizer_bytes if plan.fused_optimizer else constants.optimizer_bytes
    size *= min(1.0, plan.state_bytes / 8) if plan.state_bytes else 0.5  # smaller moments are fewer bytes
    speed = machine.hbm_bytes_per_s * constants.hbm_share
    values = {"count": count, "bytes": size, "speed": speed}
    return Term("optimizer", count * size / speed, SECONDS, "{count} trained parameters x {bytes} B / {speed} B/s", values)


@dataclass(frozen=True)
class _Timer:
    """Seconds of collectives on one machine."""

    machine: PlanMachine
    constants: Constants

    def one(self, collective: Collective) -> float:
        return collective.seconds(self.machine, self.constants.intra_scale, self.constants.inter_scale)

    def all(self, collectives: list[Collective]) -> float:
        return sum(map(self.one, collectives))

    def wires(self, moved: Traffic, micro_batches: int) -> list[TimedCollective]:
        """All collectives of a step with their times; those of one name together."""
        found: dict[str, tuple[Collective, float]] = {}
        each = [(c, micro_batches) for c in (*moved.forward, *moved.backward, *moved.exposed)]
        for collective, count in [*each, *((c, 1) for c in (*moved.last, *moved.after))]:
            known = found.get(collective.name, (collective, 0.0))
            found[collective.name] = (collective, known[1] + count)
        return [TimedCollective(c, self._term(c, count)) for c, count in found.values() if c.group.size > 1]

    def _term(self, collective: Collective, count: float) -> Term:
        one, latency = self.one(collective), collective.latency(self.machine)
        values: dict[str, float | int | str] = {"n": count, "size": collective.size / 1e9, "latency": latency}
        if collective.kind == "exchange":
            values |= {"factor": 1, "speed": collective.size / (one - latency) / 1e9, "of": "from rank to rank"}
        else:
            bandwidth = collective.group.bandwidth(self.machine, self.constants.intra_scale, self.constants.inter_scale)
            values |= {"factor": collective.factor, "speed": bandwidth / 1e9, "of": "of the group's ring"}
        text = "{n} x ({factor} x {size} GB / {speed} GB/s {of} + {latency} s of latency)"
        return Term(collective.name, count * one, SECONDS, text, values)
