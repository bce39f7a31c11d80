"""Rules of versions and settings: NCCL, torch, driver, backend, variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from clustertune.check.links import LinkContext, names, number
from clustertune.check.machine_stack import only_all_reduce
from clustertune.check.rule import FAIL, LINKS, PASS, UNKNOWN, WARN, Seen, rule
from clustertune.host.system import version


class FaultyVersion(NamedTuple):
    """Versions of NCCL, both ends included, with a fault that is known."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    fault: str
    fixed: str
    link: str
    arm: bool = False
    """On 64-bit ARM only."""


FAULTY = (
    FaultyVersion(
        (2, 28, 3),
        (2, 28, 8),
        "a process that aborts a communicator and continues may hang",
        "2.28.9",
        "https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md",
    ),
    FaultyVersion((2, 25, 1), (2, 25, 1), "ncclCommAbort hangs", "2.26.2", "https://github.com/pytorch/pytorch/issues/149153"),
    FaultyVersion(
        (2, 10, 0),
        (2, 29, 2),
        "collectives hang on ARM with all GPUs at 100 %",
        "2.29.3",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1",
        arm=True,
    ),
)
"""First the ones that were met most."""

DEBUG_VARIABLES = (
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DIRECT_DISABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_LAUNCH_MODE",
    "NCCL_NTHREADS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE",
    "NCCL_CHECKS_DISABLE",
    "NCCL_CHECK_POINTERS",
    "NCCL_IGNORE_DISABLED_P2P",
    "NCCL_GRAPH_FILE",
    "NCCL_NVLS_ENABLE",
    "NCCL_NET_DISABLE_INTRA",
)
"""NCCL's guide has them below "Debugging", or they replace what NCCL finds out by itself.
"""
SAME_EVERYWHERE = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_MAX_NCHANNELS",
)
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


@rule("mixed-nccl", LINKS, rank=5)
def mixed_nccl(context: LinkContext) -> Iterator[Seen]:
    """One version of NCCL on all nodes.

    Why: Versions differ in what ranks tell each other when they start: they refuse each other, or hang.
    Fix: give all nodes the same container image, and see that LD_LIBRARY_PATH and LD_PRELOAD bring in no other libnccl.so.2
    See: https://github.com/NVIDIA/nccl/issues/286
    """
    if seen := context.from_log("nccl-versions"):
        yield from seen
        return
    found = _versions(context, "nccl")
    if len(context.log.versions) > 1 and len({host for hosts in context.log.versions.values() for host in hosts}) > 1:
        found = context.log.versions
    if len(found) > 1:
        yield Seen(FAIL, f"NCCL differs: {_by_host(found)}")
    elif found or context.log.versions:
        yield Seen(PASS, f"NCCL {names(found or context.log.versions)}")


@rule("mixed-torch", LINKS, rank=5)
def mixed_torch(context: LinkContext) -> Iterator[Seen]:
    """One version of torch on all nodes.

    Why: Ranks of different versions call collectives in another order or size, and hang or compute something else.
    Fix: give all nodes the same container image
    See: https://github.com/pytorch/pytorch/issues/122571
    """
    found = _versions(context, "torch")
    if len(found) > 1:
        yield Seen(FAIL, f"torch differs: {_by_host(found)}")
    elif found:
        yield Seen(PASS, f"torch {names(found)}")


@rule("mixed-driver", LINKS, rank=5)
def mixed_driver(context: LinkContext) -> Iterator[Seen]:
    """One driver on all nodes.

    Why: NCCL may choose another way on each side of a connection, and one node's fault is not that of the others.
    Fix: update the older ones
    See: https://github.com/NVIDIA/nccl/issues/447
    """
    if any(facts.driver for facts in context.facts):
        return  # the rule nodes-driver says it
    found = {value: hosts for value, hosts in context.log.drivers.items() if value.isdigit()}
    if len(found) > 1:
        yield Seen(FAIL, f"CUDA of the drivers differs: {_by_host(found)}")
    elif found:
        yield Seen(PASS, f"driver {names(found)}")


