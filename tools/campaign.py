"""Faults at random moments, as many as there is time for: the command is killed, the power fails, an artefact is damaged.

    python -m tools.campaign [--only FAULT] [--count N] [--hours H] [--seed N]

Each case has a seed, and a fault is a function of it: the same seed is the same case. Cases run in forked processes
(:mod:`tools.forking`), each with a time limit. Power cuts need root; ``tests/long`` tries full disks. A case is a line of
JSON on stderr; the table at the end is for ``docs/results/faults.md``. Exit 1 where a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import lock, manifest
from tools.forking import REPO, ForkedCommand, run, warm
from tools.runs import attempts, events, half_written

RECIPE = "recipes/tiny-oasst2"
SAVE_STEPS = 2
SETTINGS = [
    "train.max_steps=8", f"train.save_steps={SAVE_STEPS}", "train.eval_on_start=false", "train.eval_steps=5",
    "train.max_length=64", "train.report_to=none", "eval.limit=4", "eval.max_gen_toks=4", "eval.base=false",
]  # fmt: skip
"""Steps so short that the moments between them are as likely to be hit as the steps."""
PATIENCE = 240
"""Seconds after a fault within which the command must have ended: more is a hang. Machines are shared."""
BUILD = REPO / "build" / "campaign"
STAGES = ("export", "merge", "eval", "report")


@dataclass
class Workspace:
    """Where the cases of one tree work, and what they begin with."""

    root: Path
    number: int = field(default_factory=os.getpid)

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that ``make`` has filled, read only. Two campaigns may want it at the same time."""
        folder, made = self.root / name, self.root / f"{name}.made"
        with lock.in_turn(self.root / f"{name}.lock", lambda: None):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                made.touch()
        return folder

    def until(self, stage: str) -> Path:
        """A run after this stage."""

        def make(folder: Path) -> None:
            stages = ("prepare", "train", *STAGES)
            before = stages.index(stage) - 1
            if before >= 0:
                shutil.copytree(self.until(stages[before]), folder, symlinks=True)
            began = time.monotonic()
            command(folder, stage)
            (self.root / f"{stage}.seconds").write_text(f"{time.monotonic() - began:.2f}")

        return self.once(f"after-{stage}", make)

    def copy(self, stage: str) -> Path:
        """The same, to be spoiled by one case."""
        folder = self.case / "run"
        shutil.copytree(self.until(stage), folder, symlinks=True)
        return folder

    def seconds(self, stage: str) -> float:
        """How long a stage took when nothing happened."""
        self.until(stage)
        return float((self.root / f"{stage}.seconds").read_text())

    @property
    def case(self) -> Path:
        """A folder for one case, empty at its start."""
        return self.root / f"case-{self.number}"

    @property
    def adapter(self) -> str:
        """Digest of the adapter of a run that nothing happened to."""
        return digest(self.until("export") / "adapter")


def draw(seed: int) -> random.Random:
    """What a case does: the same for the same seed."""
    return random.Random(seed)  # noqa: S311 - faults, no secrets


def start(folder: Path, last: str, *more: str, out: Path | None = None) -> ForkedCommand:
    """The command on a run folder, to this stage. ``out``: its output, beside the folder where none is given."""
    out = out or folder.parent / f"{folder.name}.{time.monotonic_ns()}.log"
    return ForkedCommand("run", RECIPE, "--run-dir", folder, "--to", last, *SETTINGS, *more, out=out)


def command(folder: Path, last: str, out: Path | None = None) -> str:
    """As :func:`start`, to a good end."""
    code, text = start(folder, last, out=out).end(PATIENCE * 2)
    assert code == 0, f"exit {code}: {text[-800:]}"
    return text


def digest(folder: Path) -> str:
    """Over the digests of a folder's manifest, which its files have."""
    assert manifest.find_problems(folder) == [], manifest.find_problems(folder)
    records = manifest.read_manifest(folder).files
    return hashlib.sha256(repr(sorted((name, record.digest) for name, record in records.items())).encode()).hexdigest()


@dataclass
class Done:
    """A case that held."""

    count: int = 1
    """Faults in it."""
    figures: dict[str, list[float]] = field(default_factory=dict)


# --- kills --------------------------------------------------------------------------------------------------------------


