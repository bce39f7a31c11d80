"""``stage --verify``: the checksums of an offline bundle, then the chain up to its first step with the network off."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.errors import Problem, UserError
from clustertune.manifest import SHA256
from clustertune.process import captured
from clustertune.staging import bundle, netwatch, worker
from clustertune.staging.worker import Bounds

STEP_SECONDS = 900.0
"""How long one step may take: loading some gigabytes from a slow disk."""
_SHOWN_FRAMES = 8
_NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
"""A network namespace of its own: nothing but loopback, whatever the program is and whether Python sees it or not."""
_LOOPBACK = ("sh", "-c", 'ip link set lo up 2> /dev/null; exec "$@"', "sh")
_INHERITED = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "OMP_NUM_THREADS",
    "VIRTUAL_ENV",
    "TZ",
    "CUDA_VISIBLE_DEVICES",
)
"""What a rehearsal takes over from the environment: no cache, no token, no address of a hub."""


@dataclass
class Verification:
    """What a verification found."""

    files: int = 0
    bytes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Each thing that was asked of the network: host, port, library, stack, step."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``, without the problems."""
        return {
            "ok": not self.problems,
            **{"files": self.files, "bytes": self.bytes},
            **{"steps": self.steps, "attempts": self.attempts, "notes": self.notes},
        }


def verify(
    folder: Path, recipe: str | None, overrides: Sequence[str], *, tiny: bool, bounds: Bounds, tell: Callable[[str], None]
) -> Verification:
    """Check an offline bundle. Problems are in the verdict; raises UserError where the folder is none.

    ``recipe``: another one than the copy in the bundle.
    """
    folder = folder.absolute()
    verdict = Verification()
    found = bundle.read(folder)
    _check_sums(folder, found, verdict, bounds)
    if verdict.problems:
        return verdict
    tell(f"{verdict.files} files, {worker.amount(verdict.bytes)}: sums are right")
    meta = found.meta
    order = {
        "folder": str(folder),
        "recipe": recipe or str(folder / bundle.RECIPES / str(meta["recipe"])),
        "overrides": list(overrides) or list(meta["overrides"]),
        "tiny": tiny or (recipe is None and bool(meta["tiny"])),
    }
    with tempfile.TemporaryDirectory(prefix="clustertune-verify-") as scratch:
        _rehearse(order, Path(scratch), verdict, tell)
    return verdict


def _check_sums(folder: Path, found: manifest.Manifest, verdict: Verification, bounds: Bounds) -> None:
    """Every file by its SHA-256, several at once, and nothing beside them that a library would read."""
    names = sorted(found.files)
    total = sum(record.size for record in found.files.values())
    with worker.shown("sums", total) as advance:
        answers = worker.hash_files([(folder / name, SHA256) for name in names], bounds, advance)
    fix = "copy it again from where it was staged, or stage it again"
    for name, answer in zip(names, answers, strict=True):
        record, file = found.files[name], str(folder / name)
        if isinstance(answer, str):
            verdict.problems.append(Problem(f"cannot be read: {answer}", file=file, fix=fix))
        elif answer[0] != record.size:
            verdict.problems.append(Problem(f"{answer[0]} bytes, the manifest says {record.size}", file=file, fix=fix))
        elif answer[1] != record.sha256:
            verdict.problems.append(Problem("its content differs from the manifest's SHA-256", file=file, fix=fix))
    for name in sorted(set(manifest.list_files(folder)) - found.files.keys()):
        fix = "remove it: a library may read it in place of what was staged"
        verdict.problems.append(Problem("is not named by the manifest", file=str(folder / name), fix=fix))
    verdict.files, verdict.bytes = len(names), total


def no_namespace() -> str | None:
    """Why this machine gives a process no network of its own; None where it does."""
    try:
        done = captured([*_NO_NETWORK, "true"], 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or "unshare failed"


def _rehearse(order: Mapping[str, Any], scratch: Path, verdict: Verification, tell: Callable[[str], None]) -> None:
    log, errors = scratch / "netwatch.jsonl", scratch / "stderr.txt"
    environment = _environment(Path(order["folder"]), scratch, log)
    command = [sys.executable, "-m", "clustertune.staging.rehearsal"]
    refused = no_namespace()
    if refused is None:
        command = [*_NO_NETWORK, *_LOOPBACK, *command]
    else:
        text = f"no network namespace here ({refused}): native code could connect unseen, Python cannot"
        verdict.notes.append(text)
        tell(f"warning: {text}")
    with errors.open("wb") as error_log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_log,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({**order, "scratch": str(scratch / "work")}).encode() + b"\n")
            child.stdin.close()
        text = f"a step of the rehearsal took more than {STEP_SECONDS:.0f} s"
        for line in worker.lines(child, STEP_SECONDS, UserError(text, fix="is the storage slow?")):
            verdict.steps.append(line)
            words_of = line["found"] or "; ".join(problem["message"] for problem in line["problems"])
            tell(f"{line['step']}: {words_of}")
            verdict.problems += [Problem(**problem) for problem in line["problems"]]
        code = child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        child.wait()
    verdict.attempts = _attempts(log)
    verdict.problems += [_name(attempt) for attempt in verdict.attempts]
    if code or not verdict.steps:
        last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no word"]
        verdict.problems.append(Problem(f"the rehearsal ended with code {code}: {last[0]}", file=str(order["folder"])))


def _environment(folder: Path, scratch: Path, log: Path) -> dict[str, str]:
    """What a fresh account on a machine without network has: empty caches, and the hook in every Python process."""
    site, home = scratch / "site", scratch / "home"
    for path in (site, home, scratch / "work", scratch / "tmp"):
        path.mkdir()
    netwatch.write_site(site)
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    package = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [str(site), package, inherited.get("PYTHONPATH", "")]))
    return {
        **inherited,
        **bundle.variables(folder),
        "HOME": str(home),
        "TMPDIR": str(scratch / "tmp"),
        "PYTHONPATH": search,
        netwatch.LOG: str(log),
        netwatch.STEP: "start",
        "PYTHONNOUSERSITE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _attempts(log: Path) -> list[dict[str, Any]]:
    """What Python processes asked of the network, each thing once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in log.read_text(errors="replace").splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            known = found.setdefault((line["library"], line["host"], line["step"]), {**line, "times": 0})
            known["times"] += 1
            known["port"] = known["port"] or line["port"]
    return list(found.values())


def _shown(attempt: Mapping[str, Any]) -> list[str]:
    """The frames for a reader: who asked comes first, no frames of the import system, and of each path its end."""
    frames = [frame for frame in map(str, attempt["stack"]) if not frame.startswith("<frozen")]
    library_frames = [number for number, frame in enumerate(frames) if str(attempt["library"]) in frame]
    return [
        "/".join(frame.split("/")[-3:]) if "/" in frame.split(":")[0] else frame
        for frame in frames[min(library_frames, default=0) :]
    ][:_SHOWN_FRAMES]


def _name(attempt: Mapping[str, Any]) -> Problem:
    """Who tried to reach what, and by which way."""
    port = f":{attempt['port']}" if attempt["port"] not in (None, 0) else ""
    times = f", {attempt['times']} times" if attempt["times"] > 1 else ""
    text = f"{attempt['library']} asked for {attempt['host']}{port} during step {attempt['step']}{times}"
    stack = " < ".join(_shown(attempt))
    fix = f"stage what it wanted, or keep it from asking; it came from: {stack}"
    return Problem(text, file="network", key=str(attempt["event"]), fix=fix)
