"""File systems: whether they answer, how they are mounted, what can be done on them, how full they are. Python 3.8."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.doctor.machine import Machine, gigabytes, on_network
from clustertune.health import FAIL, PASS, WARN, Finding, Rule
from clustertune.host.facts import Mount

_NFS = "https://man7.org/linux/man-pages/man5/nfs.5.html"

SILENT = Rule(
    "mount-silent",
    "file systems that do not answer",
    "whatever touches it hangs, and cannot be killed: ranks, srun, and the end of the job",
    _NFS,
)
MISSING = Rule(
    "mount-missing",
    "the file systems of the cluster file",
    "what is written to a folder on which nothing is mounted fills the root disk, and no other node sees it",
    "https://github.com/huggingface/accelerate/issues/3010",
)
READ_ONLY = Rule(
    "mount-read-only",
    "file systems that ought to be writable",
    "a kernel that finds errors mounts a file system read-only: the next checkpoint fails",
    "https://man7.org/linux/man-pages/man8/mount.8.html",
)
NFS_OPTIONS = Rule(
    "nfs-options",
    "how NFS is mounted",
    "a soft mount gives an error to the program where the server is slow, in the middle of a checkpoint: a damaged file",
    _NFS,
)
POOL_MODE = Rule(
    "pool-mmap",
    "mapped files on a mergerfs pool",
    "with page caching off files cannot be mapped shared: memory maps and SQLite end with 'no such device'",
    "https://github.com/trapexit/mergerfs/issues/674",
)
BRANCH = Rule(
    "pool-branch",
    "what the branches of a mergerfs pool lie on",
    "where a brick is not mounted the pool takes the root disk for the emptiest, and writes checkpoints there",
    "https://manpages.ubuntu.com/manpages/questing/man1/mergerfs.1.html",
)
EXPORT = Rule(
    "nfs-over-fuse",
    "NFS exports of a FUSE file system",
    "the kernel forgets files of FUSE that a client still has open: 'stale file handle' at any time",
    "https://github.com/trapexit/mergerfs/issues/1557",
)
MMAP = Rule(
    "mmap",
    "shared mappings where caches and models lie",
    "datasets, memory maps and SQLite need them",
    "https://github.com/trapexit/mergerfs/issues/1290",
)
FLOCK = Rule(
    "flock",
    "locks where caches lie",
    "datasets and huggingface_hub lock their caches: without locks ranks end with an error, or write over each other",
    "https://github.com/huggingface/datasets/issues/6744",
)
EXECUTE = Rule(
    "noexec",
    "folders in which compiled code is kept",
    "Triton and torch.compile load what they compile there: 'failed to map segment from shared object'",
    "https://github.com/pytorch/pytorch/issues/91005",
)
COMPILER = Rule(
    "compiler-cache",
    "file system of Triton's and Inductor's caches",
    "on a network file system one rank meets a stale handle and ends, and all others wait for it",
    "https://github.com/triton-lang/triton/issues/11512",
)
HUB = Rule(
    "hub-cache",
    "file system of the Hugging Face cache",
    "weights are mapped page by page: over NFS or FUSE loading takes 10 to 50 times as long",
    "https://github.com/huggingface/safetensors/issues/562",
)
FULL = Rule(
    "disk-full",
    "room on the file systems that jobs write to",
    "a full disk ends the job at its next checkpoint, a full /tmp at any moment",
    "https://man7.org/linux/man-pages/man3/statvfs.3.html",
)
INODES = Rule(
    "inodes",
    "files that can still be made",
    "without inodes a disk is full that df shows as empty",
    "https://man7.org/linux/man-pages/man3/statvfs.3.html",
)
SCRATCH = Rule(
    "scratch",
    "the node's own folder for caches",
    "without it ranks cannot compile, or do so on a network file system",
    "https://github.com/pytorch/pytorch/issues/173679",
)
OVERLAY = Rule(
    "container-root",
    "room on the container's own file system",
    "what is written outside of the binds goes to an overlay of some MB, or to a read-only image",
    "https://github.com/apptainer/apptainer-userdocs/blob/master/persistent_overlays.rst",
)
READABLE = Rule(
    "secret-mode",
    "who may read files with secrets",
    "a token that others can read is theirs",
    "https://slurm.schedmd.com/slurmdbd.conf.html",
)
WRITABLE = Rule(
    "program-mode",
    "who may change what jobs run",
    "whoever can change the script runs code as you",
    "https://slurm.schedmd.com/sbatch.html",
)
RULES = (
    SILENT, MISSING, READ_ONLY, NFS_OPTIONS, POOL_MODE, BRANCH, EXPORT, MMAP, FLOCK, EXECUTE, COMPILER, HUB, FULL, INODES,
    SCRATCH, OVERLAY, READABLE, WRITABLE,
)  # fmt: skip

GB = 10**9
TIGHT, EMPTY = 10 * GB, 1 * GB
FEW_INODES = 10_000


def _named(m: Machine) -> dict[str, str]:
    """Folders of the cluster file that are mounted, or written to: path to what it is."""
    storage = m.section("storage")
    named = {}
    for brick in storage.get("bricks") or ():
        named[str(brick.get("mount"))] = "brick"
    if pool := storage.get("pool"):
        named[str(pool.get("mount"))] = "pool"
    if storage.get("shared"):
        named.setdefault(str(storage["shared"]), "shared")
    return named


def silent(m: Machine) -> Iterator[Finding]:
    """Every file system answers."""
    hung = [mount for mount in m.facts.mounts if mount.silent or mount.fault]
    for mount in hung:
        fix = f"look at the server of {mount.source or 'it'}; if it is gone for good: umount -l {mount.point} as root"
        needed = m.computes and any(place == mount.point or place.startswith(mount.point + "/") for place in _needed(m))
        said = mount.fault or "gave no answer"
        yield m.tell(SILENT, FAIL if needed else WARN, f"{mount.point} ({mount.kind}, {mount.source}): {said}", fix)
    if m.facts.mounts and not hung:
        yield m.tell(SILENT, PASS, f"{len(m.facts.mounts)} file systems answer")


def _needed(m: Machine) -> list[str]:
    """Folders that a job touches."""
    named = [
        str(m.section("storage").get("scratch") or ""),
        m.environ("HOME"),
        m.environ("TMPDIR"),
        m.environ("HF_HOME"),
        "/tmp",  # noqa: S108 - it is looked at
    ]
    return [path for path in (*_named(m), *named) if path]


def missing(m: Machine) -> Iterator[Finding]:
    """What the cluster file mounts is mounted, on the machines of the file. In a container it is a bind of it."""
    named = {path: what for path, what in _named(m).items() if what in ("brick", "pool")}
    if not named or not m.facts.mounts or not (m.is_member or m.in_step) or m.rehearsal:
        return
    own = {str(b.get("mount")) for b in m.section("storage").get("bricks") or () if _same(str(b.get("node")), m.facts.hostname)}
    points = {mount.point for mount in m.facts.mounts}
    below = {mount.point for mount in m.facts.mounts if mount.point != "/"}
    for path, what in named.items():
        there = path in points or (m.in_container and any(path.startswith(point + "/") for point in below))
        if not there and path in own:
            there = any(path.startswith(point + "/") for point in below)  # a brick of its own may lie on a larger disk
        if not there and any(path == point or path.startswith(point.rstrip("/") + "/") for point in m.facts.automounts):
            continue  # it is mounted when it is first used
        if there:
            yield m.tell(MISSING, PASS, f"{path} is mounted")
        elif m.in_container:
            yield m.tell(
                MISSING, WARN, f"the container does not see the {what} {path}", "bind it: container.binds of the cluster file"
            )
        else:
            fix = f"mount {path}; clustertune ops storage check says why it is not; an immutable mount point keeps writes off"
            yield m.tell(
                MISSING, FAIL if m.computes else WARN, f"nothing is mounted on {path} ({what} of the cluster file)", fix
            )


def _same(one: str, other: str) -> bool:
    return one.lower().partition(".")[0] == other.lower().partition(".")[0]


def read_only(m: Machine) -> Iterator[Finding]:
    """Bricks, pool, scratch and /tmp are writable."""
    storage = m.section("storage")
    wanted = [*_named(m), str(storage.get("scratch") or ""), "/tmp"]  # noqa: S108 - it is looked at
    bad = {}
    for path in wanted:
        mount = m.mount_of(path) if path else None
        if mount is not None and "ro" in mount.options and (mount.point != "/" or not m.in_container):
            bad[mount.point] = mount
    for mount in bad.values():
        fix = "look at dmesg for errors of the disk; repair it, then mount -o remount,rw; in a container bind it without :ro"
        hard = m.computes and not m.in_container and _named(m).get(mount.point) != "brick"  # a pool passes over such a brick
        yield m.tell(READ_ONLY, FAIL if hard else WARN, f"{mount.point} ({mount.kind}) is read-only", fix)
    if m.facts.mounts and not bad:
        yield m.tell(READ_ONLY, PASS, "none that is to be written")


def nfs_options(m: Machine) -> Iterator[Finding]:
    """NFS is mounted hard, and with locks."""
    mounts = [mount for mount in m.facts.mounts if mount.kind.startswith("nfs")]
    for mount in mounts:
        bad = [word for word in mount.options if word in ("soft", "softerr", "softreval", "nolock") or word == "local_lock=all"]
        if bad:
            fix = "mount it hard and with locks: clustertune ops storage plan prints the lines"
            yield m.tell(NFS_OPTIONS, WARN, f"{mount.point}: {', '.join(bad)}", fix)
        else:
            yield m.tell(NFS_OPTIONS, PASS, f"{mount.point}: hard")


def pools(m: Machine) -> Iterator[Finding]:
    """Pools can map files; no FUSE file system is exported."""
    f = m.facts
    for mount in f.mounts:
        if mount.kind != "fuse.mergerfs":
            continue
        yield from _branches(m, mount)
        bad = [word for word in mount.options if word in ("cache.files=off", "direct_io")]
        tried = [p.ok for p in f.probes if p.what == "mmap" and p.ok is not None and m.mount_of(p.folder) is mount]
        if bad and not tried:  # what was tried is known, with kernels that map such files too: the rule mmap tells
            fix = "cache.files=auto-full (or partial) in the pool's fstab line: clustertune ops storage plan"
            yield m.tell(POOL_MODE, WARN, f"{mount.point}: {', '.join(bad)}", fix)
    for path in f.exports:
        below = m.mount_of(path)
        if below is not None and below.kind.startswith("fuse."):
            fix = "export the bricks, not the pool: every node mounts them and makes its own pool"
            yield m.tell(EXPORT, FAIL, f"/etc/exports: {path} lies on {below.kind} at {below.point}", fix)


def _branches(m: Machine, pool: Mount) -> Iterator[Finding]:
    said = next((word[len("branches=") :] for word in pool.options if word.startswith("branches=")), "")
    paths = [part.partition("=")[0] for part in said.split(":") if part.startswith("/")]
    bare = [path for path in paths if (under := m.mount_of(path)) is not None and under.point == "/"]
    if bare:
        fix = "mount the bricks, and keep their empty mount points immutable (chattr +i): clustertune ops storage check"
        yield m.tell(BRANCH, FAIL, f"{pool.point}: {', '.join(bare)} on the root disk", fix)
    elif paths:
        yield m.tell(BRANCH, PASS, f"{pool.point}: {len(paths)} branches, each on a disk of its own")


def probes(m: Machine) -> Iterator[Finding]:
    """What libraries do in their folders works there."""
    rules = {"mmap": MMAP, "flock": FLOCK, "exec": EXECUTE}
    fixes = {
        "mmap": "cache.files=auto-full for a mergerfs pool, or move the folder to another file system",
        "flock": "mount with locks (local_lock=none, lockd for NFSv3), or HF_HOME on a disk of the node",
        "exec": "TMPDIR, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR on a file system that is not mounted noexec",
    }
    compiled = {m.environ("TRITON_CACHE_DIR"), m.environ("TORCHINDUCTOR_CACHE_DIR"), m.environ("TMPDIR") or "/tmp"}  # noqa: S108
    compiled.add(str(m.section("storage").get("scratch") or ""))
    done = dict.fromkeys(rules, 0)
    for probe in m.facts.probes:
        rule = rules.get(probe.what)
        if rule is None or (probe.what == "exec" and probe.folder not in compiled):
            continue
        if probe.ok is False:
            mount = m.mount_of(probe.folder)
            on = f" ({mount.kind} at {mount.point})" if mount else ""
            # without locks libraries end with an error; the other two only some of what may run would miss
            status = FAIL if m.computes and probe.what == "flock" else WARN
            yield m.tell(rule, status, f"{probe.folder}{on}: {probe.said}", fixes[probe.what])
        elif probe.ok:
            done[probe.what] += 1
    for what, number in done.items():
        if number:
            yield m.tell(rules[what], PASS, f"works in {number} folders")


def caches(m: Machine) -> Iterator[Finding]:
    """Compiled kernels lie on a disk of the node; where weights are read from is known."""
    home = m.environ("HOME")
    triton = m.environ("TRITON_CACHE_DIR") or (f"{home}/.triton" if home else "")
    for name, path in (("TRITON_CACHE_DIR", triton), ("TORCHINDUCTOR_CACHE_DIR", m.environ("TORCHINDUCTOR_CACHE_DIR"))):
        mount = m.mount_of(path) if path and m.computes else None
        if mount is None:
            continue
        if on_network(mount):
            fix = f"{name} on a disk of the node, of each job its own: jobs started by clustertune have it so"
            default = "" if m.environ(name) else " (by default)"
            if default and m.expects.launched:
                yield m.tell(COMPILER, PASS, "each job has its own, on the node")
            else:
                yield m.tell(COMPILER, WARN, f"{path}{default} lies on {mount.kind}", fix)
        else:
            yield m.tell(COMPILER, PASS, f"{path} lies on {mount.kind}")
    cache = m.environ("HF_HOME") or (f"{home}/.cache/huggingface" if home else "")
    mount = m.mount_of(cache) if cache and m.computes else None
    if mount is not None and on_network(mount):
        fix = "copy models to a disk of the node (clustertune stage), or read them with mmap switched off"
        yield m.tell(HUB, WARN, f"{cache} lies on {mount.kind} at {mount.point}", fix)
    elif mount is not None:
        yield m.tell(HUB, PASS, f"{cache} lies on {mount.kind}")


def room(m: Machine) -> Iterator[Finding]:
    """There is room, and there are inodes, where jobs write."""
    storage = m.section("storage")
    staging = storage.get("staging") or {}
    named = [*_named(m), str(storage.get("scratch") or ""), str(staging.get("path") or ""), m.environ("TMPDIR") or "/tmp"]  # noqa: S108
    if not m.in_container:
        named.append("/")
    seen: dict[str, Mount] = {}
    for path in named:
        mount = m.mount_of(path) if path else None
        if mount is not None and not mount.silent:
            seen[mount.point] = mount
    good = 0
    for mount in seen.values():
        if "ro" in mount.options or mount.free_bytes is None or not mount.total_bytes:
            continue
        small = mount.total_bytes < TIGHT  # a tmpfs or a quota of some GB is meant to be so
        if mount.free_bytes < (mount.total_bytes // 20 if small else EMPTY):
            status = FAIL if mount.free_bytes < 100_000_000 else WARN
        else:
            status = WARN if mount.free_bytes < TIGHT and not small else PASS
        told = f"{mount.point} ({mount.kind}): {gigabytes(mount.free_bytes)} of {gigabytes(mount.total_bytes)} left"
        if status == PASS:
            good += 1
        else:
            yield m.tell(FULL, status, told, f"remove what is not needed: du -xh -d 2 {mount.point} | sort -h | tail")
        if mount.free_inodes is not None and mount.free_inodes < FEW_INODES and mount.kind != "tmpfs":
            fix = f"remove small files: du --inodes -x -d 2 {mount.point} | sort -n | tail"
            status = FAIL if mount.free_inodes < 100 else WARN
            yield m.tell(INODES, status, f"{mount.point} ({mount.kind}): {mount.free_inodes} inodes left", fix)
    if good:
        yield m.tell(FULL, PASS, f"{good} file systems have room")


def scratch(m: Machine) -> Iterator[Finding]:
    """The node's own folder is on the node, and can be written."""
    path = str(m.section("storage").get("scratch") or "")
    mount = m.mount_of(path) if path and m.computes else None
    if mount is None:
        return
    tried = [probe for probe in m.facts.probes if probe.folder == path]
    if on_network(mount):
        fix = "storage.scratch of the cluster file must be on a disk of each node"
        yield m.tell(SCRATCH, WARN, f"{path} lies on {mount.kind} at {mount.point}", fix)
    elif tried and all(probe.ok is None for probe in tried):
        fix = "make it on every node (mode 1777, as /tmp), or name another one: storage.scratch of the cluster file"
        yield m.tell(SCRATCH, FAIL if m.in_step else WARN, f"{path}: {tried[0].said}", fix)
    elif tried:
        yield m.tell(SCRATCH, PASS, f"{path} on {mount.kind}")


