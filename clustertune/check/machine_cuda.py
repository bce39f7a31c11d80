"""CUDA and the paths between GPUs: the driver against the installed torch, libraries, PCIe, IOMMU. Python 3.8."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Seen, rule
from clustertune.host.gpus import gpu_links
from clustertune.host.system import readable_cpus, version

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


@rule("cuda-init", MACHINE)
def init(m: Machine) -> Iterator[Seen]:
    """CUDA starts.

    Looks at: what cuInit returns
    Why: the driver may list GPUs that CUDA cannot use: every rank ends at its first call
    See: https://github.com/pytorch/pytorch/issues/35710
    """
    f = m.facts
    if not m.computes or not f.gpus:
        return
    if f.cuda_init is None:
        yield Seen(UNKNOWN, "libcuda.so.1 was not found, or cuInit did not return in time")
    elif f.cuda_init == 100 and m.facts.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return  # that is what the variable asks for: its own rule says so
    elif f.cuda_init:
        meaning, fix = INIT_CODES.get(f.cuda_init, ("see CUresult", "look at dmesg and at the versions of driver and libcuda"))
        yield Seen(FAIL, f"cuInit returned {f.cuda_init}: {meaning}", fix)
    else:
        yield Seen(PASS, f"{f.cuda_devices} devices")


@rule("driver-cuda", MACHINE)
def old_driver(m: Machine) -> Iterator[Seen]:
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
        fix = f"update the driver to {least} or newer"
        fix += f", or install a torch for CUDA {max(served)}" if served else ""
        yield Seen(FAIL, f"{text}: that needs {least}", fix)
    else:
        yield Seen(PASS, text)


@rule("cuda-compat", MACHINE)
def compat(m: Machine) -> Iterator[Seen]:
    """The libcuda in use is the driver's.

    Looks at: no forward-compatibility library in front of the driver's own
    Why: libcuda of cuda-compat works on data-centre cards only, and not with every driver: CUDA ends with error 803 or 804
    Fix: take its folder out of LD_LIBRARY_PATH, unless the driver is a data-centre one that is too old for the image
    See: https://github.com/NVIDIA/nvidia-docker/issues/1515
    """
    f = m.facts
    found = (
        f.cuda_library if "compat" in f.cuda_library else next((path for path in f.libraries if "compat/libcuda" in path), "")
    )
    if found:
        text = f"{found} stands in front of driver {f.driver or '?'}"
        yield Seen(FAIL if f.cuda_init in (803, 804) else WARN, text)
    elif f.cuda_library:
        yield Seen(PASS, f.cuda_library)


@rule("cuda-visible-devices", MACHINE)
def visible(m: Machine) -> Iterator[Seen]:
    """Only Slurm has chosen GPUs.

    Looks at: CUDA_VISIBLE_DEVICES as this place finds it
    Why: a value from a login shell or a notebook hides GPUs from every rank, or gives all ranks the same one
    See: https://slurm.schedmd.com/gres.html
    """
    value = m.facts.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None or (m.in_step and not m.expects.gpus):
        if value is None and m.facts.gpus:
            yield Seen(PASS, "not set")
        return
    named = [part for part in value.split(",") if part.strip()]
    if m.in_step and m.expects.gpus:  # Slurm sets it, by the number of the GPU or by its UUID
        if len(named) != m.expects.gpus:
            fix = "unset it in the job's script: Slurm gives each step its own"
            yield Seen(FAIL, f"{value or 'empty'}: {len(named)} GPUs, the job has {m.expects.gpus}", fix)
        else:
            yield Seen(PASS, value)
    elif not named or value.strip() in ("-1", "NoDevFiles"):
        yield Seen(WARN, f"it is {value!r}: no GPU is to be seen", "unset CUDA_VISIBLE_DEVICES")
    elif not m.environ("SLURM_JOB_ID"):
        yield Seen(WARN, f"it is {value!r} outside of a job", "unset CUDA_VISIBLE_DEVICES, unless it is meant")


@rule("gpu-pcie", MACHINE, rank=6)
def pcie(m: Machine) -> Iterator[Seen]:
    """Cards have all their lanes; slots are of the generation that the cluster file says, or that the card has.

    Looks at: lanes and generation of the slot
    Why: a card that came up with half of its lanes loads weights and talks to the others at half speed; nothing else tells
    See: https://manpages.ubuntu.com/manpages/focal/en/man1/nvidia-smi.1.html
    """
    gpus = [gpu for gpu in m.facts.gpus if gpu.pcie_width and gpu.pcie_width_max and not COHERENT.search(gpu.name)]
    if not gpus:
        return
    narrow = [gpu for gpu in gpus if (gpu.pcie_width or 0) < (gpu.pcie_width_max or 0)]
    value = str(m.section("compute").get("interconnect") or "")
    wanted = int(value[4:]) if value.startswith("pcie") and value[4:].isdigit() else None
    slow = [gpu for gpu in gpus if gpu.pcie_gen and gpu.pcie_gen < (wanted or gpu.pcie_gen_max or 0)]
    if narrow:
        text = "; ".join(f"GPU {gpu.index}: x{gpu.pcie_width} of x{gpu.pcie_width_max}" for gpu in narrow)
        yield Seen(WARN, text, "seat card and riser again, look at the slot's settings in the firmware; lspci -vv shows LnkSta")
    elif slow:
        text = "; ".join(f"GPU {gpu.index}: PCIe {gpu.pcie_gen} of {wanted or gpu.pcie_gen_max}" for gpu in slow)
        fix = "look at riser and the slot's settings in the firmware; if the board has no more, say so in the cluster file"
        yield Seen(WARN, text, fix)
    else:
        yield Seen(PASS, f"x{gpus[0].pcie_width}, PCIe {gpus[0].pcie_gen or '?'}")


def without_nvlink(m: Machine) -> bool:
    """Whether some pair of GPUs talks over PCIe only, by the driver's map, else by the cluster file."""
    links = gpu_links(m.facts.topology)
    if links:
        return any(not link.startswith("NV") for link in links.values())
    return str(m.section("compute").get("interconnect") or "").startswith("pcie")


