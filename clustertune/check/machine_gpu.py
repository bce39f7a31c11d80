"""GPUs: CUDA and the driver, the paths between them, how many there are, who uses them, their health."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from clustertune.check.machines import Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Rules, Seen, either
from clustertune.host.facts import Gpu
from clustertune.host.nvidia_text import gpu_links
from clustertune.host.system import readable_cpus, version

RULES = Rules(MACHINE, __file__)

TABLES: dict[str, dict[Any, Any]] = yaml.safe_load(Path(__file__).with_name("gpu_tables.yaml").read_text(encoding="utf-8"))
"""Of each Xid its status, meaning and remedy; remedies by the driver's recovery action; codes of cuInit; oldest drivers."""

# --- CUDA and PCIe --------------------------------------------------------------------------------------------------------

COHERENT = re.compile(r"\bG[HB]\d{2,3}\b")
"""GH200, GB200, GB300, GB10: what goes between CPU and GPU takes NVLink-C2C, not the PCIe link of the driver's list."""


@RULES("cuda-init")
def cuda_init(m: Machine) -> Iterator[Seen]:
    """CUDA starts."""
    code = m.facts.cuda_init
    hidden = m.facts.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if not m.computes or not m.facts.gpus or (code == 100 and hidden):  # of that the variable's own rule speaks
        return
    if code is None:
        yield Seen(UNKNOWN, "libcuda.so.1 was not found, or cuInit did not return in time")
        return
    meaning, fix = TABLES["cuda_init"].get(code, ("see CUresult", "look at dmesg and at the versions of driver and libcuda"))
    yield from either(FAIL, f"cuInit returned {code}: {meaning}" if code else "", f"{m.facts.cuda_devices} devices", fix)


@RULES("driver-cuda")
def driver_cuda(m: Machine) -> Iterator[Seen]:
    """The driver serves the CUDA of torch."""
    f = m.facts
    cuda, driver = version(f.torch_cuda), version(f.driver)
    if not cuda or not driver or not m.computes:
        return
    minimum = {major: version(oldest) for major, oldest in TABLES["minimum_driver"].items()}
    needed = minimum.get(cuda[0])
    text = f"driver {f.driver}, torch for CUDA {f.torch_cuda}"
    if needed is None:
        yield Seen(UNKNOWN, f"{text}: not in the table")
    elif driver < needed and "compat" not in f.cuda_library:
        least = ".".join(map(str, needed))
        served = [major for major, oldest in minimum.items() if driver >= oldest]
        fix = f"update the driver to {least} or newer" + (f", or install a torch for CUDA {max(served)}" if served else "")
        yield Seen(FAIL, f"{text}: that needs {least}", fix)
    else:
        yield Seen(PASS, text)


@RULES("gpu-pcie")
def gpu_pcie(m: Machine) -> Iterator[Seen]:
    """Cards have all their lanes; slots are of the generation that the cluster file says, or that the card has."""
    gpus = [gpu for gpu in m.facts.gpus if gpu.pcie_width and gpu.pcie_width_max and not COHERENT.search(gpu.name)]
    value = str(m.section("compute").get("interconnect") or "")
    generation = int(value[4:]) if value.startswith("pcie") and value[4:].isdigit() else None
    narrow = [one for one in gpus if (one.pcie_width or 0) < (one.pcie_width_max or 0)]
    slow = [one for one in gpus if one.pcie_gen and one.pcie_gen < (generation or one.pcie_gen_max or 0)]
    texts = [f"GPU {one.index}: x{one.pcie_width} of x{one.pcie_width_max}" for one in narrow]
    texts = texts or [f"GPU {one.index}: PCIe {one.pcie_gen} of {generation or one.pcie_gen_max}" for one in slow]
    seat = "seat card and riser again, look at the slot's settings in the firmware; lspci -vv shows LnkSta"
    board = "look at riser and the slot's settings in the firmware; if the board has no more, say so in the cluster file"
    good = f"x{gpus[0].pcie_width}, PCIe {gpus[0].pcie_gen or '?'}" if gpus else ""
    yield from either(WARN, "; ".join(texts), good, seat if narrow else board)


