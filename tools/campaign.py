"""Faults by the hundred: what the command does when it is killed, when the disk fails, when its files are wrong.

    python -m tools.campaign [--only FAULT] [--count N] [--hours H]

Each case has a seed, and a fault is a function of it: the same seed is the same case. Results are appended to
``docs/results/faults.jsonl`` under the digest of the product (``clustertune/``, ``launch/`` and the recipes), so a campaign
that was stopped continues where it was, on another machine too; ``docs/results/faults.md`` is written from them. Cases run in
forked processes (:mod:`tools.forking`), each with a time limit. Power cuts and full disks need root, node losses the temporary
Slurm.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import lock, manifest
from clustertune.testbed.inside import descendants
from tools import spoil
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
RESULTS = REPO / "docs/results/faults.jsonl"
STAGES = ("export", "merge", "eval", "report")
TREE = ("clustertune", "launch", "recipes/_base", RECIPE)


def tree_digest() -> str:
    """What the results belong to: every file of the product that they depend on. Another comment or docstring is the same."""
    found = hashlib.sha256()
    for folder in TREE:
        for path in sorted((REPO / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = code_of(path.read_text()) if path.suffix == ".py" else path.read_bytes()
                found.update(f"{path.relative_to(REPO)} {hashlib.sha256(content).hexdigest()}\n".encode())
    return found.hexdigest()[:12]


def code_of(text: str) -> bytes:
    """A module without its comments, its layout and the strings that stand alone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.dump(tree).encode()


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
    found = []
    for path in attempt.glob(pattern):
        text = path.read_text().strip()
        if text.isdigit() and Path(f"/proc/{text}").exists():
            found.append(int(text))
    return sorted(found)


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
        wanted = SAVE_STEPS * chance.randint(1, 3)
        child.until(lambda: said_saved(child.text) >= wanted, PATIENCE)
        time.sleep(chance.uniform(0, 0.6))
        announced = said_saved(child.text)  # before the cut
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", disk], check=True)
        child.child.kill()
        child.end(PATIENCE)
        unmount(disk)
        subprocess.run(["mount", *mount, disk], check=True)
        newest, _ = store.newest_whole(disk / "run" / "checkpoints")
        last = newest.step if newest else 0
        assert announced >= wanted and last >= announced, f"{announced} was announced (wanted {wanted}), {last} is there"
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


