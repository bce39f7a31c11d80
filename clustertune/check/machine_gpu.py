"""GPUs: CUDA and the driver, the paths between them, how many there are, who uses them, their health."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import yaml

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Seen, either
from clustertune.host.facts import Gpu
from clustertune.host.gpus import gpu_links
from clustertune.host.system import readable_cpus, version

# --- CUDA and PCIe --------------------------------------------------------------------------------------------------------

MINIMUM_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""Oldest driver that serves a major version of CUDA on Linux, by minor version compatibility (the link of ``driver-cuda``)."""

INIT_CODES = {
    3: ("not initialized", "reboot the node; look at dmesg"),
    34: ("a stub of libcuda was loaded", "take the folder 'stubs' out of LD_LIBRARY_PATH"),
    46: ("a GPU is not available", "another process holds it in exclusive mode, or MIG is being set up: nvidia-smi"),
    100: ("no GPU", "ask for GPUs; CUDA_VISIBLE_DEVICES must not be empty; in a container --nv or --gpus all"),
    101: ("CUDA_VISIBLE_DEVICES names a GPU that is not there", "unset it"),
    802: ("the system is not ready: the fabric manager does not run", "as root: systemctl start nvidia-fabricmanager"),
    803: ("libcuda and kernel driver do not match", "reboot after a driver update; take cuda-compat out of LD_LIBRARY_PATH"),
    804: ("cuda-compat does not work on this GPU", "take cuda-compat out of LD_LIBRARY_PATH, or update the driver"),
    999: (
        "an unknown error: often nvidia-uvm is not loaded",
        "as root: modprobe nvidia-uvm, nvidia-modprobe -u -c 0; or reboot",
    ),
}
"""What cuInit may return (CUresult of cuda.h), what it means on a cluster, and what to do."""


COHERENT = re.compile(r"\bG[HB]\d{2,3}\b")
"""GH200, GB200, GB300, GB10: what goes between CPU and GPU takes NVLink-C2C, not the PCIe link of the driver's list."""


def cuda_init(m: Machine) -> Iterator[Seen]:
    """CUDA starts.

    Looks at: what cuInit returns
    Why: the driver may list GPUs that CUDA cannot use: every rank ends at its first call
    See: https://github.com/pytorch/pytorch/issues/35710
    """
    code = m.facts.cuda_init
    hidden = m.facts.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if not m.computes or not m.facts.gpus or (code == 100 and hidden):  # of that the variable's own rule speaks
        return
    if code is None:
        yield Seen(UNKNOWN, "libcuda.so.1 was not found, or cuInit did not return in time")
        return
    meaning, fix = INIT_CODES.get(code, ("see CUresult", "look at dmesg and at the versions of driver and libcuda"))
    yield from either(FAIL, f"cuInit returned {code}: {meaning}" if code else "", f"{m.facts.cuda_devices} devices", fix)


