"""Rules of one node: how its GPUs reach each other, PCIe, shared and locked memory."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.links import LinkContext, logged, names
from clustertune.check.rule import FAIL, LINKS, PASS, WARN, Seen, rule


def _gpus(context: LinkContext) -> int:
    """Most GPUs of a node that NCCL used."""
    if context.backend != "nccl":
        return 0
    return max(context.ranks, context.log.highest_gpu + 1 if context.nodes else 0)


@rule("p2p-hang", LINKS, rank=2)
def p2p_hang(context: LinkContext) -> Iterator[Seen]:
    """Two GPUs of a node exchange data.

    Why: Behind an IOMMU or ACS the first all-reduce over PCIe never ends, and the GPUs stay at 100 % until they are reset.
    Fix: turn the IOMMU and ACS off in the BIOS (or iommu=pt and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge);
      until then NCCL_P2P_DISABLE=1 goes through the node's memory
    See: https://github.com/NVIDIA/nccl/issues/2079
    """
    good: set[str] = set()
    for item in context.entries("p2p_probe"):
        node, status = str(item.get("node", "")), item.get("status")
        given = item.get("gpus")
        gpus = " and ".join(map(str, given)) if isinstance(given, list) else "?"
        if status == "hung":
            yield Seen(FAIL, f"an all-reduce between GPUs {gpus} did not end in time", where=node)
        elif status == "failed":
            message = str(item.get("message") or "it failed")[:200]
            yield Seen(FAIL, f"an all-reduce between GPUs {gpus} failed: {message}", where=node)
        elif status == "ok":
            good.add(node)
    if good:
        yield Seen(PASS, "pairs of GPUs exchange data", where=names(good))


@logged("p2p-refused", "no-transport", rank=2)
def p2p_refused() -> None:
    """The driver lets GPUs reach each other's memory.

    Why: NCCL was set to use P2P, and the driver refuses it when the first buffer is opened.
    Fix: give ranks all GPUs of the node (no CUDA_VISIBLE_DEVICES or cgroup of one GPU each); cards without P2P:
      NCCL_P2P_DISABLE=1
    See: https://github.com/NVIDIA/nccl/issues/2079
    """


@rule("nvlink-unused", LINKS, rank=6)
def nvlink_unused(context: LinkContext) -> Iterator[Seen]:
    """NVLink carries the traffic inside a node.

    Why: Through PCIe or the node's memory it is a tenth of NVLink's bandwidth.
    Fix: look at `nvidia-smi nvlink -s` and at the fabric manager (`systemctl status nvidia-fabricmanager`); all ranks of a node
      in one container, which sees all its GPUs; NCCL_P2P_DISABLE and NCCL_P2P_LEVEL unset
    See: https://github.com/NVIDIA/nccl/issues/1781
    """
    if not context.nvlink or _gpus(context) < 2:
        return
    broken = [fault for fault in context.log.faults if fault.kind == "p2p-broken"]
    if broken or context.log.p2p_off:
        found = broken[0].text if broken else f"P2P is disabled between {len(context.log.p2p_off)} pairs of GPUs"
        yield Seen(FAIL, found, where=names(fault.host for fault in broken))
        return
    inside = _inside(context)
    slow = {name: count for name, count in inside.items() if not name.startswith("P2P")}
    if slow:
        yield Seen(FAIL, f"GPUs of a node talk over {names(slow)}, while NVLink joins them")
        return
    bad = {kind for kind in context.log.gpu_paths if kind in ("PHB", "SYS", "NODE")}
    if bad:
        yield Seen(FAIL, f"NCCL sees paths of kind {names(bad)} between GPUs that NVLink should join")
    elif inside:
        yield Seen(PASS, f"GPUs of a node talk over {names(inside)}")


def _inside(context: LinkContext) -> dict[str, int]:
    """Transports inside a node, with how often the log names them."""
    found = {name: count for name, count in context.log.transports.items() if name.startswith(("P2P/", "SHM/"))}
    crossing = context.log.crossing()
    for edge, count in context.log.edges.items():
        if edge not in crossing:
            found[f"NET/{edge.plugin}"] = found.get(f"NET/{edge.plugin}", 0) + count
    return found


@rule("p2p-disabled", LINKS, rank=6)
def p2p_disabled(context: LinkContext) -> Iterator[Seen]:
    """P2P between the GPUs of a node.

    Why: Without it everything passes through the node's memory, twice.
    Fix: unset NCCL_P2P_DISABLE, and where the first all-reduce hangs then: turn the IOMMU and ACS off in the BIOS (or iommu=pt
      and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge); until then NCCL_P2P_DISABLE=1 goes through the node's
      memory
    See: https://github.com/NVIDIA/nccl/issues/631
    """
    counted = bool(context.log.nodes or context.document.get("gpus_per_node"))
    if context.backend == "gloo" or (context.ranks == 1 and counted):
        return
    if context.is_on("NCCL_P2P_DISABLE"):
        yield Seen(FAIL if context.nvlink else WARN, "NCCL_P2P_DISABLE is set")
    elif context.setting("NCCL_P2P_LEVEL") in ("LOC", "0"):
        yield Seen(FAIL if context.nvlink else WARN, f"NCCL_P2P_LEVEL={context.setting('NCCL_P2P_LEVEL')} turns P2P off")
    elif context.log.p2p_off and not context.nvlink:
        yield Seen(WARN, f"the driver has P2P disabled between {len(context.log.p2p_off)} pairs of GPUs")
    elif _gpus(context) < 2:
        return
    elif not context.nvlink and not any(name.startswith("P2P") for name in context.log.transports) and _near(context):
        if any(name.startswith("SHM") for name in context.log.transports):
            yield Seen(WARN, f"{_near(context)} share a PCIe switch, but talk through the node's memory")
    elif any(name.startswith("P2P") for name in context.log.transports):
        yield Seen(PASS, f"{names(name for name in context.log.transports if name.startswith('P2P'))} is in use")


def _near(context: LinkContext) -> str:
    """The first pair of GPUs that share a PCIe switch, by ``nvidia-smi topo -m``; empty where none does."""
    for facts in context.facts:
        for line in facts.topology.splitlines():
            fields = line.split()
            if not fields or not fields[0].startswith("GPU") or "X" not in fields:
                continue
            for index, word in enumerate(fields[1 : len(facts.gpus) + 1]):
                if word in ("PIX", "PXB"):
                    return f"{fields[0]} and GPU{index}"
    return ""


@rule("shm-disabled", LINKS, rank=6)
def shm_disabled(context: LinkContext) -> Iterator[Seen]:
    """Shared memory inside a node.

    Why: GPUs without P2P between them talk through shared memory; without that too, over the network card.
    Fix: unset NCCL_SHM_DISABLE; where it was set for want of space, enlarge /dev/shm
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    inside = [name for name in _inside(context) if name.startswith("NET/")]
    if context.is_on("NCCL_SHM_DISABLE"):
        yield Seen(FAIL if inside else WARN, "NCCL_SHM_DISABLE is set" + (f": {names(inside)} inside a node" if inside else ""))
    elif inside and _gpus(context) > 1:
        yield Seen(
            WARN, f"GPUs of a node talk over {names(inside)}", "run all ranks of a node in one container, with one /dev/shm"
        )


