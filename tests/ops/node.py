"""A node to try storage on: mount, PID and network namespaces of its own, with a private /etc, loop disks and real mergerfs."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clustertune.cli.app import main
from clustertune.ops.storage.node import immutable
from tests.command import REPO, Done

TOOLS = ("unshare", "nsenter", "losetup", "mkfs.xfs", "mergerfs", "exportfs", "blkid", "wipefs")
SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
LIMIT = 300
"""Seconds, for what hangs; a busy machine needs a minute for a file system."""

SETUP = """
set -e
mount -t tmpfs tmpfs {base}/own
mkdir {base}/own/up {base}/own/work {base}/own/nfs
mount -t overlay overlay -o lowerdir=/etc,upperdir={base}/own/up,workdir={base}/own/work /etc
mount -t tmpfs tmpfs /run
[ ! -d /var/lib/nfs ] || mount --bind {base}/own/nfs /var/lib/nfs
rm -rf /etc/exports.d; : > /etc/exports; : > /etc/fstab
ip link set lo up
"""


FORKS = multiprocessing.get_context("forkserver")
"""Commands are forked of one process that has their imports already: a second less for each."""
FORKS.set_forkserver_preload(
    [*(f"clustertune.ops.storage.{name}" for name in ("judge", "plan")), "clustertune.cli.app", __name__]
)


def _enter(pid: int) -> None:
    """Go on in the namespaces of a process."""
    spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("pid", "net", "mnt")]
    here = Path.cwd()
    assert not [space for space in spaces if ctypes.CDLL(None).setns(space, 0)]
    os.chdir(here)
    if child := os.fork():  # who is in a PID namespace is only its children
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)


def _command(arguments: list[str], user: int | None, pid: int | None, outputs: list[str]) -> None:
    os.environ |= {"PATH": SBIN, "PYTHONPATH": str(REPO)}
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    if pid:
        _enter(pid)
    sys.argv = ["clustertune", *arguments]
    if user:  # what it imports on its way may lie in root's home, where nobody else can read
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main()
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    sys.exit(main())


def served(*arguments: str | Path, user: int | None = None, pid: int | None = None) -> Done:
    """Run ``clustertune`` to its end: as ``user``, in the namespaces of process ``pid``."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/{name}" for name in ("out", "err")]
        child = FORKS.Process(target=_command, args=([*map(str, arguments)], user, pid, outputs))
        child.start()
        child.join(LIMIT)
        assert child.exitcode is not None, "it hangs"
        done = Done(child.exitcode, *(Path(path).read_text() for path in outputs))
    assert "Traceback" not in done.err, done.err
    return done


def lacking(*more: str) -> str | None:
    """Why no node can be made here; None: it can."""
    if os.geteuid() != 0:
        return "needs root for loop devices and mounts"
    absent = [name for name in (*TOOLS, *more) if not shutil.which(name, path=SBIN)]
    return f"needs {', '.join(absent)}" if absent else None