@RULES("pcie-p2p")
def pcie_p2p(m: Machine) -> Iterator[Seen]:
    """Nothing stands between GPUs on PCIe."""
    f = m.facts
    links = gpu_links(f.topology)  # by the driver's map, else by the cluster file
    pcie = str(m.section("compute").get("interconnect") or "").startswith("pcie")
    if len(f.gpus) < 2 or not m.computes or not (any(not link.startswith("NV") for link in links.values()) if links else pcie):
        return
    lines = []
    if f.acs_redirect:
        lines.append(f"ACS redirects at {', '.join(f.acs_redirect[:6])}{' and more' if len(f.acs_redirect) > 6 else ''}")
    if f.iommu and not m.expects.p2p:
        lines.append("the IOMMU translates")
    if m.environ("NCCL_P2P_DISABLE") == "1":
        yield Seen(PASS, "NCCL_P2P_DISABLE=1: GPUs talk through host memory")
    elif not lines and f.acs_redirect is None:
        yield Seen(UNKNOWN, "whether bridges redirect (ACS) only root can see: lspci -vvv")
    else:
        yield from either(FAIL if m.expects.p2p is False else WARN, " and ".join(lines), "neither IOMMU nor ACS in the way")


@RULES("gpudirect-rdma")
def gpudirect_rdma(m: Machine) -> Iterator[Seen]:
    """Adapters that are up can reach GPU memory."""
    f, kind = m.facts, m.section("network").get("kind")
    if f.gpus and m.computes and m.several and kind != "ethernet" and any(port.active for port in f.rdma):
        lacking = "nvidia_peermem is not loaded, and the driver is not the open one" if f.peermem is False else ""
        yield from either(WARN, lacking, "nvidia_peermem or dma-buf" if f.peermem else "")


@RULES("gpu-numa")
def gpu_numa(m: Machine) -> Iterator[Seen]:
    """Each GPU has cores of its own NUMA node among those of this place."""
    f = m.facts
    mine = readable_cpus(f.affinity_list)
    near = {gpu.index: readable_cpus(f.numa_cpus.get(str(gpu.numa), "")) for gpu in f.gpus if gpu.numa is not None}
    if not mine or not m.in_step or not any(near.values()) or len(f.numa_cpus) < 2:
        return
    far = ", ".join(str(index) for index, cpus in near.items() if cpus and not cpus & mine)
    text = f"GPU {far}: none of the step's CPUs {f.affinity_list} is on its NUMA node" if far else ""
    yield from either(WARN, text, "each GPU has cores nearby")


# --- the GPUs themselves --------------------------------------------------------------------------------------------------

BUSY_MIB = 1024
"""Memory in use above which a GPU is not idle: without reserved memory a driver shows below 100 MiB, older ones some 600."""
DAY_S = 86_400.0
SURE_S = 40
"""Seconds from which a driver that does not answer hangs: eight GPUs without persistence mode take up to half a minute."""


@RULES("gpu-driver")
def gpu_driver(m: Machine) -> Iterator[Seen]:
    """The driver answers, for every GPU that is on the bus."""
    f = m.facts
    devices, answer = f.nvidia_devices or 0, f.nvidia_smi
    if not m.computes or (not devices and not f.gpus and not answer):
        return
    waited = re.search(r"no answer within (\d+) s", answer)
    if "mismatch" in answer.lower():
        fix = "the driver was updated while the old one is loaded: reboot the node, and pin the driver's packages"
        yield Seen(FAIL, f"nvidia-smi: {answer}", fix)
    elif waited and int(waited[1]) < SURE_S:
        fix = "look longer (--seconds=60): without persistence mode the driver wakes each GPU again; else a GPU hangs"
        yield Seen(WARN, f"nvidia-smi gave {answer}", fix)
    elif "no answer" in answer:
        yield Seen(FAIL, f"nvidia-smi gave {answer}", "a GPU hangs: look for Xid in dmesg, drain the node, power it off and on")
    elif answer:
        yield Seen(FAIL, f"nvidia-smi: {answer}", "drain the node; look for Xid in dmesg; reset or reboot")
    elif f.gpus:
        yield Seen(PASS, f"driver {f.driver or '?'} answers for {len(f.gpus)} GPUs")
    elif m.in_container:
        fix = "give the container the driver: apptainer exec --nv, docker run --gpus all"
        yield Seen(FAIL, f"{devices} NVIDIA GPUs on the bus, and no driver in the container", fix)
    else:
        fix = "install the driver, or load it: modprobe nvidia"
        yield Seen(FAIL, f"{devices} NVIDIA GPUs on the bus, and no nvidia-smi", fix)


