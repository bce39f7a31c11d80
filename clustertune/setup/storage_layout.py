"""What a node's storage shall be, from the cluster file alone: mounts as lines of fstab, exports, folders, and what to know."""

from __future__ import annotations

import ipaddress
import math
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from clustertune.cluster.hardware import read_hardware
from clustertune.cluster.schema import FOLDERS, Brick, Cluster, Host
from clustertune.errors import Problem, UserError
from clustertune.host.system import GIB, MIB
from clustertune.setup.setup_machine import choose_node

DATA = "data"
"""The folder of a brick that the pool is made of. It exists on the brick only: where the brick is not mounted, the pool has no
such branch, and writes nothing to the disk below the mount point."""
CACHE_FILES = "auto-full"
"""mergerfs' page cache. ``off`` makes shared mappings fail with ENODEV, and safetensors and arrow read through mappings."""
EXPORT_FILE = "/etc/exports.d/clustertune.exports"
CLONING = "https://github.com/trapexit/mergerfs/issues/1218"
"""mergerfs needs root on its branches to make a folder there that another branch has."""
_SHARD_BYTES = 5_000_000_000
"""Largest shard that the merge writes (``clustertune merge --shard-size``, transformers' own limit for ``save_pretrained``)."""


@dataclass(frozen=True)
class FstabMount:
    """One line of fstab."""

    kind: str
    """``device``, ``bind``, ``nfs`` or ``pool``."""
    source: str
    target: str
    fstype: str
    options: tuple[str, ...]
    check: int = 0
    """The sixth field: 2 where fsck looks at boot."""

    @property
    def line(self) -> str:
        """As fstab(5) has it; the schema lets no field hold blanks."""
        return f"{self.source} {self.target} {self.fstype} {','.join(self.options)} 0 {self.check}"


@dataclass(frozen=True)
class SharedFolder:
    """A folder that users share, on a brick of this node."""

    path: str
    mode: int
    group: str | None
    """None: root's."""


@dataclass(frozen=True)
class StorageLayout:
    """All of one node."""

    mounts: tuple[FstabMount, ...]
    """In the order in which they can be mounted; what is mounted by other means is not among them."""
    own: tuple[Brick, ...]
    """The bricks whose disk is in this node."""
    exports: tuple[str, ...]
    """Lines of exports(5)."""
    folders: tuple[SharedFolder, ...]
    """On this node's own bricks, parents first."""
    local: tuple[SharedFolder, ...]
    """On this node's own disk: where ``clustertune stage`` copies to."""
    notes: tuple[str, ...]


def mode_of(group: str | None) -> int:
    """2775: what is made inside belongs to the group too. Without a group 1777 as /tmp: all write, none removes another's."""
    return 0o2775 if group else 0o1777


def find_node(cluster: Cluster, name: str) -> Host:
    """The machine of that name. Raises UserError with the nearest name, and where there is no storage to set up."""
    host = choose_node(cluster, name)
    if not cluster.storage.bricks:
        fix = "to have disks of nodes joined into one storage, name the bricks: docs/storage.md"
        text = "there is no storage to set up: without bricks the site's own is used as it is"
        raise UserError(Problem(text, file=cluster.source, key="storage.bricks", fix=fix))
    return host


def layout(cluster: Cluster, node: str) -> StorageLayout:
    """What ``node`` mounts, exports and holds. Raises UserError where the cluster file does not say enough."""
    host = find_node(cluster, node)
    storage = cluster.storage
    by_name = {other.name: other for other in cluster.nodes}
    own = [brick for brick in storage.bricks if brick.node == host.name]
    mounts = [mount for brick in own for mount in _own(brick)]
    mounts += [_remote(cluster, brick, by_name[brick.node], host) for brick in storage.bricks if brick.node != host.name]
    free, notes = minfreespace(cluster)
    if storage.pool:
        mounts.append(_pool(cluster, free, {mount.target for mount in mounts}))
        notes += _pool_notes(cluster, own)
    stage, group = storage.staging, storage.group
    if storage.shared is None:
        notes.append("storage.shared is not given: no folders for models, caches and checkpoints are made")
    return StorageLayout(
        mounts=tuple(mounts),
        own=tuple(own),
        exports=tuple(_export(cluster, brick) for brick in own if len(cluster.nodes) > 1),
        folders=tuple(folder for brick in own for folder in _shared_on(cluster, brick)),
        local=(SharedFolder(stage.path, mode_of(group), group),) if stage and "compute" in host.roles else (),
        notes=tuple(notes),
    )


