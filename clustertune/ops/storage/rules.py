"""What is looked at on a node with storage, and why it hurts."""

from __future__ import annotations

from clustertune.check.rule import Rule
from clustertune.ops.storage.layout import CLONING

MERGERFS = "https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html"
NFS = "https://man7.org/linux/man-pages/man5/nfs.5.html"
EXPORTS = "https://man7.org/linux/man-pages/man5/exports.5.html"
FSTAB = "https://man7.org/linux/man-pages/man5/systemd.mount.5.html"
CHATTR = "https://man7.org/linux/man-pages/man1/chattr.1.html"

MOUNTED = Rule(
    "brick-mounted",
    "a brick is mounted",
    "the pool shrinks without a message: its files vanish, new ones go elsewhere",
    MERGERFS,
)
ANSWERS = Rule(
    "brick-answers", "a brick answers", "ls, df and every new file in the pool wait for it, and cannot be killed", NFS
)
ROOT_DISK = Rule(
    "brick-not-on-root-disk", "a brick is no part of the root disk", "writes fill the disk the node boots from", MERGERFS
)
WRITABLE = Rule("brick-writable", "a brick takes writes", "checkpoints that were to go there fail", MERGERFS)
SPACE = Rule(
    "brick-space", "a brick has room", "below minfreespace it takes no new file; with none left, training stops", MERGERFS
)
DATA_RULE = Rule("brick-data", "a brick has the pool's folder", "without it the pool passes the brick over", MERGERFS)
SOURCE = Rule(
    "brick-source", "a brick is mounted from where the cluster file says", "nodes see different files at one path", NFS
)
OPTIONS = Rule("brick-options", "an NFS brick is mounted hard", "soft mounts give up, and lose what was written", NFS)
SERVER = Rule("nfs-server-answers", "a server answers on TCP 2049", "every access waits until it does", NFS)
EXPORT = Rule(
    "nfs-export", "this node exports its bricks", "other nodes cannot mount them, or see them with other rights", EXPORTS
)
POOL_MOUNTED = Rule(
    "pool-mounted", "the pool is mounted", "what is written goes to the disk below, and is hidden later", MERGERFS
)
POOL_ANSWERS = Rule("pool-answers", "the pool answers", "training waits for it for ever", MERGERFS)
POOL_BRICKS = Rule("pool-bricks", "the pool has all bricks", "files on the missing one are not there for anybody", MERGERFS)
POOL_OPTIONS = Rule(
    "pool-options", "the pool runs with the options meant", "files outgrow a brick, or go where they should not", MERGERFS
)
POOL_MMAP = Rule(
    "pool-mmap", "files of the pool can be mapped", "safetensors, arrow and sqlite read through mappings", MERGERFS
)
POOL_WRITES = Rule("pool-writable", "the pool takes writes", "no checkpoint can be written", CLONING)
POINT = Rule(
    "mount-point-immutable", "nothing can be written below a mount", "an absent brick takes writes on the root disk", CHATTR
)
FOLDERS = Rule("shared-folders", "the shared folders are there, with their modes", "users cannot write, or not share", CHATTR)
CLOCK = Rule("storage-clock", "server and client agree on the time", "munge refuses jobs, make and caches go wrong", NFS)
CURRENT = Rule(
    "files-current", "fstab and exports are what the cluster file says", "the next boot mounts something else", FSTAB
)

RULES = (
    MOUNTED, ANSWERS, ROOT_DISK, WRITABLE, SPACE, DATA_RULE, SOURCE, OPTIONS, SERVER, EXPORT, POOL_MOUNTED, POOL_ANSWERS,
    POOL_BRICKS, POOL_OPTIONS, POOL_MMAP, POOL_WRITES, POINT, FOLDERS, CLOCK, CURRENT,
)  # fmt: skip
