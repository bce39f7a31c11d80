"""How an attempt ended, judged from what each rank and each node left behind: one code, one reason, the first to fail.

And whether a job still makes progress: attempts that end without a new checkpoint are counted, and the reason is looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError, is_full
from clustertune.launch.agent import ask_anew, log_file, node_record, rank_record
from clustertune.launch.attempt import OUTCOME, PLAN, AttemptPlan, PastAttempt, read_attempts
from clustertune.manifest import read_object, read_text, read_whole, write_durably
from clustertune.rundir import RunDir

MISSING_RECORD = "ended without a record: killed (out of memory, kill -9, or a node fault)"
AGAIN = "the same command resumes from the newest whole checkpoint"
_RANK_KILLED = re.compile(r"exitcode\s*: -\d+\b")
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", re.DOTALL)
"""How torch's launcher reports the rank that failed first on its node."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: ExitCode
    problems: list[Problem] = field(default_factory=list)
    nodes_gone: tuple[str, ...] = ()
    """Nodes that left no record: lost, cut off, or ended from outside."""
    stop_requested: bool = False
    """It ended because it was asked to: ahead of a limit, for a preemption, or by a person."""
    port_taken: bool = False
    """The rendezvous port was taken between its choice and its use."""

    def write(self, folder: Path, **more: Any) -> None:
        """Leave ``outcome.json`` in the attempt's folder."""
        body = {**asdict(self), "code": int(self.code), "time": round(time.time(), 3), **more}
        # "asked": the key that every version reads.
        write_durably(folder / OUTCOME, json.dumps({"asked": body.pop("stop_requested"), **body}, indent=1) + "\n")


def judge(folder: Path, plan: AttemptPlan, *, requested: bool = False) -> Outcome:
    """The code and reason of an attempt.

    Decisions that all ranks took together come first; then being asked to stop; then a rank that was killed or hung; then
    the earliest failure. ``requested``: a stop was requested, which explains ranks that say nothing.
    """
    traces = _Traces.read(folder, plan)
    requested = requested or any(body and body.get("asked") for body in traces.nodes.values())
    killed = any(body is not None and body["launcher"] == -signal.SIGKILL for body in traces.nodes.values())
    return (
        traces.decision()
        or (traces.stopped() if requested else None)
        or traces.given_up()
        or traces.killed_first()
        or traces.nodes_lost()
        or traces.silence(killed=killed)
        or traces.first_failure()
        or Outcome(ExitCode.AGAIN if ExitCode.AGAIN in traces.codes else ExitCode.OK)
    )


def conclude(folder: Path, plan: AttemptPlan, *, requested: bool = False) -> Outcome:
    """:func:`judge`, and ``outcome.json`` beside the plan: what the starter of an attempt does at its end."""
    outcome = judge(folder, plan, requested=requested)
    with contextlib.suppress(OSError):  # a full disk is what it may have to tell
        outcome.write(folder)
    return outcome


def any_node_failed(folder: Path, plan: AttemptPlan) -> bool:
    """Whether a node has left a record that says so: its attempt is over, whatever the others do."""
    ask_anew(folder)
    return any(node_record(folder, node).get("code") for node in range(len(plan.nodes)))