def bad_disk(seed: int, workspace: Workspace) -> Done:
    """Full, read-only, over quota, or failing at fsync, from a random moment on; then whole again."""
    chance, out = draw(seed), workspace.case / "disk.log"
    kind = ("full", "read-only", "quota", "EIO")[seed % 4]
    moment = chance.uniform(0, 1) * workspace.seconds("train")
    with disk_with_run(workspace, "-t", "tmpfs", "-o", "size=96m", "tmpfs") as disk:
        folder = disk / "run"
        child = start(folder, "export", out=out)
        child.until(lambda: False, moment)
        tracer = None
        if kind == "full":
            fill(disk, chance.choice([0, 4_096, 200_000, 1_500_000]))
        elif kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=False, capture_output=True)
        else:
            # Root has no quota: strace answers EDQUOT to fsync, as NFS and XFS do.
            ranks = pids(attempts(folder)[-1], "rank-*.pid") if attempts(folder) else []
            error = "EDQUOT" if kind == "quota" else "EIO"
            words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", f"inject=fsync:error={error}"]
            # strace leaves each process that it lets go as it was
            tracer = subprocess.Popen([*words, *[part for pid in ranks or [child.pid] for part in ("-p", str(pid))]],
                                      stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            code, text = child.end(PATIENCE)
        finally:
            if tracer:
                tracer.terminate()
                tracer.wait()
        went_ro = kind == "read-only" and not os.access(folder, os.W_OK)
        assert code == 73 or (code == 0 and not went_ro), f"{kind} after {moment:.1f} s: exit {code}: {text[-800:]}"
        subprocess.run(["mount", "-o", "remount,rw", disk], check=False)
        (disk / "ballast").unlink(missing_ok=True)
        command(folder, "export", out=out)
        assert digest(folder / "adapter") == workspace.adapter
        return Done(int(code == 73))


def fill(disk: Path, room: int) -> None:
    with (disk / "ballast").open("wb", buffering=0) as out:
        while (left := shutil.disk_usage(disk).free - room) > 0:
            try:
                if not out.write(bytes(min(left, 1 << 16))):
                    return
            except OSError:
                return


# --- damage -------------------------------------------------------------------------------------------------------------


def staged(workspace: Workspace) -> Path:
    """An offline bundle of all that the recipe needs."""

    def make(folder: Path) -> None:
        code, text = run("stage", RECIPE, "--to", folder, "--tiny", out=folder.with_suffix(".log"))
        assert code == 0, text

    return workspace.once("parcel", make)


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
    how = spoil.damage(copied / name, chance, [folder / other for other in manifest.read_manifest(folder).files])
    if how is None:
        return Done(0)
    before = manifest.read_manifest(folder)
    if kind == "checkpoint":
        problems = store.verify(copied)
    elif kind == "parcel":
        from clustertune.errors import UserError
        from clustertune.staging import bundle_check

        verdict = bundle_check.Verification()
        try:
            bundle_check.check_sums(copied, manifest.read_manifest(copied, "parcel"), verdict, 120)
            problems = verdict.problems
        except UserError as error:
            problems = error.problems
    else:
        problems = manifest.find_problems(copied, kind)
    same = not problems and name == manifest.MANIFEST and manifest.read_manifest(copied) == before
    assert problems or same, f"{how} of {kind}/{name} went unseen"
    return Done()


# --- files of users -----------------------------------------------------------------------------------------------------


def refused(text: str) -> bool:
    """Whether a refusal names a place and says what is wrong."""
    return any(re.match(r"(error|warning): .+: .+", line) for line in text.splitlines())


def recipe_copy(source: str, file: str, target: Path) -> Path:
    """A file of a recipe, copied with its recipe, the bases, and the recipe whose ``model.json`` it shares."""
    for name in {"_base", source, source.replace("zero3-offload", "fsdp2")}:
        shutil.copytree(REPO / "recipes" / name, target / name)
    return target / source / file


def mutated(seed: int, workspace: Workspace) -> Done:
    """A recipe, accelerate, DeepSpeed, cluster or model file with one mutation: refused, or it means what it says."""
    chance = draw(seed)
    source, file = chance.choice(spoil.CONFIGS)
    is_cluster = source == "clusters"
    if is_cluster:
        path = Path(shutil.copy(REPO / "ops/clusters" / file, workspace.case))
    else:
        path = recipe_copy(source, file, workspace.case / "recipes")
    how = spoil.mutate(path, chance)
    words: list[str | Path] = ["show-cluster", path] if is_cluster else ["show", path.parent]
    out = workspace.case / "out"
    began = time.monotonic()
    code, text = run(*words, "--json", out=out, seconds=60)
    assert time.monotonic() - began < 30, f"{how}: {time.monotonic() - began:.0f} s"
    assert code in (0, 2), f"{how}: exit {code}: {text[-500:]}"
    if code == 2:
        assert refused(text), f"{how}: no place named: {text[-500:]}"
        return Done(figures={"refused": [1]})
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    wrong = spoil.differences(path, found, "cluster" if is_cluster else file)
    assert not wrong, f"{how}: accepted, and {'; '.join(wrong[:3])}"
    return Done(figures={"refused": [0]})


def malformed(seed: int, workspace: Workspace) -> Done:
    """A data file with rows that are none: rows kept and rows counted as bad add up, and each bad one is named."""
    chance = draw(seed)
    folder = workspace.case
    path, format_, good, bad = spoil.data_file(folder, chance)
    out = folder / "out"
    code, text = run("prepare", RECIPE, "--out", folder / "data", f"data.input={path}", f"data.format={format_}",
                     "data.eval_fraction=0.1", "data.max_rejected=1", "data.language=null", "--json", out=out)  # fmt: skip
    assert code in (0, 2), f"exit {code}: {text[-500:]}"
    if code == 2:
        assert refused(text), text[-500:]
        assert good is None or good == 0 or "cannot be" in text or path.name in text, f"all refused: {text[-500:]}"
        return Done(figures={"refused": [1]})
    good_rows = sum(len((folder / "data" / name).read_text().splitlines()) for name in ("train.jsonl", "eval.jsonl"))
    rejects = (folder / "data" / "rejected.jsonl").read_text().splitlines()
    assert good is None or (good_rows, len(rejects)) == (good, bad), (
        f"{good} good and {bad} bad rows: {good_rows} kept, {len(rejects)} named"
    )
    for line in rejects:
        entry = json.loads(line)
        assert entry.get("reason") and entry.get("file") and entry.get("line"), entry
    return Done(figures={"refused": [0]})


def hostile(seed: int, workspace: Workspace) -> Done:
    """A name that would be a command, a path, a tag or an option somewhere: no file is made by it, nothing of it runs."""
    chance = draw(seed)
    canary = workspace.case / "canary"
    name = spoil.hostile_name(chance, canary)
    work = workspace.case / "work"
    work.mkdir()
    before = spoil.outside(workspace.case, work)
    out = workspace.case / "out"
    kind = chance.choice(["recipe", "override", "cluster", "template", "html", "run-dir", "host", "sbatch"])
    env = {"HOME": str(work)}
    if kind == "html":
        folder = workspace.copy("prepare")
        spoil.plant(folder, name)
        code, text = run("report", folder, out=out, env=env, cwd=work)
        page = (folder / "report.html").read_text() if code == 0 else ""
        assert not re.search(r"<(script|img|svg|iframe|b) ?[^>]*(canary|onerror|alert)", page), "a tag of a name's"
    else:
        words = spoil.hostile_command(kind, name, work, chance)
        code, text = run(*words, out=out, env=env, cwd=work)
    assert code in (0, 1, 2, 73, 75), f"{kind} {name!r}: exit {code}: {text[-500:]}"
    assert "\x1b]" not in text and "\u202e" not in text, f"{kind} {name!r}: control signs reach the terminal"
    assert not canary.exists() and spoil.outside(workspace.case, work) == before, f"{kind} {name!r}: a file appeared"
    if kind == "sbatch" and code == 0:
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert not any("canary" in line and not line.startswith("#SBATCH --job-name=") for line in lines), lines
    return Done()


def planted(seed: int, workspace: Workspace) -> Done:
    """Tokens in the environment and in .env: in no file of the run, of the home folder, of /tmp, and on no command line."""
    look = importlib.import_module("tests.test_secrets")
    chance = draw(seed)
    secret = "".join(chance.choice("abcdef0123456789") for _ in range(40))
    tokens = {"HF_TOKEN": f"hf_{secret}", "WANDB_API_KEY": secret[::-1]}
    home, folder = workspace.case / "home", workspace.copy("prepare")
    home.mkdir()
    out = workspace.case / "out"
    caches = {"HOME": str(home), "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home)}
    child = ForkedCommand("run", RECIPE, "--run-dir", folder, *SETTINGS, out=out, env=tokens | caches)
    seen = b""
    while child.child.poll() is None:
        for pid in [child.pid, *descendants(child.pid)]:
            seen += b"".join(
                part for part in (look.held_by(pid).split(b"\0")) if not part.startswith(tuple(k.encode() for k in tokens))
            )
        time.sleep(0.1)
    code, text = child.end(PATIENCE)
    assert code == 0, text[-500:]
    paths = [path for at in (folder, home) for path in at.rglob("*") if path.is_file()]
    for token in tokens.values():
        assert token not in text and token.encode() not in seen
        assert [path for path in paths if token.encode() in path.read_bytes()] == []
    return Done(len(tokens), {"files": [len(paths)]})


# --- Slurm --------------------------------------------------------------------------------------------------------------


def on_slurm(seed: int, workspace: Workspace, *, fault: str) -> Done:
    """One fault at a random moment of one job on the temporary Slurm; the adapter is that of a job nothing happened to."""
    faults, slurm, jobs = map(importlib.import_module, ("tests.launch.test_slurm_faults", "tests.slurm", "tests.slurm_job"))
    acts = {"requeue": faults.requeue, "preemption": faults.preempt, "power": faults.power_off(1 + seed % 2),
            "link": faults.cut_off(1 + seed % 2)}  # fmt: skip
    chance, quiet = draw(seed), workspace.root / "slurm.adapter"
    with slurm.make() as cluster:
        if not quiet.exists():
            job = jobs.Job(cluster, workspace.case / "quiet").submit()
            assert job.end()["JobState"] == "COMPLETED", job.text[-800:]
            quiet.write_text(job.adapter())
        job = jobs.Job(cluster, workspace.case / "r").submit()
        after = chance.randint(1, 9)
        job.until(lambda: len(job.steps()) >= after, f"{after} steps")
        acts[fault](cluster, job)
        assert job.end()["JobState"] == "COMPLETED", job.text[-800:]
        assert job.adapter() == quiet.read_text(), "other bytes than those of a quiet job"
        steps = job.steps()
        again = len(steps) - len(set(steps))
        assert fault not in ("requeue", "preemption") or again == 0, f"{again} steps done again though the job was warned"
        return Done(figures={"steps done again": [again]})


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    words: str
    goal: int
    case: Callable[..., Done]
    seconds: int = 60
    """Limit of one case."""
    more: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "mutated": Fault("mutated recipes, accelerate, DeepSpeed, cluster and model.json files", 500, mutated),
    "malformed": Fault("malformed data files", 200, malformed),
    "hostile": Fault("hostile names, paths, templates, host names, HTML", 200, hostile),
    "damage": Fault("bit flips, cuts, swaps, deletions: files of checkpoint, adapter, merged model, staged tree", 1000, damage),
    "kills": Fault("SIGKILL of a rank, all ranks, launcher or command at random moments", 200, kill_training, 1800),
    "saving": Fault("the same during a background save", 50, kill_training, 1800, {"saving": True}),
    **{name: Fault(f"SIGKILL in {name}", 50, kill_stage, 900, {"stage": name}) for name in STAGES},
    "power": Fault("power cut (XFS on a loop device, shut down) after a save was announced", 100, power_cut, 900),
    "disk": Fault("full disk, read-only, quota, EIO at random moments", 50, bad_disk, 900),
    "secrets": Fault("planted secrets in all that a run leaves, caches and process lists too", 10, planted, 900),
    **{f"slurm-{name}": Fault(f"{words} on the test Slurm", 20, on_slurm, 1800, {"fault": name}) for name, words in (
        ("requeue", "requeue"), ("preemption", "preemption"), ("power", "power loss of a node"), ("link", "cut link"))},
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
        found: dict[str, Any]
        try:
            signal.alarm(fault.seconds)
            found = dataclasses.asdict(fault.case(seed, workspace, **fault.more))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = {"failed": f"{type(error).__name__}: {error}"[:1500], "at": f"{Path(last.filename).name}:{last.lineno}"}
        answer.write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(child, 0)
    found = json.loads(answer.read_text()) if answer.exists() else {"failed": f"no end within {fault.seconds} s"}
    return {"fault": name, "seed": seed, "seconds": round(time.monotonic() - began, 1), **found}


def results(tree: str) -> list[dict[str, Any]]:
    """What was found on a tree; the last word of each seed counts."""
    try:
        lines = RESULTS.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = {(line["fault"], line["seed"]): line for line in map(json.loads, lines) if line["tree"] == tree}
    return list(found.values())


def counted(rows: list[dict[str, Any]]) -> int:
    return sum(row.get("count", 1) for row in rows)


def page(tree: str) -> str:
    """The table."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False
    ).stdout
    found, lines = results(tree), []
    for name, fault in FAULTS.items():
        rows = [row for row in found if row["fault"] == name]
        bad = [row for row in rows if "failed" in row]
        figures: dict[str, list[float]] = {}
        for key, values in itertools.chain.from_iterable(row.get("figures", {}).items() for row in rows):
            figures.setdefault(key, []).extend(values)
        shown = [f"{key}: median {statistics.median(values):.3g}, most {max(values):.3g}" for key, values in figures.items()
                if values and key not in ("refused", "files")]  # fmt: skip
        if refusals := figures.get("refused"):
            shown.append(f"{int(sum(refusals))} refused, {len(refusals) - int(sum(refusals))} taken")
        failed = ", ".join(f"seed {row['seed']}" for row in bad) or "none"
        total = counted(rows)
        lines.append(
            f"| {fault.words} (`{name}`) | {fault.goal} | {total - len(bad)} of {total} | {failed} | {'; '.join(shown)} |"
        )
    return "\n".join([
        "# Faults, counted", "",
        f"`make campaign` on the product's tree `{tree}` (near commit `{commit.strip()}`), {platform.machine()}, "
        f"{os.cpu_count()} cores, beside other work. Recipe `tiny-oasst2`, two ranks, FSDP2 on gloo. A case is known by "
        "its seed: `python -m tools.campaign --only FAULT --seed N`.", "",
        "| fault | goal | held | failed | figures |", "|---|---|---|---|---|", *lines, "",
    ])  # fmt: skip


def wanted(arguments: argparse.Namespace, tree: str) -> Iterator[tuple[str, int]]:
    """The cases that are missing, a few of each fault in turn."""
    names = arguments.only or list(FAULTS)
    while True:
        before = results(tree)
        todo = []
        for name in names:
            rows = [row for row in before if row["fault"] == name]
            if counted(rows) < (arguments.count or FAULTS[name].goal):
                known = {row["seed"] for row in rows}
                todo.append((name, next(seed for seed in itertools.count() if seed not in known)))
        if not todo:
            return
        yield from todo


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--count", type=int, help="faults of each kind, in place of the goal")
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--seed", type=int, help="this case alone, its folder left in build/campaign")
    parser.add_argument("--page", action="store_true", help="write docs/results/faults.md from what is known, and end")
    arguments = parser.parse_args()
    tree, deadline = tree_digest(), time.monotonic() + arguments.hours * 3600
    workspace = Workspace(BUILD / tree)
    workspace.root.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        sys.stderr.write(f"tree {tree}; importing the stack\n")
        warm()
    cases = [(name, arguments.seed) for name in arguments.only or []] if arguments.seed is not None else wanted(arguments, tree)
    for name, seed in () if arguments.page else cases:
        if time.monotonic() > deadline:
            break
        found = one(name, seed, workspace)
        with RESULTS.open("a") as out:
            out.write(json.dumps({"tree": tree, **found}) + "\n")
        sys.stderr.write(
            f"{name} seed {seed}: {'FAILED ' + found['failed'] if 'failed' in found else 'held'}, {found['seconds']} s\n"
        )
    text = page(tree)
    sys.stdout.write(text)
    target = REPO / "docs/results/faults.md"
    notes = re.search(r"\|\n\n(.*)", target.read_text(), re.DOTALL)  # below the table: written by hand
    target.write_text(text + (f"\n{notes[1]}" if notes else ""))
    return int(any("failed" in row for row in results(tree)))


if __name__ == "__main__":
    sys.exit(main())
