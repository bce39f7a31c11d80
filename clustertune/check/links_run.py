"""Rules of what NCCL reported, of versions and settings, and of what was measured.

Bandwidths are bus bandwidths in GB/s of 10^9 bytes. Against the hardware an all-gather counts, which the planner takes too: the
median of its largest sizes. What to expect comes with the document (``clustertune.nccl_check.check.expected``).
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from clustertune.check.links import COLLECTIVES, ENOUGH, LinkContext, logged, names, number
from clustertune.check.log_read import FOLLOWS, OTHER
from clustertune.check.machine_stack import only_all_reduce
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Seen, either
from clustertune.host.system import version

# --- what NCCL reported ---------------------------------------------------------------------------------------------------

_CUDA_KINDS = ("duplicate-gpu", "gpu-missing", "nccl-memory", "gpu-fault", "driver", "p2p-refused", "nvls")
"""Errors of CUDA that have rules of their own."""


@logged("duplicate-gpu")
def duplicate() -> None:
    """One GPU for each rank.

    Why: Two ranks chose the same GPU: NCCL refuses to start.
    Fix: call torch.cuda.set_device(LOCAL_RANK) before the first collective; start no more ranks than the node has GPUs
    See: https://github.com/NVIDIA/nccl/issues/1241
    """


@logged("gpu-missing")
def gpu_missing() -> None:
    """Ranks see the GPUs that they ask for.

    Why: Slurm or the container shows a rank fewer GPUs than its number needs, or another process holds one exclusively.
    Fix: use --gpus-per-node (not --gpus-per-task), or --gpu-bind=none; look at `nvidia-smi` in the step
    See: https://github.com/NVIDIA/nccl/issues/1066
    """


@logged("nccl-memory")
def nccl_memory() -> None:
    """GPU memory for NCCL's buffers.

    Why: NCCL needs some hundred MB beside the model; another process may hold the rest.
    Fix: look with `nvidia-smi` who uses the GPU; leave 1 to 2 GB free
    See: https://github.com/NVIDIA/nccl/issues/1235
    """


@logged("gpu-fault")
def gpu_fault() -> None:
    """No hardware faults of GPUs.

    Why: A GPU, an NVLink or the fabric manager failed; NCCL is only the first to see it.
    Fix: look for Xid lines in `dmesg`, for ECC in `nvidia-smi -q`, and at nvidia-fabricmanager; drain the node
    See: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    """


@logged("nvls")
def nvls() -> None:
    """NVLink SHARP (multicast).

    Why: NCCL could not make a multicast group of the GPUs.
    Fix: restart nvidia-fabricmanager with the driver's own version; until then NCCL_NVLS_ENABLE=0
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