@dataclass(frozen=True)
class _Traces:
    """What an attempt left behind. Each method is one way to end, or None where it was not that one."""

    folder: Path
    plan: AttemptPlan
    records: dict[int, dict[str, Any]]
    """By rank, of those that left one."""
    nodes: dict[int, dict[str, Any] | None]

    @classmethod
    def read(cls, folder: Path, plan: AttemptPlan) -> _Traces:
        ask_anew(folder)
        nodes = {node: node_record(folder, node) or None for node in range(len(plan.nodes))}
        records = ((rank, rank_record(folder, rank)) for rank in range(plan.world_size))
        return cls(folder, plan, {rank: record for rank, record in records if record}, nodes)

    @property
    def codes(self) -> set[ExitCode]:
        return {ExitCode(record["code"]) for record in self.records.values()}

    @property
    def silent(self) -> list[int]:
        return sorted(set(range(self.plan.world_size)) - set(self.records))

    @property
    def gone(self) -> tuple[str, ...]:
        if len(self.plan.nodes) == 1:
            return ()
        return tuple(self.plan.nodes[node].name for node, body in self.nodes.items() if body is None)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Earliest first."""
        failures = (record for record in self.records.values() if record["code"] not in (0, ExitCode.AGAIN))
        return sorted(failures, key=lambda record: float(record["time"]))

    def decision(self) -> Outcome | None:
        """What all ranks, or a node, decided outranks the noise of ranks that then lost their peers."""
        for code in (ExitCode.STOP, ExitCode.CONFIG, ExitCode.STORAGE):
            if code in self.codes:
                return Outcome(code, _problems(r for r in self.records.values() if r["code"] == code))
        for body in self.nodes.values():
            if body and body["code"] in (ExitCode.CONFIG, ExitCode.STORAGE):
                return Outcome(ExitCode(body["code"]), [Problem(**p) for p in body["problems"]])
        return None

    def stopped(self) -> Outcome | None:
        """As asked, where no rank failed for another reason."""
        if self.silent or self.codes <= {ExitCode.OK, ExitCode.AGAIN}:
            return Outcome(ExitCode.AGAIN, stop_requested=True)
        return None

    def given_up(self) -> Outcome | None:
        """No rank began for want of a port, or an agent ended its own: hung, or superseded by a newer attempt."""
        if not self.records and _PORT_TAKEN.search(text := read_text(log_file(self.folder, 0))):
            problem = Problem(
                f"the rendezvous port was taken: {_last_line(text)}", file=str(log_file(self.folder, 0)), fix=AGAIN
            )
            return Outcome(ExitCode.AGAIN, [problem], port_taken=True)
        ended = _problems(body for body in self.nodes.values() if body)
        return Outcome(ExitCode.AGAIN, ended, self.gone) if ended else None

    def killed_first(self) -> Outcome | None:
        """A rank without a record that its node's launcher saw die first by a signal."""
        for node in range(len(self.plan.nodes)):
            match = _ROOT_CAUSE.search(read_text(log_file(self.folder, node)))
            # SIGTERM is how launchers and schedulers end ranks whose peers have failed: never the cause.
            if match and int(match[1]) in self.silent and int(match[2]) < 0 and int(match[2]) != -signal.SIGTERM:
                text = f"{self.plan.where(int(match[1]))} failed first: {how_ended(-int(match[2]))}"
                return Outcome(ExitCode.AGAIN, [Problem(text, file=str(self.folder), fix=AGAIN)], self.gone)
        return None

    def nodes_lost(self) -> Outcome | None:
        if not self.gone or self.failed:
            return None
        text = f"{', '.join(self.gone)} ended without a record: lost, cut off, or ended from outside"
        return Outcome(ExitCode.AGAIN, [Problem(text, file=str(self.folder), fix=AGAIN)], self.gone)

    def silence(self, *, killed: bool) -> Outcome | None:
        """Ranks that left no record; with several nodes the scheduler ends those of the others when one fails."""
        if not self.silent or (self.failed and len(self.plan.nodes) > 1):
            return None
        if not self.folder.is_dir():
            text = "the run folder was deleted or moved, or its storage was unmounted, while the ranks worked in it"
            fix = "bring it back, then the same command again; without it the run starts from its first step"
            return Outcome(ExitCode.STORAGE, [Problem(text, file=str(self.folder.parent.parent), fix=fix)], self.gone)
        if is_full(self.folder):
            problem = Problem("no space left for what the ranks write", file=str(self.folder), fix=f"free space, then {AGAIN}")
            return Outcome(ExitCode.STORAGE, [problem])
        log = log_file(self.folder, 0)
        text = read_text(log)
        if not (self.folder / "rank-0.log").exists() and not killed and not _RANK_KILLED.search(text):
            problem = Problem(f"the launcher started no rank: {_last_line(text)}", file=str(log))
            return Outcome(ExitCode.FAILED, [problem], self.gone)
        names = ", ".join(self.plan.where(rank) for rank in self.silent)
        return Outcome(ExitCode.AGAIN, [Problem(f"{names} {MISSING_RECORD}", file=str(self.folder), fix=AGAIN)], self.gone)

    def first_failure(self) -> Outcome | None:
        if not self.failed:
            return None
        first = self.failed[0]
        text = f"{self.plan.where(int(first['rank']))} failed first: "
        if self.gone:  # it lost its peers there: what it says about its connection is not the cause
            lost = Problem(f"{', '.join(self.gone)} ended without a record", file=str(self.folder), fix=AGAIN)
            return Outcome(ExitCode.AGAIN, [lost, *_problems([first], prefix=text)], self.gone)
        return Outcome(ExitCode(first["code"]), _problems([first], prefix=text))


