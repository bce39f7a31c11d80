"""Slurm as a login node sees it: the controller, accounting, and whether jobs keep to their own GPUs. Python 3.8."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, WARN, Seen, rule


@rule("slurm-controller", MACHINE)
def controller(m: Machine) -> Iterator[Seen]:
    """It answers.

    Looks at: whether slurmctld answers
    Why: nothing can be submitted, and jobs that run cannot be requeued
    Fix: scontrol ping; systemctl status slurmctld on its machine; the same slurm.conf everywhere; munge -n | unmunge
    See: https://slurm.schedmd.com/troubleshoot.html
    """
    f = m.facts
    if f.slurm_silent:
        yield Seen(FAIL, f.slurm_silent)
    elif f.slurm:
        yield Seen(PASS, f.slurm.get("SLURM_VERSION", "answers"))


@rule("slurm-nodes", MACHINE)
def nodes(m: Machine) -> Iterator[Seen]:
    """All nodes of the cluster file take jobs.

    Looks at: nodes that take no jobs
    Why: a job that asks for all nodes waits for ever, with reason ReqNodeNotAvail or Resources
    Fix: look at the reason (sinfo -R), fix it, then: scontrol update nodename=NODE state=resume
    See: https://slurm.schedmd.com/troubleshoot.html#nodes
    """
    f = m.facts
    if f.slurm_silent or not f.slurm:
        return
    wanted = {name.lower().partition(".")[0] for name in m.names_with("compute")}
    bad = {name: state for name, state in f.slurm_nodes.items() if not wanted or name.lower().partition(".")[0] in wanted}
    if bad:
        told = "; ".join(f"{name}: {state}" for name, state in sorted(bad.items())[:8])
        told += f"; and {len(bad) - 8} more" if len(bad) > 8 else ""
        yield Seen(WARN, told)
    else:
        yield Seen(PASS, "all take jobs")


@rule("slurm-accounting", MACHINE)
def accounting(m: Machine) -> Iterator[Seen]:
    """Accounting is as the cluster file says.

    Looks at: accounting, against the cluster file
    Why: without slurmdbd sacct knows nothing of jobs that have ended; where it ought to run it is broken
    Fix: start slurmdbd (clustertune ops slurm plan), or accounting: false in the cluster file
    See: https://slurm.schedmd.com/accounting.html
    """
    kind = m.facts.slurm.get("AccountingStorageType", "")
    runs = not kind.endswith("/none") and kind != "(null)"
    if kind and not runs and m.section("slurm").get("accounting"):
        yield Seen(WARN, "the cluster file counts on it, and Slurm has none")
    elif kind:
        yield Seen(PASS, "slurmdbd" if runs else "none: clustertune asks squeue and scontrol")


@rule("slurm-devices", MACHINE)
def devices(m: Machine) -> Iterator[Seen]:
    """Jobs are kept apart by their GPUs.

    Looks at: whether a job sees only its own GPUs
    Why: without ConstrainDevices every job sees all GPUs of a node: two jobs meet on GPU 0
    Fix: ConstrainDevices=yes in cgroup.conf, and task/cgroup in TaskPlugin: clustertune ops slurm plan
    See: https://slurm.schedmd.com/cgroup.conf.html
    """
    config = m.facts.slurm
    if m.rehearsal or "gpu" not in config.get("GresTypes", ""):
        return
    if "ConstrainDevices" not in config and "cgroup" in config.get("TaskPlugin", ""):
        pass  # Slurm before 22.05 does not show cgroup.conf
    elif config.get("ConstrainDevices", "no").lower() != "yes":
        yield Seen(WARN, "ConstrainDevices is off")
    else:
        yield Seen(PASS, "ConstrainDevices is on")


@rule("slurm-affinity", MACHINE)
def affinity(m: Machine) -> Iterator[Seen]:
    """Jobs are kept apart by their cores.

    Looks at: whether a job keeps to its own cores
    Why: without a task plugin the ranks of two jobs share cores, and none is bound
    Fix: TaskPlugin=task/cgroup,task/affinity in slurm.conf
    See: https://slurm.schedmd.com/slurm.conf.html#OPT_TaskPlugin
    """
    config = m.facts.slurm
    if m.rehearsal or "gpu" not in config.get("GresTypes", ""):
        return
    plugin = config.get("TaskPlugin", "")
    if plugin in ("", "task/none", "(null)"):
        yield Seen(WARN, plugin or "no TaskPlugin")
    else:
        yield Seen(PASS, plugin)


@rule("srun-cpus", MACHINE)
def srun_cpus(m: Machine) -> Iterator[Seen]:
    """A batch script passes its number of cores on to srun.

    Looks at: cores that srun gives to steps of this job
    Why: since Slurm 22.05 srun does not take sbatch's --cpus-per-task: a step that is started by hand gets one core
    See: https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41
    """
    asked, told = m.environ("SLURM_CPUS_PER_TASK"), m.environ("SRUN_CPUS_PER_TASK")
    if not asked.isdigit() or int(asked) < 2 or m.in_step:
        return
    if told != asked:
        yield Seen(WARN, f"--cpus-per-task={asked}, SRUN_CPUS_PER_TASK is not set", f"export SRUN_CPUS_PER_TASK={asked}")
    else:
        yield Seen(PASS, told)
