"""Submission: each stage a job of its own, with the header that its shape asks for over the one body of launch/run.sbatch."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import secrets
from clustertune.cluster.schema import Cluster
from clustertune.console import emit_json, escape, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error
from clustertune.launch import cluster_paths, slurm
from clustertune.launch.shape import JobShape
from clustertune.manifest import read_whole, write_durably
from clustertune.recipe.sections import NAME
from clustertune.rundir import STAGES
from clustertune.tree import ROOT, env_file, python_lines

SCRIPT = ROOT / "launch" / "run.sbatch"
JOBS = "jobs.json"
STAGE_SIGNAL_SECONDS = 60
"""Warning of the stages other than training: they continue file by file, prompt by prompt."""

Send = Callable[[Sequence[str], str, Sequence[str]], str]
"""Options, script and arguments of an ``sbatch`` in, the job's id out."""


@dataclass(frozen=True)
class StageJob:
    """One job of a submission."""

    stage: str
    shape: JobShape
    script: str
    """The text of its sbatch file."""
    path: Path
    """Where that file is written."""
    options: tuple[str, ...]
    """What stands on sbatch's command line: paths, which an ``#SBATCH`` line would split at blanks."""
    arguments: tuple[str, ...]
    """What the script gets."""

    def command(self, after: str | None) -> list[str]:
        """The whole command; ``after`` is the id of the job that must have succeeded."""
        depends = [f"--dependency=afterok:{after}"] if after else []
        return ["sbatch", "--parsable", *self.options, *depends, str(self.path), *self.arguments]


def split_script(text: str) -> tuple[str, str]:
    """Header (up to the last ``#SBATCH`` line before the first command) and body of an sbatch file, which together are it."""
    lines = text.splitlines(keepends=True)
    last = 0
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            last = number + 1
    return "".join(lines[:last]), "".join(lines[last:])


def header_line(option: str) -> str:
    """``#SBATCH`` with one option, which must be one word: sbatch would read a second one as an option of its own."""
    if not re.fullmatch(r"--[a-z][a-z-]*(=[A-Za-z0-9_@%\[(][A-Za-z0-9._:@%,+=&|*()\[\]-]*)?", option):
        raise UserError(f"{option[:80]!r} is not allowed in an #SBATCH line", fix="rename what it is made from")
    return f"#SBATCH {option}\n"


def ahead_of_body(shape: JobShape) -> str:
    """What loads the cluster's modules, ahead of a script's body: before its ``set -u``, which their start files break.

    Of an installed package also the Python that has it.
    """
    if not shape.modules:
        return python_lines()
    names = " ".join(shape.modules)  # plain words: cluster/schema.py MODULE
    return f"{python_lines()}\n# slurm.modules of the cluster file: module load {names}\n. launch/modules.sh {names}\n\n"


def render(name: str, shape: JobShape, signal_seconds: int, *, extra: Sequence[str] = (), source: str | None = None) -> str:
    """An sbatch file: the header for ``shape`` and the body of launch/run.sbatch, byte for byte.

    ``name`` is the job's name (letters, digits, ``. _ -``); ``extra`` are further options, such as ``--array=0-3%2``;
    ``source`` is the text of launch/run.sbatch where it was read already. Raises UserError for a value that would break out
    of its line.
    """
    if not re.fullmatch(NAME.replace("{0,63}", "{0,127}"), name):
        raise UserError(f"{name[:80]!r} cannot be the name of a job", fix="letters, digits, '.', '_' and '-'")
    _, body = split_script(source if source is not None else SCRIPT.read_text())
    options = [
        f"--job-name={name}",
        *shape.options(),
        f"--signal=B:USR1@{signal_seconds}",
        "--requeue",
        "--open-mode=append",
        "--export=NIL",
        *extra,
    ]
    note = "# Derived by clustertune submit from the recipe and the cluster file; below the header it is launch/run.sbatch.\n"
    return "#!/usr/bin/env bash\n" + note + "".join(map(header_line, options)) + ahead_of_body(shape) + body


def escape_pattern(path: Path) -> str:
    """A path for ``--output``: sbatch replaces ``%x`` and the like in it, and takes a backslash for an order not to."""
    text = str(path)
    if "\\" in text:
        raise UserError(f"{text!r}: Slurm cannot write a log below a folder with a backslash", fix="rename it")
    return text.replace("%", "%%")


def command_options(run_path: Path, repo: Path = ROOT) -> list[str]:
    """The options on sbatch's command line: paths, and ``--export``, which SBATCH_EXPORT would replace in a header."""
    logs = escape_pattern(run_path.absolute() / "logs")
    return ["--kill-on-invalid-dep=yes", "--export=NIL", f"--chdir={repo}", f"--output={logs}/%x-%j.log"]