@logged("imex")
def imex() -> None:
    """NVLink between nodes.

    Why: NVLink joins the nodes, but the IMEX service that shares memory over it does not work.
    Fix: start nvidia-imex on all nodes of the domain and give the container /dev/nvidia-caps-imex-channels; until then
      NCCL_MNNVL_ENABLE=0
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


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


@logged("rdma-timeout")
def rdma_timeout() -> None:
    """RDMA answers in time.

    Why: An adapter sent, and the other one never answered: the wrong GID, a route or MTU that RoCE has not, or a bad cable.
    Fix: RoCE: NCCL_IB_GID_INDEX with RoCE v2 and IPv4 (`show_gids`), one MTU on all switches; all adapters must reach each
      other (`ib_write_bw` between the pairs); then NCCL_IB_TIMEOUT=22
    See: https://github.com/NVIDIA/nccl/issues/426
    """


@logged("rdma-connect")
def rdma_connect() -> None:
    """RDMA connections can be made.

    Why: The adapters of two nodes have no way to each other, or the GID is not one that routes.
    Fix: name the adapters of the training network in network.hca (NCCL_IB_HCA), not the one for storage; RoCE:
      NCCL_IB_GID_INDEX (`show_gids`)
    See: https://github.com/NVIDIA/nccl-tests/issues/185
    """


@logged("rdma-link", status=WARN)
def rdma_link() -> None:
    """No events of RDMA ports.

    Why: A port went down or came back while ranks used it.
    Fix: look at `ibstat`, at the cable and the switch's error counters
    See: https://github.com/NVIDIA/nccl/issues/1405
    """


@logged("rdma-error")
def rdma_error() -> None:
    """RDMA operations succeed.

    Why: An operation was refused: memory that the adapter may not reach (ACS, GPUDirect), or a peer that had ended.
    Fix: look for the rank that failed first; try NCCL_NET_GDR_LEVEL=LOC, and where that helps turn ACS off
    See: https://github.com/NVIDIA/nccl/issues/1405
    """


@logged("collectives-differ")
def collectives_differ() -> None:
    """All ranks call the same collectives.

    Why: Ranks called collectives in another order or with other sizes.
    Fix: look for a branch that depends on the rank (saving, logging, evaluation), and for different data lengths;
      TORCH_DISTRIBUTED_DEBUG=DETAIL names the call
    See: https://github.com/NVIDIA/nccl/issues/296
    """


@logged("peers-disagree")
def peers_disagree() -> None:
    """Ranks understand each other.

    Why: A rank was contacted by a process that uses another protocol: another job, another version, other settings.
    Fix: give all nodes the same image and settings, a port of its own for each job, and keep port scanners off the nodes
    See: https://github.com/NVIDIA/nccl-tests/issues/188
    """


@logged("refused", name="port-refused")
def refused() -> None:
    """Nodes reach each other on all ports.

    Why: NCCL connects to ports that the kernel chooses: a firewall that opens only the rendezvous port stops it.
    Fix: open all TCP ports between the nodes (`firewall-cmd --zone=trusted --add-source=SUBNET`, `ufw allow from SUBNET`); see
      that the address belongs to the training network; `nc -l 12345` and `nc NODE 12345` show it
    See: https://github.com/NVIDIA/nccl-tests/issues/162
    """


@logged("descriptors")
def descriptors() -> None:
    """Enough open files.

    Why: Each connection takes a descriptor.
    Fix: LimitNOFILE=1048576 in slurmd's unit, `ulimit -n` in the job
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """


def collective_hung(context: LinkContext) -> Iterator[Seen]:
    """Every collective ends.

    Why: One rank that stops holds all others, until a watchdog ends the job half an hour later.
    Fix: look at what the silent rank does (py-spy dump, the flight recorder's files), then at the host's GPUs and network; with
      PCIe cards try NCCL_P2P_DISABLE=1
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#networking-issues
    """
    log, results = context.log, context.entries("results")
    for item in context.entries("hung"):
        given = item.get("hosts")
        hosts = names(str(host) for host in given) if isinstance(given, list) else ""
        what = f"{item.get('collective', 'a collective')} ({item.get('scope', '?')}, {number(item.get('bytes')):.0f} bytes)"
        yield Seen(FAIL, f"{what} did not end within {number(item.get('seconds')):.0f} s", where=hosts)
    logged = context.from_log("hung")
    yield from logged
    others = {fault.kind for fault in log.faults} - {"no-verbs"}  # every log of a machine without RDMA names that
    if results:
        yield from either(FAIL, "", "" if logged or context.entries("hung") else "every collective ended")
    elif log.started and not log.complete and not log.faults:
        began = f"{log.started} ranks" if log.started > 1 else "a rank"
        yield Seen(WARN, f"{began} began to connect, and the log ends before any was ready")
    elif log.networks and not (log.started or log.complete or log.transports or others):
        yield Seen(UNKNOWN, "the log ends before ranks are connected")


@logged("peer-lost")
def peer_lost() -> None:
    """No rank is lost.

    Why: A connection ended because the process behind it did: this is the echo of another rank's error.
    Fix: look for the first error of all ranks, at the host that is named; the kernel's log may say that it ran out of memory
    See: https://github.com/NVIDIA/nccl/issues/1232
    """


def wrong_result(context: LinkContext) -> Iterator[Seen]:
    """Collectives compute what they should.

    Why: Data that is changed on the way ruins a model without an error.
    Fix: take the node out; look at ECC, NVLink (`nvidia-smi nvlink -e`) and PCIe errors; try another version of NCCL and
      NCCL_PROTO=Simple
    See: https://github.com/NVIDIA/nccl/issues/596
    """
    if context.log.wrong:
        yield Seen(FAIL, f"nccl-tests found {context.log.wrong} values out of bounds")
    items = [item for key in ("results", "per_node", "per_pair") for item in context.entries(key)]
    bad = next((item for item in items if item.get("correct") is False), None)
    if bad:
        given = bad.get("nodes")
        where = names(map(str, given)) if isinstance(given, list) else str(bad.get("node", ""))
        what = f"{bad.get('collective', 'a collective')} of {number(bad.get('bytes')):.0f} bytes"
        yield Seen(FAIL, f"{what} has wrong values", where=where)
    elif any(item.get("correct") is True for item in items) and not context.log.wrong:
        yield Seen(PASS, "every value was correct")


def unexplained_error(context: LinkContext) -> Iterator[Seen]:
    """No error without a reason.

    Why: A call of NCCL failed, and what is here does not say why.
    Fix: run again with NCCL_DEBUG=INFO and give the logs of all ranks
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    faults = context.log.faults
    failures = [fault for fault in faults if fault.kind in ("failed", FOLLOWS)]
    known = any(fault.kind not in (OTHER, FOLLOWS, "failed", "no-verbs") for fault in faults)
    if not known and (failures or context.log.failed):
        warned = [fault for fault in faults if fault.kind == OTHER]
        why = f"; the last warning: {warned[-1].text}" if warned else ""
        found = failures[0].text if failures else "a call of NCCL failed"
        yield Seen(FAIL, found + why, where=names(fault.host for fault in failures or warned[-1:]))


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


# --- versions and settings ------------------------------------------------------------------------------------------------

_ABORT = "https://github.com/pytorch/pytorch/issues/149153"
_RESILIENCY = "https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md"
_ARM = "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1"
FAULTY = (
    ((2, 28, 3), (2, 28, 8), "a process that aborts a communicator and continues may hang", "2.28.9", _RESILIENCY),
    ((2, 25, 1), (2, 25, 1), "ncclCommAbort hangs", "2.26.2", _ABORT),
)
"""Versions of NCCL, both ends included, with a fault that is known, the version that fixes it, and where that is said."""
FAULTY_ON_ARM = (((2, 10, 0), (2, 29, 2), "collectives hang on ARM with all GPUs at 100 %", "2.29.3", _ARM),)
"""The same on 64-bit ARM only."""

DEBUG_VARIABLES = """
NCCL_P2P_LEVEL NCCL_P2P_DIRECT_DISABLE NCCL_NET_GDR_LEVEL NCCL_LAUNCH_MODE NCCL_NTHREADS NCCL_MAX_NCHANNELS NCCL_MAX_CTAS
NCCL_BUFFSIZE NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS NCCL_IGNORE_DISABLED_P2P NCCL_GRAPH_FILE NCCL_NVLS_ENABLE
NCCL_NET_DISABLE_INTRA
""".split()  # noqa: SIM905 (one word a variable is what a person can read and extend)
"""NCCL's guide has them below "Debugging", or they replace what NCCL finds out by itself."""
SAME_EVERYWHERE = """
NCCL_ALGO NCCL_PROTO NCCL_BUFFSIZE NCCL_NTHREADS NCCL_IB_DISABLE NCCL_NET NCCL_MAX_NCHANNELS
""".split()  # noqa: SIM905
"""Variables that ranks must agree about: they decide what both ends of a connection expect."""


def _versions(context: LinkContext, key: str) -> dict[str, set[str]]:
    """A package's versions by the document, each with its nodes."""
    found: dict[str, set[str]] = {}
    for item in context.entries("software"):
        value = item.get(key)
        if isinstance(value, str) and value:
            found.setdefault(value, set()).add(str(item.get("node", "")))
    return found


def _by_host(found: dict[str, set[str]]) -> str:
    return "; ".join(f"{value} on {names(nodes) or 'others'}" for value, nodes in sorted(found.items())[:4])


def _one_version(what: str, differs: str, found: dict[str, set[str]], seen: dict[str, set[str]]) -> Iterator[Seen]:
    """Several versions are a fault; of what was ``seen`` otherwise, it is said which."""
    yield from either(FAIL, f"{differs}: {_by_host(found)}" if len(found) > 1 else "", f"{what} {names(seen)}" if seen else "")


def mixed_nccl(context: LinkContext) -> Iterator[Seen]:
    """One version of NCCL on all nodes.

    Why: Versions differ in what ranks tell each other when they start: they refuse each other, or hang.
    Fix: give all nodes the same container image, and see that LD_LIBRARY_PATH and LD_PRELOAD bring in no other libnccl.so.2
    See: https://github.com/NVIDIA/nccl/issues/286
    """
    if seen := context.from_log("nccl-versions"):
        yield from seen
        return
    log, found = context.log.versions, _versions(context, "nccl")
    if len(log) > 1 and len({host for hosts in log.values() for host in hosts}) > 1:
        found = log
    yield from _one_version("NCCL", "NCCL differs", found, found or log)


def mixed_torch(context: LinkContext) -> Iterator[Seen]:
    """One version of torch on all nodes.

    Why: Ranks of different versions call collectives in another order or size, and hang or compute something else.
    Fix: give all nodes the same container image
    See: https://github.com/pytorch/pytorch/issues/122571
    """
    found = _versions(context, "torch")
    yield from _one_version("torch", "torch differs", found, found)


def mixed_driver(context: LinkContext) -> Iterator[Seen]:
    """One driver on all nodes.

    Why: NCCL may choose another way on each side of a connection, and one node's fault is not that of the others.
    Fix: update the older ones
    See: https://github.com/NVIDIA/nccl/issues/447
    """
    if not any(facts.driver for facts in context.facts):  # else the rule nodes-driver says it
        found = {value: hosts for value, hosts in context.log.drivers.items() if value.isdigit()}
        yield from _one_version("driver", "CUDA of the drivers differs", found, found)


def driver(context: LinkContext) -> Iterator[Seen]:
    """A driver that is new enough for NCCL's CUDA.

    Why: CUDA refuses to start, or NCCL does without what it needs.
    Fix: update the driver to that of the image's CUDA, or take an image with an older CUDA; forward-compatibility libraries
      help on data-centre cards only
    See: https://github.com/NVIDIA/nvidia-docker/issues/1515
    """
    if seen := context.from_log("driver"):
        yield from seen
        return
    built = max((number_of(text) for text in context.log.cuda), default=0) // 1000
    serves = min((int(text) for text in context.log.drivers if text.isdigit()), default=0)
    if built and serves:  # Within one major version of CUDA any driver serves any minor one.
        text = f"{serves // 1000}.{serves % 1000 // 10}"
        old = f"NCCL is built for CUDA {built}, the driver serves {text} at most" if serves // 1000 < built else ""
        yield from either(FAIL, old, f"the driver serves CUDA {text}")


def number_of(text: str) -> int:
    """``12.9`` as CUDA counts: 12090."""
    major, _, minor = text.partition(".")
    return 1000 * int(major) + 10 * int(minor.partition(".")[0] or 0) if major.isdigit() and minor[:1].isdigit() else 0


def nccl_fault(context: LinkContext) -> Iterator[Seen]:
    """Versions of NCCL with known faults.

    Why: A hang that needs a certain version looks like a fault of the network.
    Fix: take another version of the package nvidia-nccl-cu12 or nvidia-nccl-cu13 in the image
    See: https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md
    """
    versions = {*context.log.versions, *_versions(context, "nccl")}
    arm = any("aarch64" in facts.kernel or "arm64" in facts.kernel for facts in context.facts)
    bad = False
    for text in sorted(versions):
        for first, last, fault, fixed, link in FAULTY + FAULTY_ON_ARM if arm else FAULTY:
            if len(version(text)) == 3 and first <= version(text) <= last:
                bad = True
                yield Seen(WARN, f"NCCL {text}: {fault}", f"take NCCL {fixed} or later: {link}")
    if versions and not bad:
        yield Seen(PASS, f"no fault of NCCL {names(versions)} is known here")


def gloo_with_gpus(context: LinkContext) -> Iterator[Seen]:
    """NCCL where there are GPUs.

    Why: gloo's figures say nothing about the speed of training: it moves data through the CPU.
    Fix: install a torch with CUDA in the image, see that ranks see the GPUs (`nvidia-smi` in the step), and run the check again
    See: https://pytorch.org/docs/1.5.1/distributed.html
    """
    if context.backend != "gloo":
        return
    why = context.text("backend_why")
    with_gpus = [facts.hostname for facts in context.facts if facts.gpus]
    peers = sum(len(facts.gpus) for facts in context.facts)
    if peers > 1:
        text = f"gloo was measured although there are {peers} GPUs" + (f": {why}" if why else "")
        yield Seen(WARN, text, where=names(with_gpus))
    elif not context.facts:
        yield Seen(UNKNOWN, "gloo was measured; whether there are GPUs is not known")
    else:
        yield Seen(PASS, f"gloo between CPUs: {why or 'no GPUs'}")


def small_world(context: LinkContext) -> Iterator[Seen]:
    """All GPUs take part.

    Why: Ranks that do not find each other make worlds of their own: each trains the whole job, and the other GPUs idle.
    Fix: see that every node has the same rendezvous address and port, and that each rank gets its own RANK and WORLD_SIZE; for
      GPUs that ranks do not see: --gres and CUDA_VISIBLE_DEVICES
    See: https://github.com/pytorch/pytorch/issues/137402
    """
    log = context.log
    if log.ranks == 1 and len(log.processes) > 1 and log.complete > 1:
        yield Seen(FAIL, f"{len(log.processes)} processes, each with a communicator of one rank")
        return
    if context.backend != "nccl":
        return
    wanted = int(number(context.section("expected", "compute").get("gpus")))
    wanted = wanted or max((len(facts.gpus) for facts in context.facts), default=0)
    stated = int(number(context.document.get("nodes")) * number(context.document.get("gpus_per_node")))
    if wanted and context.ranks and context.ranks < wanted:
        yield Seen(WARN, f"{context.ranks} of the {wanted} GPUs of a node took part")
    elif stated > 1 and log.ranks and log.ranks < stated:
        yield Seen(FAIL, f"NCCL's largest communicator has {log.ranks} ranks of {stated}")
    elif log.ranks or stated:
        yield Seen(PASS, f"{stated or log.ranks} ranks took part")


def forced_algorithm(context: LinkContext) -> Iterator[Seen]:
    """NCCL chooses its algorithms and protocols.

    Why: FSDP lives on all_gather and reduce_scatter, which have no tree: NCCL_ALGO=Tree stops them, or is skipped.
    Fix: unset NCCL_ALGO and NCCL_PROTO; since 2.24 NCCL_ALGO may name one collective: NCCL_ALGO=allreduce:tree
    See: https://github.com/NVIDIA/nccl/issues/317
    """
    if seen := context.from_log("no-algorithm"):
        yield from seen
        return
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if value := context.setting(name):
            only_reduce = name == "NCCL_ALGO" and only_all_reduce(value)
            found = f"{name}={value}" + (": all_gather and reduce_scatter have no such algorithm" if only_reduce else " is set")
            yield Seen(FAIL if only_reduce else WARN, found)


def debug_left_on(context: LinkContext) -> Iterator[Seen]:
    # The check itself captures the log at INFO, so that the variable in it is not that of training.
    """NCCL_DEBUG in training.

    Why: INFO writes megabytes for each rank and start; TRACE slows every call.
    Fix: set NCCL_DEBUG=WARN: it says why a call failed, and nothing else
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    value = context.section("environment").get("NCCL_DEBUG")
    if isinstance(value, str) and value:
        loud = f"NCCL_DEBUG={value} in the environment of training" if value.upper() in ("INFO", "TRACE") else ""
        yield from either(WARN, loud, f"NCCL_DEBUG={value}")


def debug_variables(context: LinkContext) -> Iterator[Seen]:
    """No variables that are meant for debugging.

    Why: What helped once on another machine may be slower, crash or hang on this one, says NCCL's guide.
    Fix: unset them (look in /etc/nccl.conf too), measure, and set again only what makes it faster here
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    found = [f"{name}={context.setting(name)}" for name in DEBUG_VARIABLES if context.setting(name)]
    if found:
        yield Seen(WARN, f"{names(found)} set")


def mixed_settings(context: LinkContext) -> Iterator[Seen]:
    """The same settings on all nodes.

    Why: Ranks that disagree about algorithm, protocol or buffers wait for data that never comes.
    Fix: set them in the job for all ranks, and look for an /etc/nccl.conf on single nodes
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    for name in SAME_EVERYWHERE:
        values = {value: hosts - {""} for value, hosts in context.log.settings.get(name, {}).items() if hosts - {""}}
        hosts = [host for those in values.values() for host in those]
        if len(values) > 1 and len(hosts) == len(set(hosts)):
            yield Seen(WARN, f"{name} differs: {_by_host(values)}")


# --- what was measured ----------------------------------------------------------------------------------------------------

LARGEST = 3
"""The median of so many largest sizes, as the planner's."""
LEAST_S = 1e-3
"""A shorter collective tells the latency, not the bandwidth."""
HALF = 0.5
"""The same, below which a rule fails: a fall-back to another way costs half and more."""
UNEVEN = 0.8
"""Share of the typical node, or of the other direction, below which a node or direction is slow."""
JITTER = 0.5
"""(95th - 5th percentile) / median of a large collective above which its time is not steady."""
CPU_SHARE = 0.5
"""gloo copies through the CPU: between nodes it is no faster than inside one, and is held to half of that."""
GLOO_SHARE = 0.65
"""Of what the line should carry: gloo has one connection for each pair of ranks, in which what one rank is ready to take waits
behind what it sends; its all-gather of two nodes reached 0.63 to 0.66 of lines that were shaped to known rates."""
CPU_GB_S = 0.25
"""What gloo is held to at most where that was not measured: one core copies and sums more."""


def speed(items: Iterable[Mapping[str, Any]], collective: str = "all_gather") -> tuple[float, float, float]:
    """Bandwidth of the largest sizes of one collective, the time of one of them and its spread; zeros where there is none."""
    sizes: dict[float, Mapping[str, Any]] = {}
    for item in items:
        if item.get("collective") == collective and number(item.get("bytes")) > 0:
            sizes[number(item.get("bytes"))] = item
    largest = [sizes[size] for size in sorted(sizes)[-LARGEST:]]
    if not largest:
        return 0.0, 0.0, 0.0
    # A budget may end in the middle of the sizes: small ones must not drag the median down.
    top = number(largest[-1].get("bytes"))
    largest = [item for item in largest if number(item.get("bytes")) * 16 >= top]
    gb_s = statistics.median(number(item.get("busbw_gb_s")) for item in largest)
    last = largest[-1]
    seconds = number(last.get("median_s")) or (top / gb_s / 1e9 if gb_s else 0.0)
    return gb_s, seconds, number(last.get("spread"))


def _scope(context: LinkContext, name: str) -> list[dict[str, Any]]:
    return [item for item in context.entries("results") if item.get("scope") == name]


def _expected(context: LinkContext, name: str) -> tuple[float, float, str]:
    """What a link should carry, its nominal speed, and a hint."""
    section = context.section("expected", name)
    return number(section.get("expected_gb_s")), number(section.get("nominal_gb_s")), context.stated(name, "hint")


def _judged(where: str, gb_s: float, seconds: float, expected: float, nominal: float, hint: str) -> Iterator[Seen]:
    """What a figure means against what is expected."""
    text = f"{gb_s:.3g} GB/s {where}"
    if expected <= 0:
        yield Seen(UNKNOWN, f"{text}; what the link should carry is not known (no cluster file)")
        return
    share = gb_s / expected
    text += f", {100 * gb_s / nominal:.2g} % of nominal ({nominal:.3g} GB/s)" if nominal > 0 else ""
    text += f", {100 * share:.0f} % of what is expected"
    if share < ENOUGH and seconds < LEAST_S:
        yield Seen(UNKNOWN, f"{text}; sizes were too small to judge")
    else:
        yield from either(FAIL if share < HALF else WARN, text if share < ENOUGH else "", text, hint)


def intra_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth inside a node.

    Why: FSDP gathers every layer over it, twice in each step.
    Fix: look at the other findings first (P2P, NVLink, PCIe, ACS); then at `nvidia-smi topo -m` and NUMA binding, and try
      NCCL_MIN_NCHANNELS=8
    See: https://github.com/NVIDIA/nccl-tests/issues/270
    """
    if context.backend != "nccl":
        return
    gb_s, seconds, _ = speed(_scope(context, "intra"))
    if not gb_s and context.nodes == 1:
        gb_s, seconds, _ = speed(_scope(context, "world"))
    if gb_s:
        expected, nominal, hint = _expected(context, "intra")
        fix = f"look at the other findings first (P2P, PCIe, ACS); then: {hint}" if hint else ""
        yield from _judged("inside a node", gb_s, seconds, expected, nominal, fix)


def inter_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth between nodes.

    Why: It bounds how fast any job on several nodes can be.
    Fix: look at the other findings first (transport, interface, adapters, GPUDirect, one slow node); then measure the line
      alone (`ib_write_bw`, `iperf3 -P 8`)
    See: https://github.com/NVIDIA/nccl-tests/issues/182
    """
    compute, network = context.section("expected", "compute"), context.section("expected", "network")
    if context.nodes < 2 or context.nodes * context.ranks <= number(compute.get("nvlink_domain")):
        return
    gb_s, seconds, _ = speed(_scope(context, "world"))
    if not gb_s and number(network.get("ports")) <= 1:
        # One rank of each node drives one adapter: that says nothing of several.
        gb_s, seconds, _ = speed(_scope(context, "inter"))
    if not gb_s:
        return
    expected, nominal, hint = _expected(context, "inter")
    if context.backend == "gloo" and expected:
        local = max((number(item.get("busbw_gb_s")) for item in _scope(context, "intra")), default=0.0)
        most = CPU_SHARE * local if local else CPU_GB_S
        line, carries = _slowest_way(context), min(expected, most)
        expected = min(GLOO_SHARE * expected, most)
        if line / carries > gb_s / expected:  # the lines are good: what is slow is gloo, or the CPUs
            yield from _judged("one way between the slowest pair of nodes", line, LEAST_S, carries, nominal, hint)
            return
    yield from _judged("between nodes", gb_s, seconds, expected, nominal, hint)


class Pair(NamedTuple):
    """What one node sends to another."""

    gb_s: float
    at_best: float
    """The same of its quickest repetitions: a machine that is busy is not taken for a slow cable."""


def _pairs(context: LinkContext, collectives: Container[str] = COLLECTIVES) -> dict[tuple[str, str], Pair]:
    """Bandwidth from one node to another; a collective of both counts for both directions."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for item in context.entries("per_pair"):
        nodes, collective = item.get("nodes"), item.get("collective")
        if isinstance(nodes, list) and len(nodes) == 2 and isinstance(collective, str) and collective in collectives:
            grouped.setdefault((str(nodes[0]), str(nodes[1]), collective), []).append(item)
    found: dict[tuple[str, str], Pair] = {}
    for (first, second, collective), items in grouped.items():
        gb_s, seconds, spread = speed(items, collective)
        pair = Pair(gb_s, gb_s * (1 + max(0.0, spread)))
        if gb_s and seconds >= LEAST_S and collective == "p2p":
            found[first, second] = pair
        elif gb_s and seconds >= LEAST_S:
            found.setdefault((first, second), pair)
            found.setdefault((second, first), pair)
    return found


def _slowest_way(context: LinkContext) -> float:
    """What every pair of nodes carries at least, one way at a time, GB/s; 0 where not every way was measured."""
    ways = _pairs(context, ("p2p",)).values()
    return min(pair.at_best for pair in ways) if len(ways) == context.nodes * (context.nodes - 1) else 0.0


def _slow_nodes(pairs: Mapping[tuple[str, str], Pair]) -> dict[str, tuple[float, float, str]]:
    """Nodes that are slow with every other one: bandwidth at best, that of a typical node, whether it sends or receives.

    A node's best pair is that with the fastest other node, so that one slow node does not make the others look slow.
    """
    slow: dict[str, tuple[float, float, str]] = {}
    nodes = sorted({node for pair in pairs for node in pair})
    if len(nodes) < 3:
        return slow
    for side, verb in ((0, "sends"), (1, "receives")):
        best = {node: max((p for pair, p in pairs.items() if pair[side] == node), default=None) for node in nodes}
        typical = statistics.median(pair.gb_s for pair in best.values() if pair) if any(best.values()) else 0.0
        for node, pair in best.items():
            if pair and pair.at_best < UNEVEN * typical and (node not in slow or pair.gb_s < slow[node][0]):
                slow[node] = (pair.gb_s, typical, verb)
    return slow


def slow_node(context: LinkContext) -> Iterator[Seen]:
    """All nodes are alike.

    Why: A collective runs at the speed of the slowest node: one bad cable slows the whole job.
    Fix: leave the node out (--exclude) and look at its port's speed and errors (`ethtool`, `ibstat`, `perfquery`), its cable,
      its PCIe width, and whether another job uses it
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    slow, inside = _slow_nodes(pairs), _per_node(context)
    for node, (gb_s, typical, verb) in sorted(slow.items()):
        ordered = sorted(pairs.items(), key=lambda item: item[1])
        worst = ", ".join(f"{a} to {b} {pair.gb_s:.3g}" for (a, b), pair in ordered if node in (a, b))
        found = f"{node} {verb} {gb_s:.3g} GB/s at best, the others {typical:.3g} ({worst[:160]})"
        yield Seen(FAIL if gb_s < HALF * typical else WARN, found, where=node)
    typical = max(inside.values()) if len(inside) == 2 else statistics.median(inside.values() or [0.0])
    bad = {node: gb_s for node, gb_s in sorted(inside.items()) if gb_s < UNEVEN * typical}
    for node, gb_s in bad.items():
        found = f"{gb_s:.3g} GB/s inside {node}, {typical:.3g} inside the others"
        yield Seen(FAIL if gb_s < HALF * typical else WARN, found, where=node)
    if not slow and not bad and (len({node for pair in pairs for node in pair}) > 2 or inside):
        yield Seen(PASS, "no node is slower than the others")


def _per_node(context: LinkContext) -> dict[str, float]:
    """Bandwidth inside each node; empty for one node, and for gloo, which measures the CPU's load."""
    entries = context.entries("per_node") if context.backend == "nccl" else []
    nodes = {str(one.get("node")) for one in entries}
    speeds = {node: speed(one for one in entries if one.get("node") == node) for node in nodes}
    found = {node: gb_s for node, (gb_s, seconds, _) in speeds.items() if gb_s and seconds >= LEAST_S}
    return found if len(found) > 1 else {}


def asymmetric(context: LinkContext) -> Iterator[Seen]:
    """Both directions of a pair are alike.

    Why: A cable or port that is bad in one direction passes every test of the other.
    Fix: look at the sending side's port and cable, and at traffic shaping there (`tc qdisc show`)
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    slow = _slow_nodes(pairs)
    ways = [(one, back) for one in sorted(pairs) if (back := pairs.get(one[::-1])) and not slow.keys() & set(one)]
    for (first, second), back in ways:
        pair = pairs[first, second]
        if pair.at_best < UNEVEN * back.gb_s:
            found = f"{first} sends {pair.gb_s:.3g} GB/s to {second}, and receives {back.gb_s:.3g}"
            yield Seen(FAIL if pair.gb_s < HALF * back.gb_s else WARN, found, where=first)
            return
    if ways:
        yield Seen(PASS, "pairs are as fast in both directions")


def slow_pair(context: LinkContext) -> Iterator[Seen]:
    """No pair of good nodes is slow.

    Why: Two nodes that are fast with others and slow with each other share a bad link between switches.
    Fix: look at the switches between them (links between leaf and spine, adaptive routing), and keep jobs on one side until
      then
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    slow = _slow_nodes(pairs)
    if len({node for pair in pairs for node in pair}) < 4:
        return
    typical = statistics.median(pair.gb_s for pair in pairs.values())
    best = {names: max(pair.at_best, pairs.get(names[::-1], pair).at_best) for names, pair in pairs.items()}
    low = (one for one, at_best in best.items() if at_best < UNEVEN * typical)
    bad = sorted((pairs[one].gb_s, one) for one in low if not slow.keys() & set(one))
    for gb_s, (first, second) in bad[:1]:
        count = len({frozenset(pair) for _, pair in bad})
        more = f" (and {count - 1} pairs more)" if count > 1 else ""
        found = f"{first} and {second} reach {gb_s:.3g} GB/s, pairs typically {typical:.3g}{more}"
        yield Seen(WARN, found, where=f"{first}, {second}")
    if not bad:
        yield Seen(PASS, "no pair is slower than the others")


def jitter(context: LinkContext) -> Iterator[Seen]:
    """Steady times.

    Why: A collective that takes twice as long now and then holds up all ranks each time.
    Fix: look for other jobs on the nodes or the network, for clocks that are throttled, and for retransmissions (`nstat`, port
      counters)
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    speeds = [(scope, *speed(_scope(context, scope))) for scope in ("world", "intra")] if context.backend == "nccl" else []
    measured = [(scope, spread) for scope, gb_s, seconds, spread in speeds if gb_s and seconds >= LEAST_S]
    bad = next(((scope, spread) for scope, spread in measured if spread > JITTER), None)
    text = f"the time of the largest all_gather ({bad[0]}) spreads by {100 * bad[1]:.0f} % of its median" if bad else ""
    yield from either(WARN, text, "times are steady" if measured else "")


def not_measured(context: LinkContext) -> Iterator[Seen]:
    """What the check had no time for.

    Why: A result that is not there cannot be judged.
    Fix: give the check more time
    See: https://github.com/NVIDIA/nccl-tests
    """
    if left := context.entries("left_out"):
        yield Seen(UNKNOWN, f"{len(left)} measurements were left out: {str(left[0].get('reason', ''))[:120]}")
    for item in context.entries("problems"):
        yield Seen(UNKNOWN, str(item.get("message", ""))[:200], where=str(item.get("node", "")))
