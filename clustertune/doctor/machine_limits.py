"""Shared memory, limits, cores, memory, kernel and clock of one machine. Python 3.8, standard library."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.doctor.machine import LOGIN, Machine, gigabytes
from clustertune.health import FAIL, PASS, UNKNOWN, WARN, Finding, Rule
from clustertune.host.system import version

SHM = Rule(
    "shm",
    "size and room of /dev/shm",
    "NCCL and data loaders pass data through it: a small one ends ranks with a bus error or 'no space left on device'",
    "https://github.com/NVIDIA/nccl/issues/342",
)
MEMLOCK = Rule(
    "memlock",
    "how much memory may be locked, in the place where ranks run",
    "RDMA adapters lock what they send: with Slurm's own small limit ibv_reg_mr ends with 'cannot allocate memory'",
    "https://github.com/NVIDIA/nccl-tests/issues/206",
)
NOFILE = Rule(
    "open-files",
    "limit of open files",
    "connections, data loaders and shards of weights all take files: 'too many open files' comes hours into a job",
    "https://man7.org/linux/man-pages/man2/getrlimit.2.html",
)
NPROC = Rule(
    "processes",
    "limit of processes",
    "ranks, their threads and data loaders count together: a fork then fails with 'resource temporarily unavailable'",
    "https://man7.org/linux/man-pages/man2/getrlimit.2.html",
)
CORES = Rule(
    "cores-in-step",
    "cores of the step, against those that were asked for",
    "since Slurm 22.05 srun does not take sbatch's --cpus-per-task: all ranks of a node share one core",
    "https://github.com/Lightning-AI/pytorch-lightning/issues/18650",
)
MEMORY = Rule(
    "memory",
    "memory that is free before the job begins",
    "what an earlier job or a full tmpfs holds is missing when the weights are loaded: the kernel ends a rank",
    "https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html",
)
SWAP = Rule(
    "swap",
    "memory in swap",
    "a rank whose memory comes back from disk keeps all others waiting",
    "https://www.kernel.org/doc/html/latest/admin-guide/sysctl/vm.html",
)
THP = Rule(
    "huge-pages",
    "how the kernel makes huge pages",
    "with defrag=always every allocation may wait while the kernel moves memory: steps of very different length",
    "https://docs.kernel.org/admin-guide/mm/transhuge.html",
)
KERNEL = Rule(
    "kernel",
    "version of the kernel",
    "accelerate warns below 5.5: processes may hang",
    "https://github.com/modelscope/ms-swift/issues/283",
)
GLIBC = Rule(
    "glibc",
    "version of the C library, where packages are installed",
    "torch's wheels are built for 2.28 and newer: pip finds none, or the import ends with 'GLIBC_2.28 not found'",
    "https://github.com/pytorch/pytorch/issues/123649",
)
CLOCK = Rule(
    "clock",
    "whether something keeps the clock right",
    "clocks drift apart: munge refuses jobs beyond 5 minutes, NFS shows files from the future, logs cannot be put in order",
    "https://slurm.schedmd.com/troubleshoot.html",
)
RULES = (SHM, MEMLOCK, NOFILE, NPROC, CORES, MEMORY, SWAP, THP, KERNEL, GLIBC, CLOCK)

MIB, GIB = 1 << 20, 1 << 30
DOCKER_SHM = 64 * MIB
"""What Docker gives a container without --shm-size."""
ENOUGH_FILES, ENOUGH_PROCESSES = 4096, 4096
KERNEL_LEAST, GLIBC_LEAST = (5, 5), (2, 28)
OFFSET_S = 1.0


def shm(m: Machine) -> Iterator[Finding]:
    """Shared memory is there, is larger than Docker's default, and has room."""
    f = m.facts
    if f.shm_bytes is None or not m.computes:
        return
    fix = "docker run --shm-size=16g (or --ipc=host); apptainer binds the host's; on a host: mount -o remount,size=50% /dev/shm"
    free = f.shm_bytes if f.shm_free_bytes is None else f.shm_free_bytes
    needed = bool(m.facts.gpus or m.expects.gpus) and m.expects.gpus != 1 and not m.rehearsal
    if not f.shm_bytes:
        yield m.tell(SHM, FAIL, "there is no /dev/shm", fix)
    elif f.shm_bytes <= DOCKER_SHM:
        yield m.tell(SHM, FAIL if needed else WARN, f"{gigabytes(f.shm_bytes)} in all", fix)
    elif f.shm_bytes < GIB:
        yield m.tell(SHM, WARN, f"{gigabytes(f.shm_bytes)} in all", fix)
    elif free < GIB // 4:
        clean = "remove what ended jobs have left (ls -l /dev/shm), as root or as the files' owner"
        yield m.tell(
            SHM, FAIL if free < DOCKER_SHM and needed else WARN, f"{gigabytes(free)} left of {gigabytes(f.shm_bytes)}", clean
        )
    else:
        yield m.tell(SHM, PASS, f"{gigabytes(free)} free")


