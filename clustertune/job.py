"""The program of a Slurm job, on its first node: check the allocation, run the stages, restart or requeue what can continue."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune import chain, secrets
from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.containers import pins
from clustertune.doctor import preflight
from clustertune.errors import ExitCode, UserError, raise_if
from clustertune.evaluate.servers import GIVEN, JOB, KEY, START_SECONDS, ServingJob, new_key, note_end
from clustertune.launch import (
    cluster_paths,
    container,
    container_image,
    container_packages,
    lease,
    megatron_image,
    node_folders,
    progress,
    serving,
    shape,
    slurm,
    srun,
)
from clustertune.launch.agent import stop_request_file
from clustertune.launch.allocation import Allocation
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.environment import Setting, environment
from clustertune.launch.node import first_port, random_port
from clustertune.launch.outcome import Outcome, any_node_failed
from clustertune.manifest import read_object, read_whole
from clustertune.nccl_check import link_check
from clustertune.process import STOP_SIGNALS, Stopped, end
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import SCORES, STAGES, Description, RunDir, keep_private
from clustertune.staging import bundle, staging_step
from clustertune.training.event_log import EventLog

CONTROLLER_SECONDS = 900.0
"""How long a job that has to go back into the queue waits for a controller that does not answer: it may be restarted."""
ASK_SECONDS = 10.0


@dataclass(frozen=True)
class JobInputs:
    """What a job works on, from its first line to its last."""

    resolved: Resolved
    cluster: Cluster
    allocation: Allocation
    path: Path
    """The run folder."""
    stages: tuple[str, str]
    """The first and the last."""
    variables: Sequence[Setting] = ()
    """Of every stage and rank: where caches lie. This process has them already."""
    evaluation: serving.Evaluation | None = None
    """How ``eval`` answers its prompts; None: it is derived here."""

    @property
    def trains(self) -> bool:
        """Whether the training is among the stages."""
        return "train" in STAGES[STAGES.index(self.stages[0]) : STAGES.index(self.stages[1]) + 1]

    def step_command(self, attempt: int, environ: Mapping[str, str] = os.environ) -> list[str]:
        """``srun`` of the node's program, in the cluster's container if it has one. ``environ``: of the batch script."""
        return self._on_nodes(srun.node_command(self.path, attempt), environ=environ)

    def staging_command(self, attempt: int) -> list[str]:
        """``srun`` of the copies on every node. One that fails leaves the others theirs."""
        return self._on_nodes(staging_step.step_command(self.path, attempt), options=["--kill-on-bad-exit=0"])

    def _on_nodes(self, command: Sequence[str], **how: Any) -> list[str]:
        inside = megatron_image.of_training(self.resolved, self.cluster)
        return srun.in_job(command, inside, self.allocation, binds=container.paths_of(self.resolved, self.path), **how)

    def settings(self, traces: str | None = None) -> list[Setting]:
        """The environment of every rank. Cores are those that this node really has: a rehearsal claims more."""
        cores = len(os.sched_getaffinity(0))
        return environment(
            self.cluster,
            world_size=self.resolved.world_size,
            ranks_per_node=max(1, self.resolved.world_size // len(self.allocation.nodes)),
            cpus_per_node=self.allocation.cpus_per_node or cores,
            job=self.allocation.job_id,
            cpu_only=not has_gpus(),
            present=cores,
            traces=traces,
        )

    def split(self) -> JobInputs:
        """The same with the nodes of the servers beside the trainer set apart, where the job trains."""
        return replace(self, allocation=self.allocation.split(self.resolved)) if self.trains else self

    def describe(self) -> list[str]:
        """What the job is about to do, a line each: nodes, ranks, environment with the reason of each variable, the command."""
        allocation, (first, last) = self.allocation, self.stages
        start = f", start {allocation.restart + 1}" if allocation.restart else ""
        what = first if first == last else f"{first} to {last}"
        nodes = ", ".join(allocation.nodes)
        lines = [f"job {allocation.job_id}{start}: {self.resolved.name}, {what}, on {nodes}; run folder {self.path}"]
        lines += [f"  {s.name}={s.value}  # {s.reason}" for s in self.variables]
        if not self.trains:
            return lines
        own = self.split()
        ranks, spare = self.resolved.world_size // len(own.allocation.nodes), ", ".join(own.allocation.spare)
        return [
            *lines,
            f"{self.resolved.world_size} ranks, {ranks} on each node; cluster {self.cluster.name}",
            *([f"servers beside the trainer on {spare}"] if spare else []),
            *(f"  {s.name}={s.value}  # {s.reason}" for s in own.settings()),
            f"on every node: {shlex.join(own.step_command(1))}",
        ]


@dataclass
class JobChain(chain.Chain):
    """The chain with its training spread over the nodes of an allocation."""

    inputs: JobInputs = field(kw_only=True)
    signals: list[int] = field(default_factory=list)
    """Stop signals that this process got, in order."""

    @property
    def allocation(self) -> Allocation:
        return self.inputs.allocation

    @property
    def cluster(self) -> Cluster:
        return self.inputs.cluster

    @property
    def job(self) -> str:
        return self.allocation.job_id

    def get_ready(self) -> None:
        """Look at every node, and at the links between them where the cluster file asks for that."""
        self.check_nodes()
        self.check_links()

    def check_nodes(self) -> None:
        """Look at every node before the ranks start, once in every start of the job. Raises UserError (exit 2 or 75)."""
        if not self.cluster.doctor.preflight:
            return
        ranks = self.resolved.world_size // len(self.allocation.nodes)
        with contextlib.closing(EventLog(self.run.metrics, 0)) as log:
            preflight.check(
                self.cluster, self.allocation, ranks, gpus=has_gpus(), binds=[self.run.path], say=say, log=log.write
            )

    def check_links(self) -> None:
        """The short nccl-check that the cluster file asks for, once in every start of the job. Raises UserError (exit 93)."""
        settings, nodes = self.cluster.nccl_check, len(self.allocation.nodes)
        if settings is None or self.resolved.world_size < 2:
            return
        folder = self.run.path.resolve() / link_check.FOLDER / f"{self.allocation.job_id}-{self.allocation.restart}"
        backend, why = ("nccl", "GPUs") if has_gpus() else ("gloo", "no GPU here: gloo between CPU ranks")
        cpus = min(self.allocation.cpus_per_node or 1 << 20, len(os.sched_getaffinity(0)))
        ranks = self.resolved.world_size // nodes
        target = link_check.job_target(self.allocation, self.cluster, os.environ)
        say(f"nccl-check: {settings.seconds} s at most")
        outcome = link_check.before_job(
            target, link_check.options_for(settings.seconds, backend, why, ranks, cpus, nodes), folder
        )
        with contextlib.closing(EventLog(self.run.metrics, 0)) as log:
            log.write("nccl", **outcome.event())
        say(f"nccl-check, {outcome.seconds:.0f} s: {outcome.headline}")
        link_check.decide(outcome, settings.on_fail)

    def may_repeat(self, outcome: Outcome) -> bool:
        """Whether no stop was requested, and every node answered."""
        if outcome.code not in (ExitCode.AGAIN, ExitCode.FAILED) or self.signals:
            return False
        return not outcome.stop_requested and not outcome.nodes_gone and self.still_mine()

    def still_mine(self) -> bool:
        """Whether no later start of this job works in the run folder."""
        return lease.still_mine(self.run.path, self.allocation.job_id, self.allocation.restart)

    def run_stage(self, stage: str) -> None:
        """In the cluster's container where it has one; the training starts one on every node by itself."""
        answered = stage in ("eval", SCORES) and self.ring is None
        with self.servers() if answered else contextlib.nullcontext(None) as servers:
            self._run_stage(stage, servers)

    def run_scores(self) -> None:
        """With the servers beside the trainer, or the nodes' as the stage ``eval``."""
        self.run_stage(SCORES)

    def _run_stage(self, stage: str, servers: Path | None) -> None:
        contained = self.cluster.container.runtime != "none"
        if stage == "train" or (stage != SCORES and not contained):
            with secrets.lent({GIVEN: str(servers)} if servers else {}):
                super().run_stage(stage)
            return
        command = srun.on_first_node(
            [*self.part(stage), *(["--servers", str(servers)] if servers else [])],
            self.cluster,
            binds=container.paths_of(self.resolved, self.run.path),
            host=self.allocation.nodes[0],
            gpus=bool(self.allocation.gpus_per_node),
            environ=os.environ,
        )
        record = self.run_part(stage, command, "the container" if contained else "its process")
        if stage in STAGES:
            self.results[stage] = record

    @contextlib.contextmanager
    def servers(self) -> Iterator[Path | None]:
        """vLLM's servers as a step of the job, while the context lasts; the folder by which the client finds them."""
        evaluation = self.inputs.evaluation or serving.evaluation(self.resolved, self.cluster)
        if evaluation.serving is None:
            yield None
            return
        say(str(evaluation))
        if len(self.allocation.nodes) < evaluation.serving.nodes:
            text = f"{evaluation.serving} in a job of {len(self.allocation.nodes)}"
            raise UserError(text, key="eval", fix="clustertune submit gives each stage a job of its own size")
        job = f"{self.allocation.job_id}-{self.allocation.restart}"
        folder = self.run.path.resolve() / "servers" / job
        nodes = self.allocation.nodes[: evaluation.serving.nodes]
        folder.mkdir(parents=True, exist_ok=True)
        ServingJob(
            "",  # the client names it: the merged model, then the base
            evaluation.serving,
            "",
            str(folder),
            random_port(),
            f"{self.cluster.storage.scratch}/clustertune-vllm-{job}",
            new_key(folder),
            nodes=nodes if len(nodes) > 1 else (),
            interface=self.cluster.network.interface,
            gpus=tuple(map(str, range(evaluation.serving.gpus_per_node))) if has_gpus() else (),
            program=self.server_program(),
            start_seconds=serving.deadline_seconds(evaluation.start_seconds) if evaluation.start_seconds else START_SECONDS,
        ).write(folder / JOB)
        child = srun.begin(self._servers_command(folder, nodes))
        threading.Thread(target=note_end, args=(child, folder), daemon=True).start()
        try:
            yield folder
        finally:
            end(child, srun.END_SECONDS)
            (folder / KEY).unlink(missing_ok=True)

    def _servers_command(self, folder: Path, nodes: Sequence[str]) -> list[str]:
        """``srun`` of vLLM's servers on some of the job's nodes, in vLLM's container where the cluster has one."""
        settings = self.cluster.container
        return srun.in_job(
            [sys.executable, "-m", "clustertune.evaluate.servers", str(folder)],
            self.cluster.model_copy(update={"container": settings.model_copy(update={"image": settings.vllm})}),
            self.allocation,
            binds=[*container.paths_of(self.resolved, self.run.path), self.base_folder()],
            on=nodes,
        )

    def server_nodes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.allocation.spare, tuple(map(str, range(self.allocation.gpus_per_node if has_gpus() else 0)))

    def scratch(self) -> str:
        return self.cluster.storage.scratch

    def server_program(self) -> str | None:
        return None if self.cluster.container.runtime != "none" else self.cluster.container.vllm

    def begin_servers(self, folder: Path) -> subprocess.Popen[bytes]:
        return srun.begin(self._servers_command(folder, self.allocation.spare))

    def make_plan(self, attempt: int, from_step: int) -> AttemptPlan:
        names = self.allocation.nodes
        settings = self.inputs.settings(traces=str(self.run.attempt(attempt).resolve()))
        return AttemptPlan(
            attempt=attempt,
            nodes=tuple(Node(name, name) for name in names),
            ranks_per_node=self.resolved.world_size // len(names),
            launcher="slurm",
            sigterm_asks=False,
            limit_minutes=self.allocation.limit_minutes,
            job=self.allocation.job_id,
            restart=self.allocation.restart,
            from_step=from_step,
            interface=self.cluster.network.interface if len(names) > 1 else None,
            environment={setting.name: setting.value for setting in settings} | self.attempt_environment(),
            stall_seconds=self.resolved.recipe.slurm.stall_seconds,
            port=first_port(self.allocation.job_id, attempt),
        )

    def start(self, plan: AttemptPlan) -> bool:
        """One attempt as one step of the job."""
        folder = self.run.attempt(plan.attempt)
        command = self.inputs.step_command(plan.attempt)
        say(f"attempt {plan.attempt}: {plan.world_size} ranks on {', '.join(node.name for node in plan.nodes)}")
        contained = self.cluster.container.runtime in container.RUNTIMES
        ask = stop_request_file(folder).touch if contained else None
        if staging_step.is_on(self.resolved, self.cluster):
            # A step of its own: it ends when every node has its copies, and no rank waits in a collective for one that copies.
            copies = self.inputs.staging_command(plan.attempt)
            srun.run_step(copies, self.signals, self.still_mine, ask=stop_request_file(folder).touch)
        srun.run_step(command, self.signals, self.still_mine, lambda: any_node_failed(folder, plan), ask)
        return bool(self.signals)


