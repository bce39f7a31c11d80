"""What one node of an attempt runs: find the others, then start and watch this node's ranks.

The ranks of several nodes meet at a free port of the first node, passed on in the run folder.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.host.system import Probe
from clustertune.launch.agent import Agent, await_object, leave_record
from clustertune.launch.attempt import PLAN, RENDEZVOUS, AttemptPlan, check_fence, newest_attempt
from clustertune.launch.node_folders import make_caches, make_own_folder
from clustertune.manifest import write_durably
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

PATIENCE_SECONDS = 60.0
"""How long a node looks for the plan: an NFS client may answer from its cache of absent names for so long (acdirmax)."""


Around = Callable[[Path, AttemptPlan, int], contextlib.AbstractContextManager[None]]
"""Given the run folder, the plan and the node: what has to be there while the node's ranks run, such as its staged copies."""


def _nothing(_run_path: Path, _plan: AttemptPlan, _node: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def main(run_path: Path, attempt: int, node: int, *, quiet: bool, around: Around = _nothing) -> int:
    """Run node ``node`` of an attempt. Returns 0 where its ranks ended by themselves: their records say how.

    ``around`` is entered before the nodes meet. Any other code tells the launcher that the other nodes have to be ended too.
    """
    folder = RunDir(run_path).attempt(attempt)
    stack = contextlib.ExitStack()
    try:
        plan = _read_plan(folder)
        check_fence(run_path, attempt)
        make_caches()
        _check_interface(plan, node)
        own = make_own_folder(plan.environment)
        stack.enter_context(around(run_path, plan, node))
        address, port = meet(folder, plan, node, lambda: newest_attempt(run_path) > plan.attempt)
    except UserError as error:
        leave_record(folder, node, error.code, error.problems)
        raise  # the message is still printed where the folder cannot be seen
    run = RunDir(run_path)
    resolved = run.resolved()
    agent = Agent(run_path, plan, node, patient=True)
    command = ranks_command(run, resolved, attempt, plan, node, address, port, quiet=quiet)
    environment = {**environment_between(plan, node), **plan.environment}
    try:
        with stack:
            code = agent.run(command, quiet=quiet or node > 0, environment=environment)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    if code is ExitCode.OK:
        return 0
    agent.linger()
    return int(code)


def _read_plan(folder: Path) -> AttemptPlan:
    await_object(folder / PLAN, PATIENCE_SECONDS)
    try:
        return AttemptPlan.read(folder)
    except UserError as error:
        text, fix = f"timed out after {PATIENCE_SECONDS:g} s", "put the run folder on storage that all nodes share"
        raise UserError([*error.problems, Problem(text, file=str(folder), fix=fix)]) from None


def _check_interface(plan: AttemptPlan, node: int) -> None:
    """NCCL and gloo fail with messages of their own, minutes later, where the interface is not there."""
    if plan.interface is not None and (text := missing_interface(plan.interface)):
        fix = "network.interface of the cluster file must be the name on every compute node"
        raise UserError(f"{plan.nodes[node].name} {text}", fix=fix)


# --- the command of the ranks ---------------------------------------------------------------------------------------------


def rank_program(run_path: Path, attempt: int, *, quiet: bool) -> list[str]:
    """The arguments of the ``clustertune`` module that every rank runs."""
    return ["train", "--run-dir", str(run_path.resolve()), "--attempt", str(attempt), *(["--quiet"] if quiet else [])]


def ranks_command(
    run: RunDir,
    resolved: Resolved,
    attempt: int,
    plan: AttemptPlan | None = None,
    node: int = 0,
    address: str = "",
    port: int = 0,
    *,
    quiet: bool = False,
) -> list[str]:
    """torchrun for the ranks of node ``node``, all of them where there is no ``plan``, with the program of a rank.

    With several nodes the rendezvous is static: node 0 listens at ``address:port``. On one node torch takes a free port, under
    an address that needs no resolver. ``--log-dir``: torch's elastic agent would leave a folder ``torchelastic_*`` in /tmp for
    every node and attempt; the ranks have logs of their own.
    """
    nodes, ranks = (len(plan.nodes), plan.ranks_per_node) if plan else (1, resolved.world_size)
    static = ["--rdzv-backend", "static", "--master-addr", address, "--master-port", str(port)]
    return [
        sys.executable, "-m", "clustertune.launch.elastic",
        "--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", str(node),
        "--max-restarts", "0", "--log-dir", os.devnull,
        *(static if nodes > 1 else ["--standalone", "--local-addr", "127.0.0.1"]),
        "--module", "clustertune", *rank_program(run.path, attempt, quiet=quiet),
    ]  # fmt: skip


# --- where the ranks of several nodes meet ----------------------------------------------------------------------------

_FIRST, _COUNT = 20_000, 12_000
"""20000 to 31999: above the ports of Slurm (6817 to 6819) and of common services, below Linux' ephemeral range, from which
any outgoing connection may take a port at any moment (net.ipv4.ip_local_port_range, 32768 and up)."""
_TRIES = 200
_STEP = 7
"""Jobs with neighbouring numbers search from neighbouring ports: a stride keeps their searches apart."""


def first_port(job: str | int, attempt: int) -> int:
    """Where the search for a job's port begins: another one for each job, and for each attempt of a job."""
    digits = "".join(c for c in str(job) if c.isdigit()) or "0"
    return _FIRST + (int(digits) * 37 + attempt) % _COUNT


def random_port() -> int:
    """Any port of that range: one that nobody knows ahead cannot be taken ahead."""
    return _FIRST + secrets.randbelow(_COUNT)


def free_port(start: int, *, ephemeral_from: int | None = None) -> int:
    """The first port from ``start`` on that can be bound here now, outside the ephemeral range.

    Raises UserError (exit 75) where none of 200 can.
    """
    limit = min(_FIRST + _COUNT, ephemeral_from or Probe().number("/proc/sys/net/ipv4/ip_local_port_range") or 32_768)
    if limit < 4096:  # every port is ephemeral here: there is nothing outside
        low, count = _FIRST, _COUNT
    elif limit <= _FIRST + 1000:  # an administrator has widened the ephemeral range downwards: stay below it
        low, count = limit - 2000, 2000
    else:
        low, count = _FIRST, limit - _FIRST
    for offset in range(_TRIES):
        port = low + (start - low + offset * _STEP) % count
        if can_bind(port):
            return port
    problem = Problem(f"no free port among {_TRIES} from {start} on", file=socket.gethostname(), fix="requeue the job")
    raise UserError(problem, ExitCode.AGAIN)


def can_bind(port: int) -> bool:
    """Bound as torch's store binds it: on all addresses, IPv6 and IPv4 alike."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 - a probe, closed at once
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and not _has_ipv6(error):
                continue
            return False
    return True


def _has_ipv6(error: OSError) -> bool:
    import errno

    return error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def meet(folder: Path, plan: AttemptPlan, node: int, give_up: Callable[[], bool] = lambda: False) -> tuple[str, int]:
    """Address and port of an attempt: chosen by the first node, learnt by the others; ``("", 0)`` where there is only one node.

    Raises UserError (exit 75) where no port is free, or the first node does not publish one.
    """
    if len(plan.nodes) == 1:
        return "", 0
    if node > 0:
        return await_published(folder, plan, give_up)
    port = free_port(plan.port or first_port(plan.job or os.getpid(), plan.attempt))
    publish(folder, plan.nodes[0].address, port)
    return plan.nodes[0].address, port


def publish(folder: Path, address: str, port: int) -> None:
    """Tell the other nodes where the first one listens."""
    body = {"address": address, "port": port, "host": os.uname().nodename}
    write_durably(folder / RENDEZVOUS, json.dumps(body) + "\n")


def await_published(folder: Path, plan: AttemptPlan, give_up: Callable[[], bool], seconds: float = 300) -> tuple[str, int]:
    """The address and port that the first node published. Raises UserError (exit 75) where it does not in time."""
    if address := await_object(folder / RENDEZVOUS, seconds, give_up):
        return str(address["address"]), int(address["port"])
    name = plan.nodes[0].name
    fix = "is the run folder on storage that all nodes see?"
    raise UserError(f"{name} gave no rendezvous address within {seconds:.0f} s", file=str(folder), fix=fix, code=ExitCode.AGAIN)


# --- the interface --------------------------------------------------------------------------------------------------------

INTERFACES = Path("/sys/class/net")


def missing_interface(name: str) -> str:
    """What this machine lacks where it has no network interface of this name; empty where it has it, or is not Linux."""
    if (INTERFACES / name).exists() or not INTERFACES.is_dir():
        return ""
    return f"has no interface {name} (it has {', '.join(sorted(entry.name for entry in INTERFACES.iterdir()))})"


def interface_to(address: str) -> tuple[str, str | None]:
    """This machine's address on the way to ``address``, and the interface that has it (None where it cannot be determined).

    gloo and NCCL otherwise take what the host name resolves to, which on Debian is 127.0.1.1.
    """
    import psutil

    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)  # sends nothing: it only asks the routing table
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{address}: {error.strerror or error}", file="command line", key="--master", fix="give node 0's address"
        ) from None
    if _is_loopback(own) and not (address == "localhost" or _is_loopback(address)):
        raise UserError(
            f"{address} means this machine's loopback here", file="command line", key="--master", fix="give its address"
        )
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries):
            return own, name
    return own, None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def network_environment(interface: str | None) -> dict[str, str]:
    """gloo's and NCCL's choice of interface, where the caller's environment does not make it. NCCL takes every name that begins
    so unless ``=`` is in front."""
    if not interface:
        return {}
    values = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in values.items() if name not in os.environ}


def environment_between(plan: AttemptPlan, node: int) -> dict[str, str]:
    """:func:`network_environment` of the way from a node to the first one (from that to the second); empty where the plan names
    an interface, where there is one node, or where no way is known: gloo then says so at the start."""
    if len(plan.nodes) == 1 or plan.interface is not None:
        return {}
    try:
        return network_environment(interface_to(plan.nodes[0 if node else 1].address)[1])
    except UserError:
        return {}
