"""The difference between what a node's storage shall be and what it is."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.host.mounts import MountLine
from clustertune.ops.bounded import Answer, Work, ask_all, mounts
from clustertune.ops.files import NODE, Change, diff, foreign, inside, read, with_block
from clustertune.ops.nodes import has_systemd, tool
from clustertune.ops.storage import devices, etab, points
from clustertune.ops.storage.devices import StorageStep
from clustertune.ops.storage.fstab import FSTAB, elsewhere, entries, exported, other_exports, taken
from clustertune.ops.storage.layout import EXPORT_FILE, FstabMount, SharedFolder, StorageLayout, find_node, layout
from clustertune.process import captured

BLOCK = "storage"
"""The name between the markers."""
PROBE_SECONDS = 10.0
_UNITS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
TOOLS = {
    "pool": ("mergerfs", "mergerfs"),
    "nfs": ("mount.nfs", "nfs-common"),
    "exports": ("exportfs", "nfs-kernel-server"),
}
"""What each kind of line needs: the program, and Debian's and Ubuntu's package of it."""


@dataclass(frozen=True)
class StoragePlan:
    """All that is to be done on one node; nothing of it is done yet."""

    layout: StorageLayout
    root: Path
    changes: tuple[Change, ...]
    points: tuple[points.MountPoint, ...]
    folders: tuple[SharedFolder, ...]
    """To be made, on bricks that are mounted, and on the node's own disk."""
    steps: tuple[StorageStep, ...]
    later: tuple[str, ...]
    """Where this is a tree: what the node itself needs once it has started, as commands."""
    notes: tuple[str, ...]
    fstab: bytes = field(default=b"", repr=False)
    """The new text of fstab."""

    @property
    def live(self) -> bool:
        """This machine itself, not a tree."""
        return self.root == NODE

    @property
    def point_words(self) -> list[str]:
        """What is to be done about mount points."""
        return [message for point in self.points if (message := points.missing(point, live=self.live))]

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
    node = find_node(cluster, node).name
    live = root == NODE
    found: list[Problem] = []
    text = read(root, FSTAB)
    lines = entries(foreign(text, BLOCK, shown=FSTAB))
    mounted = mounts() if live else []
    wanted = layout_of(cluster, node, root)
    found += taken(lines, (mount.target for mount in wanted.mounts))
    found += exported(_other_exports(root), (brick.path for brick in wanted.own))
    changes = list(_changes(wanted, root, text, cluster.source, force, found))
    seen = points.look((mount.target for mount in wanted.mounts), root)
    found += points.problems(seen)
    if found:
        raise UserError(found)
    steps: list[StorageStep] = []
    folders: list[SharedFolder] = []
    notes = list(wanted.notes)
    if live:
        steps = list(_steps(wanted, mounted, changes))
        folders, more = _folders(wanted)
        notes += more + [note for mount in wanted.mounts for note in _other_mount(mount, mounted)]
    notes += [*_below(seen), *by_hand(cluster, node, root)]
    return StoragePlan(
        layout=wanted,
        root=root,
        changes=tuple(changes),
        points=tuple(seen),
        folders=tuple(folders),
        steps=tuple(steps),
        later=() if live else tuple(_later(wanted)),
        notes=tuple(notes),
        fstab=changes[0].after,
    )


def _later(wanted: StorageLayout) -> Iterator[str]:
    """What apply does on the node itself, in its order, beyond what a tree can hold."""
    for mount in wanted.mounts:
        yield f"chattr +i {mount.target}"
    for mount in wanted.mounts:
        if mount.kind == "device" and mount.brick:
            yield f"{shlex.join(devices.MKFS[mount.brick.filesystem])} {mount.source}   # only if it is blank; apply --format"
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


