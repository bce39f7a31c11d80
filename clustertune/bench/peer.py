"""Another program on the same machines, model and conversations: ``--against trl``, ``trl-defaults`` or ``SCRIPT.py``.

A peer is a Python script that ``accelerate launch`` starts with the recipe's own file, once per rank, with two arguments:

``SETTINGS.json``
    ``model`` (folder), ``data`` (JSON Lines with ``messages``), ``max_length``, ``per_device_train_batch_size``,
    ``gradient_accumulation_steps``, ``lora`` (PEFT's keys, or null), ``chat_template`` (or null), ``bf16``, ``seed``, ``sft``
    (every key of ``SFTConfig`` that the recipe gives) and ``schedule``: ``warmup``, ``steps`` and ``profiled`` optimizer steps.
``FOLDER``
    Each rank R leaves ``bench-rank-R.json`` there: ``{"steps": [{"seconds", "tokens", "computed", "labelled"}, ...],
    "peak": {"allocated", "reserved", "rss"}}``. ``steps`` are the timed ones; ``tokens`` are this rank's, padding left out,
    ``computed`` with it; bytes, those of a GPU left out where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clustertune import secrets
from clustertune.chain import visible_gpus
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import rendezvous
from clustertune.launch.environment import one_gpu
from clustertune.launch.node import accelerate_command
from clustertune.launch.plan import AttemptPlan
from clustertune.process import die_with_parent, end
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.training.bench_schedule import GONE, THEIRS, BenchSchedule

TRL, DEFAULTS = "trl", "trl-defaults"
NAMES = {
    TRL: "TRL's SFTTrainer with the recipe's own arguments and distribution file",
    DEFAULTS: "TRL's SFTTrainer with its defaults",
}
"""The peers that come with the project, each with a description."""
SETTINGS, ORDER, LOG = "settings.json", "order.json", "log.txt"
MOST_SECONDS = 3600.0
"""A peer that takes longer than this is ended."""
TAIL = 2000
"""Bytes of its log that are searched for what ended it."""


def start_of(name: str) -> tuple[str, ...]:
    """What accelerate launch is to start for a peer of ``--against``. Raises UserError."""
    if name in NAMES:
        return ("--module", "clustertune.bench.baseline")
    path = Path(name).expanduser()
    if path.suffix != ".py" or not path.is_file():
        fix = "trl, trl-defaults, or the path of a Python script (docs/bench.md says what it gets and gives)"
        raise UserError(Problem(f"{name!r} is not a script", file="command line", key="--against", fix=fix))
    return (str(path.absolute()),)


def peers_of(given: Iterable[str]) -> tuple[str, ...]:
    """The peers of the command line, each once: the option may come several times, and a value may name several with commas."""
    return tuple(dict.fromkeys(name.strip() for text in given for name in text.split(",") if name.strip()))


def take_turns(arguments: Sequence[str], *, local: bool) -> bool:
    """Whether steps alternate by default: on this machine's CPUs, with peers that know of turns."""
    return local and bool(arguments) and set(arguments) <= set(NAMES) and not visible_gpus()


def title(name: str) -> str:
    """A peer's description."""
    return NAMES.get(name) or Path(name).name


def settings(resolved: Resolved, run: RunDir, model: str, schedule: BenchSchedule, name: str) -> dict[str, Any]:
    """What a peer gets: the same model, conversations, lengths and batch; all but ``trl-defaults`` every other argument too."""
    args = resolved.train_args
    return {
        "sft": None if name == DEFAULTS else dict(args),
        "model": model,
        "data": str((run.data / "train.jsonl").absolute()),
        "max_length": args.get("max_length"),
        "per_device_train_batch_size": args.get("per_device_train_batch_size"),
        "gradient_accumulation_steps": args.get("gradient_accumulation_steps"),
        "lora": resolved.recipe.lora,
        "chat_template": resolved.chat_template,
        "bf16": resolved.distribution.mixed_precision == "bf16",
        "seed": int(args["seed"]),
        "schedule": asdict(schedule),
    }


def prepare(folder: Path, run: RunDir, plan: AttemptPlan, start: Sequence[str], recorded: Mapping[str, Any]) -> Path:
    """Write what the nodes of a round read. Returns the file that each of them is given."""
    folder.mkdir(parents=True)
    plan.write(folder)
    (folder / SETTINGS).write_text(json.dumps(recorded, indent=1) + "\n")
    order = folder / ORDER
    order.write_text(json.dumps({"run": str(run.path.absolute()), "start": list(start)}) + "\n")
    return order


def node_command(order: Path) -> list[str]:
    """What every node runs."""
    return [sys.executable, "-m", "clustertune.bench.peer", str(order.absolute())]


def run_node(order: Path, node: int) -> int:
    """Run this node's ranks to their end. Returns the launcher's exit code. Raises UserError."""
    folder, record = order.parent.absolute(), json.loads(order.read_text())
    run, plan = RunDir(Path(record["run"])), AttemptPlan.read(folder)
    address, port = rendezvous.meet(folder, plan, node)
    arguments = [str(folder / SETTINGS), str(folder)]
    turns = json.loads((folder / SETTINGS).read_bytes())["schedule"].get("turns")
    command = accelerate_command(run, run.resolved(), arguments, plan, node, address, port, start=record["start"])
    # The model is a folder; the user's tokens are none of another program's business.
    known = {key: value for key, value in os.environ.items() if key not in secrets.SECRET}
    with (folder / f"node-{node}.{LOG}").open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={"HF_HUB_OFFLINE": "1", **known, **plan.environment, **one_gpu(plan.world_size, known)},
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - no thread is running here
        )  # fmt: skip
        try:
            return await_round(child, MOST_SECONDS)
        finally:
            if turns is not None:  # however it ended: the other program waits no more
                Path(turns, str(THEIRS)).write_text(str(GONE))


def start_round(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command that puts a round on its nodes."""
    return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True)


def await_round(child: subprocess.Popen[bytes], seconds: float = MOST_SECONDS + 60) -> int:
    """Wait for a round's end, for so many seconds, then end it. Returns its exit code."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return int(ExitCode.FAILED)
    finally:
        end(child, 15)


def why(folder: Path) -> str:
    """What ended a round, by its logs: the last line that names an error, or the last line."""
    for log in sorted(folder.glob(f"node-*.{LOG}")):
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - 64 * TAIL))
            lines = source.read().decode(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "Error: " in line or line.strip().endswith("Error")]
        own = [line for line in errors if "ChildFailedError" not in line]
        if own or lines:
            return (own or lines)[-1][:300]
    return "it left no message"


def main() -> int:
    """The program of one node: which one, Slurm says; without it the only one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("order", type=Path)
    node = os.environ.get("SLURM_NODEID", "0")
    try:
        return run_node(parser.parse_args().order, int(node) if node.isdigit() else 0)
    except UserError as error:
        sys.stderr.write(f"error: {error.problems[0]}\n")
        return int(error.code)


if __name__ == "__main__":
    sys.exit(main())
