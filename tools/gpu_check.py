"""``make gpu-check``: whether this checkout trains on the GPUs of this machine, in parts that end by themselves.

``python -m tools.gpu_check --name NAME [--parts a,b] [--again] [--budget SECONDS] [--backend nccl|gloo]``. It needs the
standard library alone: where something that a part needs is not installed, the part says so. Each part ends in ``pass``,
``fail`` or ``not possible here``, after eight minutes at most, and nothing that one does stops the others. The verdicts are
kept beside the logs, so that a second call continues with what has not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.manifest import read_object, write_durably
from clustertune.testbed.inside import end_descendants

REPO = Path(__file__).resolve().parent.parent
LONGEST = 480.0
"""Seconds of a part at most."""
GRACE = 10.0
"""Seconds between asking a command to end and killing it."""
PASS, FAIL, NOT_HERE = "pass", "fail", "not possible here"
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A part found a fault."""


class NotHere(Exception):
    """A part cannot be done on this machine; the message says why."""


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended."""

    code: int
    out: str
    log: Path
    """What it wrote to stderr."""

    @property
    def err(self) -> str:
        return self.log.read_text(errors="replace")

    def last_error(self) -> str:
        """The last line that names an error, or the last line."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror: |Error: |Error$", line) and "ChildFailedError" not in line]
        return (errors or lines or ["it wrote nothing"])[-1][:300]

    def document(self) -> dict[str, Any]:
        """The JSON document on stdout. Raises Failed."""
        try:
            body = json.loads(self.out)
        except ValueError:
            raise Failed(f"no document on stdout (exit code {self.code}): {self.last_error()}") from None
        if not isinstance(body, dict):
            raise Failed(f"a document that is not an object (exit code {self.code})")
        return body


@dataclass
class GpuCheck:
    """One call: where it works and what it may use."""

    name: str
    folder: Path
    """State and logs; small."""
    work: Path
    """Run folders; a bench of 8 billion parameters needs 20 GB here until it ends."""
    python: str
    backend: str
    """``nccl`` or ``gloo``."""
    gpus: int
    short: bool = False
    """Small models in place of large ones."""
    deadline: float = 0.0
    part: str = ""
    _count: int = field(default=0, repr=False)

    @property
    def ranks(self) -> int:
        """Ranks of a training here: one a GPU; two without GPUs."""
        return self.gpus if self.backend == "nccl" else 2

    def environment(self, **more: str) -> dict[str, str]:
        """Of every command: this checkout before an installed package, no Hub, no GPU under gloo."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        path = os.pathsep.join(part for part in (str(REPO), os.environ.get("PYTHONPATH", "")) if part)
        variables |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        if self.backend == "gloo":
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return variables | more

    def start(self, words: Sequence[str], **env: str) -> tuple[subprocess.Popen[str], Path]:
        """Start a command in a process group of its own. Returns it and the file of its stderr."""
        self._count += 1
        log = self.folder / "logs" / f"{self.part}-{self._count}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as err, log.with_suffix(".out").open("w") as out:
            err.write(f"$ {' '.join(words)}\n")
            err.flush()
            child = subprocess.Popen(
                list(words), cwd=REPO, env=self.environment(**env), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                text=True, start_new_session=True,
            )  # fmt: skip
        return child, log

    def wait(self, child: subprocess.Popen[str], log: Path) -> EndedCommand:
        """Wait for a command until the part's time is over, then end it with all that it started. Raises Failed then."""
        try:
            code = child.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {LONGEST:.0f} s: {EndedCommand(1, '', log).last_error()}") from None
        finally:
            end_tree(child)
        return EndedCommand(code, log.with_suffix(".out").read_text(errors="replace"), log)

    def run(self, *words: str, **env: str) -> EndedCommand:
        """Run a command to its end. Raises Failed where the part's time is over."""
        return self.wait(*self.start(words, **env))

    def clustertune(self, *words: str, **env: str) -> EndedCommand:
        """Run a command of the project."""
        return self.run(self.python, "-m", "clustertune", *words, **env)

    def has(self, *packages: str) -> list[str]:
        """Those of the Python packages that are not installed for the Python in use."""
        script = "import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if u.find_spec(p) is None))"
        return self.run(self.python, "-c", script, *packages).out.split()

    def need(self, *packages: str) -> None:
        """Raises NotHere where a Python package is missing."""
        if missing := self.has(*packages):
            raise NotHere(f"not installed: {', '.join(missing)}")


# --- processes ----------------------------------------------------------------------------------------------------------


def end_tree(child: subprocess.Popen[str]) -> None:
    """End a command and everything that it started, in whatever session (torch's agent gives each rank one of its own), asked
    first."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    end_descendants(os.getpid())
    child.poll()


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own below this process: so that a rank without its launcher is found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- state --------------------------------------------------------------------------------------------------------------


def read_state(path: Path) -> dict[str, Any]:
    """What earlier calls found; empty where there were none."""
    state = read_object(path)
    return state if isinstance(state.get("parts"), dict) else {"parts": {}}


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """A call that is killed leaves the old state or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(state, indent=1, default=str) + "\n")