def how_ended(number: int) -> str:
    """How a rank ended that a signal of this number killed, in words for a person."""
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    return "killed (SIGKILL: out of memory, kill -9, or a node fault)" if number == signal.SIGKILL else f"ended by {name}"


def _problems(records: Iterable[dict[str, Any]], prefix: str = "") -> list[Problem]:
    problems = (Problem(**{**p, "message": prefix + p["message"]}) for record in records for p in record["problems"])
    return list(dict.fromkeys(problems))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


# --- progress ---------------------------------------------------------------------------------------------------------

FAILED_LIMIT = 3
"""Attempts in a row that failed by themselves without a new checkpoint, after which a job stops (NVRx: 3 cycles)."""
ENDED_LIMIT = 10
"""The same for attempts that were ended from outside (node lost, preempted, requeued), once they used up :data:`ENDED_SECONDS`:
not the job's fault, but no end. Ten losses within minutes are a bad hour of the cluster, not of the job."""
ENDED_SECONDS = 30 * 60
ENDED_MOST = 60
"""So many however short they were: what ends a job as soon as it starts would send it round for ever."""

REQUEUED = "requeued.json"
_PLACE = re.compile(r"rank \d+ on [A-Za-z0-9._-]+")


def without_progress(attempts: Sequence[PastAttempt], job: str | None, step: int) -> list[PastAttempt]:
    """The attempts of this job at the end of the list that began at the step at which the next one would begin."""
    stuck: list[PastAttempt] = []
    for attempt in reversed(attempts):
        if attempt.plan.job != job or attempt.plan.from_step != step:
            break
        stuck.append(attempt)
    return stuck[::-1]


def check_progress(run_path: Path, job: str | None, step: int) -> None:
    """Refuse another attempt of a job that makes no progress. A new job, submitted after a look, begins to count again.

    Raises UserError (exit 93) with what the attempts have in common.
    """
    stuck = without_progress(read_attempts(run_path), job, step)
    failed = [attempt for attempt in stuck if not attempt.ended_outside]
    lost = sum(attempt.seconds for attempt in stuck)
    often = len(stuck) >= ENDED_MOST or (len(stuck) >= ENDED_LIMIT and lost >= ENDED_SECONDS)
    if len(failed) < FAILED_LIMIT and not often:
        return
    where = f"since step {step}" if step else "from the beginning"
    if len(failed) >= FAILED_LIMIT:
        head = f"{len(failed)} attempts {where} failed without a new checkpoint: the job stops"
    else:
        spent = f"{lost / 60:.0f} minutes"
        head = f"{len(stuck)} attempts {where}, {spent} in all, were ended from outside before a new checkpoint: the job stops"
    problems = [Problem(head, file=str(run_path / "attempts"), fix=_advice(failed or stuck))]
    for attempt in (failed or stuck)[-FAILED_LIMIT:]:
        reason = "; ".join(attempt.messages) or "ended from outside, without a message"
        problems.append(Problem(f"attempt {attempt.plan.attempt}: {reason}", file=str(attempt.folder)))
    raise UserError(problems, ExitCode.STOP)