def check_image(run: RunDir, inputs: JobInputs) -> None:
    """Hold the cluster's image against its sum, and what it has installed against the pins; run.json keeps both.

    Once in every start of the job: what is missing is reported before hours of preparation. Raises UserError.
    """
    resolved, allocation = inputs.resolved, inputs.allocation
    gpus = bool(allocation.gpus_per_node)

    def look(of: Cluster) -> tuple[container_image.Image, list[str], container_packages.Stack] | None:
        """The image of a cluster, what to warn of, and what it has installed. Raises UserError where it does not start."""
        image, notes = container_image.look(of.container)
        if image is None:
            return None
        command, binds = [sys.executable, "-m", container_packages.MODULE], [run.path.resolve()]
        started = srun.on_first_node(command, of, binds=binds, host=allocation.nodes[0], gpus=gpus, environ=os.environ)
        return image, notes, container_packages.ask(started, image.image)

    if (looked := look(inputs.cluster)) is None:
        return
    (image, notes, seen), pinned = looked, pins.read()
    problems, warnings = container_packages.judge(seen, pinned, image.image)
    problems += container_packages.lacking(seen, resolved.train_args, image.image, gpus=gpus)
    for text in filter(None, (*notes, container_image.changed(run.read().get("container"), image), *warnings)):
        say(f"warning: {text}")
    raise_if(problems)
    say(f"container: {image.image}, sha256 {(image.sha256 or 'unknown')[:16]}, Python {seen.python}")
    run.update(container={**image.as_json(), **container_packages.record(seen, pinned)})
    inner = megatron_image.of_training(resolved, inputs.cluster)
    if inner is inputs.cluster or (looked := look(inner)) is None:  # the ranks of a Megatron recipe run in another image
        return
    image, notes, seen = looked
    for text in notes:
        say(f"warning: {text}")
    raise_if(megatron_image.judge_megatron(seen, image.image))
    versions = {name: seen.packages[name] for name in megatron_image.MEGATRON_NEEDED}
    say(f"container of the ranks: {image.image}, Megatron-Bridge {versions['megatron-bridge']}")
    run.update(megatron_container={**image.as_json(), "python": seen.python, "packages": versions})