@RULES("gpu-count")
def gpu_count(m: Machine) -> Iterator[Seen]:
    """As many GPUs as the job has; CUDA's own count where it was asked."""
    f, expected = m.facts, m.expects.gpus
    if not m.computes or not expected or f.nvidia_smi:
        return
    seen = f.cuda_devices if f.cuda_devices is not None else len(f.gpus)
    limited = m.environ("CUDA_VISIBLE_DEVICES")
    if not seen and not f.nvidia_devices and m.rehearsal:
        yield Seen(UNKNOWN, f"{expected} GPUs according to Slurm only: this is a rehearsal")
    elif seen < expected:
        fix = "ask with --gpus-per-node and --gpu-bind=none, not --gpus-per-task"
        fix += f"; CUDA_VISIBLE_DEVICES is {limited}" if limited else ""
        if not f.nvidia_devices and f.nvidia_devices is not None:
            fix = "no NVIDIA GPU is on this machine's bus: look at it (lspci), and at what gres.conf says about it"
        elif f.nvidia_devices and len(f.gpus) < expected <= f.nvidia_devices:
            fix += "; the driver serves fewer than are on the bus: look for Xid in dmesg"
        yield Seen(FAIL, f"{seen} GPUs are visible, the job has {expected}", fix)
    elif seen > expected and m.in_step:
        fix = "set ConstrainDevices=yes in cgroup.conf, else two jobs use the same GPUs"
        yield Seen(WARN, f"{seen} GPUs are visible, the job has {expected}", fix)
    else:
        yield Seen(PASS, f"{seen} GPUs")


@RULES("gpu-mixed")
def gpu_mixed(m: Machine) -> Iterator[Seen]:
    """All GPUs are of one model and size."""
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in m.facts.gpus if gpu.name)
    listed = [f"{number} x {name} with {mib or '?'} MiB" for (name, mib), number in sorted(kinds.items(), key=str)]
    one = f"{len(m.facts.gpus)} x {next(iter(kinds))[0]}" if kinds else ""
    yield from either(WARN, ", ".join(listed) if len(kinds) > 1 else "", one)


@RULES("gpu-in-use")
def gpu_in_use(m: Machine) -> Iterator[Seen]:
    """The GPUs are free."""
    if not m.facts.gpus or not m.computes:
        return
    busy = [gpu for gpu in m.facts.gpus if gpu.pids or (gpu.used_mib or 0) > BUSY_MIB]
    hard = m.in_step and any((gpu.used_mib or 0) * 10 > (gpu.memory_mib or 0) for gpu in busy)
    pids = {gpu.index: f", processes {', '.join(map(str, gpu.pids[:8]))}" if gpu.pids else "" for gpu in busy}
    used = [f"GPU {one.index}: {'?' if one.used_mib is None else one.used_mib} MiB used{pids[one.index]}" for one in busy]
    yield from either(FAIL if hard else WARN, "; ".join(used), "no process and no memory in use")


@RULES("gpu-mig")
def gpu_mig(m: Machine) -> Iterator[Seen]:
    """No GPU is split by MIG."""
    gpus = m.facts.gpus if m.computes else []
    yield from either(FAIL, _of(gpus, lambda gpu: gpu.mig, "MIG is on"), "off" if any(gpu.mig is False for gpu in gpus) else "")


@RULES("gpu-persistence")
def gpu_persistence(m: Machine) -> Iterator[Seen]:
    """The driver stays loaded between processes."""
    gpus = m.facts.gpus if m.computes else []
    unkept = _of(gpus, lambda gpu: gpu.persistence is False, "off")
    yield from either(WARN, unkept, "on" if any(gpu.persistence for gpu in gpus) else "")


@RULES("gpu-throttled")
def gpu_throttled(m: Machine) -> Iterator[Seen]:
    """No GPU is held back. The power cap of one that computes is as it should be."""
    held = {gpu.index: [word for word in gpu.throttle if word != "sw_power_cap" or not gpu.pids] for gpu in m.facts.gpus}
    bad = "; ".join(f"GPU {index}: {', '.join(reasons)}" for index, reasons in held.items() if reasons)
    yield from either(WARN, bad, "no GPU is held back" if held and m.computes else "")


@RULES("gpu-ecc")
def gpu_ecc(m: Machine) -> Iterator[Seen]:
    """ECC counts nothing that it could not correct."""
    gpus = m.facts.gpus
    bad = "; ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in gpus if gpu.ecc_uncorrected)
    some = any(gpu.ecc is not False for gpu in gpus)
    off = _of(gpus, lambda gpu: gpu.ecc is False, "ECC is off, on the others it is on") if some else ""
    replace = "drain the node and reset the GPU (nvidia-smi -r); replace it if they come again"
    fix = replace if bad else "as root: nvidia-smi -e 1, then reboot"
    good = "on, and nothing uncorrected" if any(gpu.ecc for gpu in gpus) else ""
    yield from either(FAIL if bad else WARN, bad or off, good, fix)