def memlock(m: Machine) -> Iterator[Finding]:
    """No limit where RDMA is used; on a login node it is what Slurm passes on to jobs."""
    f = m.facts
    kind = m.section("network").get("kind")
    rdma = any(port.active for port in f.rdma) or kind in ("infiniband", "roce")
    # every Ethernet adapter of some makers shows an active port: where the file says ethernet RDMA is switched off
    if f.memlock_bytes is None or not rdma or m.rehearsal or kind == "ethernet" or m.environ("NCCL_IB_DISABLE") == "1":
        return
    if f.memlock_bytes < 0:
        yield m.tell(MEMLOCK, PASS, "unlimited")
        return
    fix = "LimitMEMLOCK=infinity in slurmd's unit (systemctl edit slurmd), PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    told = f"{gigabytes(f.memlock_bytes)} may be locked"
    if m.place == LOGIN:
        passed_on = (
            "MEMLOCK" not in f.slurm.get("PropagateResourceLimitsExcept", "")
            and f.slurm.get("PropagateResourceLimits") == "ALL"
        )
        if passed_on:
            yield m.tell(MEMLOCK, WARN, f"{told} here, and Slurm passes the limit on to jobs", fix)
    elif not m.several or f.user == "root":  # CAP_IPC_LOCK, where it is not taken away, knows no limit
        yield m.tell(MEMLOCK, WARN, told, fix)
    else:
        yield m.tell(MEMLOCK, FAIL if f.memlock_bytes <= 64 * MIB else WARN, told, fix)


def counts(m: Machine) -> Iterator[Finding]:
    """Limits of open files and of processes."""
    f = m.facts
    if not m.computes:
        return
    fix = "LimitNOFILE=1048576 in slurmd's unit; in a shell: ulimit -n 65536"
    if f.nofile is not None:
        low = 0 <= f.nofile < ENOUGH_FILES
        hard = f.nofile < 256
        status = (FAIL if hard else WARN) if low else PASS
        yield m.tell(NOFILE, status, "unlimited" if f.nofile < 0 else str(f.nofile), fix if low else "")
    if f.nproc is not None:
        low = 0 <= f.nproc < ENOUGH_PROCESSES
        more = "LimitNPROC=infinity in slurmd's unit, TasksMax=infinity; in a shell: ulimit -u 65536"
        yield m.tell(NPROC, WARN if low else PASS, "unlimited" if f.nproc < 0 else str(f.nproc), more if low else "")


def cores(m: Machine) -> Iterator[Finding]:
    """The step may use the cores that the job asked for, as far as the machine has them."""
    f = m.facts
    if not m.in_step or f.affinity is None or not f.cpus:
        return
    said = m.environ("SLURM_CPUS_PER_TASK") or m.environ("SRUN_CPUS_PER_TASK")
    asked = int(said) if said.isdigit() else m.expects.cpus
    if not asked:
        return
    wanted = min(asked, f.cpus)  # a rehearsal claims more than there are
    if f.affinity < wanted:
        fix = f"srun --cpus-per-task={asked}, or export SRUN_CPUS_PER_TASK in the job's script"
        hard = f.affinity * 2 <= wanted
        told = f"{f.affinity} CPUs ({f.affinity_list or '?'}), asked for {asked}"
        yield m.tell(CORES, FAIL if hard else WARN, told, fix)
    else:
        yield m.tell(CORES, PASS, f"{f.affinity} CPUs, asked for {asked}")


