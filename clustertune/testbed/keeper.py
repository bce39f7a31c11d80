"""A temporary cluster that outlives the command that started it: a process that owns it, and a file that describes it.

``python -m clustertune.testbed.keeper NAME`` reads the cluster's shape from stdin, starts it, writes ``NAME.json``, says on
stdout in one JSON line what went wrong, and keeps it until SIGTERM. When it is killed the cluster ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import clustertune
from clustertune import lock
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import write_durably
from clustertune.testbed import inside
from clustertune.testbed.cluster import ClusterFailed, TemporaryCluster, enter
from clustertune.testbed.spec import ClusterSpec

_START = 120.0
"""Seconds that a start may take; it takes less than one on an idle machine."""


@dataclass(frozen=True)
class KeeperState:
    """A cluster that a keeper started."""

    name: str
    keeper: int
    """Process id."""
    keeper_started: int
    """Its start in clock ticks since boot, which distinguishes it from a later process of the same id."""
    root: str
    """The cluster's folder."""
    login: int
    """Process id of the cluster's first process, whose namespaces a command must enter."""
    prefix: list[str] | None
    """The command that made the namespaces; None where there are none."""
    nodes: list[str]
    gpus: int

    @property
    def alive(self) -> bool:
        """Whether the keeper is there, and so the cluster."""
        return started(self.keeper) == self.keeper_started and inside.state(self.keeper) not in ("Z", "")

    @property
    def uptime(self) -> float:
        """Seconds since the keeper started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.keeper_started / os.sysconf("SC_CLK_TCK")

    @property
    def conf(self) -> Path:
        return Path(self.root, "slurm.conf")

    def command(self, arguments: list[str], cwd: Path) -> list[str]:
        """A command as it must be started to run on the login node, in folder ``cwd``."""
        return [*enter(self.login, self.prefix, cwd), *arguments]


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), field 22); 0 where there is none."""
    fields = inside.stat(pid)
    return int(fields[19]) if fields else 0


def folder() -> Path:
    """This user's folder of clusters, made with mode 0700. Raises UserError where it is another user's."""
    path = Path(tempfile.gettempdir(), f"clustertune-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    # Anybody can make it first in a folder that all write to, and would then say which namespaces commands enter.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        fix = "remove it, or set TMPDIR to a folder of your own"
        raise UserError(Problem("is not a folder that only you can read and write", file=str(path), fix=fix))
    return path


def _path(name: str) -> Path:
    return folder() / f"{name}.json"


def read(name: str) -> KeeperState | None:
    """What is known of a cluster; None where there is none of that name."""
    try:
        body = json.loads(_path(name).read_bytes())
        return KeeperState(**{field.name: body[field.name] for field in fields(KeeperState)})
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, TypeError, KeyError):
        raise UserError(Problem("describes no cluster", file=str(_path(name)), fix="remove it")) from None


