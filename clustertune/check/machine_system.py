"""One machine's limits, cores, memory and clock, its Slurm, and the Python and environment that it hands down to ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from clustertune.check.machines import Machine, first_part, gigabytes
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Rules, Seen, either
from clustertune.host.credentials import has_login
from clustertune.host.facts import LOGIN
from clustertune.host.mounts import lies_elsewhere
from clustertune.host.nvidia_text import gpus_of, has_nvlink
from clustertune.host.system import GIB, MIB
from clustertune.recipe.sections import parse_minutes
from clustertune.text import listed

RULES = Rules(MACHINE, __file__)


# --- limits, cores, memory, clock --------------------------------------------------------------------------------------

SHM_LEAST, SHM_SMALL = 128 * MIB, GIB
"""NCCL maps 9.6 MB for each connection (https://github.com/NVIDIA/nccl/issues/525): thirteen of them fill the first, which is
more than Docker's default of 64 MiB; eight ranks with two channels between neighbours come near the second."""
MEMLOCK_LEAST, MEMLOCK_ENOUGH = 64 * MIB, 4 * GIB
"""The limit holds for each process (getrlimit(2)). A rank registers 4 MiB for each connection (NCCL_BUFFSIZE in NCCL's guide):
the second is enough for a thousand of them. Slurm's services start with 64 KiB or 8 MiB: there the first connection fails."""
ENOUGH_FILES, FEW_FILES = 4096, 256
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


@RULES("open-files")
def open_files(m: Machine) -> Iterator[Seen]:
    """Enough files may be open at once."""
    limit, fix = m.facts.nofile, "LimitNOFILE=1048576 in slurmd's unit; in a shell: ulimit -n 65536"
    if limit is not None and m.computes:
        low = str(limit) if 0 <= limit < ENOUGH_FILES else ""
        yield from either(FAIL if limit < FEW_FILES else WARN, low, "unlimited" if limit < 0 else str(limit), fix)


@RULES("cores-in-step")
def cores_in_step(m: Machine) -> Iterator[Seen]:
    """The step may use the cores that the job asked for, as far as the machine has them."""
    f = m.facts
    requested_text = m.environ("SLURM_CPUS_PER_TASK") or m.environ("SRUN_CPUS_PER_TASK")
    requested = int(requested_text) if requested_text.isdigit() else m.expects.cpus
    if not m.in_step or f.affinity is None or not f.cpus or not requested:
        return
    needed = min(requested, f.cpus)  # a rehearsal claims more than there are
    few = f"{f.affinity} CPUs ({f.affinity_list or '?'}), asked for {requested}" if f.affinity < needed else ""
    fix = f"srun --cpus-per-task={requested}, or export SRUN_CPUS_PER_TASK in the job's script"
    status = FAIL if f.affinity * 2 <= needed else WARN
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


# --- Slurm, as a machine outside of a step sees it ---------------------------------------------------------------------

KILL_WAIT_S = 30
"""Slurm's own KillWait: what is left after the signal and the time limit to write a checkpoint's last bytes."""
LOST_AT_BOOT = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - they are named as wrong


@RULES("slurm-nodes")
def slurm_nodes(m: Machine) -> Iterator[Seen]:
    """All nodes of the cluster file take jobs."""
    f = m.facts
    if f.slurm_silent:
        yield Seen(UNKNOWN, f"Slurm's controller does not answer: {f.slurm_silent}")
    if f.slurm_silent or not f.slurm:
        return
    compute = {first_part(name) for name in m.names_with("compute")}
    bad = [f"{name}: {state}" for name, state in sorted(f.slurm_nodes.items()) if not compute or first_part(name) in compute]
    yield from either(WARN, listed(bad, 8, "; ", "; and"), "all take jobs")


@RULES("slurm-devices")
def slurm_devices(m: Machine) -> Iterator[Seen]:
    """Jobs are kept apart by their GPUs."""
    config = m.facts.slurm
    # Slurm before 22.05 does not show cgroup.conf
    unseen = "ConstrainDevices" not in config and "cgroup" in config.get("TaskPlugin", "")
    if not m.rehearsal and "gpu" in config.get("GresTypes", "") and not unseen:
        off = config.get("ConstrainDevices", "no").lower() != "yes"
        yield Seen(WARN if off else PASS, f"ConstrainDevices is {'off' if off else 'on'}")


@RULES("slurm-gres")
def slurm_gres(m: Machine) -> Iterator[Seen]:
    """Slurm counts the GPUs of each node that the cluster file names, and that this one has."""
    f, stated = m.facts, m.section("compute").get("gpus")
    compute = {first_part(name) for name in m.names_with("compute")}
    own = first_part(f.hostname)
    counts = {first_part(name): gpus_of(gres)[0] for name, gres in f.slurm_gres.items()}
    if m.rehearsal or not counts:
        return
    bad = [f"{name} has {counts[name]}" for name in sorted(compute & set(counts)) if stated and counts[name] != stated]
    text = f"the cluster file says {stated} GPUs a node: {listed(bad, 8)}" if bad else ""
    if not text and f.nvidia_devices is not None and counts.get(own, f.nvidia_devices) != f.nvidia_devices:
        text = f"{f.nvidia_devices} GPUs are on the bus, Slurm counts {counts[own]}"
    yield from either(WARN, text, f"{len(counts)} nodes")


@RULES("slurm-folders")
def slurm_folders(m: Machine) -> Iterator[Seen]:
    """The controller's state outlives a boot; each slurmd has a spool folder of its own."""
    state, spool = m.facts.slurm.get("StateSaveLocation", ""), m.facts.slurm.get("SlurmdSpoolDir", "")
    bad = []
    if any(state == folder or state.startswith(f"{folder}/") for folder in LOST_AT_BOOT) and not m.rehearsal:
        bad.append(f"StateSaveLocation={state} is emptied at boot: all jobs are lost")
    mount = m.mount_of(spool) if spool else None
    if mount is not None and lies_elsewhere(mount.kind) and not re.search("%[nh]", spool):
        bad.append(f"SlurmdSpoolDir={spool} is on {mount.kind}, where all nodes write over each other")
    yield from either(FAIL, "; ".join(bad), f"{state}, {spool}" if state and spool else "")


@RULES("slurm-prolog")
def slurm_prolog(m: Machine) -> Iterator[Seen]:
    """Prolog and epilog can be run."""
    bad = [f"{path} {fault}" for path, fault in m.facts.slurm_scripts.items() if fault]
    if m.computes:
        yield from either(FAIL, "; ".join(bad), ", ".join(m.facts.slurm_scripts))


@RULES("slurm-times")
def slurm_times(m: Machine) -> Iterator[Seen]:
    """The partition lets jobs run as long as the cluster file says, and gives them time to end."""
    section, config = m.section("slurm"), m.facts.slurm
    limit, stated = m.facts.slurm_limits.get(str(section.get("partition")), ""), str(section.get("max_time") or "")
    minutes, meant = parse_minutes(limit), parse_minutes(stated)  # None where there is no limit
    if minutes is not None and meant is not None and minutes < meant:
        yield Seen(WARN, f"the partition's limit is {limit}, the cluster file says {stated}", "correct slurm.max_time")
    wait = re.match(r"\d+", config.get("KillWait", ""))
    if wait and not m.rehearsal:
        short = f"KillWait is {wait[0]} s" if int(wait[0]) < KILL_WAIT_S else ""
        yield from either(WARN, short, f"KillWait is {wait[0]} s, the partition's limit {limit or '?'}")


# --- the ranks' Python and environment ---------------------------------------------------------------------------------

VARIABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("environment.yaml").read_text(encoding="utf-8"))
SLOW: dict[str, tuple[str, str]] = VARIABLES["slow"]
NO_GATHER = ("tree", "collnetchain", "nvlstree")
"""Algorithms that only an all-reduce has (https://github.com/NVIDIA/nccl/issues/1473)."""


