"""vLLM's servers on one node: start, wait until they answer, watch, and leave nothing running.

A server is a group of processes (API server, engine, workers): when its first one ends, the whole group is ended, because an
engine whose API server was killed keeps the GPU (run with vLLM 0.30.0). ``/health`` alone proves nothing: on the first node it
stays 200 while a follower is gone. Hence each node watches its own processes, and Slurm ends the step when one node does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.evaluate.model import Backend, ModelFacts, weight_bytes
from clustertune.host.adapters import addresses
from clustertune.launch.guard import vllm_guard
from clustertune.launch.node import can_bind, random_port
from clustertune.launch.node_folders import make_private
from clustertune.launch.server_requests import GONE, NotOurs, ask, load_adapter, unload_adapter
from clustertune.launch.serving import ModelSize, Serving, deadline_seconds, serving, start_seconds
from clustertune.manifest import read_whole, write_durably
from clustertune.process import Stopped, captured, die_with_parent, stop_signals
from clustertune.recipe.sections import Eval
from clustertune.secrets import ACCOUNT_KEYS
from clustertune.tensorfile import FLOATS, read_header
from clustertune.training.base_weights import check_tensors, say_unproved

PROGRAM = "CLUSTERTUNE_VLLM"
"""The variable that names vLLM's program where it is not on the PATH: vLLM asks for another numpy than training."""
NAME = "model"
"""What the servers call the model."""
HOST = "127.0.0.1"
START_SECONDS = 3600.0
"""Until all servers answer, where the model's size does not say: 406 GB a node at 0.2 GB/s are 34 minutes."""
VERSION_SECONDS = 300.0
"""Until vLLM has printed its version: it imports torch."""
POLL_SECONDS = 0.5
END_SECONDS = 10.0
"""Between SIGTERM and SIGKILL: a follower whose head was gone did not end within 5 s."""
DEATHS = 5
"""How often a server that is kept may end before it answers again: a reason that stays, such as a GPU that is lost."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
_LOG_LINES = 15


@dataclass(frozen=True)
class ServingJob:
    """What every node of an evaluation must know, the same for all, to start its servers."""

    model: str
    """The folder of the merged model, or of the base of ``adapter``."""
    shape: Serving
    dtype: str
    """Of the computation; never ``auto``, which makes bfloat16 of float32 weights."""
    folder: str
    """Where logs and :data:`READY` go; on storage that all nodes see."""
    port: int
    """Of the first server; the others follow. Where it is taken, a node chooses another one and says so in its
    :data:`READY`; of one server over :attr:`nodes` all nodes must know it."""
    cache: str
    """A folder on each node's own disk; each server has its own below."""
    key_file: str
    """The key, which a server proves to have before anything is sent to it, and asks for itself. Empty: a person starts the
    server and asks it (``clustertune serve``)."""
    nodes: tuple[str, ...] = ()
    """Names or addresses of the nodes, the first one's first; empty: this machine."""
    interface: str | None = None
    """Network interface between the nodes; None: the one that the route to the first node takes."""
    gpus: tuple[str, ...] = ()
    """Of each node, as CUDA_VISIBLE_DEVICES names them; empty: none."""
    adapter: str | None = None
    """Folder of a LoRA adapter that is applied while it serves."""
    rank: int = 0
    """LoRA rank of ``adapter``."""
    options: tuple[str, ...] = ()
    """Further options of ``vllm serve``."""
    program: str | None = None
    """vLLM's program; None: as :func:`find_program` says."""
    start_seconds: float = START_SECONDS
    """Until all servers answer."""
    adapters: int = 1
    """That a server applies at once, where it is given some while it runs."""
    kept: bool = False
    """Each node has servers of its own, which other nodes ask and give adapters; one that ends is started again. Otherwise: one
    server over :attr:`nodes`, or this machine's own."""

    @property
    def served(self) -> str:
        """What requests call the model: the adapter's name where there is one."""
        if self.adapter is None:
            return NAME
        return Path(self.adapter).name if self.kept else "adapter"

    @property
    def over_several(self) -> bool:
        """Whether one server spans the nodes."""
        return len(self.nodes) > 1 and not self.kept

    def host(self, node: int) -> str:
        """Where a node's servers listen."""
        return self.nodes[node] if self.kept else HOST

    def urls_of(self, node: int) -> list[str]:
        """The addresses of a node's servers."""
        return [f"http://{self.host(node)}:{self.port + i}" for i in range(self.shape.servers)]

    @property
    def urls(self) -> list[str]:
        """The addresses of the first node's servers."""
        return self.urls_of(0)

    def read_key(self) -> str:
        """The job's key."""
        return read_whole(Path(self.key_file)).decode()

    def write(self, path: Path) -> None:
        """Durably, for the nodes."""
        write_durably(path, json.dumps(asdict(self), indent=1) + "\n", mode=0o600)

    @classmethod
    def read(cls, path: Path) -> ServingJob:
        """What :meth:`write` wrote."""
        body: dict[str, Any] = json.loads(read_whole(path))
        lists = {key: tuple(value) for key, value in body.items() if isinstance(value, list)}
        return cls(**{**body, **lists, "shape": Serving(**body["shape"])})