def driver_cuda(m: Machine) -> Iterator[Seen]:
    """The driver serves the CUDA of torch.

    Looks at: the driver, against the CUDA of the installed torch
    Why: a torch that was built for a newer CUDA than the driver serves finds no GPU at all
    See: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    f = m.facts
    cuda, driver = version(f.torch_cuda), version(f.driver)
    if not cuda or not driver or not m.computes:
        return
    needed = MINIMUM_DRIVER.get(cuda[0])
    text = f"driver {f.driver}, torch for CUDA {f.torch_cuda}"
    if needed is None:
        yield Seen(UNKNOWN, f"{text}: not in the table")
    elif driver < needed and "compat" not in f.cuda_library:
        least = ".".join(map(str, needed))
        served = [major for major, oldest in MINIMUM_DRIVER.items() if driver >= oldest]
        fix = f"update the driver to {least} or newer" + (f", or install a torch for CUDA {max(served)}" if served else "")
        yield Seen(FAIL, f"{text}: that needs {least}", fix)
    else:
        yield Seen(PASS, text)


def cuda_compat(m: Machine) -> Iterator[Seen]:
    """The libcuda in use is the driver's.

    Looks at: no forward-compatibility library in front of the driver's own
    Why: libcuda of cuda-compat works on data-centre cards only, and not with every driver: CUDA ends with error 803 or 804
    Fix: take its folder out of LD_LIBRARY_PATH, unless the driver is a data-centre one that is too old for the image
    See: https://github.com/NVIDIA/nvidia-docker/issues/1515
    """
    f = m.facts
    library = f.cuda_library if "compat" in f.cuda_library else ""
    found = library or next((path for path in f.libraries if "compat/libcuda" in path), "")
    status = FAIL if f.cuda_init in (803, 804) else WARN
    yield from either(status, f"{found} stands in front of driver {f.driver or '?'}" if found else "", f.cuda_library)


def cuda_visible_devices(m: Machine) -> Iterator[Seen]:
    """Only Slurm has chosen GPUs.

    Looks at: CUDA_VISIBLE_DEVICES as it is set where the check runs
    Why: a value from a login shell or a notebook hides GPUs from every rank, or gives all ranks the same one
    See: https://slurm.schedmd.com/gres.html
    """
    value = m.facts.environment.get("CUDA_VISIBLE_DEVICES")
    named = [part for part in (value or "").split(",") if part.strip()]
    if value is None:
        yield from either(WARN, "", "not set" if m.facts.gpus else "")
    elif m.in_step and m.expects.gpus:  # Slurm sets it, by the number of the GPU or by its UUID
        differs = f"{value or 'empty'}: {len(named)} GPUs, the job has {m.expects.gpus}" if len(named) != m.expects.gpus else ""
        yield from either(FAIL, differs, value, "unset it in the job's script: Slurm gives each step its own")
    elif m.in_step:
        return
    elif not named or value.strip() in ("-1", "NoDevFiles"):
        yield Seen(WARN, f"it is {value!r}: no GPU is visible", "unset CUDA_VISIBLE_DEVICES")
    elif not m.environ("SLURM_JOB_ID"):
        yield Seen(WARN, f"it is {value!r} outside of a job", "unset CUDA_VISIBLE_DEVICES, unless it is meant")


def gpu_pcie(m: Machine) -> Iterator[Seen]:
    """Cards have all their lanes; slots are of the generation that the cluster file says, or that the card has.

    Looks at: lanes and generation of the slot
    Why: a card that came up with half of its lanes loads weights and talks to the others at half speed; no error reports it
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = [gpu for gpu in m.facts.gpus if gpu.pcie_width and gpu.pcie_width_max and not COHERENT.search(gpu.name)]
    value = str(m.section("compute").get("interconnect") or "")
    wanted = int(value[4:]) if value.startswith("pcie") and value[4:].isdigit() else None
    narrow = [one for one in gpus if (one.pcie_width or 0) < (one.pcie_width_max or 0)]
    slow = [one for one in gpus if one.pcie_gen and one.pcie_gen < (wanted or one.pcie_gen_max or 0)]
    texts = [f"GPU {one.index}: x{one.pcie_width} of x{one.pcie_width_max}" for one in narrow]
    texts = texts or [f"GPU {one.index}: PCIe {one.pcie_gen} of {wanted or one.pcie_gen_max}" for one in slow]
    seat = "seat card and riser again, look at the slot's settings in the firmware; lspci -vv shows LnkSta"
    board = "look at riser and the slot's settings in the firmware; if the board has no more, say so in the cluster file"
    good = f"x{gpus[0].pcie_width}, PCIe {gpus[0].pcie_gen or '?'}" if gpus else ""
    yield from either(WARN, "; ".join(texts), good, seat if narrow else board)


def pcie_p2p(m: Machine) -> Iterator[Seen]:
    """Nothing stands between GPUs on PCIe.

    Looks at: IOMMU and ACS between GPUs without NVLink
    Why: traffic between GPUs goes up to the CPU: slow at best; on some cards the first all-reduce hangs until they are reset
    Fix: boot with iommu=pt or without IOMMU, turn ACS off on the bridges; else NCCL_P2P_DISABLE=1. nccl-check tries it
    See: https://github.com/NVIDIA/nccl/issues/1999
    """
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


