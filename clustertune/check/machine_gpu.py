"""GPUs: how many there are, who uses them, and whether they are healthy. Python 3.8, standard library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Seen, rule
from clustertune.host.facts import Gpu

BUSY_MIB = 1024
"""Memory in use above which a GPU is not idle: without reserved memory a driver shows below 100 MiB, older ones some 600."""
DAY_S = 86_400.0
SURE_S = 40
"""Seconds from which a driver that does not answer hangs: eight GPUs without persistence mode take up to half a minute."""

XIDS: dict[int, tuple[str, str, str]] = {
    48: (
        FAIL,
        "an uncorrected double-bit memory error",
        "reset the GPU (nvidia-smi -r) or reboot; replace it if it comes again",
    ),
    63: (WARN, "a row of memory is to be remapped", "drain the node and reset the GPU: rows are remapped then"),
    64: (FAIL, "remapping a row of memory failed", "drain the node and have the GPU replaced"),
    74: (FAIL, "an error of NVLink", "reset the GPUs; check bridge, baseboard and fabric manager if it comes again"),
    79: (FAIL, "the GPU has fallen off the bus", "power the node off and on; check seating, power and heat"),
    92: (WARN, "a high rate of corrected memory errors", "watch it; run the vendor's field diagnostics"),
    94: (
        WARN,
        "a contained uncorrected memory error: it ended one process",
        "drain the node when it is free and reset the GPU",
    ),
    95: (FAIL, "an uncontained uncorrected memory error", "reset the GPU or reboot before anything else runs on it"),
    119: (FAIL, "the GPU's system processor (GSP) does not answer", "power the node off and on; update the driver"),
    120: (FAIL, "an error of the GPU's system processor (GSP)", "power the node off and on; update the driver"),
    140: (FAIL, "an unrecovered memory error", "reset the GPU or reboot"),
}
"""What an Xid means and asks for, by the vendor's catalogue. Others are mostly a program's own faults (13, 31, 43, 45)."""


@rule("gpu-driver", MACHINE)
def driver(m: Machine) -> Iterator[Seen]:
    """The driver answers, for every GPU that is on the bus.

    Looks at: whether the driver answers
    Why: nothing runs on a GPU whose driver does not answer; one that hangs takes the job's processes with it
    See: https://github.com/NVIDIA/ubuntu-packaging-nvidia-driver/issues/3
    """
    f = m.facts
    devices = f.nvidia_devices or 0
    if not m.computes or (not devices and not f.gpus and not f.nvidia_smi):
        return
    if "mismatch" in f.nvidia_smi.lower():
        fix = "the driver was updated while the old one is loaded: reboot the node, and pin the driver's packages"
        yield Seen(FAIL, f"nvidia-smi: {f.nvidia_smi}", fix)
    elif (waited := re.search(r"no answer within (\d+) s", f.nvidia_smi)) and int(waited[1]) < SURE_S:
        fix = "look longer (--seconds=60): without persistence mode the driver wakes each GPU again; else a GPU hangs"
        yield Seen(WARN, f"nvidia-smi gave {f.nvidia_smi}", fix)
    elif "no answer" in f.nvidia_smi:
        fix = "a GPU hangs: look for Xid in dmesg, drain the node, power it off and on"
        yield Seen(FAIL, f"nvidia-smi gave {f.nvidia_smi}", fix)
    elif f.nvidia_smi:
        yield Seen(FAIL, f"nvidia-smi: {f.nvidia_smi}", "drain the node; look for Xid in dmesg; reset or reboot")
    elif f.gpus:
        yield Seen(PASS, f"driver {f.driver or '?'} answers for {len(f.gpus)} GPUs")
    elif m.in_container:
        fix = "give the container the driver: apptainer exec --nv, docker run --gpus all"
        yield Seen(FAIL, f"{devices} NVIDIA GPUs on the bus, and no driver in the container", fix)
    else:
        yield Seen(
            FAIL,
            f"{devices} NVIDIA GPUs on the bus, and no nvidia-smi",
            "install the driver, or load it: modprobe nvidia",
        )


@rule("gpu-count", MACHINE)
def count(m: Machine) -> Iterator[Seen]:
    """As many GPUs as the job has; CUDA's own count where it was asked.

    Looks at: GPUs that this place sees, against those that the job has
    Why: ranks without a GPU of their own end with an invalid device, or share one and run out of memory
    See: https://github.com/NVIDIA/nccl/issues/1066
    """
    f, expected = m.facts, m.expects.gpus
    if not m.computes or not expected or f.nvidia_smi:
        return
    seen = f.cuda_devices if f.cuda_devices is not None else len(f.gpus)
    limited = m.environ("CUDA_VISIBLE_DEVICES")
    if not seen and not f.nvidia_devices and m.rehearsal:
        yield Seen(UNKNOWN, f"{expected} GPUs by Slurm's word only: a rehearsal")
    elif seen < expected:
        fix = "ask with --gpus-per-node and --gpu-bind=none, not --gpus-per-task"
        fix += f"; CUDA_VISIBLE_DEVICES is {limited}" if limited else ""
        if not f.nvidia_devices and f.nvidia_devices is not None:
            fix = "no NVIDIA GPU is on this machine's bus: look at it (lspci), and at what gres.conf says about it"
        elif f.nvidia_devices and len(f.gpus) < expected <= f.nvidia_devices:
            fix += "; the driver serves fewer than are on the bus: look for Xid in dmesg"
        yield Seen(FAIL, f"{seen} GPUs to be seen, the job has {expected}", fix)
    elif seen > expected and m.in_step:
        fix = "set ConstrainDevices=yes in cgroup.conf, else two jobs use the same GPUs"
        yield Seen(WARN, f"{seen} GPUs to be seen, the job has {expected}", fix)
    else:
        yield Seen(PASS, f"{seen} GPUs")


@rule("gpu-mixed", MACHINE)
def mixed(m: Machine) -> Iterator[Seen]:
    """All GPUs are of one model and size.

    Looks at: one model of GPU
    Why: all ranks wait for the slowest card, and the smallest memory decides what fits
    Fix: ask for one kind (--gres=gpu:TYPE:N, or --constraint), or set CUDA_VISIBLE_DEVICES to it
    See: https://slurm.schedmd.com/gres.html
    """
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in m.facts.gpus if gpu.name)
    if len(kinds) > 1:
        text = ", ".join(f"{number} x {name} with {mib or '?'} MiB" for (name, mib), number in sorted(kinds.items(), key=str))
        yield Seen(WARN, text)
    elif kinds:
        yield Seen(PASS, f"{len(m.facts.gpus)} x {next(iter(kinds))[0]}")


@rule("gpu-in-use", MACHINE)
def in_use(m: Machine) -> Iterator[Seen]:
    """The GPUs are free.

    Looks at: memory and processes of others on the GPUs
    Why: a process that was left over, or another user's, takes memory that the training counts on
    Fix: find who it is (nvidia-smi, scontrol pidinfo PID, squeue -w NODE); drain the node if it belongs to no job
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    busy = [gpu for gpu in m.facts.gpus if gpu.pids or (gpu.used_mib or 0) > BUSY_MIB]
    if not m.facts.gpus or not m.computes:
        return
    if not busy:
        yield Seen(PASS, "no process and no memory in use")
        return
    text = "; ".join(_use(gpu) for gpu in busy)
    hard = m.in_step and any((gpu.used_mib or 0) * 10 > (gpu.memory_mib or 0) for gpu in busy)
    yield Seen(FAIL if hard else WARN, text)


