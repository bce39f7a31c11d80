"""Bring a node's storage to what the cluster file says, in steps that each leave it whole: any run completes another."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.ops.bounded import ask, mount_points
from clustertune.ops.files import exclusive, put
from clustertune.ops.nodes import group_id, tool
from clustertune.ops.storage import devices, points
from clustertune.ops.storage.devices import StorageStep
from clustertune.ops.storage.fstab import FSTAB
from clustertune.ops.storage.layout import SharedFolder
from clustertune.ops.storage.plan import PROBE_SECONDS, StoragePlan, complaints, lacking, make_plan, own_disk

LOCK = "clustertune-storage.lock"
COMMAND_SECONDS = 60.0
"""For one command: systemd's own limit for a mount is 90."""
MKFS_SECONDS = 600.0
"""mkfs.xfs discards a whole disk first, which takes minutes on some."""
FOLDER_SECONDS = 20.0
"""For one folder."""
_FRESH = ".clustertune-new"

Report = Callable[[str], None]
"""Is called before each step with what it does."""


@dataclass
class ApplyResult:
    """What a run did, and what it could not do."""

    did: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Each with what to do; the next run takes it up."""
    backups: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def apply(
    cluster: Cluster,
    node: str,
    root: Path,
    *,
    force: bool = False,
    format_device: str | None = None,
    report: Report = lambda _: None,
) -> ApplyResult:
    """Make the difference of :func:`make_plan` go away. The same call again does nothing, and completes one that was killed.

    Order: checks and systemd's verdict on the new fstab, before anything is written; mount points; files with their backups;
    the disk (only ``format_device``, only blank); mounts of this node; folders; exports; what other nodes serve; the pool.
    Raises UserError: exit 2 where something stands in the way, 73 and 75 as :func:`files.put`.
    """
    with exclusive(root, LOCK, "sets up storage here"):
        return _apply(cluster, node, root, force, format_device, report)


def _apply(cluster: Cluster, node: str, root: Path, force: bool, format_device: str | None, report: Report) -> ApplyResult:
    plan = make_plan(cluster, node, root, force=force)
    formatted = _require(plan, format_device)
    done = ApplyResult(notes=list(plan.notes))
    if plan.live and any(change.needed and change.path == FSTAB for change in plan.changes):
        report("ask systemd about the new fstab")
        _verify(plan, done)
    _write(plan, done, report)
    if plan.live:
        _run_steps(plan, done, report, formatted)
    return done


def _require(plan: StoragePlan, format_device: str | None) -> str | None:
    """Everything that must hold before anything is touched."""
    problems = []
    if plan.live:
        if packages := lacking(plan.layout):
            fix = f"apt-get install {' '.join(packages)}"
            problems.append(Problem(f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed", fix=fix))
        group = plan.layout.group
        if group and (plan.layout.own or plan.layout.local) and group_id(group) is None:
            fix = f"groupadd {group}, with the same number on every node, then run the same command again"
            problems.append(Problem(f"this node has no group {group}", file="cluster file", key="storage.group", fix=fix))
    formatted = None
    if format_device is not None:
        try:
            mounts = (mount for mount in plan.layout.mounts if mount.kind == "device")
            mount = devices.require_blank(format_device, mounts)
            formatted = mount.source
            if plan.live and mount.target in mount_points():
                message = f"something else is mounted at {mount.target}, where {formatted} belongs"
                problems.append(Problem(message, file="command line", key="--format", fix=f"umount {mount.target}"))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return formatted


def _verify(plan: StoragePlan, done: ApplyResult) -> None:
    old = next(change.before or b"" for change in plan.changes if change.path == FSTAB)
    old_complaints = complaints(old, plan.fstab, plan.layout.mounts)
    if old_complaints is None:
        done.notes.append(
            "systemd could not be asked about the new fstab: systemd-fstab-generator or systemd-analyze is missing"
        )
    elif old_complaints:
        fix = "fstab is as it was; fix the lines that systemd names, or the cluster file"
        raise UserError(
            [Problem(f"systemd would not boot with the new lines: {line}", file=FSTAB, fix=fix) for line in old_complaints[:10]]
        )


def _write(plan: StoragePlan, done: ApplyResult, report: Report) -> None:
    wanted = [point for point in plan.points if points.missing(point, live=plan.live)]
    for problem in plan.point_words:
        report(problem)
    if wanted:
        made, failures = points.make(wanted, plan.root)
        done.notes += [f"{path}: {why}" for path, why in failures.items() if path in made]
        done.left += [f"{path} {why}" for path, why in failures.items() if path not in made]
        done.did += [points.missing(point, live=plan.live) or "" for point in wanted if point.path in made]
    for change in plan.changes:
        if change.needed:
            report(f"write {change.path}")
            backup = put(plan.root, change)
            done.did.append(f"wrote {change.path}")
            done.backups += [str(backup)] if backup else []


def _run_steps(plan: StoragePlan, done: ApplyResult, report: Report, formatted: str | None) -> None:
    """The commands, and the folders as soon as this node's disks are mounted."""
    local = {mount.target for mount in plan.layout.mounts if mount.kind in ("device", "bind")}
    waiting = list(plan.steps)
    if formatted:
        step = next(step for step in waiting if step.argv[-1] == formatted and step.argv[0].startswith("mkfs"))
        waiting.remove(step)
        if not _command(step, done, report, MKFS_SECONDS):
            return
    for step in [
        step for step in waiting if (step.argv[0] == "systemctl" and "daemon-reload" in step.argv) or step.target in local
    ]:
        waiting.remove(step)
        _step(step, plan, done, report)
    for brick in plan.layout.own:
        folders = [folder for folder in plan.folders if folder.path.startswith(f"{brick.path}/")]
        _make_folders(folders, done, report, brick.path)
    _make_folders([folder for folder in plan.folders if folder in plan.layout.local], done, report)
    for step in waiting:
        _step(step, plan, done, report)


