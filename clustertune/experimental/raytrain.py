"""The training stage on Ray Train: one worker for each rank, which it starts as a process of its own and watches.

The rank is the same program as everywhere: its signals, its exit and its logs are its own, and Ray's process holds no memory
of the GPU. Where an attempt fails, Ray starts its workers again, on other machines where some are gone; they take the next
attempt number, and the ranks resume from the newest whole checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import ray.train.torch
from ray.train.backend import Backend

from clustertune.chain import Chain
from clustertune.checkpoint import store
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import node
from clustertune.launch.agent import Agent, await_object, await_records, launcher_pid_file, log_file, monitored, of_ranks
from clustertune.launch.attempt import OUTCOME, AttemptPlan, Node, newest_attempt
from clustertune.launch.outcome import Outcome, conclude, how_ended, judge
from clustertune.launch.progress import check_progress
from clustertune.manifest import open_to_read, read_whole, write_durably
from clustertune.process import handled
from clustertune.rundir import RunDir
from clustertune.tree import ROOT

SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's own is 15: ranks that feed GPUs would yield to whatever else runs there
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the caller stay his
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # 60 s are short where Python is read over a busy NFS
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the default to be: a worker without GPUs keeps its environment
}
_MAX_TEMP = 40
"""Bytes of the folder of Ray's sessions: its sockets below it must stay under 108 (sun_path of unix(7))."""


PROGRESS = "progress.log"
"""In an attempt's folder: what rank 0 says to people, which the driver shows."""


class RankFailed(Exception):
    """A rank failed, and another attempt may succeed: what makes Ray start the workers again."""


class _NoGroup(Backend):  # type: ignore[misc]
    """The ranks form the process group. All GPUs of a node are visible to each of its ranks, as NCCL needs for P2P."""

    share_cuda_visible_devices = True


@dataclass
class RanksOnly(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """A TorchConfig that sets up nothing: a process group of Ray's own workers would hold memory of every GPU."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Nothing to start, nothing to stop."""
        return _NoGroup

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """Without it Ray makes a CUDA context in each worker, half a GB."""
        return contextlib.nullcontext


# --- in a worker -------------------------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> None:
    """What Ray runs in each worker. Raises RankFailed where the workers should be started again."""
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank, run = context.get_world_rank(), RunDir(Path(config["run_dir"]))
    attempt = broadcast_from_rank_zero(_begin(run, config) if rank == 0 else None)
    if attempt is None:  # the driver knows why
        return
    folder = run.attempt(attempt)
    own = Node(os.uname().nodename, ray.util.get_node_ip_address())
    write_durably(folder / f"worker-{rank}.json", json.dumps(asdict(own)) + "\n")
    address, port = broadcast_from_rank_zero(
        _agree_on_port(run, attempt, config, context.get_world_size()) if rank == 0 else None
    )
    plan = AttemptPlan.read(folder)
    agent = RankAgent(run.path, plan, rank)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **node.network_environment(node.interface_to(address)[1]),
    }
    program = node.rank_program(run.path, attempt, quiet=bool(config["quiet"]))
    agent.run_rank([sys.executable, "-m", "clustertune", *program], environment, Path(config["stop"]), quiet=config["quiet"])
    await_records(run.path, plan, range(len(plan.nodes)))
    outcome = conclude(folder, plan) if rank == 0 else judge(folder, plan)
    if outcome.code is ExitCode.FAILED or (outcome.code is ExitCode.AGAIN and not outcome.stop_requested):
        raise RankFailed("; ".join(str(problem) for problem in outcome.problems))


def _begin(run: RunDir, config: dict[str, Any]) -> int | None:
    """The number of this attempt: the driver's for the first, the next one after a failure.

    None where there is to be no further one: the driver was asked to stop meanwhile, or attempts make no progress.
    """
    if Path(config["stop"]).exists():
        return None
    first = int(config["attempt"])
    if not (run.attempt(first) / "plan.json").exists():
        return first
    try:
        check_progress(run.path, str(config["job"]), store.newest_step(run.checkpoints) or 0)
    except UserError:
        return None
    return run.new_attempt()