@RULES("gpu-row-remap")
def gpu_row_remap(m: Machine) -> Iterator[Seen]:
    """No row waits to be replaced."""
    gpus = m.facts.gpus
    failed = _of(gpus, lambda gpu: gpu.remap_failed, "remapping failed")
    pending = _of(gpus, lambda gpu: gpu.remap_pending, "rows wait to be remapped")
    reset = "drain the node and reset the GPU (nvidia-smi -r), or reboot: rows are remapped then"
    fix = "drain the node and have the card replaced" if failed else reset
    good = "no row waits" if any(gpu.remap_pending is False for gpu in gpus) else ""
    yield from either(FAIL if failed else WARN, failed or pending, good, fix)


def recovery_remedy(action: str) -> str:
    """What to do where the driver recommends ``action``."""
    return str(TABLES["recovery"].get(action, f"drain the node and do what the driver recommends: {action}"))


def _of(gpus: Iterable[Gpu], chosen: Callable[[Gpu], object], what: str) -> str:
    """``GPU 1, 2: WHAT`` of those that are chosen; empty where none is."""
    numbers = ", ".join(str(gpu.index) for gpu in gpus if chosen(gpu))
    return f"GPU {numbers}: {what}" if numbers else ""


def read_xid(line: str) -> tuple[str, int, float | None] | None:
    """PCI address, number and second since boot of a line with an Xid; None where it is none."""
    match = re.search(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\):\s*(\d+)", line)
    if not match:
        return None
    second = re.match(r"\s*\[\s*(\d+\.\d+)\]", line)
    return match[1].lower(), int(match[2]), float(second[1]) if second else None


RECOVERY_XID = 154
"""The driver recommends another action: ``154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)``."""
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)


@RULES("gpu-xid")
def gpu_xid(m: Machine) -> Iterator[Seen]:
    """The kernel's log contains no serious error of a GPU of the last day; an older one is a warning."""
    f = m.facts
    if not f.gpus and not f.nvidia_devices:
        return
    if not f.kernel_log_read:
        if m.computes:
            yield Seen(UNKNOWN, "the kernel's log cannot be read here (kernel.dmesg_restrict)")
        return
    xids = TABLES["xids"]
    seen: dict[tuple[int, str, str, str, str], list[float]] = {}
    recommended: dict[str, tuple[str, float]] = {}
    for line in f.xids:
        if (read := read_xid(line)) is None:
            continue
        bus, number, second = read
        age = f.uptime_s - second if f.uptime_s is not None and second is not None else 0.0
        if number == RECOVERY_XID:
            actions = re.findall(r"\(([^()]*)\)", line)
            recommended[bus] = (actions[-1] if len(actions) > 1 else "see the kernel's log", age)
        elif number in xids:
            status, meaning, fix = xids[number]
            seen.setdefault((number, bus, WARN if _NONFATAL.search(line) else status, meaning, fix), []).append(age)
    for bus, (action, age) in recommended.items():  # the last one counts
        if action != "None":
            text = f"the driver recommends a recovery action: {action}"
            seen[RECOVERY_XID, bus, FAIL, text, recovery_remedy(action)] = [age]
    for (number, bus, status, meaning, fix), ages in sorted(seen.items()):
        old = min(ages) > DAY_S
        when = f", the last {min(ages) / DAY_S:.0f} days ago" if old else ""
        yield Seen(WARN if old else status, f"Xid {number} of GPU {bus}, {len(ages)} times{when}: {meaning}", fix)
    if not seen:
        yield Seen(PASS, "no serious Xid since boot")


@RULES("gpu-recovery")
def gpu_recovery(m: Machine) -> Iterator[Seen]:
    """The driver recommends no reset and no reboot."""
    known = [gpu for gpu in m.facts.gpus if gpu.recovery_action]
    for action in dict.fromkeys(gpu.recovery_action for gpu in known if gpu.recovery_action != "None"):
        these = [gpu for gpu in known if gpu.recovery_action == action]
        yield Seen(FAIL, _of(these, lambda gpu: gpu.recovery_action, action), recovery_remedy(action))
    if known and all(gpu.recovery_action == "None" for gpu in known):
        yield Seen(PASS, "none")
