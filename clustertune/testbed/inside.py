"""The first process of a temporary cluster's login node, and of each of its nodes.

Started by path with ``python -I`` and only the standard library, so that it needs neither the package nor its environment.
``login`` starts munge and the controller, obeys one JSON line a time on stdin and ends with everything below it when stdin
closes: whatever the owner died of, nothing stays. ``node`` starts one slurmd.

With namespaces each is process 1 of its own. Without, each is a "subreaper": daemons that detach become its children and not
those of the machine's init, so that a node's processes can be found and ended together.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child")
"""unshare(1): what a node has of its own."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_START = 20.0
"""Seconds that munge, a network device or a node's first process may take to appear."""


# --- processes ---------------------------------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """The parent of every process that /proc shows."""
    by_pid = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(IndexError):
                by_pid[int(entry.name)] = int(stat(int(entry.name))[1])
    return by_pid


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on; parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    below, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            below.append(child)
            todo.append(child)
    return below


def end_descendants(pid: int, limit: float = 10.0) -> None:
    """Kill all that descends from a process, until nothing is left: new ones may be born while the list is read."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if pid == os.getpid():
            _reap()
        below = [child for child in descendants(pid) if state(child) not in ("Z", "")]
        if not below:
            return
        for child in below:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def stat(pid: int) -> list[str]:
    """State, parent and what else /proc/PID/stat has behind the name, field 3 of proc(5) first; empty where it is gone."""
    try:
        # The name in brackets may hold anything, brackets too: what follows the last one is fixed (proc(5)).
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """``R``, ``S``, ``Z`` of a process; empty where it is gone."""
    return next(iter(stat(pid)), "")


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


# --- the two programs --------------------------------------------------------------------------------------------------


class SimulatedMachine:
    """What login node and node have in common: their folder, their settings, daemons, and a loop."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.settings: dict[str, Any] = json.loads((root / "cluster.json").read_text())
        self.isolated: bool = self.settings["isolated"]
        self.wake, wakened = os.pipe()
        os.set_blocking(wakened, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def enter(self) -> int:
        """Make the namespaces this machine's own. Returns its process id as the one outside sees it."""
        outside = int(Path("/proc/self").readlink().name)  # /proc is still the outer one
        if self.isolated:
            _call("mount", "-t", "proc", "proc", "/proc")
            socket.sethostname(self.name)
            _call("ip", "link", "set", "lo", "up")
        return outside

    def daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground, with nothing of the owner's environment; it ends with this process."""
        log = self.root / "log" / f"{self.name}-{Path(command[0]).name}.out"
        with log.open("ab") as sink:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={"PATH": PATH, "SLURM_CONF": str(self.root / "slurm.conf")},
                cwd="/",
            )

    def wait(self, *files: int) -> tuple[set[int], bytes]:
        """Wait for something to read from ``files`` or a signal. Returns the readable ones and the signals."""
        ready = set(select.select([self.wake, *files], [], [])[0])
        signals = os.read(self.wake, 512) if self.wake in ready else b""
        if signals:
            _reap()
        return ready, signals


def _call(*command: str) -> None:
    """Run a set-up command. Raises SystemExit with its own message."""
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": PATH}, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def until(condition: Callable[[], object], seconds: float, pause: float = 0.05) -> bool:
    """Wait until ``condition`` holds; False where that takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def _until(condition: Callable[[], bool], message: str, child: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until ``condition`` holds. Raises SystemExit with ``message`` where that takes too long, or ``child`` has ended."""
    gone = child is not None and child.poll
    if not until(lambda: condition() or (gone and gone() is not None), _START, 0.005) or not condition():
        sys.exit(message)