def by_hand(cluster: Cluster, node: str, root: Path) -> list[str]:
    """Disks of bricks that are mounted above the exported folder now, and by nothing that the next boot knows, in message."""
    if root != NODE:
        return []
    own = [brick for brick in cluster.storage.bricks if brick.node == find_node(cluster, node).name]
    lines = entries(foreign(read(root, FSTAB), BLOCK, shown=FSTAB))
    permanent = elsewhere(lines, [], own, live=True)
    return [
        f"{device} is mounted at {at} by hand: the next boot leaves it out, as no line of {FSTAB} names it"
        for device, at in elsewhere([], mounts(), own, live=True).items()
        if device not in permanent and not any((Path(folder) / unit(at)).exists() for folder in _UNITS)
    ]


def layout_of(cluster: Cluster, node: str, root: Path) -> StorageLayout:
    """What ``node`` shall have, with what is mounted there by other means taken into account. Raises UserError."""
    live = root == NODE
    lines = entries(foreign(read(root, FSTAB), BLOCK, shown=FSTAB))
    own = [brick for brick in cluster.storage.bricks if brick.node == find_node(cluster, node).name]
    return layout(cluster, node, elsewhere(lines, mounts() if live else [], own, live=live))


def _below(seen: Iterable[points.MountPoint]) -> Iterator[str]:
    for point in seen:
        if point.mounted and point.entries:
            names = ", ".join(point.entries[:5])
            yield f"below the mount at {point.path} lie {names}: written while nothing was mounted there, and hidden now"
        if point.mounted and point.kind == "unknown":
            yield f"what lies below the mount at {point.path} is seen by root only"


def _changes(
    wanted: StorageLayout, root: Path, text: bytes | None, source: str, force: bool, found: list[Problem]
) -> Iterator[Change]:
    exports = read(root, EXPORT_FILE)
    for path, before, lines in (
        (FSTAB, text, [mount.line for mount in wanted.mounts]),
        (EXPORT_FILE, exports, list(wanted.exports)),
    ):
        try:
            after = with_block(before, BLOCK, lines, shown=path, origin=Path(source).name, force=force)
        except UserError as error:
            found += error.problems
            after = before or b""
        yield Change(path, before, after)


def _other_exports(root: Path) -> dict[str, bytes]:
    folder, _, own = EXPORT_FILE.rpartition("/")
    paths = ["/etc/exports", *(f"{folder}/{name}" for name in other_exports(inside(root, folder), own))]
    return {path: text for path in paths if (text := read(root, path)) is not None}


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


def _steps(wanted: StorageLayout, mounted: list[MountLine], changes: list[Change]) -> Iterator[StorageStep]:
    if packages := lacking(wanted):
        yield StorageStep(("apt-get", "install", *packages), "what fstab and exports name is not installed", by_hand=True)
    where = {entry.point for entry in mounted}
    for mount in wanted.mounts:
        if mount.kind == "device" and mount.target not in where:
            yield from devices.steps(mount)
    if has_systemd() and (changes[0].needed or outdated(wanted.mounts)):
        yield StorageStep(("systemctl", "daemon-reload"), "systemd makes its mount units of fstab again")
    local = [mount for mount in wanted.mounts if mount.kind in ("device", "bind") and mount.target not in where]
    yield from (_mount_step(mount) for mount in local)
    if wanted.exports:
        yield from _server_steps(wanted, changes[1].needed)
    yield from (_mount_step(mount) for mount in wanted.mounts if mount not in local and mount.target not in where)


def _mount_step(mount: FstabMount) -> StorageStep:
    # fg,retry=0: the line's own bg would have this command wait for a server that is not up yet.
    extra = ("-o", "fg,retry=0") if mount.kind == "nfs" else ()
    return StorageStep(("mount", *extra, mount.target), f"{mount.source} is not mounted", target=mount.target)