def check_requeue(run_path: Path, job: str) -> None:
    """Count a requeue; refuse one more of a job that has begun no attempt and finished no stage or file for ten of them.

    A warning that comes as soon as the job has started (its time limit is shorter than ``--signal``), or a stage that is longer
    than the limit, would send it round for ever. Raises UserError (exit 93).
    """
    path, mark = run_path / REQUEUED, _mark(run_path)
    try:
        before = json.loads(read_whole(path))
        same = before["job"] == job and all(now <= then for now, then in zip(mark, before["mark"], strict=True))
        count = int(before["count"]) + 1 if same else 1
        mark = [max(pair) for pair in zip(mark, before["mark"], strict=True)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        count = 1
    if count > ENDED_LIMIT:
        fix = "give it more time: --time must be far longer than --signal; a new job counts from zero"
        text = f"requeued {ENDED_LIMIT} times before it began an attempt or finished anything: the job stops"
        raise UserError(text, file=str(run_path), fix=fix, code=ExitCode.STOP)
    with contextlib.suppress(OSError):
        write_durably(path, json.dumps({"job": job, "count": count, "mark": mark}) + "\n")


def _mark(run_path: Path) -> list[int]:
    """What grows only with a job's progress: attempts, finished stages, files of the merged model, bytes of the evaluation."""

    def sizes(name: str) -> list[int]:
        with contextlib.suppress(OSError):
            return [entry.stat().st_size for entry in (run_path / name).iterdir() if not entry.name.startswith(".")]
        return []

    attempts = len(list((run_path / "attempts").glob(f"*/{PLAN}")))
    return [attempts, len(sizes("stages")), len(sizes("merged")), sum(sizes("eval"))]


def _advice(attempts: Sequence[PastAttempt]) -> str:
    """What the messages of the attempts have in common."""
    texts = [" ".join(attempt.messages) for attempt in attempts]
    places = Counter(word for text in texts for word in set(_PLACE.findall(text)))
    if places:
        location, count = places.most_common(1)[0]
        if count == len(texts) and " on " in location:
            node = location.rpartition(" on ")[2]
            return f"{location} failed each time: try without that node (sbatch --exclude={node}), and look at its log"
    if texts and all("SIGKILL" in text or "killed" in text for text in texts):
        return "killed each time: most often memory; more memory, more nodes, or a smaller train.max_length"
    if len(set(texts)) == 1 and texts[0]:
        return "the same each time: not the machine; fix it, then submit again"
    return "look at the logs of the attempts, fix it, then submit again: a new job counts from zero"


# --- lease ----------------------------------------------------------------------------------------------------------------

# Whose run folder it is: one job at a time, and a restarted job takes over from what is left of its former self.

OWNER = "owner.json"
WAIT_SECONDS = 60.0
"""How long a restarted job waits for its former self to notice the new attempt and let go of the lock."""


@contextlib.contextmanager
def taken_over(run: RunDir, job: str, restart: int, is_running: Callable[[str], bool]) -> Iterator[None]:
    """Hold the run folder for a job. ``is_running`` tells whether another job, by its id, runs now.

    An earlier start of the same job (the scheduler restarted it: a node was lost or cut off) may still hold the lock on a node
    that the scheduler cannot reach. It exits as soon as it sees the new attempt's folder; where it cannot even see that,
    it cannot write here either. Raises UserError (exit 75) where another job or command works here, or a later start of this
    one: the late start of a cut-off node would fence off its own successor.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    path = run.path / OWNER
    owner = read_object(path)
    former = str(owner.get("job", "")) or None
    if former not in (None, job) and is_running(str(former)):
        fix = f"wait for job {former}, or cancel it: scancel {former}"
        raise UserError(f"job {former} works in this run folder", file=str(run.path), fix=fix, code=ExitCode.AGAIN)
    if former == job and int(str(owner.get("restart", 0))) > restart:
        raise UserError(f"a later start of job {job} owns this run; stopping this one", file=str(run.path), code=ExitCode.AGAIN)
    now = {"job": job, "restart": restart, "host": os.uname().nodename, "pid": os.getpid()}
    body = json.dumps(now) + "\n"
    with contextlib.ExitStack() as stack:
        if former == job:
            write_durably(path, body)
            run.new_attempt()  # what is left of the former self sees it, and ends
            _wait_for_lock(run, stack)
        else:
            stack.enter_context(run.lock())
            write_durably(path, body)
        yield


def _wait_for_lock(run: RunDir, stack: contextlib.ExitStack) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            stack.enter_context(run.lock())
            return
        except UserError as error:
            if time.monotonic() >= deadline:
                say(f"note: {error.problems[0].message}: an earlier start of this job, isolated; it can no longer write")
                return
        time.sleep(1)


def still_mine(run_path: Path, job: str, restart: int) -> bool:
    """Whether no later start of the job has taken over; also where that cannot be read now.

    One failed read on network storage is no reason to kill a training: the number of the newest attempt fences as well.
    """
    owner = read_object(run_path / OWNER)
    return not owner or (owner.get("job") == job and int(str(owner.get("restart", restart))) <= restart)
