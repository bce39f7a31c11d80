"""The difference between what a node's storage shall be and what it is, and the steps that remove it.

Each step leaves the node whole: any run completes another.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.bounded import Work, ask, ask_all, mount_points, mounts
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.host.mounts import MountLine
from clustertune.ops.files import NODE, Change, diff, exclusive, put, read
from clustertune.ops.nodes import group_id, has_systemd, tool
from clustertune.ops.storage import node as present
from clustertune.ops.storage.layout import FstabMount, SharedFolder, StorageLayout, find_node, layout
from clustertune.process import captured, kill_group

PROBE_SECONDS = 10.0
_UNITS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
TOOLS = {"pool": ("mergerfs", "mergerfs"), "nfs": ("mount.nfs", "nfs-common"), "exports": ("exportfs", "nfs-kernel-server")}
"""What each kind of line needs: the program, and Debian's and Ubuntu's package of it."""


@dataclass(frozen=True)
class StoragePlan:
    """All that is to be done on one node; nothing of it is done yet."""

    layout: StorageLayout
    root: Path
    changes: tuple[Change, ...]
    points: tuple[present.MountPoint, ...]
    folders: tuple[SharedFolder, ...]
    """To be made, on bricks that are mounted, and on the node's own disk."""
    steps: tuple[present.StorageStep, ...]
    later: tuple[str, ...]
    """Where this is a tree: what the node itself needs once it has started, as commands."""
    notes: tuple[str, ...]

    @property
    def live(self) -> bool:
        """This machine itself, not a tree."""
        return self.root == NODE

    @property
    def point_words(self) -> list[str]:
        """What is to be done about mount points."""
        return [message for point in self.points if (message := present.to_do_at(point, live=self.live))]

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(any(c.needed for c in self.changes) or self.point_words or self.folders or self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The ``--json`` form."""
        return {
            "node": self.layout.node,
            "root": str(self.root),
            "needed": self.needed,
            "files": [{"path": c.path, "new": c.before is None, "diff": diff(c)} for c in self.changes if c.needed],
            "mount_points": self.point_words,
            "folders": [{"path": f.path, "mode": f"{f.mode:04o}", "group": f.group} for f in self.folders],
            "commands": [{"command": str(s), "why": s.why, "by_hand": s.by_hand} for s in self.steps],
            "on_the_node": list(self.later),
            "notes": list(self.notes),
        }


def make_plan(cluster: Cluster, node: str, root: Path, *, force: bool = False) -> StoragePlan:
    """Compare ``node`` of ``cluster`` with this machine (``root`` is ``/``) or with a tree. Reads only.

    Raises UserError with everything that stands in the way: lines of others for our mount points or exports, a block of
    ours that were edited (``force`` replaces it), mount points that hold something.
    """
    live = root == NODE
    found: list[Problem] = []
    wanted, by_hand = look(cluster, node, root)
    found += present.taken(present.fstab_entries(read(root, present.FSTAB)), (mount.target for mount in wanted.mounts))
    found += present.exported(root, (brick.path for brick in wanted.own))
    changes = list(present.file_changes(wanted, root, cluster.source, found, force=force))
    seen = present.look_at_points((mount.target for mount in wanted.mounts), root)
    raise_if([*found, *present.point_problems(seen)])
    steps: list[present.StorageStep] = []
    folders: list[SharedFolder] = []
    notes = list(wanted.notes)
    if live:
        mounted = mounts()
        steps = list(_steps(wanted, mounted, changes))
        folders, more = _folders(wanted)
        notes += more + [note for mount in wanted.mounts for note in _other_mount(mount, mounted)]
    for point in seen:
        if point.mounted and point.entries:
            names = ", ".join(point.entries[:5])
            notes.append(
                f"below the mount at {point.path} lie {names}: written while nothing was mounted there, and hidden now"
            )
        if point.mounted and point.kind == "unknown":
            notes.append(f"what lies below the mount at {point.path} is seen by root only")
    notes += by_hand
    later = () if live else tuple(_later(wanted))
    return StoragePlan(wanted, root, tuple(changes), tuple(seen), tuple(folders), tuple(steps), later, tuple(notes))


def _later(wanted: StorageLayout) -> Iterator[str]:
    """What apply does on the node itself, in its order, beyond what a tree can hold."""
    for mount in wanted.mounts:
        yield f"chattr +i {mount.target}"
    for mount in wanted.mounts:
        if mount.kind == "device" and mount.brick:
            yield f"{shlex.join(present.MKFS[mount.brick.filesystem])} {mount.source}   # only if it is blank; apply --format"
    yield "systemctl daemon-reload"
    for mount in wanted.mounts:
        if mount.kind in ("device", "bind"):
            yield f"mount {mount.target}"
    yield from (_install(folder) for folder in (*wanted.folders, *wanted.local))
    if wanted.exports:
        yield from ("systemctl enable --now nfs-server.service", "exportfs -ra")
    for mount in wanted.mounts:
        if mount.kind in ("nfs", "pool"):
            yield f"mount {mount.target}"


def _install(folder: SharedFolder) -> str:
    group = f" -g {folder.group}" if folder.group else ""
    return f"install -d -m {folder.mode:04o}{group} {folder.path}"


def look(cluster: Cluster, node: str, root: Path) -> tuple[StorageLayout, list[str]]:
    """What ``node`` shall have, with what is mounted there by other means taken into account. Raises UserError.

    Then disks of bricks that are mounted above the exported folder by nothing that the next boot knows, as messages.
    """
    node, live = find_node(cluster, node).name, root == NODE
    lines, mounted = present.fstab_entries(read(root, present.FSTAB)), mounts() if live else []
    own = [brick for brick in cluster.storage.bricks if brick.node == node]
    permanent = present.elsewhere(lines, [], own, live=live)
    by_hand = [
        f"{device} is mounted at {at} by hand: the next boot leaves it out, as no line of {present.FSTAB} names it"
        for device, at in present.elsewhere([], mounted, own, live=live).items()
        if device not in permanent and not any((Path(folder) / unit(at)).exists() for folder in _UNITS)
    ]
    return layout(cluster, node, present.elsewhere(lines, mounted, own, live=live)), by_hand


def as_lines(plan: StoragePlan) -> Iterator[str]:
    """A plan for a person: the differences, then the commands in their order, then what to know."""
    for change in plan.changes:
        yield from diff(change)
    for line in [*plan.point_words, *(_install(folder) for folder in plan.folders)]:
        yield f"  {line}"
    for step in plan.steps:
        yield f"  {step}   # {step.why}{' (by hand)' if step.by_hand else ''}"
    if plan.later:
        yield f"on {plan.layout.node} itself, once it runs (clustertune ops storage apply does it):"
        yield from (f"  {line}" for line in plan.later)
    for note in plan.notes:
        yield f"note: {note}"


# --- what a live node needs beyond its files ---------------------------------------------------------------------------


def lacking(wanted: StorageLayout) -> list[str]:
    """Packages without which the node's lines cannot work."""
    kinds = {mount.kind for mount in wanted.mounts} | ({"exports"} if wanted.exports else set())
    return sorted(package for kind, (program, package) in TOOLS.items() if kind in kinds and not tool(program))


def _steps(wanted: StorageLayout, mounted: list[MountLine], changes: list[Change]) -> Iterator[present.StorageStep]:
    if packages := lacking(wanted):
        yield present.StorageStep(
            ("apt-get", "install", *packages), "what fstab and exports name is not installed", by_hand=True
        )
    where = {entry.point for entry in mounted}
    for mount in wanted.mounts:
        if mount.kind == "device" and mount.target not in where:
            yield from present.device_steps(mount)
    if has_systemd() and (changes[0].needed or outdated(wanted.mounts)):
        yield present.StorageStep(("systemctl", "daemon-reload"), "systemd makes its mount units of fstab again")
    local = [mount for mount in wanted.mounts if mount.kind in ("device", "bind") and mount.target not in where]
    yield from (_mount_step(mount) for mount in local)
    if wanted.exports and not present.serves() and has_systemd():
        yield present.StorageStep(("systemctl", "enable", "--now", "nfs-server.service"), "the NFS server does not run")
    elif wanted.exports and not present.serves():
        yield present.StorageStep(
            ("rpc.nfsd", "8"), "the NFS server does not run, nor systemd, which would start it", by_hand=True
        )
    elif wanted.exports:
        now = present.read_etab()
        if changes[1].needed or list(
            present.faults(wanted.exports, now, present.canonical(wanted.exports, now, PROBE_SECONDS))
        ):
            yield present.StorageStep(("exportfs", "-ra"), "the server reads the exports again")
    yield from (_mount_step(mount) for mount in wanted.mounts if mount not in local and mount.target not in where)


def _mount_step(mount: FstabMount) -> present.StorageStep:
    # fg,retry=0: the line's own bg would have this command wait for a server that is not up yet.
    extra = ("-o", "fg,retry=0") if mount.kind == "nfs" else ()
    return present.StorageStep(("mount", *extra, mount.target), f"{mount.source} is not mounted", target=mount.target)


def _other_mount(mount: FstabMount, mounted: list[MountLine]) -> Iterator[str]:
    """Something else than meant is mounted: it stays, since jobs may use it."""
    entry = next((entry for entry in reversed(mounted) if entry.point == mount.target), None)
    if entry and not _as_meant(mount, entry):
        yield (
            f"{mount.target} is mounted from {entry.source} ({entry.fstype}), not as the new line says: it stays until you "
            f"unmount it, umount {mount.target} && mount {mount.target}"
        )


def _as_meant(mount: FstabMount, entry: MountLine) -> bool:
    if mount.kind == "pool":
        return entry.fstype == "fuse.mergerfs"
    if mount.kind == "nfs":
        return entry.fstype.startswith("nfs") and entry.source.rstrip("/") == mount.source.rstrip("/")
    if mount.kind == "device":
        return os.path.realpath(entry.source) == os.path.realpath(mount.source)
    return True


def _folders(wanted: StorageLayout) -> tuple[list[SharedFolder], list[str]]:
    """Those that are absent, on bricks that are no part of the root disk; a message for each that is not as it should be."""
    works: dict[str, Work] = {folder.path: partial(_mode, folder.path) for folder in (*wanted.folders, *wanted.local)}
    answers = ask_all({**works, **{_own(brick.path): partial(own_disk, brick.path) for brick in wanted.own}}, PROBE_SECONDS)
    notes: list[str] = []
    found: list[SharedFolder] = []
    for brick in wanted.own:
        of_brick = [folder for folder in wanted.folders if folder.path.startswith(f"{brick.path}/")]
        if any(answers[key].silent for key in (_own(brick.path), *(folder.path for folder in of_brick))):
            notes.append(f"{brick.path} does not answer: clustertune ops storage check says more")
        elif wanted.at(brick.path) is None and not (answers[_own(brick.path)].found or {}).get("own"):
            notes.append(f"{brick.path} is on the root disk, or is not there: mount its file system; no folders are made on it")
        else:
            found += of_brick
    absent = []
    for folder in (*found, *wanted.local):
        seen = (answers[folder.path].found or {}).get("mode")
        if seen is None:
            absent.append(folder)
        elif seen & 0o7777 != folder.mode:
            text = f"{folder.path} has mode {seen & 0o7777:04o}, {folder.mode:04o} is meant; apply changes none that is there"
            notes.append(f"{text}: chmod {folder.mode:04o} {folder.path}")
    return absent, notes


def _own(path: str) -> str:
    """The name of the question about a brick's disk: a staging folder of the same path is asked for its mode."""
    return f"disk of {path}"


def _mode(path: str) -> dict[str, int]:
    return {"mode": Path(path).stat().st_mode}


def own_disk(path: str) -> dict[str, bool]:
    """``own``: whether a folder is on another file system than the root disk. Raises OSError."""
    return {"own": Path(path).stat().st_dev != Path("/").stat().st_dev}


# --- verify ---------------------------------------------------------------------------------------------------------------

# Would this fstab boot? systemd's own generator and verifier say so of a text that lies nowhere yet.

GENERATOR = tuple(f"{top}/lib/systemd/system-generators/systemd-fstab-generator" for top in ("", "/usr"))
GENERATED = Path("/run/systemd/generator")
CLIENT, SECURITY = "nfs-client.target", "rpc-gssd.service"
CLIENT_UNITS = {
    CLIENT: f"[Unit]\nBefore=remote-fs-pre.target\nWants=remote-fs-pre.target {SECURITY}\nAfter={SECURITY}\n",
    SECURITY: "[Service]\nExecStart=/bin/true\n",
}
"""The order of the NFS client (nfs-utils, systemd/nfs-client.target), where it is not installed yet: a mount that
local-fs.target waits for is a cycle with these units alone."""
UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
TARGETS = ("local-fs.target", "remote-fs.target", "multi-user.target")
_SECONDS = 60
_RELEVANT = re.compile(r"ordering cycle|\.mount\b|fstab|Failed|[Dd]uplicate|ignoring")


def unit(target: str) -> str:
    """The name of a mount's unit (systemd-escape --path --suffix=mount)."""
    path = target.strip("/")
    if not path:
        return "-.mount"
    escaped = (c if c == "/" or c in _PLAIN else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in path)
    text = "".join(escaped).replace("/", "-")
    if text.startswith("."):
        text = "\\x2e" + text[1:]
    return f"{text}.mount"


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")


def generator() -> str | None:
    """Where systemd's generator is; None: this machine has none."""
    return next((path for path in GENERATOR if os.access(path, os.X_OK)), None)


def outdated(mounts: Iterable[FstabMount]) -> bool:
    """Whether systemd's units of our mounts are older than fstab, or absent."""
    try:
        changed = Path("/etc/fstab").stat().st_mtime
        return any((GENERATED / unit(mount.target)).stat().st_mtime < changed for mount in mounts)
    except OSError:
        return True


def complaints(old: bytes, new: bytes, mounts: Iterable[FstabMount]) -> list[str] | None:
    """What systemd says against ``new`` that it does not say against ``old``; None where it cannot be asked.

    It finds a required mount that is not there, two lines for one place, and a boot that orders in a circle. It knows nothing
    of mergerfs' options.
    """
    program, analyze = generator(), shutil.which("systemd-analyze")
    if program is None or analyze is None:
        return None
    try:
        before = _ask(program, analyze, old)
        after = _ask(program, analyze, new)
    except (OSError, subprocess.SubprocessError):
        return None
    if not {unit(mount.target) for mount in mounts} <= after[0]:
        # systemd before 246 reads no other file than /etc/fstab: what it says is not of this text.
        return None if not after[0] else [*after[1], "systemd makes no unit of some of the lines"]
    return [line for line in after[1] if line not in before[1]]


def _ask(program: str, analyze: str, text: bytes) -> tuple[set[str], list[str]]:
    """The mount units that come of a text, and the generator's messages."""
    with tempfile.TemporaryDirectory(prefix="clustertune-") as name:
        folder = Path(name)
        places = [folder / part for part in ("normal", "early", "late")]
        for target in places:
            target.mkdir()
        fstab = folder / "fstab"
        fstab.write_bytes(text)
        env = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL")}
        env |= {"SYSTEMD_FSTAB": str(fstab), "SYSTEMD_SYSROOT_FSTAB": os.devnull}
        env |= {"SYSTEMD_LOG_TARGET": "console", "SYSTEMD_LOG_LEVEL": "info"}
        output = _run([program, *map(str, places)], env)
        units = {path.name for path in places[0].glob("*.mount")}
        env["SYSTEMD_UNIT_PATH"] = f"{places[0]}:"
        missing = not any(Path(folder, CLIENT).exists() for folder in UNITS)
        for file, body in CLIENT_UNITS.items() if missing else ():
            (places[0] / file).write_text(body)
        names = [str(places[0] / name) for name in sorted(units)]
        output += _run([analyze, "--man=no", "verify", *names, *([CLIENT] if missing else []), *TARGETS], env)
        lines = [line.replace(str(folder), "") for line in output if _RELEVANT.search(line)]
        return units, list(dict.fromkeys(line for line in lines if not line.startswith("Parsing ")))


def _run(argv: list[str], env: dict[str, str]) -> list[str]:
    done = captured(argv, _SECONDS, env)
    failed = [f"{Path(argv[0]).name} Failed with exit status {done.returncode}"] if done.returncode else []
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()] + failed