def container_root(m: Machine) -> Iterator[Finding]:
    """A container's overlay has room."""
    root = m.mount_of("/") if m.in_container else None
    if root is None or root.kind not in ("overlay", "fuse.fuse-overlayfs") or root.free_bytes is None:
        return
    if root.free_bytes < 64_000_000 and "ro" not in root.options:
        fix = "write below bound folders only (TMPDIR, HF_HOME, the run folder); or a larger overlay"
        yield m.tell(OVERLAY, WARN, f"{gigabytes(root.free_bytes)} left on the container's root", fix)
    else:
        yield m.tell(OVERLAY, PASS, f"{gigabytes(root.free_bytes)} left")


def file_modes(m: Machine) -> Iterator[Finding]:
    """Secrets are read, and programs changed, by their owner only."""
    secret = [file for file in m.facts.files if file.what == "secret"]
    program = [file for file in m.facts.files if file.what == "program"]
    for file in secret:
        if file.mode & 0o077:
            yield m.tell(READABLE, WARN, f"{file.path} has mode {file.mode:04o}", f"chmod 600 {file.path}")
    for file in program:
        if file.mode & 0o022:
            yield m.tell(WRITABLE, WARN, f"{file.path} has mode {file.mode:04o}", f"chmod go-w {file.path}")
    if secret and not any(file.mode & 0o077 for file in secret):
        yield m.tell(READABLE, PASS, f"{len(secret)} files")
    if program and not any(file.mode & 0o022 for file in program):
        yield m.tell(WRITABLE, PASS, f"{len(program)} files")


LOOKS = (silent, missing, read_only, nfs_options, pools, probes, caches, room, scratch, container_root, file_modes)


def check(m: Machine) -> Iterator[Finding]:
    """All of them."""
    for look in LOOKS:
        yield from look(m)
