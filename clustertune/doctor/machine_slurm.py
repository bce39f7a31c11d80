"""Slurm as a login node sees it: the controller, accounting, and whether jobs keep to their own GPUs. Python 3.8."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.doctor.machine import Machine
from clustertune.health import FAIL, PASS, WARN, Finding, Rule

CONTROLLER = Rule(
    "slurm-controller",
    "whether slurmctld answers",
    "nothing can be submitted, and jobs that run cannot be requeued",
    "https://slurm.schedmd.com/troubleshoot.html",
)
NODES = Rule(
    "slurm-nodes",
    "nodes that take no jobs",
    "a job that asks for all nodes waits for ever, with reason ReqNodeNotAvail or Resources",
    "https://slurm.schedmd.com/troubleshoot.html#nodes",
)
ACCOUNTING = Rule(
    "slurm-accounting",
    "accounting, against the cluster file",
    "without slurmdbd sacct knows nothing of jobs that have ended; where it ought to run it is broken",
    "https://slurm.schedmd.com/accounting.html",
)
DEVICES = Rule(
    "slurm-devices",
    "whether a job sees only its own GPUs",
    "without ConstrainDevices every job sees all GPUs of a node: two jobs meet on GPU 0",
    "https://slurm.schedmd.com/cgroup.conf.html",
)
TASKS = Rule(
    "slurm-affinity",
    "whether a job keeps to its own cores",
    "without a task plugin the ranks of two jobs share cores, and none is bound",
    "https://slurm.schedmd.com/slurm.conf.html#OPT_TaskPlugin",
)
SRUN_CPUS = Rule(
    "srun-cpus",
    "cores that srun gives to steps of this job",
    "since Slurm 22.05 srun does not take sbatch's --cpus-per-task: a step that is started by hand gets one core",
    "https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41",
)
RULES = (CONTROLLER, NODES, ACCOUNTING, DEVICES, TASKS, SRUN_CPUS)


def controller(m: Machine) -> Iterator[Finding]:
    """It answers, and all nodes of the cluster file take jobs."""
    f = m.facts
    if f.slurm_silent:
        fix = "scontrol ping; systemctl status slurmctld on its machine; the same slurm.conf everywhere; munge -n | unmunge"
        yield m.tell(CONTROLLER, FAIL, f.slurm_silent, fix)
        return
    if not f.slurm:
        return
    yield m.tell(CONTROLLER, PASS, f.slurm.get("SLURM_VERSION", "answers"))
    wanted = {name.lower().partition(".")[0] for name in m.names_with("compute")}
    bad = {name: state for name, state in f.slurm_nodes.items() if not wanted or name.lower().partition(".")[0] in wanted}
    if bad:
        told = "; ".join(f"{name}: {state}" for name, state in sorted(bad.items())[:8])
        told += f"; and {len(bad) - 8} more" if len(bad) > 8 else ""
        yield m.tell(
            NODES, WARN, told, "look at the reason (sinfo -R), mend it, then: scontrol update nodename=NODE state=resume"
        )
    else:
        yield m.tell(NODES, PASS, "all take jobs")


def configuration(m: Machine) -> Iterator[Finding]:
    """Accounting as the cluster file says, and jobs that are kept apart."""
    config = m.facts.slurm
    if not config:
        return
    kind = config.get("AccountingStorageType", "")
    runs = not kind.endswith("/none") and kind != "(null)"
    if kind and not runs and m.section("slurm").get("accounting"):
        fix = "start slurmdbd (clustertune ops slurm plan), or accounting: false in the cluster file"
        yield m.tell(ACCOUNTING, WARN, "the cluster file counts on it, and Slurm has none", fix)
    elif kind:
        yield m.tell(ACCOUNTING, PASS, "slurmdbd" if runs else "none: clustertune asks squeue and scontrol")
    if m.rehearsal or "gpu" not in config.get("GresTypes", ""):
        return
    if "ConstrainDevices" not in config and "cgroup" in config.get("TaskPlugin", ""):
        pass  # Slurm before 22.05 does not show cgroup.conf
    elif config.get("ConstrainDevices", "no").lower() != "yes":
        fix = "ConstrainDevices=yes in cgroup.conf, and task/cgroup in TaskPlugin: clustertune ops slurm plan"
        yield m.tell(DEVICES, WARN, "ConstrainDevices is off", fix)
    else:
        yield m.tell(DEVICES, PASS, "ConstrainDevices is on")
    plugin = config.get("TaskPlugin", "")
    if plugin in ("", "task/none", "(null)"):
        yield m.tell(TASKS, WARN, plugin or "no TaskPlugin", "TaskPlugin=task/cgroup,task/affinity in slurm.conf")
    else:
        yield m.tell(TASKS, PASS, plugin)


def srun_cpus(m: Machine) -> Iterator[Finding]:
    """In a batch script srun is told of the cores."""
    asked, told = m.environ("SLURM_CPUS_PER_TASK"), m.environ("SRUN_CPUS_PER_TASK")
    if not asked.isdigit() or int(asked) < 2 or m.in_step:
        return
    if told != asked:
        yield m.tell(
            SRUN_CPUS, WARN, f"--cpus-per-task={asked}, SRUN_CPUS_PER_TASK is not set", f"export SRUN_CPUS_PER_TASK={asked}"
        )
    else:
        yield m.tell(SRUN_CPUS, PASS, told)


LOOKS = (controller, configuration, srun_cpus)


def check(m: Machine) -> Iterator[Finding]:
    """All of them."""
    for look in LOOKS:
        yield from look(m)