def _server_steps(wanted: StorageLayout, changed: bool) -> Iterator[StorageStep]:
    if not serves():
        if has_systemd():
            yield StorageStep(("systemctl", "enable", "--now", "nfs-server.service"), "the NFS server does not run")
        else:
            yield StorageStep(("rpc.nfsd", "8"), "the NFS server does not run, nor systemd, which would start it", by_hand=True)
        return
    now = etab.read()
    if changed or list(etab.faults(wanted.exports, now, etab.canonical(wanted.exports, now, PROBE_SECONDS))):
        yield StorageStep(("exportfs", "-ra"), "the server reads the exports again")


def serves(proc: Path = Path("/proc")) -> bool:
    """Whether this machine's NFS server runs: the number of its threads, which only root reads where nfsd(7) has it."""
    with contextlib.suppress(OSError, ValueError):
        return int((proc / "fs/nfsd/threads").read_text()) > 0
    with contextlib.suppress(OSError):
        for line in (proc / "net/rpc/nfsd").read_text().splitlines():
            if (fields := line.split())[:1] == ["th"]:
                return fields[1:2] not in ([], ["0"])
    return False


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
    """Those that are absent on this node's bricks, which must be no part of the root disk."""
    notes: list[str] = []
    result: list[SharedFolder] = []
    for brick in wanted.own:
        of_brick = [folder for folder in wanted.folders if folder.path.startswith(f"{brick.path}/")]
        works: dict[str, Work] = {folder.path: partial(_mode, folder.path) for folder in of_brick}
        answers = ask_all({**works, brick.path: partial(own_disk, brick.path)}, PROBE_SECONDS)
        if any(answer.silent for answer in answers.values()):
            notes.append(f"{brick.path} does not answer: clustertune ops storage check says more")
            continue
        ready = wanted.at(brick.path) is not None or (answers[brick.path].found or {}).get("own")
        if not ready:
            notes.append(f"{brick.path} is on the root disk, or is not there: mount its file system; no folders are made on it")
            continue
        found, more = _compare(of_brick, answers)
        result, notes = result + found, notes + more
    answers = ask_all({folder.path: partial(_mode, folder.path) for folder in wanted.local}, PROBE_SECONDS)
    found, more = _compare(wanted.local, answers)
    return result + found, notes + more


def _compare(folders: Iterable[SharedFolder], answers: Mapping[str, Answer]) -> tuple[list[SharedFolder], list[str]]:
    """Those that are absent, and a message for each that is not as it should be."""
    absent, notes = [], []
    for folder in folders:
        seen = (answers[folder.path].found or {}).get("mode")
        if seen is None:
            absent.append(folder)
        elif seen & 0o7777 != folder.mode:
            text = f"{folder.path} has mode {seen & 0o7777:04o}, {folder.mode:04o} is meant; apply changes none that is there"
            notes.append(f"{text}: chmod {folder.mode:04o} {folder.path}")
    return absent, notes


def _mode(path: str) -> dict[str, int]:
    return {"mode": Path(path).stat().st_mode}


def own_disk(path: str) -> dict[str, bool]:
    """``own``: whether a folder is on another file system than the root disk. Raises OSError."""
    return {"own": Path(path).stat().st_dev != Path("/").stat().st_dev}


def empty_tree() -> tempfile.TemporaryDirectory[str]:
    """A node that has nothing: what a plan for another machine is compared with."""
    return tempfile.TemporaryDirectory(prefix="clustertune-")


# --- verify ---------------------------------------------------------------------------------------------------------------

# Would this fstab boot? systemd's own generator and verifier say so of a text that lies nowhere yet.

GENERATOR = (
    "/lib/systemd/system-generators/systemd-fstab-generator",
    "/usr/lib/systemd/system-generators/systemd-fstab-generator",
)
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
        env = {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL")},
            "SYSTEMD_FSTAB": str(fstab),
            "SYSTEMD_SYSROOT_FSTAB": os.devnull,
            "SYSTEMD_LOG_TARGET": "console",
            "SYSTEMD_LOG_LEVEL": "info",
        }
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