def only_all_reduce(value: str) -> bool:
    """Whether NCCL_ALGO leaves all_gather and reduce_scatter, which FSDP needs, without an algorithm."""
    algorithms = {word.strip().lower() for word in value.lstrip("^").split(",")}
    return algorithms <= set(NO_GATHER) and not value.startswith("^")


@RULES("user-site")
def user_site(m: Machine) -> Iterator[Seen]:
    """Nothing of the stack is taken from the user's own folder."""
    f = m.facts
    home = f.user_site.rstrip("/")
    local = sorted(p.name for p in f.packages if home and (p.location == home or "/.local/lib/python" in p.location))
    strays = f"from {home or '~/.local'}: {', '.join(local)}" if local else ""
    good = "Python does not use it" if f.user_site_used is False else "nothing of the stack in it"
    if f.executable:
        yield from either(FAIL if m.in_container else WARN, strays, good)


@RULES("python-path")
def python_path(m: Machine) -> Iterator[Seen]:
    """Neither variable is set."""
    lines = [f"{name}={m.environ(name)}" for name in ("PYTHONHOME", "PYTHONPATH") if m.environ(name)]
    status = FAIL if m.environ("PYTHONHOME") and m.in_container else WARN
    yield from either(status, "; ".join(lines), "not set", "unset them (module unload python, conda deactivate, .bashrc)")