# --- mounts ------------------------------------------------------------------------------------------------------------


def _device(brick: Brick) -> str | None:
    """The device that a line of ours mounts at the brick's path. ZFS mounts by itself."""
    return brick.device if brick.filesystem != "zfs" else None


def _own(brick: Brick) -> Iterator[FstabMount]:
    """A brick of this node: its device where the exported folder is, and that folder where all nodes see it."""
    device = _device(brick)
    if device:
        extra = ("errors=remount-ro",) if brick.filesystem == "ext4" else ()
        # nofail: a node with a broken disk must still boot, so that it can be repaired.
        options = ("noatime", "nosuid", "nodev", *extra, "nofail", "x-systemd.device-timeout=60")
        yield FstabMount("device", device, brick.path, brick.filesystem, options, 2 if brick.filesystem == "ext4" else 0)
    if brick.path != brick.mount:
        after = f"x-systemd.requires{'' if device else '-mounts-for'}={brick.path}"
        yield FstabMount("bind", brick.path, brick.mount, "none", ("bind", "nosuid", "nodev", "nofail", after))


def _remote(cluster: Cluster, brick: Brick, owner: Host, host: Host) -> FstabMount:
    options = ["rw", "hard", "proto=tcp", f"nfsvers={cluster.storage.nfs_version}", "noatime", "nosuid", "nodev"]
    # bg: systemd waits in the background, as long as it takes, for a server that boots later (systemd.mount(5)).
    options += ["bg", "nofail", "_netdev"]
    address = f"[{owner.address}]" if ":" in owner.address else owner.address
    if ":" in owner.address:
        options[options.index("proto=tcp")] = "proto=tcp6"
    if "nfs" in host.roles:
        # Two servers that mount each other's bricks: each serves before it waits for the other.
        options.append("x-systemd.after=nfs-server.service")
    return FstabMount("nfs", f"{address}:{brick.path}", brick.mount, "nfs", tuple(options))


def _pool(cluster: Cluster, free: int, ours: Collection[str]) -> FstabMount:
    pool = cluster.storage.pool
    assert pool
    size = f"{free // GIB}G" if free % GIB == 0 else f"{free // MIB}M"
    options = [
        "allow_other",
        f"category.create={pool.create}",
        f"minfreespace={size}",
        "moveonenospc=true",
        f"cache.files={CACHE_FILES}",
        "dropcacheonclose=true",
        "fsname=pool",
        "nosuid",
        "nodev",
        "nofail",
        # Without it the pool is a local file system that requires remote ones: where nofail is taken out too, boot orders in a
        # circle and systemd leaves mounts out.
        "_netdev",
        # A brick that is mounted by other means may have no unit to require.
        *(f"x-systemd.requires{'' if b.mount in ours else '-mounts-for'}={b.mount}" for b in cluster.storage.bricks),
    ]
    branches = ":".join(f"{brick.mount}/{DATA}" for brick in cluster.storage.bricks)  # the same on every node
    return FstabMount("pool", branches, pool.mount, "fuse.mergerfs", tuple(options))


def minfreespace(cluster: Cluster) -> tuple[int, list[str]]:
    """Bytes that a brick keeps free, and what they were derived from or fall short of; 0 without a pool.

    A file that outgrows its brick is moved whole to another one, which must have room for all of it: more than the largest
    file. No rank's checkpoint file is larger than the memory of the GPU that held it.
    """
    pool, compute = cluster.storage.pool, cluster.compute
    if not pool:
        return 0, []
    gpu = read_hardware().gpus[compute.gpu] if compute.gpus and compute.gpu else None
    needed, what = _whole(_SHARD_BYTES), "the largest shard of a merged model"
    if gpu:
        needed, what = _whole(gpu.memory_gb * GIB), f"the memory of one {compute.gpu}, which bounds a rank's checkpoint file"
    short = f"it falls short of {size_text(needed)}, {what}: a larger file than it fails where its brick fills up"
    if pool.min_free_gb:
        stated = _whole(pool.min_free_gb * 1e9)
        return stated, [
            f"minfreespace={size_text(stated)} as storage.pool.min_free_gb says: {short}"
        ] if stated < needed else []
    smallest = min(brick.tb for brick in cluster.storage.bricks) * 1e12
    if needed > smallest / 4:
        space = _whole(smallest / 20)
        return space, [f"minfreespace={size_text(space)} is 5 % of the smallest brick: {short}"]
    return needed, [f"minfreespace={size_text(needed)} is {what}; storage.pool.min_free_gb says otherwise"]