def _use(gpu: Gpu) -> str:
    pids = f", processes {', '.join(map(str, gpu.pids[:8]))}" if gpu.pids else ""
    return f"GPU {gpu.index}: {gpu.used_mib if gpu.used_mib is not None else '?'} MiB used{pids}"


@rule("gpu-compute-mode", MACHINE)
def compute_mode(m: Machine) -> Iterator[Seen]:
    """Several processes may use each GPU.

    Looks at: compute mode
    Why: in exclusive mode a second process, such as an evaluation, gets no context; prohibited means none at all
    Fix: as root: nvidia-smi -c 0
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    prohibited = [gpu.index for gpu in gpus if gpu.compute_mode == "Prohibited"]
    exclusive = [gpu.index for gpu in gpus if gpu.compute_mode.startswith("Exclusive")]
    if prohibited:
        yield Seen(FAIL, f"{_gpus(prohibited)}: Prohibited")
    elif exclusive:
        yield Seen(WARN, f"{_gpus(exclusive)}: Exclusive_Process")
    elif any(gpu.compute_mode for gpu in gpus):
        yield Seen(PASS, "Default")


@rule("gpu-mig", MACHINE)
def mig(m: Machine) -> Iterator[Seen]:
    """No GPU is split by MIG.

    Looks at: MIG is off
    Why: a process sees one slice of a GPU, and NCCL has no path between slices
    Fix: as root, with nothing running: nvidia-smi -mig 0, then reset the GPU; or ask for whole GPUs
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    with_mig = [gpu.index for gpu in gpus if gpu.mig]
    if with_mig:
        yield Seen(FAIL, f"{_gpus(with_mig)}: MIG is on")
    elif any(gpu.mig is False for gpu in gpus):
        yield Seen(PASS, "off")