JOB, VERSION, FAILED = "job.json", "version.json", "failed"
"""In the folder of a Slurm job: what all its servers have in common, vLLM's version, and what a node that gave up leaves."""
ASKED, READY = "model-{}.json", "ready-{}.json"
"""There too: the job of the N-th model that the client asks for, and what is there as soon as its servers answer."""
RING, KEY = "ring.json", "key"
"""Of servers beside a trainer: their addresses with the key, and the key alone; both are removed at the end."""
AGAIN_SECONDS = 5.0
"""Before what runs on the servers' nodes is started again."""
GIVEN = "CLUSTERTUNE_SERVERS"
"""The variable that names the folder of a job whose servers are already there: those of a Slurm job."""


@dataclass(frozen=True)
class ServerCommand:
    """One server's part on one node."""

    name: str
    """For messages and its log: ``server 3``, or ``node 1 (n2)`` of a server over several nodes."""
    arguments: list[str]
    environment: dict[str, str]
    url: str | None
    """Where it answers; None: a follower, which has no API."""


def commands(job: ServingJob, node: int, address: str | None = None) -> list[ServerCommand]:
    """What node number ``node`` starts. ``address``: its own on the cluster's network, where there are several nodes."""
    shape, several, host = job.shape, job.over_several, job.host(node)
    both = [
        *("serve", job.model, "--served-model-name", NAME, "--dtype", job.dtype),
        *("--tensor-parallel-size", str(shape.tensor_parallel), "--max-model-len", str(shape.max_model_len)),
        *("--max-num-seqs", str(shape.max_num_seqs), "--generation-config", "auto", *job.options),
    ]
    if job.adapter:
        both += ["--enable-lora", "--lora-modules", f"{job.served}={job.adapter}", "--max-lora-rank", str(lora_rank(job.rank))]
    guarded = dict[str, str]()
    if job.key_file:
        both += ["--middleware", "vllm_guard.KeyGuard"]
        paths = [str(Path(vllm_guard.__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        guarded |= {vllm_guard.KEY: job.read_key(), "PYTHONPATH": os.pathsep.join(paths)}
    if job.kept:
        lora = ["--enable-lora", "--max-lora-rank", str(lora_rank(job.rank)), "--max-loras"]
        # Of the token that was drawn, temperature and the like included: what the trainer corrects by.
        both += [*lora, str(job.adapters), "--logprobs-mode", "processed_logprobs"]
        guarded |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    server_commands = []
    for i in range(1 if several else shape.servers):
        api = ["--host", host, "--port", str(job.port + i)]
        environment = {**QUIET, **guarded, "VLLM_CACHE_ROOT": f"{job.cache}/{node}-{i}"}
        environment[vllm_guard.ADDRESS] = f"{host}:{job.port + i}"
        name, url = f"server {i}" + (f" of {host}" if job.kept else ""), job.urls_of(node)[i]
        if job.gpus:
            mine = job.gpus[i * shape.tensor_parallel : (i + 1) * shape.tensor_parallel]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if several:
            api = [
                *(api if node == 0 else ["--headless"]),
                *("--pipeline-parallel-size", str(shape.pipeline_parallel), "--nnodes", str(len(job.nodes))),
                *("--node-rank", str(node), "--master-addr", job.nodes[0], "--master-port", str(job.port + 1)),
                *("--distributed-executor-backend", "mp"),
            ]
            name = f"node {node} ({job.nodes[node]})"
            if address:
                environment["VLLM_HOST_IP"] = address
            if job.interface:
                environment |= {"GLOO_SOCKET_IFNAME": job.interface, "NCCL_SOCKET_IFNAME": f"={job.interface}"}
        server_commands.append(ServerCommand(name, [*both, *api], environment, url if node == 0 or not several else None))
    return server_commands


def lora_rank(rank: int) -> int:
    """The least value of vLLM's ``--max-lora-rank`` that holds a rank (``vllm/config/lora.py`` lists them)."""
    return next((n for n in (1, 8, 16, 32, 64, 128, 256, 320, 512) if n >= rank), rank)


def own_address(job: ServingJob) -> str | None:
    """This node's address on the network by which it reaches the first one; None on one node.

    vLLM would open a socket towards a public name server, and without a route take 0.0.0.0.
    """
    if not job.over_several:
        return None
    if job.interface and (own := addresses().get(job.interface)):
        return own[0].partition("/")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((job.nodes[0], job.port))  # UDP: nothing is sent
        except OSError as error:
            raise UserError(f"no way to {job.nodes[0]}: {error.strerror}", fix="network.interface") from None
        return str(probe.getsockname()[0])


def find_program() -> str | None:
    """vLLM's program; None where there is none."""
    return shutil.which(os.environ.get(PROGRAM) or "vllm")


def require_program() -> str:
    """vLLM's program. Raises UserError where there is none."""
    if (program := find_program()) is None:
        fix = f"use the vllm image, or set {PROGRAM} to the program of an environment of its own; --backend hf needs none"
        raise UserError("vLLM is not installed here", file="vllm", fix=fix)
    return program


@dataclass
class Servers:
    """The processes of one node. Use as a context: at its end none of them is left."""

    job: ServingJob
    node: int = 0
    program: Sequence[str] = ()
    """What stands in front of ``serve``; empty: vLLM's program on this machine."""
    dead: dict[str, str] = field(default_factory=dict)
    """Servers that ended, by name, with what is known of it."""
    _running: list[tuple[ServerCommand, subprocess.Popen[bytes], Path]] = field(default_factory=list)
    _held: list[socket.socket] = field(default_factory=list)
    """The servers' ports, bound here: see :func:`_hold`."""

    def __enter__(self) -> Servers:
        program = list(self.program) or [self.job.program or require_program()]
        listed = tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        try:
            if self.node == 0 or not self.job.over_several:
                self.job, self._held = hold_ports(self.job, self.node)
            job = replace(self.job, gpus=listed) if listed and self.job.gpus else self.job
            for command in commands(job, self.node, own_address(job)):
                self._begin(program, command)
        except BaseException:
            self.stop()
            raise
        return self

    def _begin(self, program: Sequence[str], command: ServerCommand) -> None:
        make_private(Path(self.job.cache))
        log = Path(self.job.folder) / f"{command.name.split(' (')[0].replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*program, *command.arguments],
                env={**offline_environment(), **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 - libc only
            )
        self._running.append((command, process, log))

    def keep(self) -> None:
        """Start again what ends, until a signal. Raises UserError where one ends :data:`DEATHS` times without an answer."""
        program, silent = list(self.program) or [self.job.program or require_program()], dict[str, int]()
        commands_ = {command.name: command for command, _, _ in self._running}
        while True:
            self.poll()
            for name, text in list(self.dead.items()):
                say(f"{name} {text}\nit is started again")
                silent[name] = silent.get(name, 0) + 1
                if silent[name] >= DEATHS:
                    raise self.died("ended again and again")
                del self.dead[name]
                self._begin(program, commands_[name])
            for command, _, _ in self._running:
                if silent.get(command.name) and self._answers(str(command.url)):
                    silent[command.name] = 0
            time.sleep(POLL_SECONDS)

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def poll(self) -> int:
        """Look after the processes; how many servers run. What has ended takes the rest of its group with it."""
        for entry in list(self._running):
            command, process, log = entry
            if (code := process.poll()) is not None:
                _kill(process, signal.SIGKILL)
                self._running.remove(entry)
                self.dead[command.name] = f"ended with {_how_it_ended(code)}; {log} ends:\n{_tail(log)}"
        return len(self._running)

    def died(self, what: str) -> UserError:
        """An error that names each server that ended."""
        return UserError(
            [Problem(f"{name} {what}: {text}", file=self.job.model) for name, text in self.dead.items()], ExitCode.FAILED
        )

    def wait(self) -> None:
        """Until all of this node's servers answer. Raises UserError where one ends before, or the deadline passes."""
        deadline = time.monotonic() + self.job.start_seconds
        waiting = [command for command, _, _ in self._running if command.url]
        while waiting:
            self.poll()
            if self.dead:
                raise self.died("ended while it started")
            if time.monotonic() > deadline:
                names = ", ".join(command.name for command in waiting)
                problem = Problem(f"no answer after {self.job.start_seconds:.0f} s from {names}", file=self.job.folder)
                raise UserError([problem, *last_log_lines(self.job)], ExitCode.FAILED)
            waiting = [command for command in waiting if not self._answers(str(command.url))]
            time.sleep(POLL_SECONDS)

    def _answers(self, url: str) -> bool:
        """Whether our server answers there; another program may have taken the port. Raises UserError."""
        text = "another server answers there, which does not have this job's key"
        try:
            if (reply := ask(url, "/v1/models", self.job.read_key())) is None:
                return False
            listed = reply.get("data")
            models = {str(one.get("id")): one.get("root") for one in listed or () if isinstance(one, dict)}
            if models.get(NAME) == self.job.model:
                return True
            text = f"another server answers there, of {', '.join(map(str, models.values())) or 'nothing'}"
        except NotOurs:
            pass
        raise UserError(text, file=url, fix="end it, or run again: each job has other ports", code=ExitCode.AGAIN)

    def stop(self) -> None:
        """End all groups: asked first, then killed."""
        for _, process, _ in self._running:
            _kill(process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while any(process.poll() is None for _, process, _ in self._running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for _, process, _ in self._running:
            _kill(process, signal.SIGKILL)
            process.wait()
        self._running.clear()
        for held in self._held:
            held.close()
        self._held.clear()


PORT_TRIES = 100


def hold_ports(job: ServingJob, node: int) -> tuple[ServingJob, list[socket.socket]]:
    """The job with ports that this node holds for its servers, and what holds them until it is closed.

    A socket that is bound with SO_REUSEPORT and does not listen keeps the port from every other user: Linux lets only sockets
    of the same user share one (socket(7)). vLLM binds with SO_REUSEPORT itself. Where the nodes of one server meet, torch does
    not: that port is only looked at. Raises UserError where the ports are taken.
    """
    fixed, port = job.over_several, job.port
    fix = "run again: each job has other ports"
    if fixed and not can_bind(port + 1):
        text = "the port where the nodes of the server meet is taken by another program"
        raise UserError(text, file=f"{job.host(node)}:{port + 1}", fix=fix, code=ExitCode.AGAIN)
    for _ in range(1 if fixed else PORT_TRIES):
        held: list[socket.socket] = []
        try:
            for i in range(1 if fixed else job.shape.servers):
                held.append(_bound(job.host(node), port + i))
            return replace(job, port=port), held
        except OSError as error:
            for one in held:
                one.close()
            if error.errno != errno.EADDRINUSE:
                own = "the name of a node must lead to an address of its own"
                raise UserError(f"cannot be listened at: {error.strerror or error}", file=job.host(node), fix=own) from None
        port = random_port()
    raise UserError("the port is taken", file=f"{job.host(node)}:{job.port}", fix=fix, code=ExitCode.AGAIN)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as vLLM's create_server_socket
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


def new_key(folder: Path) -> str:
    """Write a key for a job's servers that only its owner can read; the path of its file."""
    path = folder / KEY
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as out:
        out.write(secrets.token_hex(16))
        out.flush()
        os.fchmod(out.fileno(), 0o600)
        os.fsync(out.fileno())
    return str(path)


def _kill(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole group, also when its first process is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _how_it_ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _tail(log: Path) -> str:
    try:
        return "\n".join(read_whole(log).decode(errors="replace").splitlines()[-_LOG_LINES:])
    except OSError:
        return ""


def last_log_lines(job: ServingJob) -> list[Problem]:
    """When each of a job's servers or nodes wrote to its log last, and what: the one that hangs is often the silent one."""
    problems = []
    for log in sorted(Path(job.folder).glob("*.log")):
        with contextlib.suppress(OSError):
            silent = max(0.0, time.time() - log.stat().st_mtime)
            text = _tail(log).rpartition("\n")[2] or "nothing"
            problems.append(Problem(f"{log.stem.replace('-', ' ')}: last wrote {silent:.0f} s ago: {text}", file=str(log)))
    return problems


def run_node(folder: Path, node: int) -> None:
    """One node's part of a Slurm step: serve one model after the other, as the client asks for them, until a signal.

    Raises UserError (exit 1) where no server of this node is left, or its part of the one server over several nodes has ended.
    """
    template, number = ServingJob.read(folder / JOB), 0
    if template.kept:
        _run_kept(template, folder, node)
    if node == 0:
        write_durably(folder / VERSION, json.dumps({"version": _version(template.program)}) + "\n")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_cache, template.cache, node)
        stack.enter_context(_stop_on_signals())
        while True:
            following = ASKED.format(number + 1)
            if following not in os.listdir(folder):  # noqa: PTH208 - a listing makes an NFS client ask the server
                time.sleep(POLL_SECONDS)
                continue
            number += 1
            with Servers(ServingJob.read(folder / following), node) as servers:
                servers.wait()
                if node == 0:
                    write_durably(folder / READY.format(number), json.dumps({"port": servers.job.port}) + "\n")
                    say(f"serving {servers.job.model}: {', '.join(servers.job.urls)}")
                _watch(servers, folder / ASKED.format(number + 1))


def _run_kept(job: ServingJob, folder: Path, node: int) -> None:
    """One node's servers for a trainer, until a signal."""
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_cache, job.cache, node)
        stack.enter_context(_stop_on_signals())
        ready = folder / READY.format(node)
        known = int(json.loads(read_whole(ready))["port"]) if ready.exists() else None  # the ranks know it: started again
        servers = stack.enter_context(Servers(job if known is None else replace(job, port=known), node))
        if known not in (None, servers.job.port):
            fix = "run again: the same command continues"
            raise UserError("another program has taken the port meanwhile", file=f"{job.host(node)}:{known}", fix=fix)
        servers.wait()
        write_durably(ready, json.dumps({"port": servers.job.port}) + "\n")
        if node == 0:
            write_durably(folder / VERSION, json.dumps({"version": _version(job.program)}) + "\n")
        servers.keep()


@contextlib.contextmanager
def kept(job: ServingJob, begin: Callable[[], subprocess.Popen[bytes]], end: Callable[[Any], None]) -> Iterator[Path]:
    """Servers beside a trainer while the context lasts; what its ranks find them by. Raises UserError where one does not start.

    ``begin`` starts ``python -m clustertune.evaluate.servers FOLDER`` on all of ``job.nodes``; where that ends by itself, it is
    started again. ``end`` ends it.
    """
    folder, over = Path(job.folder), threading.Event()
    job.write(folder / JOB)
    children = [begin()]

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            if (code := children[-1].poll()) is not None and all(
                (folder / READY.format(n)).exists() for n in range(len(job.nodes))
            ):
                say(f"the servers' nodes ended with exit code {code}; they are started again")
                over.wait(AGAIN_SECONDS)
                if not over.is_set():
                    children.append(begin())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for node in range(len(job.nodes)):
            _await(folder, READY.format(node), job.start_seconds + END_SECONDS, children[0].poll)
        urls = kept_urls(job)
        write_durably(folder / RING, json.dumps({"urls": urls, "key": job.read_key()}) + "\n", mode=0o600)
        say(f"servers beside the trainer: {', '.join(urls)}")
        yield folder / RING
    finally:
        over.set()
        watcher.join()
        end(children[-1])
        Path(job.key_file).unlink(missing_ok=True)
        (folder / RING).unlink(missing_ok=True)


def kept_urls(job: ServingJob) -> list[str]:
    """The addresses of all nodes' servers, as the nodes have said them. Raises OSError where one has not."""
    urls = []
    for node in range(len(job.nodes)):
        port = int(json.loads(read_whole(Path(job.folder) / READY.format(node)))["port"])
        urls += replace(job, port=port).urls_of(node)
    return urls


def offline_environment() -> dict[str, str]:
    """The environment of a server, without the keys of accounts: it reads local files and asks nobody."""
    return {name: value for name, value in os.environ.items() if name not in ACCOUNT_KEYS}


def _remove_cache(cache: str, node: int) -> None:
    """Leave nothing of this node's servers on its disk, which several nodes may share."""
    for path in Path(cache).glob(f"{node}-*"):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # another node's lie there still
        Path(cache).rmdir()


def _watch(servers: Servers, following: Path) -> None:
    """Until another model is asked for. Raises UserError where no server is left."""
    reported: set[str] = set()
    while servers.poll():
        for name in servers.dead.keys() - reported:
            say(f"{name} {servers.dead[name]}")
        reported |= servers.dead.keys()
        if following.name in os.listdir(following.parent):  # noqa: PTH208
            return
        time.sleep(POLL_SECONDS)
    raise servers.died("ended")


def describe(model: ModelFacts, adapter: Path | None = None) -> Backend:
    """The servers for a model on this machine, or those of the Slurm job, before the first request. Raises UserError."""
    if named := os.environ.get(GIVEN):
        shape, version = ServingJob.read(Path(named) / JOB).shape, str(_await(Path(named), VERSION, START_SECONDS)["version"])
    else:
        shape, version = job_here(model, adapter).shape, _version()
    return Backend("vllm", version, dtype_of(model.folder), shape.tensor_parallel, shape.pipeline_parallel, shape.servers)


@contextlib.contextmanager
def model_for(model: ModelFacts, settings: Eval, *, adapter: Path | None = None) -> Iterator[Any]:
    """lm-eval's ``LM`` over servers, which are ended with the context; those beside a trainer stay, and lose the adapter.

    Raises UserError where a tensor is missing, before a server starts; where one does not start; and where no server gives an
    answer within ``settings.stall_seconds``, with the last lines of each log.
    """
    from clustertune.evaluate.client import ServersLM

    raise_if(check_tensors(model.folder))
    say_unproved(model.folder)
    with contextlib.ExitStack() as stack:
        urls = None
        if (named := os.environ.get(GIVEN)) and (template := ServingJob.read(Path(named) / JOB)).kept:
            job = _of(template, model, adapter)
            urls = stack.enter_context(_with_adapter(job))
        elif named:
            job = _ask_for(Path(named), model, adapter)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="clustertune-vllm-"))
            here = replace(job_here(model, adapter), folder=folder, cache=f"{folder}/cache", key_file=new_key(Path(folder)))
            servers = stack.enter_context(Servers(here))
            servers.wait()
            job = servers.job
        shape = job.shape
        lm = ServersLM(
            urls or job.urls,
            model.tokenizer_folder,
            model=job.served,
            concurrent=shape.concurrent,
            max_length=shape.max_model_len,
            stall_seconds=settings.stall_seconds,
            key=job.read_key(),
        )
        try:
            yield lm
        except UserError as error:
            if not lm.down:
                raise
            deadline, failure = time.monotonic() + END_SECONDS, None
            while named and not (failure := _given_up(Path(named))) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)  # the node whose part ended is about to say so
            raise UserError([*error.problems, *(failure.problems if failure else last_log_lines(job))], error.code) from None


@contextlib.contextmanager
def _with_adapter(job: ServingJob) -> Iterator[list[str]]:
    """Servers beside a trainer have the job's adapter while the context lasts; the addresses of those that do.

    Where none answers, one that ended is on its way back, and is waited for. Raises UserError where it was given up, and where
    none takes the adapter.
    """
    key, all_urls, deadline = job.read_key(), kept_urls(job), time.monotonic() + job.start_seconds
    urls, reasons = all_urls, dict[str, str]()
    while not any(_is_up(url, key) for url in all_urls) and time.monotonic() < deadline:
        if failure := _given_up(Path(job.folder)):
            raise failure
        time.sleep(POLL_SECONDS)
    try:
        if job.adapter is not None:
            for url in all_urls:
                try:
                    why = load_adapter(url, key, job.served, Path(job.adapter))
                except (*GONE, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                if why is not None:
                    reasons[url] = why
            urls = [url for url in all_urls if url not in reasons]
        if not urls:
            problems = [Problem(f"{url} {why}", file=str(job.adapter)) for url, why in reasons.items()]
            raise UserError(problems, ExitCode.AGAIN)
        yield urls
    finally:
        for url in all_urls if job.adapter is not None else ():
            unload_adapter(url, key, job.served)


def _is_up(url: str, key: str) -> bool:
    with contextlib.suppress(NotOurs):
        return ask(url, "/health", key) is not None
    return False


def _ask_for(folder: Path, model: ModelFacts, adapter: Path | None) -> ServingJob:
    """Have the Slurm job's nodes serve a model; its job, as soon as the servers answer. Raises UserError."""
    number = 1
    while (folder / ASKED.format(number)).exists():
        number += 1
    template = ServingJob.read(folder / JOB)
    # Other ports each time: the last ones may still be in use.
    job = replace(_of(template, model, adapter), folder=str(folder / str(number)), port=random_port())
    job.write(folder / ASKED.format(number))
    ready = _await(folder, READY.format(number), job.start_seconds + END_SECONDS)  # the nodes' own messages come first
    return replace(job, port=int(ready["port"]))


def _of(job: ServingJob, model: ModelFacts, adapter: Path | None) -> ServingJob:
    """A job for a model."""
    shape = replace(job.shape, max_model_len=min(job.shape.max_model_len, model.max_length))
    named, rank = (str(adapter.resolve()), rank_of(adapter)) if adapter else (None, 0)
    return replace(job, model=str(model.folder.resolve()), shape=shape, dtype=dtype_of(model.folder), adapter=named, rank=rank)


def _await(folder: Path, name: str, seconds: float, ended: Callable[[], int | None] = lambda: None) -> dict[str, Any]:
    """What a node writes. Raises UserError with the message of a node that gave up, after ``seconds``, and where ``ended``
    gives an exit code.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if failure := _given_up(folder):
            raise failure
        if (code := ended()) is not None:
            raise UserError(f"the servers ended with exit code {code}", file=str(folder), code=ExitCode.FAILED)
        if name in os.listdir(folder):  # noqa: PTH208
            body: dict[str, Any] = json.loads(read_whole(folder / name))
            return body
        time.sleep(POLL_SECONDS)
    fix = "the logs there say how far they came"
    raise UserError(f"the servers do not answer after {seconds:.0f} s", file=str(folder), fix=fix, code=ExitCode.FAILED)


def _given_up(folder: Path) -> UserError | None:
    """The messages of the nodes of a Slurm job that gave up."""
    names = [name for name in os.listdir(folder) if name.startswith(FAILED) and name.endswith(".json")]  # noqa: PTH208
    bodies = [json.loads(read_whole(folder / name)) for name in sorted(names)]
    problems = [Problem(**problem) for body in bodies for problem in body["problems"]]
    return UserError(problems, ExitCode(bodies[0]["exit_code"])) if bodies else None


def job_here(model: ModelFacts, adapter: Path | None = None) -> ServingJob:
    """The servers for a model on this machine's GPUs, or its CPU. Raises UserError where it does not fit."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    room = min((torch.cuda.get_device_properties(i).total_memory for i in range(gpus)), default=None)
    size = ModelSize.of(json.loads(read_whole(model.folder / "config.json")), weight_bytes(model.folder))
    shape = serving(size, room, gpus, nodes=1)
    if shape is None:
        text = f"{size.weights / 1e9:,.0f} GB do not fit {gpus} GPUs of {(room or 0) / 1e9:,.0f} GB"
        raise UserError(text, file=str(model.folder), fix="clustertune submit serves it over several nodes")
    start = deadline_seconds(start_seconds(shape, size)) if gpus else START_SECONDS
    return _of(
        ServingJob("", shape, "", "", random_port(), "", "", gpus=tuple(map(str, range(gpus))), start_seconds=start),
        model,
        adapter,
    )


def dtype_of(folder: Path) -> str:
    """The type that transformers would load the weights as: the configuration's, else that of the first tensor."""
    config = json.loads(read_whole(folder / "config.json"))
    if named := config.get("dtype") or config.get("torch_dtype"):
        return str(named)
    return FLOATS.get(read_header(min(folder.glob("*.safetensors"))).tensors[0].dtype, "float32")


def rank_of(adapter: Path) -> int:
    """The largest LoRA rank of an adapter."""
    config = json.loads(read_whole(adapter / "adapter_config.json"))
    return int(max([config["r"], *(config.get("rank_pattern") or {}).values()]))


def _version(program: str | None = None) -> str:
    command = [program or require_program(), "--version"]
    try:
        done = captured(command, VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"does not say its version: {error}", file=command[0], code=ExitCode.FAILED) from None
    words = done.stdout.split()
    return words[-1] if words and done.returncode == 0 else "unknown"


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    def stop(number: int, _frame: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def note_end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a step's end, and tell the client of one that no node gave a reason for: it would wait for its deadline."""
    code = child.wait()
    if not any(path.name.startswith(FAILED) for path in folder.iterdir()):
        error = UserError(f"the step of the servers ended with exit code {code}", file=str(folder), code=ExitCode.FAILED)
        write_durably(folder / f"{FAILED}-step.json", json.dumps(error.as_dict()) + "\n")


def main(arguments: Sequence[str]) -> int:
    """``python -m clustertune.evaluate.servers FOLDER [NODE]``: what ``srun`` starts on every node."""
    folder, node = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else int(os.environ.get("SLURM_PROCID", "0"))
    try:
        run_node(folder, node)
    except UserError as error:
        write_durably(folder / f"{FAILED}-{node}.json", json.dumps(error.as_dict()) + "\n")
        for problem in error.problems:
            say(f"error: {problem}")
        return int(error.code)
    except Stopped:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