def pids(attempt: Path, pattern: str) -> list[int]:
    """The processes of an attempt that live, by the files that hold their ids."""
    alive = []
    for path in attempt.glob(pattern):
        text = path.read_text().strip()
        if text.isdigit() and Path(f"/proc/{text}").exists():
            alive.append(int(text))
    return sorted(alive)


def kill_training(seed: int, workspace: Workspace, *, saving: bool = False) -> Done:
    """One run, killed up to four times at random moments, then left in peace."""
    chance, folder, kills = draw(seed), workspace.copy("prepare"), 0
    figures: dict[str, list[float]] = {"steps lost": [], "s to the first new step": []}
    reached, long = 0, workspace.seconds("train")
    while True:
        known, left = len(attempts(folder)), half_written(folder)
        child = start(folder, "export")
        struck = False
        if kills < 4:
            if saving:
                struck = child.until(lambda: half_written(folder) - left, PATIENCE)  # noqa: B023
                time.sleep(chance.uniform(0, 0.25))
            else:
                struck = not child.until(lambda: False, chance.uniform(0, 1.1) * long) and child.child.poll() is None
            new = attempts(folder)[known:]
            ranks, launcher = ([], []) if not new else (pids(new[-1], "rank-*.pid"), pids(new[-1], "node-*.pid"))
            victims = {"rank": ranks[:1] and [chance.choice(ranks)], "ranks": ranks, "launcher": launcher}.get(
                chance.choice(["rank", "ranks", "launcher", "command"])
            )
            for pid in (victims or [child.pid]) if struck and child.child.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
        code, text = child.end(PATIENCE)
        assert code in (0, 75, -9), f"exit {code} after {kills} kills: {text[-800:]}"
        if new := attempts(folder)[known:]:
            number = int(new[-1].name)
            begun = [e["step"] for e in events(folder, "start") if e["attempt"] == number]
            steps = [e["time"] for e in events(folder, "step") if e["attempt"] == number]
            if begun and kills:
                figures["steps lost"].append(reached - begun[0])
                assert reached - begun[0] <= 2 * SAVE_STEPS, f"{reached - begun[0]} steps lost: {reached} to {begun[0]}"
            if begun and steps and kills:
                figures["s to the first new step"].append(steps[0] - child.started)
            reached = max(reached, max((e["step"] for e in events(folder, "step")), default=0))
        if code == 0:
            break
        kills += 1
    assert digest(folder / "adapter") == workspace.adapter, "other bytes than those of a quiet run"
    return Done(kills, figures)


def kill_stage(seed: int, workspace: Workspace, *, stage: str) -> Done:
    """The command is killed in one stage, again and again up to three times; then its result is that of a quiet one."""
    chance, kills = draw(seed), 0
    folder = workspace.copy(("train", *STAGES)[STAGES.index(stage)])
    while kills < 3:
        child = start(folder, stage)
        if child.until(lambda: False, chance.uniform(0.05, 1) * workspace.seconds(stage)) or child.child.poll() is not None:
            break
        child.child.kill()
        assert child.end(PATIENCE)[0] in (0, -9)
        kills += 1
    command(folder, stage)
    quiet = workspace.until(stage)
    if stage == "report":
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")
        assert not list(folder.glob(".report*"))
    elif stage == "eval":
        for name in ("results.json", "samples.jsonl"):
            ours, theirs = ((run_dir / "eval" / name).read_text() for run_dir in (folder, quiet))
            assert answers(ours) == answers(theirs), f"{name} differs"
    else:
        name = {"export": "adapter", "merge": "merged"}[stage]
        assert digest(folder / name) == digest(quiet / name)
    return Done(kills)


def answers(text: str) -> Any:
    """What an evaluation found, without its times."""
    return sorted(re.findall(r'"(?:resps|prompt_level_[a-z_,]*|inst_level_[a-z_,]*)": (?:\[[^\]]*\]|[-\d.e]+)', text))


# --- storage ------------------------------------------------------------------------------------------------------------


def said_saved(text: str) -> int:
    """The newest step that was announced as saved."""
    return max((int(step) for step in re.findall(r"saved \S*?step-0*(\d+)", text)), default=0)


@contextlib.contextmanager
def disk_with_run(workspace: Workspace, *mount: str | Path) -> Iterator[Path]:
    """A mount of its own that holds a prepared run."""
    own_mounts()
    workspace.until("export")
    disk = workspace.case / "disk"
    disk.mkdir()
    subprocess.run(["mount", *mount, disk], check=True)
    try:
        shutil.copytree(workspace.until("prepare"), disk / "run", symlinks=True)
        os.sync()
        yield disk
    finally:
        unmount(disk)