@rule("acs-redirect", LINKS, rank=6)
def acs_redirect(context: LinkContext) -> Iterator[Seen]:
    """No ACS or IOMMU between GPUs on PCIe.

    Why: They send what one GPU writes to another up to the CPU: slow at best, and with some boards it hangs.
    Fix: turn the IOMMU and ACS off in the BIOS (or iommu=pt and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge);
      until then NCCL_P2P_DISABLE=1 goes through the node's memory
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#pci-access-control-services-acs
    """
    faults = [f for f in context.log.faults if "iommu=pt" in f.text]
    if faults:
        yield Seen(WARN, faults[0].text, "add iommu=pt to the kernel's command line", names(fault.host for fault in faults))


@logged("shm", name="small-shm", rank=2)
def small_shm() -> None:
    """Room in /dev/shm.

    Why: Ranks of a node map 10 MB for each connection there; docker and Kubernetes give 64 MiB.
    Fix: give the container --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with medium: Memory at /dev/shm), and remove
      stale files /dev/shm/nccl-*
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory
    """


@logged("shm-lost", rank=2)
def shm_lost() -> None:
    """Shared memory of other ranks can be opened.

    Why: A rank's file in /dev/shm was gone when its neighbour opened it: another container's, removed, or that rank had ended.
    Fix: run all ranks of a node in one container (or with one /dev/shm, --ipc=host), set RemoveIPC=no in logind.conf; look for
      the rank that failed first
    See: https://github.com/NVIDIA/nccl/issues/1589
    """


@logged("memlock", name="low-memlock", rank=2)
def low_memlock() -> None:
    """Locked memory for RDMA.

    Why: RDMA registers memory that must stay in place; Slurm's services start with a limit of 64 KiB or 8 MiB.
    Fix: LimitMEMLOCK=infinity in slurmd's unit (limits.conf does not reach services), PropagateResourceLimitsExcept=MEMLOCK in
      slurm.conf, --ulimit memlock=-1 for a container; check with `srun bash -c 'ulimit -l'`
    See: https://github.com/NVIDIA/nccl-tests/issues/206
    """