def size_text(size: int) -> str:
    """A size in GiB, MiB or bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} bytes"


def _whole(size: float) -> int:
    """Rounded up to GiB, below one to MiB: what the option counts in."""
    unit = GIB if size >= GIB else MIB
    return math.ceil(size / unit) * unit


def _pool_notes(cluster: Cluster, own: Sequence[Brick]) -> Iterator[str]:
    pool, bricks = cluster.storage.pool, cluster.storage.bricks
    assert pool
    if not pool.create.startswith("ep") and len({brick.node for brick in bricks}) > 1:
        yield (
            f"category.create={pool.create} may choose a brick that lacks a folder; mergerfs makes it there as root, whom "
            "root_squash maps to nobody, and users get EACCES. storage.pool.create=epmfs keeps the files of a folder on the "
            f"brick that has it ({CLONING})"
        )
    for brick in own:
        yield f"what lies in {brick.path} already is seen in {pool.mount} once it is moved to {brick.path}/{DATA}"


# --- exports and folders -----------------------------------------------------------------------------------------------


def _export(cluster: Cluster, brick: Brick) -> str:
    """One line: the folder, and for the subnet, or each other machine where none is given, the same options."""
    options = ["rw", "sync", "root_squash", "no_subtree_check", "sec=sys"]
    # Only while the disk is mounted: else clients would write to the server's root disk.
    if _device(brick):
        options.append("mountpoint")
    if brick.filesystem in ("zfs", "btrfs"):
        # Their device numbers change with each boot; file handles need a name that stays (exports(5)).
        options.append(f"fsid={uuid.uuid5(uuid.NAMESPACE_URL, f'{cluster.name}/{brick.node}{brick.path}')}")
    text = f"({','.join(options)})"
    clients = [node.address for node in cluster.nodes if node.name != brick.node]
    if cluster.network.subnet:
        clients = [str(ipaddress.ip_network(cluster.network.subnet))]
    return " ".join([brick.path, *(f"{client}{text}" for client in clients)])


def _names(cluster: Cluster) -> tuple[str, ...]:
    """FOLDERS, and the image's folder where that lies beside them."""
    shared, image = cluster.storage.shared, cluster.container.image
    parent = PurePosixPath(image).parent if image else None
    extra = (parent.name,) if shared and parent and str(parent.parent) == (shared.rstrip("/") or "/") else ()
    return tuple(dict.fromkeys((*FOLDERS.values(), *extra)))


def _shared_on(cluster: Cluster, brick: Brick) -> Iterator[SharedFolder]:
    """The folders on one brick, at its own path: what lies below ``shared`` is below each brick's part of the pool."""
    storage = cluster.storage
    shared, group = storage.shared, storage.group
    mount, base = brick.mount, brick.path
    if storage.pool:
        base = f"{brick.path}/{DATA}"
        on_pool = shared is not None and _below(shared, storage.pool.mount) is not None
        yield SharedFolder(base, mode_of(group), group) if shared == storage.pool.mount else SharedFolder(base, 0o755, None)
        if on_pool:
            mount = storage.pool.mount
        else:
            base = brick.path
    below = _below(shared, mount) if shared else None
    if below is None:
        return
    path = base
    for number, part in enumerate(below.parts, 1):
        path, last = f"{path}/{part}", number == len(below.parts)
        yield SharedFolder(path, mode_of(group) if last else 0o755, group if last else None)
    yield from (SharedFolder(f"{path}/{name}", mode_of(group), group) for name in _names(cluster))


def _below(path: str, mount: str) -> PurePosixPath | None:
    try:
        return PurePosixPath(path).relative_to(mount)
    except ValueError:
        return None