def power_cut(seed: int, workspace: Workspace) -> Done:
    """XFS on a loop device is shut down, without its log, at a random moment after a save was announced."""
    from clustertune.checkpoint import store

    def make(folder: Path) -> None:
        folder.mkdir()
        with (folder / "image").open("wb") as out:
            out.truncate(320 << 20)
        subprocess.run(["mkfs.xfs", "-q", folder / "image"], check=True)

    chance, image, out = draw(seed), workspace.case / "image", workspace.case / "cut.log"
    subprocess.run(["cp", "--sparse=always", workspace.once("xfs", make) / "image", image], check=True)
    mount = ("-o", "loop,nouuid", image)
    with disk_with_run(workspace, *mount) as disk:
        child = start(disk / "run", "train", out=out)
        step = SAVE_STEPS * chance.randint(1, 3)
        child.until(lambda: said_saved(child.text) >= step, PATIENCE)
        time.sleep(chance.uniform(0, 0.6))
        announced = said_saved(child.text)  # before the cut
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", disk], check=True)
        child.child.kill()
        child.end(PATIENCE)
        unmount(disk)
        subprocess.run(["mount", *mount, disk], check=True)
        newest, _ = store.newest_whole(disk / "run" / "checkpoints")
        last = newest.step if newest else 0
        assert announced >= step and last >= announced, f"{announced} was announced (wanted {step}), {last} is there"
        command(disk / "run", "export", out=out)
        assert digest(disk / "run" / "adapter") == workspace.adapter
        return Done(figures={"step announced": [announced]})


def own_mounts() -> None:
    """Keep what this process mounts to itself and its children: a copy in the namespace of a Slurm node, made while another
    campaign runs, would keep a file system alive that was shut down, and the next mount of its image would find that one."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS, sched.h
        raise OSError(ctypes.get_errno(), "no namespace of mounts")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def unmount(folder: Path) -> None:
    for _ in range(200):
        if f" {folder} " not in Path("/proc/self/mounts").read_text():
            return
        if subprocess.run(["umount", folder], capture_output=True, check=False).returncode:
            time.sleep(0.1)
    subprocess.run(["umount", "--lazy", folder], check=True)
    raise AssertionError(f"{folder} is busy")


# --- damage -------------------------------------------------------------------------------------------------------------


def staged(workspace: Workspace) -> Path:
    """An offline bundle of all that the recipe needs."""

    def make(folder: Path) -> None:
        code, text = run("stage", RECIPE, "--to", folder, "--tiny", out=folder.with_suffix(".log"))
        assert code == 0, text

    return workspace.once("parcel", make)


def spoil(path: Path, chance: random.Random, others: Sequence[Path]) -> str | None:
    """Flip a bit of a file, cut it, put another in its place, or remove it. Returns the kind; None where nothing changed."""
    data = path.read_bytes()
    how = chance.choice(["flip", "flip", "cut", "swap", "delete", "tail of zeros"])
    changed = bytearray(data)
    if how == "flip" and data:
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del changed[chance.randrange(len(data) or 1) :]
    elif how == "swap":
        changed = bytearray(chance.choice(others).read_bytes())
    elif how == "tail of zeros":
        size = chance.randint(1, 4096)
        changed[-size:] = bytes(min(size, len(data)))
    if how == "delete":
        path.unlink()
    elif bytes(changed) == data:
        return None
    else:
        path.write_bytes(changed)
    return how


def damage(seed: int, workspace: Workspace) -> Done:
    """One file of one artefact: a bit, an end, another file's content, or all of it; its reader sees it."""
    from clustertune.checkpoint import store

    chance = draw(seed)
    finished = workspace.until("merge")
    newest = sorted((finished / "checkpoints").iterdir())[-1]
    artefacts = {"checkpoint": newest, "adapter": finished / "adapter", "merged": finished / "merged"}
    kind, folder = chance.choice([*artefacts.items(), ("parcel", staged(workspace))])
    copied = workspace.case / folder.name
    shutil.copytree(folder, copied, symlinks=True)
    name = chance.choice([*manifest.read_manifest(folder).files, manifest.MANIFEST])
    how = spoil(copied / name, chance, [folder / other for other in manifest.read_manifest(folder).files])
    if how is None:
        return Done(0)
    before = manifest.read_manifest(folder)
    if kind == "checkpoint":
        problems = store.verify(copied)
    elif kind == "parcel":
        from clustertune.errors import UserError
        from clustertune.staging import bundle

        verdict = bundle.Verification()
        try:
            bundle.check_sums(copied, manifest.read_manifest(copied, "parcel"), verdict, 120)
            problems = verdict.problems
        except UserError as error:
            problems = error.problems
    else:
        problems = manifest.find_problems(copied, kind)
    same = not problems and name == manifest.MANIFEST and manifest.read_manifest(copied) == before
    assert problems or same, f"{how} of {kind}/{name} went unseen"
    return Done()


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    words: str
    goal: int
    case: Callable[..., Done]
    seconds: int = 60
    """Limit of one case."""
    more: dict[str, Any] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {
    "damage": Fault("bit flips, cuts, swaps, deletions: files of checkpoint, adapter, merged model, bundle", 1000, damage, 900),
    "kills": Fault("SIGKILL of a rank, all ranks, launcher or command at random moments", 200, kill_training, 1800),
    "saving": Fault("the same during a background save", 50, kill_training, 1800, {"saving": True}),
    **{name: Fault(f"SIGKILL in {name}", 50, kill_stage, 900, {"stage": name}) for name in STAGES},
    "power": Fault("power cut (XFS on a loop device, shut down) after a save was announced", 100, power_cut, 900),
}  # fmt: skip


