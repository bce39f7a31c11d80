"""Rules of what NCCL itself reported, and of collectives that ended wrong or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.links import LinkContext, logged, names, number
from clustertune.check.log_read import FOLLOWS, OTHER
from clustertune.check.rule import FAIL, LINKS, PASS, UNKNOWN, WARN, Seen, rule

_CUDA_KINDS = ("duplicate-gpu", "gpu-missing", "gpu-memory", "gpu-fault", "driver", "p2p-refused", "nvls")
"""Errors of CUDA that have rules of their own."""


@logged("duplicate-gpu", rank=1)
def duplicate() -> None:
    """One GPU for each rank.

    Why: Two ranks chose the same GPU: NCCL refuses to start.
    Fix: call torch.cuda.set_device(LOCAL_RANK) before the first collective; start no more ranks than the node has GPUs
    See: https://github.com/NVIDIA/nccl/issues/1241
    """


@logged("gpu-missing", rank=1)
def gpu_missing() -> None:
    """Ranks see the GPUs that they ask for.

    Why: Slurm or the container shows a rank fewer GPUs than its number needs, or another process holds one exclusively.
    Fix: use --gpus-per-node (not --gpus-per-task), or --gpu-bind=none; look at `nvidia-smi` in the step
    See: https://github.com/NVIDIA/nccl/issues/1066
    """


@logged("gpu-memory", rank=1)
def gpu_memory() -> None:
    """GPU memory for NCCL's buffers.

    Why: NCCL needs some hundred MB beside the model; another process may hold the rest.
    Fix: look with `nvidia-smi` who uses the GPU; leave 1 to 2 GB free
    See: https://github.com/NVIDIA/nccl/issues/1235
    """


@logged("gpu-fault", rank=1)
def gpu_fault() -> None:
    """No hardware faults of GPUs.

    Why: A GPU, an NVLink or the fabric manager failed; NCCL is only the first to see it.
    Fix: look for Xid lines in `dmesg`, for ECC in `nvidia-smi -q`, and at nvidia-fabricmanager; drain the node
    See: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    """


@logged("nvls", rank=1)
def nvls() -> None:
    """NVLink SHARP (multicast).

    Why: NCCL could not make a multicast group of the GPUs.
    Fix: restart nvidia-fabricmanager with the driver's own version; until then NCCL_NVLS_ENABLE=0
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


@logged("imex", rank=1)
def imex() -> None:
    """NVLink between nodes.

    Why: NVLink joins the nodes, but the IMEX service that shares memory over it does not work.
    Fix: start nvidia-imex on all nodes of the domain and give the container /dev/nvidia-caps-imex-channels; until then
      NCCL_MNNVL_ENABLE=0
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


@rule("cuda", LINKS, rank=11)
def cuda(context: LinkContext) -> Iterator[Seen]:
    """No errors of CUDA.

    Why: A call of CUDA failed inside NCCL; where it says no more, an earlier kernel of the program may be the cause.
    Fix: run again with NCCL_DEBUG=INFO and look at the first error; with CUDA_LAUNCH_BLOCKING=1 where it says illegal memory
      access
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    faults = context.log.faults
    cuda_faults = [fault for fault in faults if fault.kind == "cuda"]
    # torch says "unhandled cuda error" whatever it was.
    if cuda_faults and not any(fault.kind in _CUDA_KINDS for fault in faults):
        first = next((fault for fault in cuda_faults if "failure" in fault.text.lower()), cuda_faults[0])
        yield Seen(FAIL, first.text, where=names(fault.host for fault in cuda_faults))


@logged("rdma-timeout", rank=7)
def rdma_timeout() -> None:
    """RDMA answers in time.

    Why: An adapter sent, and the other one never answered: the wrong GID, a route or MTU that RoCE has not, or a bad cable.
    Fix: RoCE: NCCL_IB_GID_INDEX with RoCE v2 and IPv4 (`show_gids`), one MTU on all switches; all adapters must reach each
      other (`ib_write_bw` between the pairs); then NCCL_IB_TIMEOUT=22
    See: https://github.com/NVIDIA/nccl/issues/426
    """


@logged("rdma-connect", rank=7)
def rdma_connect() -> None:
    """RDMA connections can be made.

    Why: The adapters of two nodes have no way to each other, or the GID is not one that routes.
    Fix: name the adapters of the training network in network.hca (NCCL_IB_HCA), not the one for storage; RoCE:
      NCCL_IB_GID_INDEX (`show_gids`)
    See: https://github.com/NVIDIA/nccl-tests/issues/185
    """


@logged("rdma-link", status=WARN, rank=11)
def rdma_link() -> None:
    """No events of RDMA ports.

    Why: A port went down or came back while ranks used it.
    Fix: look at `ibstat`, at the cable and the switch's error counters
    See: https://github.com/NVIDIA/nccl/issues/1405
    """


@logged("rdma-error", rank=11)
def rdma_error() -> None:
    """RDMA operations succeed.

    Why: An operation was refused: memory that the adapter may not reach (ACS, GPUDirect), or a peer that had ended.
    Fix: look for the rank that failed first; try NCCL_NET_GDR_LEVEL=LOC, and where that helps turn ACS off
    See: https://github.com/NVIDIA/nccl/issues/1405
    """


