"""Weights and optimizer states in host memory or on NVMe: what their way to the GPU and the update on the CPU take."""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.plan.machine import Machine
from clustertune.plan.shape import Shape
from clustertune.plan.term import SECONDS, Term

HOST_ADAM_BYTES_PER_S = 150e9
"""Bytes per second that AdamW on all cores of a node reads and writes: about half of what two sockets of DDR5 copy. Assumed."""
NVME_BYTES_PER_S = 6e9
"""Sequential read or write of a node's local NVMe, bytes per second: one PCIe 4.0 x4 drive. Assumed."""
ADAM_BYTES = 28
"""Read: weight, gradient, two moments; written: weight and moments; float32."""


@dataclass(frozen=True)
class Offload:
    """Transfers beside the passes of one micro batch, and the optimizer step where it runs on the CPU."""

    forward_s: float
    backward_s: float
    optimizer: Term | None
    note: str | None
    transfer: Term | None = None
    """The weights' way of one micro batch."""
    place: str = ""
    """Where the weights come from, in words."""


def offload(shape: Shape, machine: Machine) -> Offload:
    """Times of one rank; zeros where nothing is offloaded."""
    plan = shape.strategy
    link = machine.host_link_bytes_per_s
    forward = backward = 0.0
    transfer, place, notes = None, "", []
    if "nvme" in (plan.offload_params, plan.offload_optimizer):
        notes.append(f"a node's NVMe is assumed to read and write {NVME_BYTES_PER_S / 1e9:g} GB/s")
    if plan.offload_params != "none":
        # The shard goes as it is stored, and is cast on the GPU (torch, FSDPParam.all_gather_inputs).
        share = shape.stored / plan.weight_shards
        if plan.offload_params == "nvme":
            link = min(link, NVME_BYTES_PER_S / machine.gpus_per_node)
        back = share * (1 if plan.reshard else 0) + shape.local_trained * plan.gradient_bytes / plan.gradient_shards
        forward, backward = share / link, back / link
        place = "NVMe" if plan.offload_params == "nvme" else "host memory"
        parts: dict[str, float | int | str] = {"forward": share, "backward": back, "link": link}
        text = "({forward} B + {backward} B) / {link} B/s, a micro batch forward and backward"
        transfer = Term(f"weights and gradients between {place} and GPU", forward + backward, SECONDS, text, parts)
    if plan.offload_optimizer == "none":
        return Offload(forward, backward, None, "; ".join(notes) or None, transfer, place)
    count = shape.local_trained / plan.state_shards
    speed = HOST_ADAM_BYTES_PER_S / plan.gpus_per_node
    if plan.offload_optimizer == "nvme":
        speed = min(speed, NVME_BYTES_PER_S / plan.gpus_per_node)
    to_host = count * (plan.gradient_bytes + 2)  # the gradient goes, the updated weight comes back in bfloat16
    value = count * ADAM_BYTES / speed + to_host / machine.host_link_bytes_per_s
    values = {"count": count, "bytes": ADAM_BYTES, "speed": speed, "moved": to_host, "link": machine.host_link_bytes_per_s}
    text = "{count} trained parameters x {bytes} B / {speed} B/s on the CPU + {moved} B / {link} B/s to and fro"
    if plan.offload_optimizer == "cpu":
        notes.append(f"the optimizer on the CPU is assumed to move {HOST_ADAM_BYTES_PER_S / 1e9:g} GB/s per node")
    return Offload(forward, backward, Term("optimizer", value, SECONDS, text, values), "; ".join(notes), transfer, place)