def commit() -> str:
    """The checkout's commit, ``unknown`` outside of git and without it."""
    git = ["git", "-C", str(REPO)]
    changed = output_of([*git, "status", "--porcelain", "-uno"])
    return (output_of([*git, "rev-parse", "--short=12", "HEAD"]) or "unknown") + (" with changes" if changed else "")


def output_of(words: Sequence[str]) -> str:
    """What a program prints, without blanks around it; empty where it fails or is not installed."""
    try:
        done = subprocess.run(list(words), capture_output=True, text=True, check=False, cwd=REPO)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- running the parts ---------------------------------------------------------------------------------------------------


def run_part(check: GpuCheck, name: str, do: Callable[[GpuCheck], dict[str, Any]], limit: float = LONGEST) -> dict[str, Any]:
    """One part: its verdict, why, seconds and facts. Whatever goes wrong in it is its verdict."""
    check.part, check._count, began = name, 0, time.monotonic()
    check.deadline = began + min(limit, LONGEST)
    verdict, why, facts = PASS, "", {}
    try:
        facts = do(check)
        why = str(facts.pop("why", ""))
    except NotHere as reason:
        verdict, why = NOT_HERE, f"because {reason}"
    except Failed as reason:
        verdict, why = FAIL, str(reason)
    except Exception as error:  # the other parts continue, whatever this one met
        verdict, why = FAIL, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return {
        "verdict": verdict, "why": why, "seconds": round(time.monotonic() - began, 1), "facts": facts,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), "commit": commit(), "backend": check.backend,
    }  # fmt: skip


def visible_gpus(python: str) -> int:
    """GPUs that torch sees in the Python in use; 0 where there is no torch."""
    count = output_of([python, "-c", "import torch; print(torch.cuda.device_count())"])
    return int(count) if count.isdigit() else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="", help="of the result's folder; without it the GPU's")
    parser.add_argument("--parts", default="", help="only these, with commas; tiny takes all that begin so")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--again", action="store_true", help="run what has passed once more")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds of this call: no part begins that may outlast it")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl where torch sees a GPU")
    parser.add_argument("--short", action="store_true", help="small models: the script itself is tried, not the machine")
    parser.add_argument("--state", type=Path, help="folder of verdicts and logs; without it runs/gpu-check/NAME")
    parser.add_argument("--work", type=Path, help="folder of the runs; without it work in that of the state")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. Exit code 0 where no part of it failed, 1 where one did, 2 for a wrong command line."""
    from tools import gpu_parts

    parsed = parse(arguments)
    known = gpu_parts.parts()
    if parsed.list:
        sys.stdout.writelines(f"{name:28} {do.__doc__.splitlines()[0]}\n" for name, do in known.items() if do.__doc__)
        return 0
    chosen, unknown = gpu_parts.choose(parsed.parts, known)
    if unknown:
        sys.stderr.write(f"error: no such part: {', '.join(unknown)} -> one of {', '.join(known)}\n")
        return 2
    if parsed.name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parsed.name):
        sys.stderr.write("error: NAME is letters, digits, '.', '_' and '-'\n")
        return 2
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the command under way ends with this one
    gpus = 0 if parsed.backend == "gloo" else visible_gpus(sys.executable)
    backend = parsed.backend if parsed.backend != "auto" else ("nccl" if gpus else "gloo")
    name = parsed.name or (gpu_parts.gpu_name() if backend == "nccl" else "cpu")
    folder = (parsed.state or REPO / "runs" / "gpu-check" / name).absolute()
    check = GpuCheck(name, folder, (parsed.work or folder / "work").absolute(), sys.executable, backend, gpus, parsed.short)
    file = folder / "state.json"
    state = read_state(file)
    state |= {"name": name, "gpus": gpus, "command": " ".join(["make gpu-check", *(arguments or sys.argv[1:])])}
    until = time.monotonic() + parsed.budget if parsed.budget else float("inf")
    failed = False
    for part in chosen:
        before = state["parts"].get(part, {})
        if before.get("verdict") == PASS and not parsed.again:
            say(f"{part}: passed earlier ({before['date']}, {before['commit']})")
            continue
        if time.monotonic() + gpu_parts.seconds(part) > until:
            say(f"{part}: left for the next call, it may take {gpu_parts.seconds(part):.0f} s")
            continue
        say(f"{part} ...")
        result = run_part(check, part, known[part], gpu_parts.seconds(part))
        failed = failed or result["verdict"] == FAIL
        state["parts"][part] = result
        write_state(file, state)
        say(f"{part}: {result['verdict']}{', ' if result['why'] else ''}{result['why']} ({result['seconds']} s)")
    say(f"verdicts, figures and logs: {folder}")
    return int(failed)


def say(text: str) -> None:
    """To the person at the terminal."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    # Imported by its parts under its own name: as __main__ its classes would be others.
    from tools.gpu_check import main as run

    sys.exit(run())