def run(inputs: JobInputs, command: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The stages of a job. Where it has to end before them, and may continue later, it is requeued.

    Raises UserError as the chain does, or Stopped.
    """
    inputs = inputs.split()
    resolved, cluster, allocation, path = inputs.resolved, inputs.cluster, inputs.allocation, inputs.path
    chain.check_folder(resolved, path)  # before anything is written there: it may be no run folder at all
    signals: list[int] = []
    began = False
    keep_private(cluster)
    with contextlib.ExitStack() as stack:  # the run folder stays this job's until it is back in the queue
        try:
            stack.enter_context(lease.taken_over(RunDir(path), allocation.job_id, allocation.restart, slurm.is_running))
            began = True
            opened = chain.open_run(resolved, path, command)
            opened.describe(resolved, cluster, None, inputs.evaluation)
            opened.update(allocation=asdict(allocation))
            opened.update(environment=[asdict(setting) for setting in inputs.variables])
            check_image(opened, inputs)
            chain.keep_forecast(opened, resolved, cluster)
            return JobChain(opened, resolved, inputs=inputs, signals=signals).go(*inputs.stages)
        except UserError as error:
            if error.code is ExitCode.AGAIN and began:
                _requeue(allocation, path, signals)
            raise
        except Stopped as stopped:
            signals.append(signal.Signals[str(stopped)])
            _requeue(allocation, path, signals)
            raise


def _requeue(allocation: Allocation, path: Path, signals: Sequence[int]) -> None:
    """Ask Slurm to start the job again, unless that was decided already.

    Raises UserError (exit 93) after repeated requeues without progress.
    """
    for number in STOP_SIGNALS:  # Slurm ends what it requeues, and may end it meanwhile; what is left to do is here
        signal.signal(number, signal.SIG_IGN)
    job = allocation.handle
    if not lease.still_mine(path, allocation.job_id, allocation.restart):
        return
    if any(number != signal.SIGUSR1 for number in signals) and not _may_requeue(job):
        return
    progress.check_requeue(path, allocation.job_id)
    if (refused := _ask_for_requeue(job)) is not None:
        fix = "submit it again: it resumes from the newest whole checkpoint"
        say(f"note: job {job} could not be requeued: {refused.problems[0].message} -> {fix}")
        return
    say(f"job {job} is requeued: it resumes from the newest whole checkpoint")


def _ask_for_requeue(job: str) -> UserError | None:
    """Requeue a job; where the controller does not answer, as soon as it does and still has the job running."""
    deadline = time.monotonic() + CONTROLLER_SECONDS
    while True:
        try:
            slurm.requeue(job)
            return None
        except slurm.Unreachable as error:
            if error.code is not ExitCode.AGAIN or time.monotonic() >= deadline:
                return error
            say(f"job {job} waits for the controller: {error.problems[0].message}")
        except UserError as error:
            return error
        time.sleep(ASK_SECONDS)
        with contextlib.suppress(slurm.Unreachable):
            if (slurm.show_job(job) or {}).get("JobState") != "RUNNING":
                return UserError(f"job {job} no longer runs")


def _may_requeue(job: str) -> bool:
    """Whether a job that got SIGTERM is ours to requeue: Slurm does so with a preempted one, and a cancelled one stays ended.

    ``scontrol requeue`` starts also a job that was cancelled (measured on 22.05), so that the state is asked first, also
    where a warning came before: people have a job save, and then cancel it. A job that ran into its limit continues later. One
    that Slurm takes for running was hit by accident: a node that comes back after it was cut off ends what it had of the job,
    and with it what has just been started there.
    """
    try:
        record = slurm.show_job(job) or {}
    except UserError:
        return False
    return record.get("Reason") == "TimeLimit" or record.get("JobState") == "RUNNING"


def has_gpus() -> bool:
    """Whether this node really has GPUs: those of a rehearsal are names only."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


# --- what a job begins with --------------------------------------------------------------------------------------------


def start(inputs: JobInputs, script: Path | None, command: Sequence[str]) -> None:
    """Say what the job is about to do, and run it. ``script``: the batch script of a job by hand. Raises UserError, Stopped."""
    node_folders.make_caches()
    late = None
    if script is not None and inputs.trains:  # the other stages continue file by file, and need less
        stated = shape.signal_given(read_whole(script).decode(errors="replace"))
        late = shape.signal_warning(stated, inputs.resolved.recipe.slurm.signal_seconds, inputs.allocation.limit_minutes)
    for line in inputs.describe():
        say(line)
    for text in filter(None, (late, *inputs.resolved.warnings)):
        say(f"warning: {text}")
    run(inputs, command)
    say(f"done: {inputs.path}")


def begun(job: str, folders: Iterable[Path]) -> Path | None:
    """The run folder of a job by hand that is started again; None if its first start recorded nothing.

    Recipe and cluster file may have been edited since: another recipe would be another run, from its first step.
    """
    return next((one for one in folders if read_object(one / lease.OWNER).get("job") == job and _is_recorded(one)), None)


def _is_recorded(folder: Path) -> bool:
    return bool(read_object(RunDir(folder).run_json).get("cluster"))


def recorded(run_dir: Path | None, *, of_sweep: bool) -> Description | None:
    """What ``submit``, or ``sweep`` for a point, decided; None for a point that was not submitted.

    Raises UserError where the run folder does not say it.
    """
    if run_dir is None:
        raise UserError("--recorded needs --run-dir", file="command line", key="--recorded", fix="add --run-dir")
    if _is_recorded(run_dir):
        return RunDir(run_dir).description()
    if of_sweep:
        return None
    raise UserError("has no cluster", file=str(RunDir(run_dir).run_json), key="cluster", fix="clustertune submit again")


def collected(resolved: Resolved, cluster: Cluster) -> Path | None:
    """What lies for the recipe in the cluster's folder of models.

    ``submit`` has looked into one that only its shell can name.
    """
    try:
        folder, notes = bundle.offered(resolved, cluster_paths.folder(cluster, "models"))
    except UserError as error:
        folder, notes = None, [str(error.problems[0])]
    for note in notes:
        say(f"note: {note}")
    return folder