def _agree_on_port(run: RunDir, attempt: int, config: dict[str, Any], world_size: int) -> tuple[str, int]:
    """Write the plan as soon as every worker has reported its node, and choose the rendezvous: on this node."""
    folder = run.attempt(attempt)
    nodes = tuple(_await_worker(folder / f"worker-{rank}.json") for rank in range(world_size))
    # One "node" for each rank: Ray may place them unevenly, and each worker watches its own.
    step, job = store.newest_step(run.checkpoints) or 0, str(config["job"])
    plan = AttemptPlan(attempt, nodes, ranks_per_node=1, launcher="ray", node_per_rank=True, job=job, from_step=step)
    plan.write(folder)
    port = node.free_port(node.first_port(os.getpid(), attempt))
    node.publish(folder, nodes[0].address, port)
    return nodes[0].address, port


def _await_worker(path: Path, seconds: float = 300) -> Node:
    if body := await_object(path, seconds):
        return Node(str(body["name"]), str(body["address"]))
    raise RankFailed(f"{path}: not there within {seconds:.0f} s -> is the run folder on storage that all nodes see?")


class RankAgent(Agent):
    """One rank, started by a worker of Ray: a thread of a process that is not ours, where no signal can be handled."""

    stop: Path
    """Once it is there, the rank is asked to save and stop."""

    def run_rank(self, command: list[str], environment: dict[str, str], stop: Path, *, quiet: bool) -> ExitCode:
        """Run the rank to its end and leave ``node-N.json``. Once the file ``stop`` is there, it is asked to save and stop.

        The rank dies with this thread: it finds its parent in ``node-N.pid`` and asks the kernel for it.
        """
        self.stop = stop
        launcher_pid_file(self.folder, self.node).write_text(f"{os.getpid()}\n")
        shown = self.folder / PROGRESS if self.node == 0 and not quiet else log_file(self.folder, self.node)
        with log_file(self.folder, self.node).open("ab") as log, shown.open("ab") as out:
            # Ray's threads are running here, so that nothing may be called in the child before the command begins.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=of_ranks(environment), start_new_session=True
            )
        try:
            first = environment.get("LOCAL_RANK") == "0"
            with monitored(self.run_path, self.plan, self.node, of_run=self.node == 0) if first else contextlib.nullcontext():
                code = self._watch(child)
        finally:
            child.kill()
            child.wait()
        if code < 0 and not self.problems and not self.received:  # elsewhere torch's launcher tells
            text = f"{self.plan.where(self.node)} failed first: {how_ended(-code)}"
            self.problems.append(Problem(text, file=str(self.folder)))
        return self._leave_record(code)

    def _stop_request(self) -> Path:
        return self.stop


# --- in the driver -----------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What the driver has shown of the attempts: Ray's own forwarding of output mixes it with reports of Ray."""

    run_path: Path
    attempt: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        self.attempt = newest_attempt(self.run_path)

    def follow(self) -> None:
        """Show what rank 0 has printed since, and why an attempt ended where another one has followed."""
        newest = newest_attempt(self.run_path)
        self._show_progress()
        while self.attempt < newest:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                body = json.loads(read_whole(self._folder / OUTCOME))
                for problem in body["problems"]:
                    say(f"attempt {self.attempt}: {Problem(**problem)}")
            self.attempt, self.offset = self.attempt + 1, 0
            say(f"attempt {self.attempt} ...")
            self._show_progress()

    @property
    def _folder(self) -> Path:
        return RunDir(self.run_path).attempt(self.attempt)

    def _show_progress(self) -> None:
        with contextlib.suppress(OSError), open_to_read(self._folder / PROGRESS) as lines:
            lines.seek(self.offset)
            new = lines.read()
            complete = new[: new.rfind(b"\n") + 1]
            self.offset += len(complete)
            if complete:
                say(complete.decode(errors="replace").rstrip("\n"))


