"""The program of a Slurm job, on its first node: check the allocation, run the stages, restart or requeue what can go on."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune import chain
from clustertune.checkpoint import store
from clustertune.config.cluster import Cluster
from clustertune.config.resolved import Resolved
from clustertune.console import say, show_error
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import lease, progress, slurm, srun, step
from clustertune.launch.allocation import Allocation
from clustertune.launch.environment import Setting, environment
from clustertune.launch.judge import Outcome, any_node_failed, judge
from clustertune.launch.plan import Node, Plan
from clustertune.launch.rendezvous import first_port
from clustertune.process import STOP_SIGNALS, Stopped
from clustertune.rundir import STAGES, RunDir

CONTROLLER_SECONDS = 900.0
"""How long a job that has to go back into the queue waits for a controller that does not answer: it may be restarted."""
ASK_SECONDS = 10.0


@dataclass
class JobChain(chain.Chain):
    """The chain with its training spread over the nodes of an allocation."""

    allocation: Allocation = field(kw_only=True)
    cluster: Cluster = field(kw_only=True)
    signals: list[int] = field(default_factory=list)
    """Stop signals that this process got, in order."""
    outcome: Outcome | None = None

    def train(self) -> dict[str, Any]:
        """Attempt after attempt in this allocation, as long as all nodes answer and a new checkpoint is reached."""
        while True:
            newest, _ = store.newest_whole(self.run.checkpoints)
            progress.check(self.run.path, self.allocation.job_id, newest.step if newest else 0)
            self.outcome = None
            try:
                return super().train()
            except UserError as error:
                if not self._may_go_on(error):
                    raise
                show_error(UserError(error.problems, ExitCode.AGAIN))
                say("the next attempt begins in this allocation")

    def _may_go_on(self, error: UserError) -> bool:
        """Whether another attempt makes sense here and now: nobody asked to stop, and every node spoke."""
        if self.outcome is None or error.code not in (ExitCode.AGAIN, ExitCode.FAILED) or self.signals:
            return False
        return not self.outcome.asked and not self.outcome.nodes_gone and self.still_mine()

    def still_mine(self) -> bool:
        """Whether no later start of this job works in the run folder."""
        return lease.still_mine(self.run.path, self.allocation.job_id, self.allocation.restart)

    def run_stage(self, stage: str) -> None:
        """In the cluster's container where it has one; the training starts one on every node by itself."""
        if self.cluster.container.runtime == "none" or stage == "train":
            super().run_stage(stage)
            return
        words = [sys.executable, "-m", "clustertune", "part", stage, "--run-dir", str(self.run.path.resolve())]
        command = in_container(words, self.run.path, self.cluster, gpus=bool(self.allocation.gpus_per_node))
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        record = self.run.stage(stage)
        if code or record is None:
            known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
            fix = "the lines above say why"
            raise UserError(Problem(f"{stage} failed in the container (exit code {code})", fix=fix), known)
        self.results[stage] = record

    def make_plan(self, attempt: int, from_step: int) -> Plan:
        names = self.allocation.nodes
        traces = str(self.run.attempt(attempt).resolve())
        settings = settings_of(self.resolved, self.cluster, self.allocation, traces)
        compute = self.cluster.compute
        return Plan(
            attempt=attempt,
            nodes=tuple(Node(name, name) for name in names),
            ranks_per_node=self.resolved.world_size // len(names),
            launcher="slurm",
            job=self.allocation.job_id,
            restart=self.allocation.restart,
            from_step=from_step,
            interface=self.cluster.network.interface if len(names) > 1 else None,
            environment={setting.name: setting.value for setting in settings},
            numa_gpus=tuple(tuple(group) for group in compute.numa_gpus or ()),
            numa_cpus=tuple(compute.numa_cpus or ()),
            stall_seconds=self.resolved.recipe.slurm.stall_seconds,
            port=first_port(self.allocation.job_id, attempt),
        )

    def run_attempt(self, plan: Plan) -> Outcome:
        """One attempt as one step of the job."""
        folder = self.run.attempt(plan.attempt)
        plan.write(folder)
        command = step_command(self.run.path, plan.attempt, self.cluster, self.allocation)
        say(f"attempt {plan.attempt}: {plan.world_size} ranks on {', '.join(node.name for node in plan.nodes)}")
        srun.run_step(command, self.signals, self.still_mine, lambda: any_node_failed(folder, plan))
        self.outcome = judge(folder, plan, asked=bool(self.signals))
        with contextlib.suppress(OSError):  # a full disk is what it may have to tell
            self.outcome.write(folder)
        return self.outcome


def step_command(run_path: Path, attempt: int, cluster: Cluster, allocation: Allocation) -> list[str]:
    """``srun`` of the node's program, in the cluster's container if it has one."""
    gpus = bool(allocation.gpus_per_node)
    inside = in_container(step.node_command(run_path, attempt), run_path, cluster, gpus=gpus)
    # Slurm gives whole cores: a job that asked for one CPU has two, and srun warns of a step that wants both.
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    cpus = int(asked) if asked.isdigit() else allocation.cpus_per_node
    return step.srun_command(inside, nodes=len(allocation.nodes), cpus=cpus, gpus=gpus, environ=os.environ)