class SimulatedLogin(SimulatedMachine):
    """The login node: controller, bridge and the owner's commands."""

    def run(self) -> None:
        pid = self.enter()
        if self.isolated:
            for name in ("hosts", "nsswitch.conf"):
                if Path("/etc", name).exists():
                    _call("mount", "--bind", str(self.root / name), f"/etc/{name}")
            _call("ip", "link", "add", "br0", "type", "bridge")
            _call("ip", "addr", "add", f"{self.settings['address']}/24", "dev", "br0")
            _call("ip", "link", "set", "br0", "up")
        self._start_controller()
        self._say({"pid": pid})
        rest = b""
        while True:
            ready, signals = self.wait(0)
            if signal.SIGTERM in signals:
                return
            if 0 in ready:
                read = os.read(0, 65536)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._say(self._obey(json.loads(line)))

    def end(self) -> None:
        """End everything and remove the folder."""
        end_descendants(os.getpid())
        shutil.rmtree(self.root, ignore_errors=True)

    def _say(self, answer: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def _start_controller(self) -> None:
        run, root = self.root / "run", self.root
        munge = self.daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={root / 'munge.key'}",
            f"--socket={run / 'munge.sock'}",
            f"--pid-file={run / 'munged.pid'}",
            f"--seed-file={run / 'munged.seed'}",
            "--num-threads=10",
        )
        _until((run / "munge.sock").exists, "munged did not start", munge)
        self._start_before()
        self.daemon("slurmctld", "-D", "-c", "-f", str(root / "slurm.conf"))

    def _start_before(self) -> None:
        """What the controller needs to find: daemons, each until its file is there, and commands, again until they succeed."""
        for item in self.settings.get("daemons", []):
            started, end = self.daemon(*item["command"]), time.monotonic() + _START
            while not (started.poll() == 0 if item["ready"] is None else Path(item["ready"]).exists()):
                if time.monotonic() > end or (item["ready"] and started.poll() is not None):
                    sys.exit(f"{' '.join(item['command'][:3])} did not start")
                if not item["ready"] and started.poll() is not None:
                    started = self.daemon(*item["command"])
                time.sleep(0.05)

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            if "node" in order:
                return {"code": 0, "out": str(self._start_node(order["node"])), "err": ""}
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {"PATH": PATH}, "timeout": 30}
            done = subprocess.run(order["run"], capture_output=True, text=True, check=False, **quiet)
        except (OSError, subprocess.TimeoutExpired, SystemExit) as error:
            return {"code": 1, "out": "", "err": str(error)}
        return {"code": done.returncode, "out": done.stdout, "err": done.stderr}

    def _start_node(self, index: int) -> int:
        """Start a node's first process. Returns its id as this process sees it."""
        pid_file = self.root / "run" / f"node-{index}.pid"
        pid_file.unlink(missing_ok=True)
        alone = ["unshare", *NAMESPACES] if self.isolated else []
        child = self.daemon(*alone, sys.executable, "-I", __file__, "node", str(self.root), str(index))
        _until(lambda: pid_file.exists() and bool(pid_file.read_text()), "its first process did not start", child)
        pid = int(pid_file.read_text())
        if self.isolated:
            # The one that a lost node had goes with its namespace, but not at once.
            subprocess.run(["ip", "link", "del", f"v{index}"], capture_output=True, env={"PATH": PATH}, check=False)
            _call("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _call("ip", "link", "set", f"v{index}", "master", "br0", "up")
        return pid


class SimulatedNode(SimulatedMachine):
    """A compute node: one slurmd. SIGUSR1 starts it again after it was killed."""

    def __init__(self, root: Path, index: int) -> None:
        settings = json.loads((root / "cluster.json").read_text())
        super().__init__(root, settings["nodes"][index - 1])
        self.index = index

    def run(self) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        pid = self.enter()
        if self.isolated:
            self._own_mounts()
        (self.root / "run" / f"node-{self.index}.pid").write_text(str(pid))
        if self.isolated:
            self._network()
        slurmd = self._slurmd()
        while True:
            _, signals = self.wait()
            if signal.SIGTERM in signals:
                return
            if signal.SIGUSR1 in signals and slurmd.poll() is not None:
                slurmd = self._slurmd()

    def end(self) -> None:
        """End all processes of this node."""
        end_descendants(os.getpid())

    def _slurmd(self) -> subprocess.Popen[bytes]:
        return self.daemon("slurmd", "-D", "-f", str(self.root / "slurm.conf"), "-N", self.name)

    def _own_mounts(self) -> None:
        _call("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")  # noqa: S108 (shared memory of this node)
        _call("mount", "-t", "tmpfs", "tmpfs", str(self.root / "scratch"))
        _call("mount", "--bind", str(self.root / "spool" / str(self.index)), str(self.root / "spool" / "here"))

    def _network(self) -> None:
        _until(lambda: "eth0" in (name for _, name in socket.if_nameindex()), "no network device")
        _call("ip", "addr", "add", f"{self.settings['addresses'][self.index - 1]}/24", "dev", "eth0")
        _call("ip", "link", "set", "eth0", "up")
        # Shows this node's devices in /sys/class/net. Some containers forbid it, and nothing of Slurm needs it.
        subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True, env={"PATH": PATH}, check=False)


def probe() -> None:
    """Try, in namespaces that the caller has made, everything that a cluster needs. Raises SystemExit."""
    _call("mount", "-t", "proc", "proc", "/proc")
    _call("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")  # noqa: S108
    socket.sethostname("probe")
    _call("ip", "link", "add", "br0", "type", "bridge")
    _call("ip", "link", "add", "v1", "type", "veth", "peer", "name", "eth0")
    _call("ip", "link", "set", "v1", "master", "br0", "up")
    _call("unshare", *NAMESPACES, "mount", "-t", "proc", "proc", "/proc")


def main(role: str, *arguments: str) -> None:
    """``login ROOT``, ``node ROOT INDEX`` or ``probe``."""
    if role == "probe":
        probe()
        return
    root = Path(arguments[0])
    machine = SimulatedLogin(root, "ctl") if role == "login" else SimulatedNode(root, int(arguments[1]))
    try:
        machine.run()
    finally:
        machine.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