def gpudirect_rdma(m: Machine) -> Iterator[Seen]:
    """Adapters that are up can reach GPU memory.

    Looks at: whether adapters can reach GPU memory
    Why: without nvidia_peermem or dma-buf every byte between nodes is copied through host memory
    Fix: as root: modprobe nvidia_peermem (and at boot); or the driver's open kernel modules with Linux 5.12, for dma-buf
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    f, kind = m.facts, m.section("network").get("kind")
    if f.gpus and m.computes and m.several and kind != "ethernet" and any(port.active for port in f.rdma):
        lacking = "nvidia_peermem is not loaded, and the driver is not the open one" if f.peermem is False else ""
        yield from either(WARN, lacking, "nvidia_peermem or dma-buf" if f.peermem else "")


def gpu_numa(m: Machine) -> Iterator[Seen]:
    """Each GPU has cores of its own NUMA node among those of this place.

    Looks at: the cores that this process may use, against the NUMA nodes of its GPUs
    Why: a rank whose cores are all on the other socket copies every batch and every checkpoint across
    Fix: ask for cores of both sockets (--cpus-per-task, --exclusive), or let Slurm choose by gres.conf (Cores=)
    See: https://github.com/pytorch/pytorch/issues/115305
    """
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


@cache
def xid_tables() -> tuple[dict[int, list[str]], dict[str, str]]:
    """``xid.yaml``: of each Xid its status, meaning and remedy; of each recovery action of the driver what to do."""
    tables = yaml.safe_load(Path(__file__).with_name("xid.yaml").read_text(encoding="utf-8"))
    return tables["xids"], tables["recovery"]


def recovery_remedy(action: str) -> str:
    """What to do where the driver recommends ``action``."""
    return xid_tables()[1].get(action, f"drain the node and do what the driver recommends: {action}")


def gpu_driver(m: Machine) -> Iterator[Seen]:
    """The driver answers, for every GPU that is on the bus.

    Looks at: whether the driver answers
    Why: nothing runs on a GPU whose driver does not answer; one that hangs takes the job's processes with it
    See: https://github.com/NVIDIA/ubuntu-packaging-nvidia-driver/issues/3
    """
    f = m.facts
    devices, said = f.nvidia_devices or 0, f.nvidia_smi
    if not m.computes or (not devices and not f.gpus and not said):
        return
    waited = re.search(r"no answer within (\d+) s", said)
    if "mismatch" in said.lower():
        fix = "the driver was updated while the old one is loaded: reboot the node, and pin the driver's packages"
        yield Seen(FAIL, f"nvidia-smi: {said}", fix)
    elif waited and int(waited[1]) < SURE_S:
        fix = "look longer (--seconds=60): without persistence mode the driver wakes each GPU again; else a GPU hangs"
        yield Seen(WARN, f"nvidia-smi gave {said}", fix)
    elif "no answer" in said:
        yield Seen(FAIL, f"nvidia-smi gave {said}", "a GPU hangs: look for Xid in dmesg, drain the node, power it off and on")
    elif said:
        yield Seen(FAIL, f"nvidia-smi: {said}", "drain the node; look for Xid in dmesg; reset or reboot")
    elif f.gpus:
        yield Seen(PASS, f"driver {f.driver or '?'} answers for {len(f.gpus)} GPUs")
    elif m.in_container:
        fix = "give the container the driver: apptainer exec --nv, docker run --gpus all"
        yield Seen(FAIL, f"{devices} NVIDIA GPUs on the bus, and no driver in the container", fix)
    else:
        fix = "install the driver, or load it: modprobe nvidia"
        yield Seen(FAIL, f"{devices} NVIDIA GPUs on the bus, and no nvidia-smi", fix)


def gpu_count(m: Machine) -> Iterator[Seen]:
    """As many GPUs as the job has; CUDA's own count where it was asked.

    Looks at: GPUs that this process sees, against those that the job has
    Why: ranks without a GPU of their own end with an invalid device, or share one and run out of memory
    See: https://github.com/NVIDIA/nccl/issues/1066
    """
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


def gpu_mixed(m: Machine) -> Iterator[Seen]:
    """All GPUs are of one model and size.

    Looks at: one model of GPU
    Why: all ranks wait for the slowest card, and the smallest memory decides what fits
    Fix: ask for one kind (--gres=gpu:TYPE:N, or --constraint), or set CUDA_VISIBLE_DEVICES to it
    See: https://slurm.schedmd.com/gres.html
    """
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in m.facts.gpus if gpu.name)
    listed = [f"{number} x {name} with {mib or '?'} MiB" for (name, mib), number in sorted(kinds.items(), key=str)]
    one = f"{len(m.facts.gpus)} x {next(iter(kinds))[0]}" if kinds else ""
    yield from either(WARN, ", ".join(listed) if len(kinds) > 1 else "", one)


def gpu_in_use(m: Machine) -> Iterator[Seen]:
    """The GPUs are free.

    Looks at: memory and processes of others on the GPUs
    Why: a process that was left over, or another user's, takes memory that the training counts on
    Fix: find who it is (nvidia-smi, scontrol pidinfo PID, squeue -w NODE); drain the node if it belongs to no job
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    if not m.facts.gpus or not m.computes:
        return
    busy = [gpu for gpu in m.facts.gpus if gpu.pids or (gpu.used_mib or 0) > BUSY_MIB]
    hard = m.in_step and any((gpu.used_mib or 0) * 10 > (gpu.memory_mib or 0) for gpu in busy)
    pids = {gpu.index: f", processes {', '.join(map(str, gpu.pids[:8]))}" if gpu.pids else "" for gpu in busy}
    used = [f"GPU {one.index}: {'?' if one.used_mib is None else one.used_mib} MiB used{pids[one.index]}" for one in busy]
    yield from either(FAIL if hard else WARN, "; ".join(used), "no process and no memory in use")