@rule("driver", LINKS, rank=0)
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
    built = max((number_of(text) for text in context.log.cuda), default=0)
    serves = [int(text) for text in context.log.drivers if text.isdigit()]
    # Within one major version of CUDA any driver serves any minor one.
    if built and serves and min(serves) // 1000 < built // 1000:
        low = min(serves)
        yield Seen(FAIL, f"NCCL is built for CUDA {built // 1000}, the driver serves {low // 1000}.{low % 1000 // 10} at most")
    elif built and serves:
        yield Seen(PASS, f"the driver serves CUDA {min(serves) // 1000}.{min(serves) % 1000 // 10}")


def number_of(text: str) -> int:
    """``12.9`` as CUDA counts: 12090."""
    major, _, minor = text.partition(".")
    return 1000 * int(major) + 10 * int(minor.partition(".")[0] or 0) if major.isdigit() and minor[:1].isdigit() else 0


@rule("nccl-fault", LINKS, rank=5)
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
        numbers = version(text)
        for known in FAULTY:
            if len(numbers) == 3 and known.first <= numbers <= known.last and (arm or not known.arm):
                bad = True
                fix = f"take NCCL {known.fixed} or later: {known.link}"
                yield Seen(WARN, f"NCCL {text}: {known.fault}", fix)
    if versions and not bad:
        yield Seen(PASS, f"no fault of NCCL {names(versions)} is known here")


@rule("gloo-with-gpus", LINKS, rank=5)
def gloo_with_gpus(context: LinkContext) -> Iterator[Seen]:
    """NCCL where there are GPUs.

    Why: Its figures say nothing of what training will see: gloo moves data through the CPU.
    Fix: install a torch with CUDA in the image, see that ranks see the GPUs (`nvidia-smi` in the step), and run the check again
    See: https://pytorch.org/docs/1.5.1/distributed.html
    """
    if context.backend != "gloo":
        return
    why = context.text("backend_why")
    with_gpus = [facts.hostname for facts in context.facts if facts.gpus]
    peers = sum(len(facts.gpus) for facts in context.facts)
    if with_gpus and peers > 1:
        yield Seen(
            WARN, f"gloo was measured although there are {peers} GPUs" + (f": {why}" if why else ""), where=names(with_gpus)
        )
    elif not context.facts:
        yield Seen(UNKNOWN, "gloo was measured; whether there are GPUs is not known")
    else:
        yield Seen(PASS, f"gloo between CPUs: {why or 'no GPUs'}")


@rule("small-world", LINKS, rank=5)
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


@rule("forced-algorithm", LINKS, rank=5)
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
        value = context.setting(name)
        if not value:
            continue
        only_reduce = name == "NCCL_ALGO" and only_all_reduce(value)
        found = f"{name}={value}" + (": all_gather and reduce_scatter have no such algorithm" if only_reduce else " is set")
        yield Seen(FAIL if only_reduce else WARN, found)


@rule("debug-left-on", LINKS, rank=5)
def debug_left_on(context: LinkContext) -> Iterator[Seen]:
    # The check itself captures the log at INFO, so that the variable in it is not that of training.
    """NCCL_DEBUG in training.

    Why: INFO writes megabytes for each rank and start; TRACE slows every call.
    Fix: set NCCL_DEBUG=WARN: it says why a call failed, and nothing else
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    value = context.section("environment").get("NCCL_DEBUG")
    if isinstance(value, str) and value.upper() in ("INFO", "TRACE"):
        yield Seen(WARN, f"NCCL_DEBUG={value} in the environment of training")
    elif isinstance(value, str) and value:
        yield Seen(PASS, f"NCCL_DEBUG={value}")


@rule("debug-variables", LINKS, rank=12)
def debug_variables(context: LinkContext) -> Iterator[Seen]:
    """No variables that are meant for debugging.

    Why: What helped once on another machine may be slower, crash or hang on this one, says NCCL's guide.
    Fix: unset them (look in /etc/nccl.conf too), measure, and set again only what makes it faster here
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    found = [f"{name}={context.setting(name)}" for name in DEBUG_VARIABLES if context.setting(name)]
    if found:
        yield Seen(WARN, f"{names(found)} set")


@rule("mixed-settings", LINKS, rank=5)
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