# --- apply -----------------------------------------------------------------------------------------------------------


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
        plan = make_plan(cluster, node, root, force=force)
        formatted = _require(plan, format_device)
        done = ApplyResult(notes=list(plan.notes))
        if plan.live and plan.changes[0].needed:
            report("ask systemd about the new fstab")
            _verify(plan, done)
        _write(plan, done, report)
        if plan.live:
            _run_steps(plan, done, report, formatted)
        return done


def _require(plan: StoragePlan, format_device: str | None) -> str | None:
    """Everything that must hold before anything is touched."""
    problems: list[Problem] = []
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
        with collect_problems(problems):
            mount = present.require_blank(format_device, [mount for mount in plan.layout.mounts if mount.kind == "device"])
            formatted = mount.source
            if plan.live and mount.target in mount_points():
                message = f"something else is mounted at {mount.target}, where {formatted} belongs"
                problems.append(Problem(message, file="command line", key="--format", fix=f"umount {mount.target}"))
    raise_if(problems)
    return formatted


def _verify(plan: StoragePlan, done: ApplyResult) -> None:
    fstab = plan.changes[0]
    found = complaints(fstab.before or b"", fstab.after, plan.layout.mounts)
    if found is None:
        done.notes.append(
            "systemd could not be asked about the new fstab: systemd-fstab-generator or systemd-analyze is missing"
        )
    elif found:
        fix = "fstab is as it was; fix the lines that systemd names, or the cluster file"
        raise UserError(
            [Problem(f"systemd would not boot with the new lines: {line}", file=present.FSTAB, fix=fix) for line in found[:10]]
        )