class Node:
    """One machine; what is mounted in it is seen by nobody else."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.loops: list[str] = []
        (base / "own").mkdir(parents=True)
        self.keeper = subprocess.Popen(
            ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            self.pid = self._first_child()
            self.shell(SETUP.format(base=base))
        except BaseException:
            self.keeper.kill()
            raise

    def _first_child(self) -> int:
        deadline = time.monotonic() + LIMIT
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children")
        while time.monotonic() < deadline:
            # The sleep stands in its namespaces once its own /proc is mounted, which unshare does before it starts it.
            if (words := children.read_text().split()) and Path(f"/proc/{words[0]}/comm").read_text().strip() == "sleep":
                return int(words[0])
            time.sleep(0.01)
        raise AssertionError("no namespaces")

    def start(self, *argv: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a program inside."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "--", *map(str, argv)]
        env = {**os.environ, "PATH": SBIN, "PYTHONPATH": str(REPO)}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True, **options}
        return subprocess.Popen(inside, cwd=REPO, env=env, **given)

    def run(self, *argv: str | Path, limit: float = LIMIT) -> Done:
        """Run a program inside to its end."""
        child = self.start(*argv)
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        return Done(child.returncode, out, err)

    def shell(self, script: str) -> str:
        """Run lines of bash; a failure fails the test."""
        done = self.run("bash", "-ec", script)
        assert done.code == 0, f"{script}\n{done.out}{done.err}"
        return done.out

    def command(self, *arguments: str | Path, user: int | None = None) -> Done:
        """Run ``clustertune ops storage`` on it."""
        return served("ops", "storage", *arguments, user=user, pid=self.pid)

    def python(self, code: str, *arguments: str | Path) -> Done:
        """Run Python inside."""
        return self.run(sys.executable, "-c", code, *arguments)

    def disk(self, name: str, megabytes: int = 320, *, make: str | None = "mkfs.xfs -q") -> str:
        """A loop device over a sparse file; with a file system unless ``make`` is None. XFS has 300 MB at least."""
        file = self.base / f"{name}.img"
        with file.open("wb") as out:
            out.truncate(megabytes << 20)
        device = self.shell(f"losetup --find --show {file}").strip()
        self.loops.append(device)
        if make:
            self.shell(f"{make} {device}")
        return device

    def close(self) -> None:
        """End everything inside and give the disks back."""
        for point in sorted(self.base.glob("b*")):
            subprocess.run(["nsenter", "-t", str(self.pid), "-m", "fsfreeze", "-u", point], capture_output=True, check=False)
        self.keeper.send_signal(signal.SIGKILL)
        self.keeper.wait()
        # The kernel unmounts on its own time, seconds for XFS; it then gives back the disks, and their files.
        for device in self.loops:
            subprocess.run(["losetup", "--detach", device], capture_output=True, check=False)
        for folder, names, _ in os.walk(self.base):
            for name in names:
                path = Path(folder, name)
                if not path.is_symlink():
                    immutable(path, make=False)
        shutil.rmtree(self.base)


@contextmanager
def node(*more: str) -> Iterator[Node]:
    """A node for one test, below a folder that other users reach too; skips where the machine lacks what it takes."""
    if reason := lacking(*more):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="clustertune-node-") as folder:
        Path(folder).chmod(0o755)
        made = Node(Path(folder, "n"))
        try:
            yield made
        finally:
            made.close()


def cluster_file(path: Path, storage: dict[str, Any], *, nodes: list[dict[str, Any]] | None = None, **sections: Any) -> Path:
    """A cluster file in which this machine is the first of ``nodes``."""
    host = socket.gethostname()
    owner = any(brick["node"] == host for brick in storage.get("bricks", []))
    first = {"name": host, "address": "10.9.0.1", "roles": ["compute", "nfs"] if owner else ["compute"]}
    text = {
        "name": "test",
        "nodes": [first, *(nodes or [])],
        "compute": {"gpus": 0, "cores": 2, "threads": 2, "memory_gb": 4},
        "network": {"kind": "ethernet", "subnet": "10.9.0.0/24", "gbit": 1, "interface": "eth0"} if nodes else {"kind": "none"},
        "storage": storage,
        **sections,
    }
    path.write_text(json.dumps(text, indent=1))
    return path


def brick(made: Node, number: int, **more: Any) -> dict[str, Any]:
    """A brick of this machine, from dN to bN."""
    base, host = made.base, socket.gethostname()
    return {"node": host, "path": f"{base}/d{number}", "mount": f"{base}/b{number}", "filesystem": "xfs", "tb": 0.001, **more}


def pooled(made: Node, bricks: list[dict[str, Any]], *, nodes: list[dict[str, Any]] | None = None, **more: Any) -> Path:
    """A cluster file of this machine with a pool of these bricks."""
    pool = {"pool": {"mount": f"{made.base}/pool", "min_free_gb": 0.01}, "shared": f"{made.base}/pool"}
    return cluster_file(made.base / "cluster.yaml", {"bricks": bricks, **pool, **more}, nodes=nodes)


def two_bricks(made: Node, devices: list[str] | None = None, **more: Any) -> Path:
    """A cluster file of one machine with a brick on each of two disks and a pool; bricks are b0 and b1, disks d0 and d1."""
    devices = devices or [made.disk("d0"), made.disk("d1")]
    bricks = [brick(made, n, tb=0.0003, device=device) for n, device in enumerate(devices)]
    return pooled(made, bricks, pool={"mount": f"{made.base}/pool", "min_free_gb": 0.04}, **more)


def checked(made: Node, cluster: Path, seconds: float = 2) -> tuple[int, dict[str, str]]:
    """The exit code of check, and the worst status of each rule that does not pass."""
    done = made.command("check", "--seconds", str(seconds), "--json", "--cluster", cluster)
    found: dict[str, str] = {}
    for item in done.json["findings"]:
        if item["status"] != "pass":
            found.setdefault(item["rule"], item["status"])
            assert item["fix"] or item["status"] == "unknown"
    return done.code, found
