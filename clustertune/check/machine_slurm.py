"""Slurm as a machine outside of a step sees it: controller, nodes, accounting, and settings that cost jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.machine_context import Machine, first_part
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Rules, Seen, either, listed
from clustertune.host.mounts import lies_elsewhere

RULES = Rules(MACHINE, __file__)
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
    wanted = {first_part(name) for name in m.names_with("compute")}
    bad = [f"{name}: {state}" for name, state in sorted(f.slurm_nodes.items()) if not wanted or first_part(name) in wanted]
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


def _gpus(gres: str) -> int:
    """GPUs of a node as Slurm counts them: ``gpu:h100:8(S:0-1)``."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


@RULES("slurm-gres")
def slurm_gres(m: Machine) -> Iterator[Seen]:
    """Slurm counts the GPUs of each node that the cluster file names, and that this one has."""
    f, stated = m.facts, m.section("compute").get("gpus")
    wanted = {first_part(name) for name in m.names_with("compute")}
    own = first_part(f.hostname)
    counts = {first_part(name): _gpus(gres) for name, gres in f.slurm_gres.items()}
    if m.rehearsal or not counts:
        return
    bad = [f"{name} has {counts[name]}" for name in sorted(wanted & set(counts)) if stated and counts[name] != stated]
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


def _seconds(time: str) -> float:
    """A time of Slurm's: ``1-00:00:00``, ``30``, ``infinite``."""
    days, dash, rest = time.rpartition("-")
    if not re.fullmatch(r"\d+(:\d+){0,2}", rest):
        return float("inf")
    parts = [int(part) for part in rest.split(":")]
    hours = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, hours, strict=False))


@RULES("slurm-times")
def slurm_times(m: Machine) -> Iterator[Seen]:
    """The partition lets jobs run as long as the cluster file says, and gives them time to end."""
    section, config = m.section("slurm"), m.facts.slurm
    limit, stated = m.facts.slurm_limits.get(str(section.get("partition")), ""), str(section.get("max_time") or "")
    if limit and stated not in ("", "UNLIMITED") and _seconds(limit) < _seconds(stated):
        yield Seen(WARN, f"the partition's limit is {limit}, the cluster file says {stated}", "correct slurm.max_time")
    wait = re.match(r"\d+", config.get("KillWait", ""))
    if wait and not m.rehearsal:
        short = f"KillWait is {wait[0]} s" if int(wait[0]) < KILL_WAIT_S else ""
        yield from either(WARN, short, f"KillWait is {wait[0]} s, the partition's limit {limit or '?'}")