def _write(plan: StoragePlan, done: ApplyResult, report: Report) -> None:
    wanted = [point for point in plan.points if present.to_do_at(point, live=plan.live)]
    for problem in plan.point_words:
        report(problem)
    if wanted:
        made, failures = present.make_points(wanted, plan.root)
        done.notes += [f"{path}: {why}" for path, why in failures.items() if path in made]
        done.left += [f"{path} {why}" for path, why in failures.items() if path not in made]
        done.did += [present.to_do_at(point, live=plan.live) or "" for point in wanted if point.path in made]
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


def _step(step: present.StorageStep, plan: StoragePlan, done: ApplyResult, report: Report) -> None:
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


def _command(step: present.StorageStep, done: ApplyResult, report: Report, seconds: float = COMMAND_SECONDS) -> bool:
    """Run one command. What it says against itself is kept for the report; a hung one is left behind after its limit."""
    report(str(step))
    program = tool(step.argv[0]) or step.argv[0]
    argv, null = [program, *step.argv[1:]], subprocess.DEVNULL
    child = subprocess.Popen(argv, stdin=null, stdout=null, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, output = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # its helpers too, where it has ended itself
            os.killpg(child.pid, signal.SIGKILL)
        kill_group(child)
        done.left.append(f"{step}: no answer in {seconds:g} s; run the same command again once what it waits for is there")
        return False
    if child.returncode == 0:
        done.did.append(str(step))
        return True
    reason = next(iter(output.decode(errors="replace").strip().splitlines()[-1:]), f"exit status {child.returncode}")
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
