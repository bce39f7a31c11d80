"""``make gpu-check``: whether this checkout trains on the GPUs of this machine, in parts that end by themselves.

``python -m tools.gpu_check --name NAME [--parts a,b] [--again] [--budget SECONDS] [--backend nccl|gloo]``. It needs the
standard library alone: where something that a part needs is not installed, the part says so. Each part ends in ``pass``,
``fail`` or ``not possible here``, after eight minutes at most, and nothing that one does stops the others. The verdicts are
kept beside the logs, so that a second call continues with what has not passed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.manifest import read_object, write_durably
from tools import gpu_parts
from tools.gpu_commands import LONGEST, REPO, Failed, GpuCheck, NotHere, output_of

PASS, FAIL, NOT_HERE = "pass", "fail", "not possible here"
_PR_SET_CHILD_SUBREAPER = 36


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
    sys.exit(main())