@dataclass
class RayChain(Chain):
    """The chain with its training on a Ray cluster; all other stages here."""

    max_failures: int = -1
    """How often Ray may start the workers again; -1: as long as there is progress."""
    use_gpu: bool = False
    call: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    received: list[int] = field(default_factory=list)

    @property
    def job(self) -> str:
        """Attempts without progress are counted within one call."""
        return self.call

    def train_is_due(self) -> bool:
        """Whether the training is still to be done: only then is Ray needed."""
        return self.run.stage("train") is None or not self._still_there("train")

    def run_attempt(self, plan: AttemptPlan) -> Outcome:
        """One call of Ray Train, in which Ray may make several attempts; the outcome is the last one's."""
        stop = self.run.path / f"stop-{self.job}"
        config = {
            "run_dir": str(self.run.path.resolve()),
            "attempt": plan.attempt,
            "quiet": self.quiet,
            "job": self.job,
            "stop": str(stop.resolve()),
        }
        try:
            error = self._fit(self._trainer(config), stop)
        finally:
            stop.unlink(missing_ok=True)
            shutil.rmtree(self.run.path / "ray", ignore_errors=True)
        return self._outcome(error)

    def _trainer(self, config: dict[str, Any]) -> Any:
        return ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config=config,
            torch_config=RanksOnly(),
            scaling_config=ray.train.ScalingConfig(num_workers=self.resolved.world_size, use_gpu=self.use_gpu),
            run_config=ray.train.RunConfig(
                name=f"attempt-{config['attempt']}",
                storage_path=str(self.run.path.resolve() / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=self.max_failures),
            ),
        )

    def _fit(self, trainer: Any, stop: Path) -> BaseException | None:
        """``trainer.fit()`` in a thread: in the main one Ray takes Ctrl-C, and kills what should be saved first."""
        errors: list[BaseException] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:
                errors.append(error)

        def handle(number: int, _frame: FrameType | None) -> None:
            if number in self.received and number != signal.SIGUSR1:
                raise KeyboardInterrupt  # impatient: the workers end with Ray
            self.received.append(number)
            stop.touch()

        shown = Shown(self.run.path)
        thread = threading.Thread(target=fit, name="ray-fit", daemon=True)
        with handled(handle):
            thread.start()
            while thread.is_alive():
                thread.join(0.5)
                shown.follow()
        return errors[0] if errors else None

    def _outcome(self, error: BaseException | None) -> Outcome:
        folder = self.run.attempt(newest_attempt(self.run.path))
        try:
            plan = AttemptPlan.read(folder)
        except UserError:
            text = (str(error or "").strip().splitlines() or ["it printed nothing"])[-1]
            problem = Problem(f"Ray started no rank: {text}", file=str(folder))
            return Outcome(ExitCode.AGAIN if self.received else ExitCode.FAILED, [problem], stop_requested=bool(self.received))
        outcome = judge(folder, plan, requested=bool(self.received))
        if outcome.code is ExitCode.OK and error is not None:
            outcome = replace(outcome, code=ExitCode.FAILED, problems=[Problem(f"Ray: {error}", file=str(folder))])
        if not (folder / OUTCOME).exists():
            with contextlib.suppress(OSError):
                outcome.write(folder)
        if outcome.code in (ExitCode.AGAIN, ExitCode.FAILED) and not outcome.stop_requested:
            check_progress(self.run.path, self.job, store.newest_step(self.run.checkpoints) or 0)
        return outcome


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[bool]:
    """Join the cluster of ``RAY_ADDRESS``, or start one on this machine. Gives whether each worker gets a GPU.

    Raises UserError (exit 75) where the cluster cannot be reached.
    """
    from clustertune.launch import cluster_paths

    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    variables = {name: os.environ[name] for name in cluster_paths.VARIABLES if os.environ.get(name)}
    settings: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT), **variables, **SETTINGS}}}
    with contextlib.ExitStack() as stack:
        if address is None:
            above = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _MAX_TEMP else "/tmp"  # noqa: S108
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-ray-", dir=above, ignore_cleanup_errors=True))
            # As many CPUs as workers at least: on a laptop ranks share them.
            cpus = max(workers, os.cpu_count() or 1)
            settings |= {"num_cpus": cpus, "_temp_dir": folder, "include_dashboard": False, "object_store_memory": 100 << 20}
        try:
            with contextlib.chdir(ROOT):  # Ray puts the working folder into the workers' sys.path
                ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **settings)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = "start Ray there, or unset RAY_ADDRESS for one on this machine"
            raise UserError(f"no Ray cluster: {text}", file=address or "this machine", fix=fix, code=ExitCode.AGAIN) from None
        stack.callback(ray.shutdown)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if 0 < gpus < workers:
            text = f"{workers} ranks, the Ray cluster has {gpus} GPUs"
            raise UserError(text, key="--workers", fix="add nodes, or give the number there is")
        yield gpus > 0