def make_jobs(
    name: str,
    stages: Sequence[str],
    shapes: Mapping[str, JobShape],
    run_path: Path,
    *,
    arguments: Sequence[str],
    flags: Sequence[str],
    signal_seconds: int,
) -> list[StageJob]:
    """The jobs of a submission, in order.

    ``name``: the recipe's. ``arguments``: the recipe (as an absolute path) and its overrides, and ``flags`` the options behind
    them, ahead of ``--run-dir``.
    """
    source = SCRIPT.read_text()
    jobs = []
    for stage in stages:
        seconds = signal_seconds if stage == "train" else STAGE_SIGNAL_SECONDS
        jobs.append(
            StageJob(
                stage=stage,
                shape=shapes[stage],
                script=render(f"{name}-{stage}", shapes[stage], seconds, source=source),
                path=run_path.absolute() / "jobs" / f"{stage}.sbatch",
                options=tuple(command_options(run_path)),
                arguments=(*arguments, *flags, "--run-dir", str(run_path.absolute()), "--from", stage, "--to", stage),
            )
        )
    return jobs


def left_to_do(finished: Sequence[str], first: str | None, last: str) -> list[str]:
    """The stages to submit: from the first unfinished one on, or the one that ``--from`` names and the unfinished after it.

    Raises UserError where an earlier stage is missing, or nothing is asked for.
    """
    start = STAGES.index(first) if first else 0
    stages = STAGES[start : STAGES.index(last) + 1]
    if not stages:
        fix = f"the order is {', '.join(STAGES)}"
        raise UserError(f"{first} comes after --to {last}", file="command line", key="--from", fix=fix)
    missing = [stage for stage in STAGES[:start] if stage not in finished]
    if missing:
        text = f"not finished in this run: {', '.join(missing)}"
        raise UserError(text, file="command line", key="--from", fix=f"--from {missing[0]}")
    todo: list[str] = [stage for stage in stages if stage not in finished or stage == first]
    if first is None and todo:
        todo = [stage for stage in stages if STAGES.index(stage) >= STAGES.index(todo[0])]
    return todo


def read_jobs(run_path: Path) -> dict[str, Any]:
    """``jobs/jobs.json`` of a run: which jobs were submitted; empty where none were."""
    path = run_path / "jobs" / JOBS
    try:
        body = json.loads(read_whole(path))
    except FileNotFoundError:
        return {"jobs": []}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"unreadable: {error}", file=str(path), fix="move it away, then submit again") from None
    if not isinstance(body, dict) or not all(isinstance(entry, dict) for entry in body.get("jobs", [None])):
        raise UserError("is not a list of jobs", file=str(path), fix="move it away, then submit again")
    return body


def find_missing(cluster: Cluster, places: Sequence[tuple[str, Path]], fix: str) -> list[Problem]:
    """What this machine lacks for a submission: a readable ``.env``, sbatch, folders that the nodes see too.

    ``places``: the folders beside the checkout; ``fix``: what to do where there is no Slurm.
    """
    problems: list[Problem] = []
    try:
        secrets.read_env(env_file())
    except UserError as error:
        problems += error.problems
    if shutil.which("sbatch") is None:
        problems.append(Problem("sbatch is not on PATH", fix=fix))
    return problems + cluster_paths.find_unshared([*places, ("the checkout", ROOT)], cluster)


def is_ours(entry: Mapping[str, Any], record: Mapping[str, str]) -> bool:
    """Whether what the controller calls by an id is the job of ``jobs.json``: a new controller counts from 1 again."""
    return record.get("JobName") == entry.get("name") and str(entry.get("script", "")) in record.get("Command", "")


def live_jobs(run_path: Path, run: slurm.Run = slurm.call) -> list[str]:
    """Ids of the jobs of a run, or arrays of a sweep, that run or may run yet. Raises UserError where Slurm does not answer."""
    live = []
    for entry in read_jobs(run_path)["jobs"]:
        tasks = slurm.show_jobs(str(entry.get("id")), run)
        if any(is_ours(entry, task) and task.get("JobState") not in slurm.ENDED for task in tasks):
            live.append(str(entry["id"]))
    return live


def require_none_live(run_path: Path, what: str, command: str) -> None:
    """Raise UserError (exit 75) where such jobs are in the queue. ``what`` they are; ``command``: what shows them."""
    if live := live_jobs(run_path):
        fix = f"{command} {shlex.quote(str(run_path))} shows them; scancel {' '.join(live)} ends them"
        raise UserError(f"{what} are in the queue: {', '.join(live)}", file=str(run_path), fix=fix, code=ExitCode.AGAIN)