@RULES("library-path")
def library_path(m: Machine) -> Iterator[Seen]:
    """LD_LIBRARY_PATH puts nothing in front of torch's libraries."""
    libraries = m.facts.libraries
    bad = [path for path in libraries if re.search(r"/lib(nccl|cudart|cudnn|cublas|cublasLt|nvrtc|stdc\+\+)\.so", path)]
    stub = next((path for path in libraries if "/stubs/libcuda.so" in path), "")
    if stub:
        fix = "take the folder 'stubs' out of LD_LIBRARY_PATH: it is for linking only"
        yield Seen(FAIL if m.computes else WARN, stub, fix)
    fix = "take their folders out of LD_LIBRARY_PATH for jobs (module unload cuda nccl): torch brings its own"
    yield from either(WARN, listed(bad, 6), "" if stub else "none", fix)


@RULES("nccl-settings")
def nccl_settings(m: Machine) -> Iterator[Seen]:
    """Only the cluster file steers NCCL, not the environment or a file of NCCL's."""
    settings = {name: (m.environ(name), "") for name in SLOW if m.environ(name)}
    for name, text in m.facts.nccl_conf.items():
        value, _, origin = text.partition(" (")
        if name in SLOW:
            settings.setdefault(name, (value, f", in {origin.rstrip(')')}"))
    network, bad = m.section("network"), []
    environment = network.get("environment") or {}
    for name, (value, origin) in sorted(settings.items()):
        least, meaning = SLOW[name]
        meant = str(environment.get(name, "")) == value or (name == "NCCL_IB_DISABLE" and network.get("kind") == "ethernet")
        if not meant and least in ("", value):
            bad.append(f"{name}={value}{origin}: {meaning}")
    stops = "NCCL_ALGO" in settings and only_all_reduce(settings["NCCL_ALGO"][0])
    through_host = settings.get("NCCL_P2P_DISABLE", ("",))[0] == "1"
    nvlink = has_nvlink(m.facts.topology)
    yield from either(FAIL if stops or (through_host and nvlink) else WARN, "; ".join(bad), "none")


@RULES("debug-settings")
def debug_settings(m: Machine) -> Iterator[Seen]:
    """Nothing is set that slows every step."""
    variables = [(name, m.environ(name), values) for name, values in VARIABLES["debugging"].items()]
    bad = [f"{name}={value}" for name, value, values in variables if value.upper() in map(str.upper, values)]
    yield from either(WARN, ", ".join(bad), "none")


@RULES("proxy")
def proxy(m: Machine) -> Iterator[Seen]:
    """What goes to this machine and to the nodes goes there directly."""
    environment = {name.lower(): value for name, value in m.facts.environment.items() if name.lower().endswith("_proxy")}
    proxies = ", ".join(name for name in ("http_proxy", "https_proxy", "all_proxy") if environment.get(name))
    direct = [word.strip().lower() for word in environment.get("no_proxy", "").split(",")]
    lacking = [] if "*" in direct else [name for name in ("localhost", "127.0.0.1") if name not in direct]
    text = f"{proxies} set, no_proxy lacks {' and '.join(lacking)}" if proxies and lacking else ""
    text += "; one holds a login" if text and any(map(has_login, environment.values())) else ""
    fix = f"export no_proxy=localhost,127.0.0.1{',' + ','.join(direct) if direct != [''] else ''} (and the nodes' names)"
    yield from either(WARN, text, f"{proxies}; local addresses go directly" if proxies else "none", fix)