def _step(step: StorageStep, plan: StoragePlan, done: ApplyResult, report: Report) -> None:
    if step.by_hand:
        done.left.append(f"{step.why}: {step}")
    elif step.target and (reason := _not_yet(plan, step.target)):
        done.left.append(reason)
    else:
        _command(step, done, report)


def _not_yet(plan: StoragePlan, target: str) -> str | None:
    """Why something cannot be mounted yet: a bind of a folder whose disk is absent would show the root disk in its place."""
    mount, now = plan.layout.at(target), mount_points()
    assert mount
    if mount.kind == "bind":
        disk = plan.layout.at(mount.source)
        if disk and mount.source not in now:
            return f"{target} is not mounted: {mount.source} is missing, {disk.source} is not mounted there"
        answer = ask(partial(own_disk, mount.source), PROBE_SECONDS)
        if answer.silent or answer.errno:
            text = "does not answer" if answer.silent else os.strerror(answer.errno or 0)
            return f"{target} is not mounted: {mount.source}: {text}; mount its file system"
        if not (answer.found or {})["own"]:
            return f"{target} is not mounted: {mount.source} is on the root disk; mount its file system"
    if mount.kind == "pool":
        absent = [brick.mount for brick in plan.layout.bricks if plan.layout.at(brick.mount) and brick.mount not in now]
        if absent:
            return f"the pool is not mounted: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
    return None


def _command(step: StorageStep, done: ApplyResult, report: Report, seconds: float = COMMAND_SECONDS) -> bool:
    """Run one command. What it says against itself is kept for the report; a hung one is left behind after its limit."""
    report(str(step))
    program = tool(step.argv[0]) or step.argv[0]
    child = subprocess.Popen(
        [program, *step.argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = ""
    try:
        _, output = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)
        done.left.append(f"{step}: no answer in {seconds:g} s; run the same command again once what it waits for is there")
        return False
    if child.returncode == 0:
        done.did.append(str(step))
        return True
    reason = next(iter(output.strip().splitlines()[-1:]), f"exit status {child.returncode}")
    later = "; run the same command again once that node serves" if "fg,retry=0" in step.argv else ""
    done.left.append(f"{step}: {reason}{later}")
    return False


def _make_folders(folders: list[SharedFolder], done: ApplyResult, report: Report, brick: str | None = None) -> None:
    """Each in a child: a frozen file system would hold us for ever. On the root disk only what is not part of a ``brick``."""
    for folder in folders:
        report(f"make {folder.path}")
        answer = ask(partial(_make_folder, folder, brick), FOLDER_SECONDS)
        if (answer.found or {}).get("made"):
            done.did.append(f"made {folder.path}, mode {folder.mode:04o}")
        elif answer.silent:
            done.left.append(f"{folder.path}: no answer in {FOLDER_SECONDS:g} s; clustertune ops storage check says more")
            return
        elif answer.errno:
            done.left.append(f"{folder.path} cannot be made: {os.strerror(answer.errno)}")
        else:
            done.left.append(f"{brick} is not mounted: no folders are made on the root disk")
            return


def _make_folder(folder: SharedFolder, brick: str | None) -> dict[str, bool]:
    """A folder with its mode and group, all at once: a killed run leaves none with half of them."""
    if brick and not own_disk(brick)["own"]:
        return {"made": False}
    path = Path(folder.path)
    fresh = path.with_name(f".{path.name}{_FRESH}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        fresh.rmdir()
    fresh.mkdir(0o700)
    os.chown(fresh, 0, group_id(folder.group) or 0)
    fresh.chmod(folder.mode)
    fresh.rename(path)
    return {"made": True}