def in_container(command: list[str], run_path: Path, cluster: Cluster, *, gpus: bool) -> list[str]:
    """The command in the cluster's container, which sees the checkout, the run, and what the cluster file binds."""
    return step.container_command(
        command,
        runtime=cluster.container.runtime,
        image=cluster.container.image,
        binds=[str(run_path.resolve()), cluster.storage.scratch, *cluster.container.binds],
        gpus=gpus,
        repo=chain.REPO,
    )


def run(
    resolved: Resolved, cluster: Cluster, allocation: Allocation, path: Path, stages: tuple[str, str], command: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The stages of a job. Where it has to end before them, and may go on later, it is requeued.

    Raises UserError as the chain does, or Stopped.
    """
    chain.check_folder(resolved, path)  # before anything is written there: it may be no run folder at all
    signals: list[int] = []
    began = False
    with contextlib.ExitStack() as stack:  # the run folder stays this job's until it is back in the queue
        try:
            stack.enter_context(lease.taken_over(RunDir(path), allocation.job_id, allocation.restart, slurm.is_running))
            began = True
            opened = chain.open_run(resolved, path, command)
            opened.update(cluster=cluster.model_dump(mode="json"), allocation=asdict(allocation))
            chain.keep_forecast(opened, resolved, cluster)
            return JobChain(opened, resolved, allocation=allocation, cluster=cluster, signals=signals).go(*stages)
        except UserError as error:
            if error.code is ExitCode.AGAIN and began:
                _requeue(allocation, path, signals)
            raise
        except Stopped as stopped:
            signals.append(signal.Signals[str(stopped)])
            _requeue(allocation, path, signals)
            raise


def _requeue(allocation: Allocation, path: Path, signals: Sequence[int]) -> None:
    """Ask Slurm to start the job again, unless somebody else has decided over it already.

    Raises UserError (exit 93) where it goes round without getting anywhere.
    """
    for number in STOP_SIGNALS:  # Slurm ends what it requeues, and may end it meanwhile; what is left to do is here
        signal.signal(number, signal.SIG_IGN)
    job = allocation.handle
    if not lease.still_mine(path, allocation.job_id, allocation.restart):
        return
    if any(number != signal.SIGUSR1 for number in signals) and not _ended_by_nobody(job):
        return
    progress.check_requeue(path, allocation.job_id)
    if (refused := _ask_for_requeue(job)) is not None:
        fix = "submit it again: it goes on from the newest whole checkpoint"
        say(f"note: job {job} could not be requeued: {refused.problems[0].message} -> {fix}")
        return
    say(f"job {job} is requeued: it goes on from the newest whole checkpoint")


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
                return UserError(f"job {job} runs no longer")


def _ended_by_nobody(job: str) -> bool:
    """Whether a job that got SIGTERM is ours to requeue: Slurm does so with a preempted one, and nobody with a cancelled one.

    ``scontrol requeue`` starts also a job that was cancelled (measured on 22.05), so that the state is asked first, also
    where a warning came before: people have a job save, and then cancel it. A job that ran into its limit goes on later. One
    that Slurm takes for running was hit by accident: a node that comes back after it was cut off ends what it had of the job,
    and with it what has just been started there.
    """
    try:
        found = slurm.show_job(job) or {}
    except UserError:
        return False
    return found.get("Reason") == "TimeLimit" or found.get("JobState") == "RUNNING"


def describe(resolved: Resolved, cluster: Cluster, allocation: Allocation, path: Path, stages: tuple[str, str]) -> list[str]:
    """What a job is about to do, line by line: nodes, ranks, environment with the reason of each variable, the command."""
    start = f", start {allocation.restart + 1}" if allocation.restart else ""
    what = stages[0] if stages[0] == stages[1] else f"{stages[0]} to {stages[1]}"
    head = f"job {allocation.job_id}{start}: {resolved.name}, {what}, on {', '.join(allocation.nodes)}; run folder {path}"
    if "train" not in STAGES[STAGES.index(stages[0]) : STAGES.index(stages[1]) + 1]:
        return [head]
    ranks = resolved.world_size // len(allocation.nodes)
    return [
        head,
        f"{resolved.world_size} ranks, {ranks} on each node; cluster {cluster.name}",
        *(f"  {s.name}={s.value}  # {s.reason}" for s in settings_of(resolved, cluster, allocation)),
        f"on every node: {shlex.join(step_command(path, 1, cluster, allocation))}",
    ]


def has_gpus() -> bool:
    """Whether this node really has GPUs: those of a rehearsal are names only."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def settings_of(resolved: Resolved, cluster: Cluster, allocation: Allocation, traces: str | None = None) -> list[Setting]:
    """The environment of every rank. Cores are those that this node really has: a rehearsal claims more."""
    ranks = max(1, resolved.world_size // len(allocation.nodes))
    here = len(os.sched_getaffinity(0))
    return environment(
        cluster,
        world_size=resolved.world_size,
        ranks_per_node=ranks,
        cpus_per_node=allocation.cpus_per_node or here,
        job=allocation.job_id,
        cpu_only=not has_gpus(),
        present=here,
        traces=traces,
    )
