"""Machines that are network namespaces: each with its own interface ``eth0`` at a switch, at a rate of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.command import REPO

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
PATIENCE = 300.0
"""Seconds that a check may take on a loaded machine."""


def need_wires() -> None:
    """Skip the test where there can be no namespaces."""
    if lacking := sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None}):
        pytest.skip(f"not installed: {', '.join(lacking)} (apt-get install)")
    done = subprocess.run([*_apart(), "true"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no right to namespaces here: {done.stderr.strip()}")


def _apart() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]


@dataclass
class Wires:
    """Namespaces node by node; index -1 of no one: the switch has a namespace of its own."""

    folder: Path
    count: int
    holders: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def within(self, index: int) -> list[str]:
        """What runs a command in the namespace of a node (from 0), or of the switch (-1)."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.holders[index + 1].pid}", *user, "--uts", "--mount", "--net"]

    def start(self) -> None:
        """The switch first: for a user it also holds the user namespace that all others lie in."""
        # What /sys/class/net shows is bound to the mount, not to who looks.
        sleep = ["sh", "-c", "mount -t sysfs sysfs /sys && echo up; exec sleep 1000"]
        for index in range(-1, self.count):
            user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
            inside = ["nsenter", f"--target={self.holders[0].pid}", *user, "unshare", "--net"] if index >= 0 else _apart()
            holder = subprocess.Popen(
                [*inside, "--uts", "--mount", *sleep], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
            self.holders.append(holder)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"up\n"
        self.do(-1, "ip link add br0 type bridge")
        self.do(-1, "ip link set br0 up")
        for index in range(self.count):
            self.add_link(index, "eth0", self.address(index))
            self.do(index, "ip link set lo up")
            self.do(index, f"hostname {self.name(index)}")

    def add_link(self, index: int, interface: str, address: str) -> None:
        """A cable from a node to the switch."""
        port = f"{interface}-{index}"
        self.do(-1, f"ip link add {port} type veth peer name {interface} netns {self.holders[index + 1].pid}")
        self.do(-1, f"ip link set {port} master br0 up")
        self.do(index, f"ip addr add {address}/24 dev {interface}")
        self.do(index, f"ip link set {interface} up")

    def do(self, index: int, command: str) -> None:
        done = subprocess.run([*self.within(index), *command.split()], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def shape(self, index: int, mbit: float, interface: str = "eth0") -> None:
        """Limit what a node sends and gets, Mbit/s. The burst is what passes unlimited: small beside what is measured."""
        rule = f"root tbf rate {mbit:g}mbit burst 16kb latency 100ms"
        self.do(index, f"tc qdisc replace dev {interface} {rule}")
        self.do(-1, f"tc qdisc replace dev {interface}-{index} {rule}")

    @staticmethod
    def name(index: int) -> str:
        return f"n{index + 1}"

    @staticmethod
    def address(index: int) -> str:
        return f"10.77.0.{index + 1}"

    def cluster_file(self, gbit: float = 1.0, interface: str = "eth0", extra: str = "") -> Path:
        """The cluster as its file."""
        path = self.folder / "wires.yaml"
        hosts = "".join(
            f"  - {{name: {self.name(i)}, address: {self.address(i)}, roles: [compute]}}\n" for i in range(self.count)
        )
        path.write_text(
            f"name: wires\nnodes:\n{hosts}"
            "compute: {gpus: 0, interconnect: none, cores: 2, threads: 2, memory_gb: 4}\n"
            f"network: {{interface: {interface}, kind: ethernet, gbit: {gbit:g}, subnet: 10.77.0.0/24}}\n{extra}"
        )
        return path

    def check(self, words: Sequence[str], *, out: str = "out") -> Checking:
        """``clustertune nccl-check`` on every node at once; the first one has the result."""
        calls = []
        for index in range(self.count):
            options = ["--cluster", str(self.folder / "wires.yaml"), "--node-rank", str(index), "--out", str(self.folder / out)]
            last = ["--json"] if index == 0 else []
            command = [*self.within(index), sys.executable, "-m", "clustertune", "nccl-check", *options, *words, *last]
            with (self.folder / f"{out}-{index}.err").open("wb") as err:
                calls.append(
                    subprocess.Popen(
                        command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip
        return Checking(self.folder / out, calls)

    def stop(self) -> None:
        for holder in reversed(self.holders):
            holder.kill()
            holder.wait(30)
            assert holder.stdout is not None
            holder.stdout.close()


@dataclass
class Checking:
    """A check that runs on all nodes."""

    folder: Path
    calls: list[subprocess.Popen[bytes]]

    def rank_pid(self, rank: int, number: int = 1) -> int:
        """The process id of a rank of a round, once it has begun to measure."""
        import json

        path = self.folder / f"round-{number}" / f"rank-{rank}.jsonl"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            lines = path.read_text().splitlines() if path.exists() else []
            if any('"event":"done"' in line for line in lines):
                return int(json.loads(lines[0])["pid"])
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} did not begin: {list(self.folder.parent.glob('*.err'))}")

    def end(self) -> tuple[dict, int]:  # type: ignore[type-arg]
        """The document of the first node and its exit code; all calls are over then."""
        import json

        try:
            text = self.calls[0].communicate(timeout=PATIENCE)[0]
            for call in self.calls[1:]:
                call.communicate(timeout=60)
        finally:
            for call in self.calls:
                if call.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(call.pid, signal.SIGKILL)
                    call.communicate()
        errors = "".join(path.read_text() for path in self.folder.parent.glob(f"{self.folder.name}-*.err"))
        try:
            return json.loads(text), self.calls[0].returncode
        except ValueError:
            raise AssertionError(f"no document: {text[:200]!r} {errors}") from None


@contextlib.contextmanager
def wires(folder: Path, count: int) -> Iterator[Wires]:
    """Nodes at a switch, gone afterwards."""
    need_wires()
    made = Wires(folder, count)
    try:
        made.start()
        yield made
    finally:
        made.stop()