def gpu_compute_mode(m: Machine) -> Iterator[Seen]:
    """Several processes may use each GPU.

    Looks at: compute mode
    Why: in exclusive mode a second process, such as an evaluation, gets no context; prohibited means none at all
    Fix: as root: nvidia-smi -c 0
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    prohibited = _of(gpus, lambda gpu: gpu.compute_mode == "Prohibited", "Prohibited")
    exclusive = _of(gpus, lambda gpu: gpu.compute_mode.startswith("Exclusive"), "Exclusive_Process")
    default = "Default" if any(gpu.compute_mode for gpu in gpus) else ""
    yield from either(FAIL if prohibited else WARN, prohibited or exclusive, default)


def gpu_mig(m: Machine) -> Iterator[Seen]:
    """No GPU is split by MIG.

    Looks at: MIG is off
    Why: a process sees one slice of a GPU, and NCCL has no path between slices
    Fix: as root, with nothing running: nvidia-smi -mig 0, then reset the GPU; or ask for whole GPUs
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    yield from either(FAIL, _of(gpus, lambda gpu: gpu.mig, "MIG is on"), "off" if any(gpu.mig is False for gpu in gpus) else "")


def gpu_persistence(m: Machine) -> Iterator[Seen]:
    """The driver stays loaded between processes.

    Looks at: persistence mode
    Why: without it the driver unloads after the last process: each start wakes every GPU again, for seconds; counters are lost
    Fix: as root: systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1 after each boot)
    See: https://manpages.ubuntu.com/manpages/focal/man1/nvidia-persistenced.1.html
    """
    gpus = m.facts.gpus if m.computes else []
    unkept = _of(gpus, lambda gpu: gpu.persistence is False, "off")
    yield from either(WARN, unkept, "on" if any(gpu.persistence for gpu in gpus) else "")