def names() -> list[str]:
    """The clusters there are, also those whose keeper is gone."""
    return sorted(path.name.removesuffix(".json") for path in folder().glob("*.json"))


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One ``up`` or ``down`` of a name at a time."""
    path = folder() / f"{name}.lock"
    with lock.held(path, f"is starting or ending the cluster {name}", shown=path, fix="try again in a moment"):
        yield
        path.unlink(missing_ok=True)


def up(name: str, shape: ClusterSpec) -> KeeperState:
    """Start a cluster that stays. Raises UserError where there is one of that name or none can be."""
    with _alone(name):
        found = read(name)
        if found and found.alive:
            which = "" if name == "default" else f" --name {name}"
            fix = f"clustertune cluster down{which} ends it; --name gives another one beside it"
            raise UserError(Problem(f"the cluster {name} is up already: {', '.join(found.nodes)}", fix=fix))
        if found:
            _forget(found)
        _start(name, shape)
        made = read(name)
        assert made is not None
        return made


def down(name: str, timeout: float = 60) -> KeeperState | None:
    """End a cluster and wait until nothing is left of it. Returns what it was, None where there was none."""
    with _alone(name):
        found = read(name)
        if found is None:
            return None
        for number in (signal.SIGTERM, signal.SIGKILL):  # its end is the cluster's, whatever ends it
            if found.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.keeper, number)
                inside.until(lambda: not found.alive, timeout)
        _forget(found)
        return found


def _forget(found: KeeperState, timeout: float = 30) -> None:
    """Remove what tells of a cluster whose keeper is gone, as soon as the cluster has ended by itself."""
    if not inside.until(lambda: not Path(found.root).exists(), timeout):
        fix = f"end process {found.login} if it is a python of clustertune, and remove the folder"
        raise UserError(Problem("the cluster's folder is still there", file=found.root, fix=fix))
    _path(found.name).unlink(missing_ok=True)


def _start(name: str, shape: ClusterSpec) -> None:
    """Start the keeper and wait for its word."""
    with tempfile.TemporaryFile() as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "clustertune.testbed.keeper", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd="/",
            start_new_session=True,
            # It starts in another folder: a checkout that is not installed would not be found there.
            env={**os.environ, "PYTHONPATH": str(Path(clustertune.__file__).resolve().parent.parent)},
        )
        try:
            answer = _ask(keeper, json.dumps(asdict(shape)).encode())
        except BaseException:
            keeper.kill()
            keeper.wait()
            raise
        if answer is None:
            keeper.kill()
            keeper.wait()
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-1:]
            fix = "run it again; is the machine very busy?"
            raise UserError(Problem(f"the cluster did not start: {' '.join(last) or 'no answer'}", fix=fix), ExitCode.FAILED)
        if answer["problems"]:
            keeper.wait()
            raise UserError([Problem(**problem) for problem in answer["problems"]], ExitCode(answer["code"]))


def _ask(keeper: subprocess.Popen[bytes], text: bytes) -> dict[str, Any] | None:
    """Give the keeper its orders and read its answer; None where none comes. It lives on: its end must not be waited for."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with keeper.stdout:
        try:
            with keeper.stdin:
                keeper.stdin.write(text)
            if not select.select([keeper.stdout], [], [], _START)[0]:
                return None
            answer: dict[str, Any] = json.loads(keeper.stdout.readline())
        except (OSError, ValueError, RecursionError):
            return None
        return answer


# --- the keeper's own process ------------------------------------------------------------------------------------------


def main() -> int:
    """Own a cluster until SIGTERM."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: stopped.append(got))
    shape = json.load(sys.stdin)
    if not isinstance(shape["nodes"], int):
        shape["nodes"] = tuple(shape["nodes"])
    try:
        cluster = TemporaryCluster(ClusterSpec(**shape)).start()
    except UserError as error:
        return _answer([asdict(problem) for problem in error.problems], error.code)
    except ClusterFailed as error:
        return _answer([asdict(Problem(str(error)))], ExitCode.FAILED)
    try:
        own = os.getpid()
        state = KeeperState(
            name=sys.argv[1],
            keeper=own,
            keeper_started=started(own),
            root=str(cluster.root),
            login=cluster.login_pid,
            prefix=list(cluster.prefix) if cluster.prefix else None,
            nodes=cluster.names,
            gpus=cluster.spec.gpus,
        )
        write_durably(_path(state.name), json.dumps(asdict(state), indent=1) + "\n")
        _answer([], ExitCode.OK)
        while not stopped and cluster.running:
            time.sleep(0.2)
    finally:
        cluster.stop()
    return 0


def _answer(problems: list[dict[str, Any]], code: ExitCode) -> int:
    """One line on stdout, which it then lets go of: a caller's pipe must not stay open as long as the cluster."""
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps({"problems": problems, "code": int(code)}) + "\n")
        sys.stdout.flush()
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