def memory(m: Machine) -> Iterator[Finding]:
    """Most of the memory is free before a job begins, and nothing of weight is in swap."""
    f = m.facts
    if not m.computes or not f.memory_bytes:
        return
    shared = m.environ("SLURM_MEM_PER_NODE") or m.environ("SLURM_MEM_PER_CPU")
    if f.memory_available_bytes is not None and not shared:
        share = f.memory_available_bytes / f.memory_bytes
        if share < 0.5:
            fix = "find who holds it (ps, df /dev/shm, leftovers of ended jobs); nobody's: reboot the node"
            yield m.tell(MEMORY, WARN, f"{gigabytes(f.memory_available_bytes)} free of {gigabytes(f.memory_bytes)}", fix)
        else:
            yield m.tell(MEMORY, PASS, f"{gigabytes(f.memory_available_bytes)} free")
    if f.swap_used_bytes is not None:
        if f.swap_used_bytes > GIB:
            fix = "as root, with enough memory free: swapoff -a; swapon -a; vm.swappiness=1 on compute nodes"
            yield m.tell(SWAP, WARN, f"{gigabytes(f.swap_used_bytes)} in swap", fix)
        else:
            yield m.tell(SWAP, PASS, f"{gigabytes(f.swap_used_bytes)} in swap" if f.swap_used_bytes else "none in use")
    if f.thp_defrag == "always":
        yield m.tell(THP, WARN, "defrag is always", "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/defrag")
    elif f.thp_defrag:
        yield m.tell(THP, PASS, f"defrag is {f.thp_defrag}")


def kernel(m: Machine) -> Iterator[Finding]:
    """Kernel and C library are new enough for the stack."""
    f = m.facts
    found = version(f.kernel)
    if found and m.computes:
        old = found < KERNEL_LEAST
        fix = "run on nodes with a newer distribution; a container does not change the kernel"
        yield m.tell(KERNEL, WARN if old else PASS, f.kernel, fix if old else "")
    library = version(f.glibc)
    outside = m.section("container").get("runtime") in (None, "none") or m.in_container
    if library and m.computes and outside:
        old = library < GLIBC_LEAST
        fix = "run in a container (container.runtime of the cluster file), or on a newer distribution"
        yield m.tell(GLIBC, FAIL if old else PASS, f.glibc, fix if old else "")


def clock(m: Machine) -> Iterator[Finding]:
    """The clock is kept right, and is right."""
    f = m.facts
    fix = "as root: systemctl enable --now chronyd (or systemd-timesyncd), with the same servers on all nodes"
    if f.clock_offset_s is not None and f.clock_offset_s > OFFSET_S:
        yield m.tell(CLOCK, WARN, f"off by {f.clock_offset_s:.1f} s", "as root: chronyc makestep; look at chronyc sources")
    elif f.clock_synchronised is False and m.in_container:
        yield m.tell(CLOCK, UNKNOWN, "nothing in this container tells")
    elif f.clock_synchronised is False:
        yield m.tell(CLOCK, WARN, "nothing keeps it right", fix)
    elif f.clock_synchronised:
        yield m.tell(CLOCK, PASS, "synchronised" if f.clock_offset_s is None else f"off by {f.clock_offset_s * 1000:.1f} ms")
    else:
        yield m.tell(CLOCK, UNKNOWN, "nothing tells")


LOOKS = (shm, memlock, counts, cores, memory, kernel, clock)


def check(m: Machine) -> Iterator[Finding]:
    """All of them."""
    for look in LOOKS:
        yield from look(m)