def one(name: str, seed: int, workspace: Workspace) -> dict[str, Any]:
    """A case in a process of its own: what it found, as a line of the results."""
    shutil.rmtree(workspace.case, ignore_errors=True)
    workspace.case.mkdir(parents=True)
    fault, began = FAULTS[name], time.monotonic()
    answer = workspace.root / f"answer-{workspace.number}.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        result: dict[str, Any]
        try:
            signal.alarm(fault.seconds)
            result = dataclasses.asdict(fault.case(seed, workspace, **fault.more))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            result = {"failed": f"{type(error).__name__}: {error}"[:1500], "at": f"{Path(last.filename).name}:{last.lineno}"}
        answer.write_text(json.dumps(result))
        os._exit(0)
    os.waitpid(child, 0)
    result = json.loads(answer.read_text()) if answer.exists() else {"failed": f"no end within {fault.seconds} s"}
    return {"fault": name, "seed": seed, "seconds": round(time.monotonic() - began, 1), **result}


def table(results: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """What was counted, as Markdown."""
    yield "| fault | held | failed | figures |\n|---|---|---|---|\n"
    for name, rows in results.items():
        bad = [row for row in rows if "failed" in row]
        figures: dict[str, list[float]] = {}
        for key, values in itertools.chain.from_iterable(row.get("figures", {}).items() for row in rows):
            figures.setdefault(key, []).extend(values)
        shown = [f"{key}: median {statistics.median(v):.3g}, most {max(v):.3g}" for key, v in figures.items() if v]
        failed, total = ", ".join(f"seed {row['seed']}" for row in bad) or "none", sum(row.get("count", 1) for row in rows)
        yield f"| {FAULTS[name].words} (`{name}`) | {total - len(bad)} of {total} | {failed} | {'; '.join(shown)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--count", type=int, help="faults of each kind, in place of the goal")
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--seed", type=int, help="this case alone, its folder left in build/campaign")
    arguments = parser.parse_args()
    deadline, workspace = time.monotonic() + arguments.hours * 3600, Workspace(BUILD)
    shutil.rmtree(BUILD, ignore_errors=True)  # of another state of the product
    BUILD.mkdir(parents=True)
    warm()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only or FAULTS}
    for seed in [arguments.seed] if arguments.seed is not None else itertools.count():  # a few of each in turn
        goals = {name: arguments.count or FAULTS[name].goal for name in results}
        left = [name for name, rows in results.items() if sum(row.get("count", 1) for row in rows) < goals[name]]
        if not left or time.monotonic() > deadline:
            break
        for name in left:
            results[name].append(one(name, seed, workspace))
            sys.stderr.write(json.dumps(results[name][-1]) + "\n")
    sys.stdout.write("".join(table(results)))
    return int(any("failed" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
