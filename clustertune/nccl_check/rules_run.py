"""Rules of what NCCL itself reported, and of collectives that ended wrong or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.nccl_check.log_faults import FOLLOWS, OTHER
from clustertune.nccl_check.rules import (
    FAIL,
    ISSUES,
    PASS,
    TESTS,
    TROUBLE,
    UNKNOWN,
    WARN,
    Check,
    Context,
    Seen,
    check,
    names,
    number,
)

_CUDA_KINDS = ("duplicate-gpu", "gpu-missing", "gpu-memory", "gpu-fault", "driver", "p2p-refused", "nvls")
"""Errors of CUDA that have rules of their own."""


def _of_kind(kind: str, title: str, why: str, link: str, fix: str, status: str = FAIL, name: str = "") -> Check:
    """A rule that says what NCCL said of one kind of fault."""

    @check(name or kind, title, why, link, fix)
    def said(context: Context) -> Iterator[Seen]:
        found = [fault for fault in context.log.faults if fault.kind == kind]
        if found:
            times = sum(context.log.faults[fault] for fault in found)
            # What torch says around a reason is longer than the reason, and comes first.
            found.sort(key=lambda fault: "NCCL error" in fault.text or "ncclRemoteError" in fault.text)
            again = f" ({times} times)" if times > 1 else ""
            yield Seen(status, f"{found[0].text}{again}", where=names(fault.host for fault in found))

    return said


DUPLICATE = _of_kind(
    "duplicate-gpu",
    "One GPU for each rank",
    "Two ranks chose the same GPU: NCCL refuses to start.",
    f"{ISSUES}/1241",
    "call torch.cuda.set_device(LOCAL_RANK) before the first collective; start no more ranks than the node has GPUs",
)
GPU_MISSING = _of_kind(
    "gpu-missing",
    "Ranks see the GPUs that they ask for",
    "Slurm or the container shows a rank fewer GPUs than its number needs, or another process holds one exclusively.",
    f"{ISSUES}/1066",
    "use --gpus-per-node (not --gpus-per-task), or --gpu-bind=none; look at `nvidia-smi` in the step",
)
GPU_MEMORY = _of_kind(
    "gpu-memory",
    "GPU memory for NCCL's buffers",
    "NCCL needs some hundred MB beside the model; another process may hold the rest.",
    f"{ISSUES}/1235",
    "look with `nvidia-smi` who uses the GPU; leave 1 to 2 GB free",
)
GPU_FAULT = _of_kind(
    "gpu-fault",
    "No hardware faults of GPUs",
    "A GPU, an NVLink or the fabric manager failed; NCCL is only the first to see it.",
    "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
    "look for Xid lines in `dmesg`, for ECC in `nvidia-smi -q`, and at nvidia-fabricmanager; drain the node",
)
NVLS = _of_kind(
    "nvls",
    "NVLink SHARP (multicast)",
    "NCCL could not make a multicast group of the GPUs.",
    TROUBLE,
    "restart nvidia-fabricmanager with the driver's own version; until then NCCL_NVLS_ENABLE=0",
)
IMEX = _of_kind(
    "imex",
    "NVLink between nodes",
    "NVLink joins the nodes, but the IMEX service that shares memory over it does not work.",
    TROUBLE,
    "start nvidia-imex on all nodes of the domain and give the container /dev/nvidia-caps-imex-channels; until then "
    "NCCL_MNNVL_ENABLE=0",
)


@check(
    "cuda",
    "No errors of CUDA",
    "A call of CUDA failed inside NCCL; where it says no more, an earlier kernel of the program may be the cause.",
    TROUBLE,
    "run again with NCCL_DEBUG=INFO and look at the first error; with CUDA_LAUNCH_BLOCKING=1 where it "
    "says illegal memory access",
)
def cuda(context: Context) -> Iterator[Seen]:
    faults = context.log.faults
    said = [fault for fault in faults if fault.kind == "cuda"]
    # torch says "unhandled cuda error" whatever it was.
    if said and not any(fault.kind in _CUDA_KINDS for fault in faults):
        first = next((fault for fault in said if "failure" in fault.text.lower()), said[0])
        yield Seen(FAIL, first.text, where=names(fault.host for fault in said))


RDMA_TIMEOUT = _of_kind(
    "rdma-timeout",
    "RDMA answers in time",
    "An adapter sent, and the other one never answered: the wrong GID, a route or MTU that RoCE has not, or a bad cable.",
    f"{ISSUES}/426",
    "RoCE: NCCL_IB_GID_INDEX with RoCE v2 and IPv4 (`show_gids`), one MTU on all switches; all adapters must reach each other "
    "(`ib_write_bw` between the pairs); then NCCL_IB_TIMEOUT=22",
)
RDMA_CONNECT = _of_kind(
    "rdma-connect",
    "RDMA connections can be made",
    "The adapters of two nodes have no way to each other, or the GID is not one that routes.",
    f"{TESTS}/185",
    "name the adapters of the training network in network.hca (NCCL_IB_HCA), not the one for storage; RoCE: NCCL_IB_GID_INDEX "
    "(`show_gids`)",
)
RDMA_LINK = _of_kind(
    "rdma-link",
    "No events of RDMA ports",
    "A port went down or came back while ranks used it.",
    f"{ISSUES}/1405",
    "look at `ibstat`, at the cable and the switch's error counters",
    WARN,
)
RDMA_ERROR = _of_kind(
    "rdma-error",
    "RDMA operations succeed",
    "An operation was refused: memory that the adapter may not reach (ACS, GPUDirect), or a peer that had ended.",
    f"{ISSUES}/1405",
    "look for the rank that failed first; try NCCL_NET_GDR_LEVEL=LOC, and where that helps turn ACS off",
)
COLLECTIVES_DIFFER = _of_kind(
    "collectives-differ",
    "All ranks call the same collectives",
    "Ranks called collectives in another order or with other sizes.",
    f"{ISSUES}/296",
    "look for a branch that depends on the rank (saving, logging, evaluation), and for different data lengths; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL names the call",
)
PEERS_DISAGREE = _of_kind(
    "peers-disagree",
    "Ranks understand each other",
    "A rank was reached by something that speaks otherwise: another job, another version, other settings.",
    f"{TESTS}/188",
    "give all nodes the same image and settings, a port of its own for each job, and keep port scanners off the nodes",
)
REFUSED = _of_kind(
    "refused",
    "Nodes reach each other on all ports",
    "NCCL connects to ports that the kernel chooses: a firewall that opens only the rendezvous port stops it.",
    f"{TESTS}/162",
    "open all TCP ports between the nodes (`firewall-cmd --zone=trusted --add-source=SUBNET`, `ufw allow "
    "from SUBNET`); see that "
    "the address belongs to the training network; `nc -l 12345` and `nc NODE 12345` show it",
    name="port-refused",
)
DESCRIPTORS = _of_kind(
    "descriptors",
    "Enough open files",
    "Each connection takes a descriptor.",
    TROUBLE,
    "LimitNOFILE=1048576 in slurmd's unit, `ulimit -n` in the job",
)
PEER_LOST = _of_kind(
    "peer-lost",
    "No rank is lost",
    "A connection ended because the process behind it did: this is the echo of another rank's error.",
    f"{ISSUES}/1232",
    "look for the first error of all ranks, at the host that is named; the kernel's log may say that it ran out of memory",
)


@check(
    "collective-hung",
    "Every collective ends",
    "One rank that stops holds all others, until a watchdog ends the job half an hour later.",
    f"{TROUBLE}#networking-issues",
    "look at what the silent rank does (py-spy dump, the flight recorder's files), then at the host's "
    "GPUs and network; with PCIe "
    "cards try NCCL_P2P_DISABLE=1",
)
def collective_hung(context: Context) -> Iterator[Seen]:
    for item in context.entries("hung"):
        given = item.get("hosts")
        hosts = names(str(host) for host in given) if isinstance(given, list) else ""
        what = f"{item.get('collective', 'a collective')} ({item.get('scope', '?')}, {number(item.get('bytes')):.0f} bytes)"
        yield Seen(FAIL, f"{what} did not end within {number(item.get('seconds')):.0f} s", where=hosts)
    said = [fault for fault in context.log.faults if fault.kind == "hung"]
    if said:
        yield Seen(FAIL, said[0].text, where=names(fault.host for fault in said))
    log = context.log
    if not said and not context.entries("hung") and context.entries("results"):
        yield Seen(PASS, "every collective ended")
    elif log.started and not log.complete and not log.faults and not context.entries("results"):
        began = f"{log.started} ranks" if log.started > 1 else "a rank"
        yield Seen(WARN, f"{began} began to connect, and the log ends before any was ready")
    elif log.networks and not (log.started or log.complete or log.transports or context.entries("results")):
        # That libibverbs is not there is said in every log of a machine without RDMA.
        silent = all(fault.kind == "no-verbs" for fault in log.faults)
        yield from [Seen(UNKNOWN, "the log ends before ranks are connected")] if silent else []


@check(
    "wrong-result",
    "Collectives compute what they should",
    "Data that is changed on the way ruins a model without a word.",
    f"{ISSUES}/596",
    "take the node out; look at ECC, NVLink (`nvidia-smi nvlink -e`) and PCIe errors; try another "
    "version of NCCL and NCCL_PROTO=Simple",
)
def wrong_result(context: Context) -> Iterator[Seen]:
    if context.log.wrong:
        yield Seen(FAIL, f"nccl-tests found {context.log.wrong} values out of bounds")
    looked = False
    for key in ("results", "per_node", "per_pair"):
        for item in context.entries(key):
            if item.get("correct") is False:
                given = item.get("nodes")
                where = names(map(str, given)) if isinstance(given, list) else str(item.get("node", ""))
                what = f"{item.get('collective', 'a collective')} of {number(item.get('bytes')):.0f} bytes"
                yield Seen(FAIL, f"{what} has wrong values", where=where)
                return
            looked = looked or item.get("correct") is True
    if looked and not context.log.wrong:
        yield Seen(PASS, "every value was as it must be")


_SPECIFIC = (OTHER, FOLLOWS, "failed", "no-verbs")


@check(
    "unexplained-error",
    "No error without a reason",
    "A call of NCCL failed, and what is here does not say why.",
    f"{ISSUES}/697",
    "run again with NCCL_DEBUG=INFO and give the logs of all ranks",
)
def unexplained_error(context: Context) -> Iterator[Seen]:
    faults = context.log.faults
    said = [fault for fault in faults if fault.kind in ("failed", FOLLOWS)]
    if not all(fault.kind in _SPECIFIC for fault in faults):
        return
    if said or context.log.failed:
        warned = [fault for fault in faults if fault.kind == OTHER]
        why = f"; the last warning: {warned[-1].text}" if warned else ""
        found = said[0].text if said else "a call of NCCL failed"
        yield Seen(FAIL, found + why, where=names(fault.host for fault in said or warned[-1:]))


@check(
    "other-warning",
    "No other warnings of NCCL",
    "NCCL warns where something is broken, or slower than it should be.",
    TROUBLE,
    "look the words up in NCCL's issues: https://github.com/NVIDIA/nccl/issues",
)
def other_warning(context: Context) -> Iterator[Seen]:
    said = [fault for fault in context.log.faults if fault.kind == OTHER and "iommu=pt" not in fault.text]
    for text in list(dict.fromkeys(fault.text for fault in said))[:3]:
        yield Seen(WARN, text, where=names(fault.host for fault in said if fault.text == text))
    if context.log.lines and not context.log.faults:
        yield Seen(PASS, "NCCL gave no warning")


CAUSES = (DUPLICATE, GPU_MISSING, GPU_FAULT, IMEX, NVLS, GPU_MEMORY, RDMA_CONNECT, RDMA_TIMEOUT, REFUSED, COLLECTIVES_DIFFER)
"""What is a cause by itself."""
EFFECTS = (
    wrong_result,
    PEERS_DISAGREE,
    DESCRIPTORS,
    cuda,
    RDMA_LINK,
    RDMA_ERROR,
    collective_hung,
    PEER_LOST,
    unexplained_error,
    other_warning,
)
"""What is often the echo of another fault."""
CHECKS = (*CAUSES, *EFFECTS)