def submit_all(
    run_path: Path, jobs: Sequence[StageJob], send: Send | None = None, run: slurm.Run = slurm.call
) -> list[dict[str, Any]]:
    """Write the scripts, submit them one after the other, each after the success of the one before, and keep their ids.

    ``jobs.json`` is written after each of them: what was submitted is known whenever this ends. Where one is refused, those
    before it are cancelled. Raises UserError.
    """
    for folder in ("jobs", "logs"):
        (run_path / folder).mkdir(parents=True, exist_ok=True)
    before = read_jobs(run_path)["jobs"]
    entries: list[dict[str, Any]] = []
    for job in jobs:
        write_durably(job.path, job.script)
        after = entries[-1]["id"] if entries else None
        command = job.command(after)
        try:
            number = (send or slurm.submit)(command[2 : command.index(str(job.path))], str(job.path), job.arguments)
        except BaseException as error:
            left = _undo(run_path, before, entries, run)
            if not isinstance(error, UserError):
                raise
            raise type(error)([*error.problems, _after_refusal(job.stage, left)], error.code) from None
        name = re.search(r"--job-name=(\S+)", job.script)
        entries.append(
            {
                "stage": job.stage,
                "id": number,
                "name": name[1] if name else "",
                "submitted": round(time.time(), 3),
                "after": after,
                "script": str(job.path),
                "sha256": hashlib.sha256(job.script.encode()).hexdigest(),
                "command": command,
            }
        )
        _write(run_path, [*before, *entries])
    return entries


def _write(run_path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    write_durably(run_path / "jobs" / JOBS, json.dumps({"jobs": list(entries)}, indent=1) + "\n")


def _undo(run_path: Path, before: list[Any], entries: list[dict[str, Any]], run: slurm.Run) -> list[str]:
    """Cancel what was submitted so far; the ids for which that failed."""
    ids = [str(entry["id"]) for entry in entries]
    try:
        slurm.cancel(ids, run)
    except UserError:
        return ids
    if ids:
        say(f"cancelled: {', '.join(ids)}")
        _write(run_path, before)
    return []


def _after_refusal(stage: str, left: Sequence[str]) -> Problem:
    if not left:
        return Problem(f"the job for {stage} could not be submitted; nothing of this submission is left in the queue")
    text = f"the job for {stage} could not be submitted, and those before it ({', '.join(left)}) could not be cancelled"
    return Problem(text, fix=f"scancel {' '.join(left)}")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What is submitted."""

    shape: JobShape
    script: str
    """The text of the sbatch file."""
    folder: Path
    """Where its file and its log go."""
    arguments: tuple[str, ...]
    """Those of the command that it runs."""
    file: str = "job.sbatch"
    beside: Mapping[str, str] = field(default_factory=dict)
    """What the job reads, by the names of files beside its own."""

    @property
    def path(self) -> Path:
        return self.folder / self.file

    @property
    def options(self) -> list[str]:
        """Paths, which an ``#SBATCH`` line would split at blanks, and what SBATCH_EXPORT would replace there."""
        return ["--export=NIL", f"--chdir={ROOT}", f"--output={escape_pattern(self.folder)}/%x-%j.log"]

    def command(self) -> list[str]:
        """``sbatch`` as it is called."""
        return ["sbatch", "--parsable", *self.options, str(self.path), *self.arguments]

    def show(self, as_json: bool, **more: Any) -> None:
        """What a dry run prints; ``more``: keys of the JSON document."""
        if as_json:
            emit_json({"file": str(self.path), "script": self.script, "command": self.command(), **more})
        else:
            sys.stdout.write(escape(f"# {self.shape}\n# {self.path}\n{self.script}$ {shlex.join(self.command())}\n"))

    def submit(self, cluster: Cluster, as_json: bool, places: tuple[tuple[str, Path], ...] = (), **more: Any) -> str:
        """Write the file and put the job into the queue; its number.

        Raises UserError where there is no sbatch, nodes would not see the checkout or one of ``places``, or storage fails.
        ``more``: keys of the JSON document.
        """
        if shutil.which("sbatch") is None:
            raise UserError("sbatch is not on PATH", fix="call this on a login node of the cluster; --dry-run needs no Slurm")
        raise_if(cluster_paths.find_unshared([*places, ("the checkout", ROOT)], cluster))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, text in {**self.beside, self.file: self.script}.items():
                write_durably(self.folder / name, text)
        except OSError as error:
            raise storage_error(error, "cannot hold the job", error.filename or self.folder) from None
        number = slurm.submit(self.options, str(self.path), self.arguments)
        if as_json:
            emit_json({"job": number, "folder": str(self.folder), **more, "command": self.command()})
        say(f"job {number}: {self.shape}")
        return number


def render_alone(name: str, shape: JobShape, note: str, source: str, *, alone: bool = True) -> str:
    """The sbatch file; the job is never started again, and ``alone`` on its nodes, so that no neighbour is measured.

    ``note`` says from what it was derived; ``source`` is the text of its body's file.
    """
    _, body = split_script(source)
    options = [f"--job-name={name}", *shape.options(), *(["--exclusive"] if alone else []), "--no-requeue", "--export=NIL"]
    return f"#!/usr/bin/env bash\n# {note}\n" + "".join(map(header_line, options)) + ahead_of_body(shape) + body
