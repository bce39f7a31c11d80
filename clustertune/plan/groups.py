"""Process groups on the machine, and how long a collective over one takes.

Ranks are numbered as accelerate's mesh and Megatron-Core do: tensor parallel innermost, then context, then data parallel,
pipeline outermost; the ranks of a node follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.plan.machine import Machine


@dataclass(frozen=True)
class Group:
    """``size`` ranks, ``stride`` apart."""

    size: int
    stride: int = 1

    def inside(self, machine: Machine) -> bool:
        """Whether all members are joined by the fast link."""
        return self.size * self.stride <= machine.domain or self.size == 1

    def bandwidth(self, machine: Machine, intra_scale: float = 1.0, inter_scale: float = 1.0) -> float:
        """Bytes per second of a ring over the group, per member.

        A ring that leaves the node (or the NVLink domain) crosses its border once in each direction; all groups that have
        members in one node share its network cards.
        """
        intra = machine.intra.bytes_per_s * intra_scale
        if self.inside(machine):
            return intra
        members = max(1, machine.domain // self.stride)
        sharing = machine.domain // members
        nodes = max(1, machine.domain // machine.gpus_per_node)
        inter = machine.inter.bytes_per_s * inter_scale * nodes / max(1, sharing)
        return min(intra, inter) if members > 1 else inter

    def latency(self, machine: Machine) -> float:
        """Seconds of one step from a member to the next, the slowest."""
        return machine.intra.latency_s if self.inside(machine) else machine.inter.latency_s


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step."""

    name: str
    kind: str
    """``gather`` (all-gather and reduce-scatter move as much), ``reduce`` (all-reduce), ``exchange`` (all-to-all), ``send``."""
    group: Group
    size: float
    """Bytes of the whole tensor (of what one rank sends, for ``exchange`` and ``send``) of all calls together."""
    calls: float
    """How many calls that is, for the latency."""

    def seconds(self, machine: Machine, intra_scale: float = 1.0, inter_scale: float = 1.0) -> float:
        """Time on the wire: a ring's (nccl-tests' definition of the bus bandwidth), and its latency."""
        members = self.group.size
        if members == 1 or self.size == 0:
            return 0.0
        if self.kind == "exchange":
            return self._exchange(machine, intra_scale, inter_scale)
        share = 1.0 if self.kind == "send" else (members - 1) / members * (2 if self.kind == "reduce" else 1)
        bandwidth = self.group.bandwidth(machine, intra_scale, inter_scale)
        return self.size * share / bandwidth + self.latency(machine)

    def latency(self, machine: Machine) -> float:
        """Seconds of all calls that no bandwidth shortens: a ring has a step less than members."""
        steps = 1 if self.kind in ("send", "exchange") else self.group.size - 1
        return self.calls * steps * self.group.latency(machine)

    def _exchange(self, machine: Machine, intra_scale: float, inter_scale: float) -> float:
        """All-to-all: every rank of a node sends at once what goes to other nodes through the node's network cards."""
        members, near = self.group.size, self.group.size
        latency = self.latency(machine)
        if not self.group.inside(machine):
            near = max(1, machine.domain // self.group.stride)
        inside = self.size * (near - 1) / members / (machine.intra.bytes_per_s * intra_scale)
        if near == members:
            return inside + latency
        card = machine.inter.bytes_per_s * inter_scale / machine.gpus_per_node
        return max(inside, self.size * (members - near) / members / card) + latency

    @property
    def factor(self) -> str:
        """The share of the tensor that one member moves, as text."""
        if self.kind == "send":
            return "1"
        return f"{2 if self.kind == 'reduce' else 1} x {self.group.size - 1}/{self.group.size}"
