"""Shared memory, limits, cores, memory and clock of one machine."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.machine_context import LOGIN, Machine, gigabytes
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Rules, Seen, either
from clustertune.host.system import GIB, MIB

RULES = Rules(MACHINE, __file__)

SHM_LEAST, SHM_SMALL = 128 * MIB, GIB
"""NCCL maps 9.6 MB for each connection (https://github.com/NVIDIA/nccl/issues/525): thirteen of them fill the first, which is
more than Docker's default of 64 MiB; eight ranks with two channels between neighbours come near the second."""
MEMLOCK_LEAST, MEMLOCK_ENOUGH = 64 * MIB, 4 * GIB
"""The limit holds for each process (getrlimit(2)). A rank registers 4 MiB for each connection (NCCL_BUFFSIZE in NCCL's guide):
the second is enough for a thousand of them. Slurm's services start with 64 KiB or 8 MiB: there the first connection fails."""
ENOUGH_FILES = 4096
OFFSET_S = 1.0


@RULES("shm")
def shm(m: Machine) -> Iterator[Seen]:
    """Shared memory is there, is larger than Docker's default, and has room."""
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


@RULES("memlock")
def memlock(m: Machine) -> Iterator[Seen]:
    """No limit where RDMA is used; on a login node it is what Slurm passes on to jobs."""
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


@RULES("open-files")
def open_files(m: Machine) -> Iterator[Seen]:
    """Enough files may be open at once."""
    fix = "LimitNOFILE=1048576 in slurmd's unit; in a shell: ulimit -n 65536"
    yield from _limit(m, m.facts.nofile, ENOUGH_FILES, fix, hard=256)


@RULES("cores-in-step")
def cores_in_step(m: Machine) -> Iterator[Seen]:
    """The step may use the cores that the job asked for, as far as the machine has them."""
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


@RULES("memory")
def memory(m: Machine) -> Iterator[Seen]:
    """Most of the memory is free before a job begins."""
    free, total = m.facts.memory_available_bytes, m.facts.memory_bytes
    shared = m.environ("SLURM_MEM_PER_NODE") or m.environ("SLURM_MEM_PER_CPU")
    if m.computes and total and free is not None and not shared:
        little = f"{gigabytes(free)} free of {gigabytes(total)}" if free / total < 0.5 else ""
        yield from either(WARN, little, f"{gigabytes(free)} free")


@RULES("clock")
def clock(m: Machine) -> Iterator[Seen]:
    """The clock is synchronised and accurate."""
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
