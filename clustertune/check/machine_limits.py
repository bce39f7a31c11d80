"""Shared memory, limits, cores, memory, kernel and clock of one machine. Python 3.8, standard library."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.machine import LOGIN, Machine, first_part, gigabytes
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Seen, either, listed
from clustertune.host.system import GIB, MIB, version

SHM_LEAST, SHM_SMALL = 128 * MIB, GIB
"""NCCL maps 9.6 MB for each connection (https://github.com/NVIDIA/nccl/issues/525): thirteen of them fill the first, which is
more than Docker's default of 64 MiB; eight ranks with two channels between neighbours come near the second."""
MEMLOCK_LEAST, MEMLOCK_ENOUGH = 64 * MIB, 4 * GIB
"""The limit holds for each process (getrlimit(2)). A rank registers 4 MiB for each connection (NCCL_BUFFSIZE in NCCL's guide):
the second is enough for a thousand of them. Slurm's services start with 64 KiB or 8 MiB: there the first connection fails."""
ENOUGH_FILES, ENOUGH_PROCESSES = 4096, 4096
KERNEL_LEAST, GLIBC_LEAST = (5, 5), (2, 28)
OFFSET_S = 1.0


def shm(m: Machine) -> Iterator[Seen]:
    """Shared memory is there, is larger than Docker's default, and has room.

    Looks at: size and room of /dev/shm
    Why: NCCL and data loaders pass data through it: a small one ends ranks with a bus error or 'no space left on device'
    See: https://github.com/NVIDIA/nccl/issues/342
    """
    f = m.facts
    if f.shm_bytes is None or not m.computes:
        return
    fix = "docker run --shm-size=16g (or --ipc=host); apptainer binds the host's; on a host: mount -o remount,size=50% /dev/shm"
    free = f.shm_bytes if f.shm_free_bytes is None else f.shm_free_bytes
    needed = bool(m.facts.gpus or m.expects.gpus) and m.expects.gpus != 1 and not m.rehearsal
    if f.shm_bytes < SHM_SMALL:
        hard = not f.shm_bytes or (needed and f.shm_bytes < SHM_LEAST)
        size = f"{gigabytes(f.shm_bytes)} in all" if f.shm_bytes else "there is no /dev/shm"
        yield Seen(FAIL if hard else WARN, size, fix)
        return
    left = f"{gigabytes(free)} left of {gigabytes(f.shm_bytes)}" if free < GIB // 4 else ""
    clean = "remove what ended jobs have left (ls -l /dev/shm), as root or as the files' owner"
    yield from either(FAIL if free < SHM_LEAST and needed else WARN, left, f"{gigabytes(free)} free", clean)


def memlock(m: Machine) -> Iterator[Seen]:
    """No limit where RDMA is used; on a login node it is what Slurm passes on to jobs.

    Looks at: how much memory may be locked, where ranks run
    Why: RDMA adapters lock what they send: with Slurm's own small limit ibv_reg_mr ends with 'cannot allocate memory'
    Fix: LimitMEMLOCK=infinity in slurmd's unit (systemctl edit slurmd), PropagateResourceLimitsExcept=MEMLOCK in
      slurm.conf
    See: https://github.com/NVIDIA/nccl-tests/issues/206
    """
    f = m.facts
    kind = m.section("network").get("kind")
    rdma = any(port.active for port in f.rdma) or kind in ("infiniband", "roce")
    # every Ethernet adapter of some makers shows an active port: where the file says ethernet RDMA is switched off
    if f.memlock_bytes is None or not rdma or m.rehearsal or kind == "ethernet" or m.environ("NCCL_IB_DISABLE") == "1":
        return
    text = "unlimited" if f.memlock_bytes < 0 else f"{gigabytes(f.memlock_bytes)} may be locked"
    if f.memlock_bytes < 0 or f.memlock_bytes >= MEMLOCK_ENOUGH:
        yield Seen(PASS, text)
    elif m.place == LOGIN:
        kept = "MEMLOCK" in f.slurm.get("PropagateResourceLimitsExcept", "")
        if not kept and f.slurm.get("PropagateResourceLimits") == "ALL":
            yield Seen(WARN, f"{text} here, and Slurm passes the limit on to jobs")
    elif not m.several or f.user == "root":  # CAP_IPC_LOCK, where it is not taken away, knows no limit
        yield Seen(WARN, text)
    else:
        yield Seen(FAIL if f.memlock_bytes <= MEMLOCK_LEAST else WARN, text)


def _limit(m: Machine, limit: int | None, enough: int, fix: str, hard: int = 0) -> Iterator[Seen]:
    """A limit of the place where ranks run; below ``hard`` it fails."""
    if limit is not None and m.computes:
        low = str(limit) if 0 <= limit < enough else ""
        yield from either(FAIL if limit < hard else WARN, low, "unlimited" if limit < 0 else str(limit), fix)


def open_files(m: Machine) -> Iterator[Seen]:
    """Enough files may be open at once.

    Looks at: limit of open files
    Why: connections, data loaders and shards of weights all take files: 'too many open files' comes hours into a job
    See: https://man7.org/linux/man-pages/man2/getrlimit.2.html
    """
    fix = "LimitNOFILE=1048576 in slurmd's unit; in a shell: ulimit -n 65536"
    yield from _limit(m, m.facts.nofile, ENOUGH_FILES, fix, hard=256)


def processes(m: Machine) -> Iterator[Seen]:
    """Enough processes may run at once.

    Looks at: limit of processes
    Why: ranks, their threads and data loaders count together: a fork then fails with 'resource temporarily unavailable'
    See: https://man7.org/linux/man-pages/man2/getrlimit.2.html
    """
    more = "LimitNPROC=infinity in slurmd's unit, TasksMax=infinity; in a shell: ulimit -u 65536"
    yield from _limit(m, m.facts.nproc, ENOUGH_PROCESSES, more)


def cores_in_step(m: Machine) -> Iterator[Seen]:
    """The step may use the cores that the job asked for, as far as the machine has them.

    Looks at: cores of the step, against those that were asked for
    Why: since Slurm 22.05 srun does not take sbatch's --cpus-per-task: all ranks of a node share one core
    See: https://github.com/Lightning-AI/pytorch-lightning/issues/18650
    """
    f = m.facts
    requested_text = m.environ("SLURM_CPUS_PER_TASK") or m.environ("SRUN_CPUS_PER_TASK")
    requested = int(requested_text) if requested_text.isdigit() else m.expects.cpus
    if not m.in_step or f.affinity is None or not f.cpus or not requested:
        return
    wanted = min(requested, f.cpus)  # a rehearsal claims more than there are
    few = f"{f.affinity} CPUs ({f.affinity_list or '?'}), asked for {requested}" if f.affinity < wanted else ""
    fix = f"srun --cpus-per-task={requested}, or export SRUN_CPUS_PER_TASK in the job's script"
    status = FAIL if f.affinity * 2 <= wanted else WARN
    yield from either(status, few, f"{f.affinity} CPUs, asked for {requested}", fix)


def memory(m: Machine) -> Iterator[Seen]:
    """Most of the memory is free before a job begins.

    Looks at: memory that is free before the job begins
    Why: what an earlier job or a full tmpfs holds is missing when the weights are loaded: the kernel ends a rank
    Fix: find who holds it (ps, df /dev/shm, leftovers of ended jobs); if it belongs to no process: reboot the node
    See: https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html
    """
    free, total = m.facts.memory_available_bytes, m.facts.memory_bytes
    shared = m.environ("SLURM_MEM_PER_NODE") or m.environ("SLURM_MEM_PER_CPU")
    if m.computes and total and free is not None and not shared:
        little = f"{gigabytes(free)} free of {gigabytes(total)}" if free / total < 0.5 else ""
        yield from either(WARN, little, f"{gigabytes(free)} free")


def swap(m: Machine) -> Iterator[Seen]:
    """Nothing of weight is in swap.

    Looks at: memory in swap
    Why: a rank whose memory comes back from disk keeps all others waiting
    Fix: as root, with enough memory free: swapoff -a; swapon -a; vm.swappiness=1 on compute nodes
    See: https://www.kernel.org/doc/html/latest/admin-guide/sysctl/vm.html
    """
    used = m.facts.swap_used_bytes
    if used is not None and m.computes and m.facts.memory_bytes:
        yield Seen(WARN if used > GIB else PASS, f"{gigabytes(used)} in swap" if used else "none in use")


def huge_pages(m: Machine) -> Iterator[Seen]:
    """No allocation waits for a huge page.

    Looks at: how the kernel makes huge pages
    Why: with defrag=always every allocation may wait while the kernel moves memory: steps of very different length
    Fix: as root: echo madvise > /sys/kernel/mm/transparent_hugepage/defrag
    See: https://docs.kernel.org/admin-guide/mm/transhuge.html
    """
    f = m.facts
    if m.computes and f.memory_bytes and f.thp_defrag:
        yield Seen(WARN if f.thp_defrag == "always" else PASS, f"defrag is {f.thp_defrag}")


def kernel(m: Machine) -> Iterator[Seen]:
    """The kernel is new enough for the stack.

    Looks at: version of the kernel
    Why: accelerate warns below 5.5: processes may hang
    See: https://github.com/modelscope/ms-swift/issues/283
    """
    old = m.facts.kernel if version(m.facts.kernel) < KERNEL_LEAST else ""
    if version(m.facts.kernel) and m.computes:
        fix = "run on nodes with a newer distribution; a container does not change the kernel"
        yield from either(WARN, old, m.facts.kernel, fix)


def glibc(m: Machine) -> Iterator[Seen]:
    """The C library is new enough for the stack.

    Looks at: version of the C library, where packages are installed
    Why: torch's wheels are built for 2.28 and newer: pip finds none, or the import ends with 'GLIBC_2.28 not found'
    See: https://github.com/pytorch/pytorch/issues/123649
    """
    library = version(m.facts.glibc)
    outside = m.section("container").get("runtime") in (None, "none") or m.in_container
    if library and m.computes and outside:
        fix = "run in a container (container.runtime of the cluster file), or on a newer distribution"
        yield from either(FAIL, m.facts.glibc if library < GLIBC_LEAST else "", m.facts.glibc, fix)


def clock(m: Machine) -> Iterator[Seen]:
    """The clock is kept right, and is right.

    Looks at: whether the clock is synchronised
    Why: clocks drift apart: munge refuses jobs beyond 5 minutes, NFS shows files from the future, logs cannot be put in order
    See: https://slurm.schedmd.com/troubleshoot.html
    """
    f = m.facts
    fix = "as root: systemctl enable --now chronyd (or systemd-timesyncd), with the same servers on all nodes"
    if f.clock_offset_s is not None and f.clock_offset_s > OFFSET_S:
        yield Seen(WARN, f"off by {f.clock_offset_s:.1f} s", "as root: chronyc makestep; look at chronyc sources")
    elif f.clock_synchronised is False and m.in_container:
        yield Seen(UNKNOWN, "nothing in this container shows whether the clock is synchronised")
    elif f.clock_synchronised is False:
        yield Seen(WARN, "no service keeps the clock synchronised", fix)
    elif f.clock_synchronised:
        yield Seen(PASS, "synchronised" if f.clock_offset_s is None else f"off by {f.clock_offset_s * 1000:.1f} ms")
    else:
        yield Seen(UNKNOWN, "no service reports whether the clock is synchronised")


# --- machine slurm --------------------------------------------------------------------------------------------------------

# Slurm as a login node sees it: the controller, accounting, and whether jobs keep to their own GPUs. Python 3.8.


def slurm_controller(m: Machine) -> Iterator[Seen]:
    """It answers.

    Looks at: whether slurmctld answers
    Why: nothing can be submitted, and jobs that run cannot be requeued
    Fix: scontrol ping; systemctl status slurmctld on its machine; the same slurm.conf everywhere; munge -n | unmunge
    See: https://slurm.schedmd.com/troubleshoot.html
    """
    f = m.facts
    yield from either(FAIL, f.slurm_silent or "", f.slurm.get("SLURM_VERSION", "answers") if f.slurm else "")


def slurm_nodes(m: Machine) -> Iterator[Seen]:
    """All nodes of the cluster file take jobs.

    Looks at: nodes that take no jobs
    Why: a job that asks for all nodes waits for ever, with reason ReqNodeNotAvail or Resources
    Fix: look at the reason (sinfo -R), fix it, then: scontrol update nodename=NODE state=resume
    See: https://slurm.schedmd.com/troubleshoot.html#nodes
    """
    f = m.facts
    if f.slurm_silent or not f.slurm:
        return
    wanted = {first_part(name) for name in m.names_with("compute")}
    bad = [f"{name}: {state}" for name, state in sorted(f.slurm_nodes.items()) if not wanted or first_part(name) in wanted]
    yield from either(WARN, listed(bad, 8, "; ", "; and"), "all take jobs")


def slurm_accounting(m: Machine) -> Iterator[Seen]:
    """Accounting is as the cluster file says.

    Looks at: accounting, against the cluster file
    Why: without slurmdbd sacct knows nothing of jobs that have ended; where it ought to run it is broken
    Fix: start slurmdbd (clustertune setup slurm), or accounting: false in the cluster file
    See: https://slurm.schedmd.com/accounting.html
    """
    kind = m.facts.slurm.get("AccountingStorageType", "")
    runs = not kind.endswith("/none") and kind != "(null)"
    lacking = kind and not runs and m.section("slurm").get("accounting")
    good = "slurmdbd" if runs else "none: clustertune asks squeue and scontrol"
    yield from either(WARN, "the cluster file counts on it, and Slurm has none" if lacking else "", good if kind else "")


def slurm_devices(m: Machine) -> Iterator[Seen]:
    """Jobs are kept apart by their GPUs.

    Looks at: whether a job sees only its own GPUs
    Why: without ConstrainDevices every job sees all GPUs of a node: two jobs meet on GPU 0
    Fix: ConstrainDevices=yes in cgroup.conf, and task/cgroup in TaskPlugin: clustertune setup slurm
    See: https://slurm.schedmd.com/cgroup.conf.html
    """
    config = m.facts.slurm
    # Slurm before 22.05 does not show cgroup.conf
    unseen = "ConstrainDevices" not in config and "cgroup" in config.get("TaskPlugin", "")
    if not m.rehearsal and "gpu" in config.get("GresTypes", "") and not unseen:
        off = config.get("ConstrainDevices", "no").lower() != "yes"
        yield Seen(WARN if off else PASS, f"ConstrainDevices is {'off' if off else 'on'}")


def slurm_affinity(m: Machine) -> Iterator[Seen]:
    """Jobs are kept apart by their cores.

    Looks at: whether a job keeps to its own cores
    Why: without a task plugin the ranks of two jobs share cores, and none is bound
    Fix: TaskPlugin=task/cgroup,task/affinity in slurm.conf
    See: https://slurm.schedmd.com/slurm.conf.html#OPT_TaskPlugin
    """
    config = m.facts.slurm
    plugin = config.get("TaskPlugin", "")
    if not m.rehearsal and "gpu" in config.get("GresTypes", ""):
        yield Seen(WARN if plugin in ("", "task/none", "(null)") else PASS, plugin or "no TaskPlugin")


def srun_cpus(m: Machine) -> Iterator[Seen]:
    """A batch script passes its number of cores on to srun.

    Looks at: cores that srun gives to steps of this job
    Why: since Slurm 22.05 srun does not take sbatch's --cpus-per-task: a step that is started by hand gets one core
    See: https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41
    """
    requested, step = m.environ("SLURM_CPUS_PER_TASK"), m.environ("SRUN_CPUS_PER_TASK")
    if requested.isdigit() and int(requested) > 1 and not m.in_step:
        differs = f"--cpus-per-task={requested}, SRUN_CPUS_PER_TASK is not set" if step != requested else ""
        yield from either(WARN, differs, step, f"export SRUN_CPUS_PER_TASK={requested}")