@rule("pcie-p2p", MACHINE, rank=6)
def peer_to_peer(m: Machine) -> Iterator[Seen]:
    """Nothing stands between GPUs on PCIe.

    Looks at: IOMMU and ACS between GPUs without NVLink
    Why: traffic between GPUs goes up to the CPU: slow at best; on some cards the first all-reduce hangs until they are reset
    Fix: boot with iommu=pt or without IOMMU, turn ACS off on the bridges; else NCCL_P2P_DISABLE=1. nccl-check tries it
    See: https://github.com/NVIDIA/nccl/issues/1999
    """
    f = m.facts
    if len(f.gpus) < 2 or not m.computes or not without_nvlink(m):
        return
    lines = []
    if f.acs_redirect:
        lines.append(f"ACS redirects at {', '.join(f.acs_redirect[:6])}{' and more' if len(f.acs_redirect) > 6 else ''}")
    if f.iommu and not m.expects.p2p:
        lines.append("the IOMMU translates")
    if m.environ("NCCL_P2P_DISABLE") == "1":
        yield Seen(PASS, "NCCL_P2P_DISABLE=1: GPUs talk through host memory")
    elif lines:
        yield Seen(FAIL if m.expects.p2p is False else WARN, " and ".join(lines))
    elif f.acs_redirect is None:
        yield Seen(UNKNOWN, "whether bridges redirect (ACS) only root can see: lspci -vvv")
    else:
        yield Seen(PASS, "neither IOMMU nor ACS in the way")


@rule("gpudirect-rdma", MACHINE, rank=4)
def gpudirect(m: Machine) -> Iterator[Seen]:
    """Adapters that are up can reach GPU memory.

    Looks at: whether adapters can reach GPU memory
    Why: without nvidia_peermem or dma-buf every byte between nodes is copied through host memory
    Fix: as root: modprobe nvidia_peermem (and at boot); or the driver's open kernel modules with Linux 5.12, for dma-buf
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    f = m.facts
    kind = m.section("network").get("kind")
    if not f.gpus or not m.computes or not m.several or kind == "ethernet" or not any(port.active for port in f.rdma):
        return
    if f.peermem is False:
        yield Seen(WARN, "nvidia_peermem is not loaded, and the driver is not the open one")
    elif f.peermem:
        yield Seen(PASS, "nvidia_peermem or dma-buf")


@rule("gpu-numa", MACHINE)
def numa(m: Machine) -> Iterator[Seen]:
    """Each GPU has cores of its own NUMA node among those of this place.

    Looks at: the cores of this place, against the NUMA nodes of its GPUs
    Why: a rank whose cores are all on the other socket copies every batch and every checkpoint across
    Fix: ask for cores of both sockets (--cpus-per-task, --exclusive), or let Slurm choose by gres.conf (Cores=)
    See: https://github.com/pytorch/pytorch/issues/115305
    """
    f = m.facts
    mine = readable_cpus(f.affinity_list)
    near = {gpu.index: readable_cpus(f.numa_cpus.get(str(gpu.numa), "")) for gpu in f.gpus if gpu.numa is not None}
    if not mine or not m.in_step or not any(near.values()) or len(f.numa_cpus) < 2:
        return
    far = [index for index, cpus in near.items() if cpus and not cpus & mine]
    if far:
        text = f"GPU {', '.join(map(str, far))}: none of the step's CPUs {f.affinity_list} is on its NUMA node"
        yield Seen(WARN, text)
    else:
        yield Seen(PASS, "each GPU has cores nearby")