def gpu_throttled(m: Machine) -> Iterator[Seen]:
    """No GPU is held back. The power cap of one that computes is as it should be.

    Looks at: reasons why clocks are held down
    Why: one GPU that is held back by heat or power slows every rank of the job
    Fix: look at heat and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER): fans, inlet, power supplies, power limit
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    held = {gpu.index: [word for word in gpu.throttle if word != "sw_power_cap" or not gpu.pids] for gpu in m.facts.gpus}
    bad = "; ".join(f"GPU {index}: {', '.join(reasons)}" for index, reasons in held.items() if reasons)
    yield from either(WARN, bad, "no GPU is held back" if held and m.computes else "")


def gpu_ecc(m: Machine) -> Iterator[Seen]:
    """ECC counts nothing that it could not correct.

    Looks at: uncorrected memory errors
    Why: a GPU with uncorrected errors ends processes, or computes with wrong values where ECC is off
    See: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
    """
    gpus = m.facts.gpus
    bad = "; ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in gpus if gpu.ecc_uncorrected)
    some = any(gpu.ecc is not False for gpu in gpus)
    off = _of(gpus, lambda gpu: gpu.ecc is False, "ECC is off, on the others it is on") if some else ""
    replace = "drain the node and reset the GPU (nvidia-smi -r); replace it if they come again"
    fix = replace if bad else "as root: nvidia-smi -e 1, then reboot"
    good = "on, and nothing uncorrected" if any(gpu.ecc for gpu in gpus) else ""
    yield from either(FAIL if bad else WARN, bad or off, good, fix)


def gpu_row_remap(m: Machine) -> Iterator[Seen]:
    """No row waits to be replaced.

    Looks at: rows of GPU memory that are to be replaced
    Why: a row with errors stays in use until the GPU is reset; where no spare row is left the card is to be replaced
    See: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
    """
    gpus = m.facts.gpus
    failed = _of(gpus, lambda gpu: gpu.remap_failed, "remapping failed")
    pending = _of(gpus, lambda gpu: gpu.remap_pending, "rows wait to be remapped")
    reset = "drain the node and reset the GPU (nvidia-smi -r), or reboot: rows are remapped then"
    fix = "drain the node and have the card replaced" if failed else reset
    good = "no row waits" if any(gpu.remap_pending is False for gpu in gpus) else ""
    yield from either(FAIL if failed else WARN, failed or pending, good, fix)


def _of(gpus: Iterable[Gpu], chosen: Callable[[Gpu], object], what: str) -> str:
    """``GPU 1, 2: WHAT`` of those that are chosen; empty where none is."""
    found = ", ".join(str(gpu.index) for gpu in gpus if chosen(gpu))
    return f"GPU {found}: {what}" if found else ""


def read_xid(line: str) -> tuple[str, int, float | None] | None:
    """PCI address, number and second since boot of a line with an Xid; None where it is none."""
    found = re.search(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\):\s*(\d+)", line)
    if not found:
        return None
    second = re.match(r"\s*\[\s*(\d+\.\d+)\]", line)
    return found[1].lower(), int(found[2]), float(second[1]) if second else None


RECOVERY_XID = 154
"""The driver recommends another action: ``154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)``."""
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)


def gpu_xid(m: Machine) -> Iterator[Seen]:
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
    xids, _ = xid_tables()
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


def gpu_recovery(m: Machine) -> Iterator[Seen]:
    """The driver recommends no reset and no reboot.

    Looks at: the recovery action that the driver recommends
    Why: the driver knows of an error that only a reset or a reboot clears: work on such a GPU fails or computes less
    See: https://docs.nvidia.com/deploy/nvidia-smi/index.html
    """
    known = [gpu for gpu in m.facts.gpus if gpu.recovery_action]
    for action in dict.fromkeys(gpu.recovery_action for gpu in known if gpu.recovery_action != "None"):
        these = [gpu for gpu in known if gpu.recovery_action == action]
        yield Seen(FAIL, _of(these, lambda gpu: gpu.recovery_action, action), recovery_remedy(action))
    if known and all(gpu.recovery_action == "None" for gpu in known):
        yield Seen(PASS, "none")