@rule("gpu-persistence", MACHINE)
def persistence(m: Machine) -> Iterator[Seen]:
    """The driver stays loaded between processes.

    Looks at: persistence mode
    Why: without it the driver unloads after the last process: each start wakes every GPU again, for seconds; counters are lost
    Fix: as root: systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1 after each boot)
    See: https://manpages.ubuntu.com/manpages/focal/man1/nvidia-persistenced.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    unkept = [gpu.index for gpu in gpus if gpu.persistence is False]
    if unkept:
        yield Seen(WARN, f"{_gpus(unkept)}: off")
    elif any(gpu.persistence for gpu in gpus):
        yield Seen(PASS, "on")


@rule("gpu-throttled", MACHINE)
def throttled(m: Machine) -> Iterator[Seen]:
    """No GPU is held back. The power cap of one that computes is as it should be.

    Looks at: reasons why clocks are held down
    Why: one GPU that is held back by heat or power slows every rank of the job
    Fix: look at heat and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER): fans, inlet, power supplies, power limit
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    held = {gpu.index: [word for word in gpu.throttle if word != "sw_power_cap" or not gpu.pids] for gpu in m.facts.gpus}
    bad = {index: reasons for index, reasons in held.items() if reasons}
    if bad:
        text = "; ".join(f"GPU {index}: {', '.join(reasons)}" for index, reasons in bad.items())
        yield Seen(WARN, text)
    elif held and m.computes:
        yield Seen(PASS, "no GPU is held back")


@rule("gpu-ecc", MACHINE)
def ecc(m: Machine) -> Iterator[Seen]:
    """ECC counts nothing that it could not correct.

    Looks at: uncorrected memory errors
    Why: a GPU with uncorrected errors ends processes, or computes with wrong values where ECC is off
    See: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
    """
    gpus = m.facts.gpus
    bad = [gpu for gpu in gpus if gpu.ecc_uncorrected]
    off = [gpu.index for gpu in gpus if gpu.ecc is False]
    if bad:
        text = "; ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in bad)
        yield Seen(FAIL, text, "drain the node and reset the GPU (nvidia-smi -r); replace it if they come again")
    elif off and len(off) < len(gpus):
        yield Seen(WARN, f"{_gpus(off)}: ECC is off, on the others it is on", "as root: nvidia-smi -e 1, then reboot")
    elif any(gpu.ecc for gpu in gpus):
        yield Seen(PASS, "on, and nothing uncorrected")


@rule("gpu-row-remap", MACHINE)
def row_remap(m: Machine) -> Iterator[Seen]:
    """No row waits to be replaced.

    Looks at: rows of GPU memory that are to be replaced
    Why: a row with errors stays in use until the GPU is reset; where no spare row is left the card is to be replaced
    See: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
    """
    gpus = m.facts.gpus
    failed = [gpu.index for gpu in gpus if gpu.remap_failed]
    pending = [gpu.index for gpu in gpus if gpu.remap_pending]
    if failed:
        yield Seen(FAIL, f"{_gpus(failed)}: remapping failed", "drain the node and have the card replaced")
    elif pending:
        fix = "drain the node and reset the GPU (nvidia-smi -r), or reboot: rows are remapped then"
        yield Seen(WARN, f"{_gpus(pending)}: rows wait to be remapped", fix)
    elif any(gpu.remap_pending is False for gpu in gpus):
        yield Seen(PASS, "no row waits")


def _gpus(indices: list[int]) -> str:
    return f"GPU {', '.join(map(str, indices))}"


def read_xid(line: str) -> tuple[str, int, float | None] | None:
    """PCI address, number and second since boot of a line with an Xid; None where it is none."""
    found = re.search(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\):\s*(\d+)", line)
    if not found:
        return None
    second = re.match(r"\s*\[\s*(\d+\.\d+)\]", line)
    return found[1].lower(), int(found[2]), float(second[1]) if second else None


@rule("gpu-xid", MACHINE)
def xids(m: Machine) -> Iterator[Seen]:
    """The kernel's log contains no serious error of a GPU of the last day; an older one is a warning.

    Looks at: errors of GPUs in the kernel's log
    Why: a GPU that has reported one of these is often lost, or gives wrong results, until it is reset
    See: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    """
    f = m.facts
    if not f.gpus and not f.nvidia_devices:
        return
    if not f.kernel_log_read:
        if m.computes:
            yield Seen(UNKNOWN, "the kernel's log cannot be read here (kernel.dmesg_restrict)")
        return
    seen: dict[tuple[int, str], list[float]] = {}
    for line in f.xids:
        if (read := read_xid(line)) and read[1] in XIDS:
            age = f.uptime_s - read[2] if f.uptime_s is not None and read[2] is not None else 0.0
            seen.setdefault((read[1], read[0]), []).append(age)
    for (number, bus), ages in sorted(seen.items()):
        status, meaning, fix = XIDS[number]
        old = min(ages) > DAY_S
        when = f", the last {min(ages) / DAY_S:.0f} days ago" if old else ""
        yield Seen(WARN if old else status, f"Xid {number} of GPU {bus}, {len(ages)} times{when}: {meaning}", fix)
    if not seen:
        yield Seen(PASS, "no serious Xid since boot")