@logged("collectives-differ", rank=7)
def collectives_differ() -> None:
    """All ranks call the same collectives.

    Why: Ranks called collectives in another order or with other sizes.
    Fix: look for a branch that depends on the rank (saving, logging, evaluation), and for different data lengths;
      TORCH_DISTRIBUTED_DEBUG=DETAIL names the call
    See: https://github.com/NVIDIA/nccl/issues/296
    """


@logged("peers-disagree", rank=11)
def peers_disagree() -> None:
    """Ranks understand each other.

    Why: A rank was reached by something that speaks otherwise: another job, another version, other settings.
    Fix: give all nodes the same image and settings, a port of its own for each job, and keep port scanners off the nodes
    See: https://github.com/NVIDIA/nccl-tests/issues/188
    """


@logged("refused", name="port-refused", rank=7)
def refused() -> None:
    """Nodes reach each other on all ports.

    Why: NCCL connects to ports that the kernel chooses: a firewall that opens only the rendezvous port stops it.
    Fix: open all TCP ports between the nodes (`firewall-cmd --zone=trusted --add-source=SUBNET`, `ufw allow from SUBNET`); see
      that the address belongs to the training network; `nc -l 12345` and `nc NODE 12345` show it
    See: https://github.com/NVIDIA/nccl-tests/issues/162
    """


@logged("descriptors", rank=11)
def descriptors() -> None:
    """Enough open files.

    Why: Each connection takes a descriptor.
    Fix: LimitNOFILE=1048576 in slurmd's unit, `ulimit -n` in the job
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


@rule("collective-hung", LINKS, rank=11)
def collective_hung(context: LinkContext) -> Iterator[Seen]:
    """Every collective ends.

    Why: One rank that stops holds all others, until a watchdog ends the job half an hour later.
    Fix: look at what the silent rank does (py-spy dump, the flight recorder's files), then at the host's GPUs and network; with
      PCIe cards try NCCL_P2P_DISABLE=1
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#networking-issues
    """
    for item in context.entries("hung"):
        given = item.get("hosts")
        hosts = names(str(host) for host in given) if isinstance(given, list) else ""
        what = f"{item.get('collective', 'a collective')} ({item.get('scope', '?')}, {number(item.get('bytes')):.0f} bytes)"
        yield Seen(FAIL, f"{what} did not end within {number(item.get('seconds')):.0f} s", where=hosts)
    logged = context.from_log("hung")
    yield from logged
    log = context.log
    if not logged and not context.entries("hung") and context.entries("results"):
        yield Seen(PASS, "every collective ended")
    elif log.started and not log.complete and not log.faults and not context.entries("results"):
        began = f"{log.started} ranks" if log.started > 1 else "a rank"
        yield Seen(WARN, f"{began} began to connect, and the log ends before any was ready")
    elif log.networks and not (log.started or log.complete or log.transports or context.entries("results")):
        # Every log of a machine without RDMA names libibverbs as missing.
        silent = all(fault.kind == "no-verbs" for fault in log.faults)
        yield from [Seen(UNKNOWN, "the log ends before ranks are connected")] if silent else []


@logged("peer-lost", rank=11)
def peer_lost() -> None:
    """No rank is lost.

    Why: A connection ended because the process behind it did: this is the echo of another rank's error.
    Fix: look for the first error of all ranks, at the host that is named; the kernel's log may say that it ran out of memory
    See: https://github.com/NVIDIA/nccl/issues/1232
    """


@rule("wrong-result", LINKS, rank=10)
def wrong_result(context: LinkContext) -> Iterator[Seen]:
    """Collectives compute what they should.

    Why: Data that is changed on the way ruins a model without a word.
    Fix: take the node out; look at ECC, NVLink (`nvidia-smi nvlink -e`) and PCIe errors; try another version of NCCL and
      NCCL_PROTO=Simple
    See: https://github.com/NVIDIA/nccl/issues/596
    """
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


@rule("unexplained-error", LINKS, rank=11)
def unexplained_error(context: LinkContext) -> Iterator[Seen]:
    """No error without a reason.

    Why: A call of NCCL failed, and what is here does not say why.
    Fix: run again with NCCL_DEBUG=INFO and give the logs of all ranks
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    faults = context.log.faults
    failures = [fault for fault in faults if fault.kind in ("failed", FOLLOWS)]
    if not all(fault.kind in _SPECIFIC for fault in faults):
        return
    if failures or context.log.failed:
        warned = [fault for fault in faults if fault.kind == OTHER]
        why = f"; the last warning: {warned[-1].text}" if warned else ""
        found = failures[0].text if failures else "a call of NCCL failed"
        yield Seen(FAIL, found + why, where=names(fault.host for fault in failures or warned[-1:]))


@rule("other-warning", LINKS, rank=11)
def other_warning(context: LinkContext) -> Iterator[Seen]:
    """No other warnings of NCCL.

    Why: NCCL warns where something is broken, or slower than it should be.
    Fix: look the message up in NCCL's issues: https://github.com/NVIDIA/nccl/issues
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    faults = [fault for fault in context.log.faults if fault.kind == OTHER and "iommu=pt" not in fault.text]
    for text in list(dict.fromkeys(fault.text for fault in faults))[:3]:
        yield Seen(WARN, text, where=names(fault.host for fault in faults if fault.text == text))
    if context.log.lines and not context.log.faults:
        yield Seen(PASS, "NCCL gave no warning")
