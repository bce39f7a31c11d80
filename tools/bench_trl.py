"""``clustertune bench`` against plain TRL: the same recipe, model, conversations, arguments and distribution file.

``python -m tools.bench_trl RECIPE [section.key=value ...] [--steps N] [--warmup N] [--rounds N] [--defaults] [BENCH OPTIONS]``.
Whole trainings of both programs alternate, and the next round begins with the other one. The ratio is that of step times,
clustertune over TRL, over pairs of steps of the same number: its median with the 95 % interval. With ``--defaults`` TRL has the
recipe's batch, lengths and seed alone, and its own defaults otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from clustertune import secrets
from clustertune.chain import Chain
from clustertune.console import say
from clustertune.process import end
from clustertune.rundir import RunDir

MOST_SECONDS = 3600.0
"""A training of TRL's that takes longer is ended."""
NOTHING_ELSE = {"eval_strategy": "no", "eval_on_start": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


class Training(NamedTuple):
    """What was measured of one training."""

    steps: list[float]
    """Seconds of each timed step, from the line in its log before to its own."""
    tokens: float
    """Of conversations in all timed steps."""
    peak: float
    """GiB of the rank with the most memory: on its GPU, or its resident set without one."""


class Failed(Exception):
    """One of the programs ended without figures."""


def compare(arguments: argparse.Namespace, bench: Sequence[str], work: Path) -> dict[str, Any]:
    """Run all rounds. Raises Failed."""
    ours: list[Training] = []
    theirs: list[Training] = []
    bodies: list[dict[str, Any]] = []
    words = [arguments.recipe, "--steps", str(arguments.steps), "--warmup", str(arguments.warmup), *bench]
    folder = work / "none"
    for number in range(arguments.rounds):
        ours_first = number % 2 == 0
        if not ours_first:  # on the model and the conversations of the round before
            theirs.append(plain_trl(folder, arguments, work / f"trl-{number}"))
        shutil.rmtree(folder, ignore_errors=True)
        folder = work / f"clustertune-{number}"
        bodies.append(clustertune(words, folder))
        ours.append(read_body(bodies[-1]))
        if ours_first:
            theirs.append(plain_trl(folder, arguments, work / f"trl-{number}"))
        say(f"round {number + 1} of {arguments.rounds}: {median(ours[-1]):.3g} s a step, TRL {median(theirs[-1]):.3g} s")
    shutil.rmtree(folder, ignore_errors=True)
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "recipe": bodies[0]["recipe"],
        "against": "TRL with its defaults" if arguments.defaults else "TRL with the recipe's arguments",
        "rounds": arguments.rounds,
        "ratio": interval([own / other for one, two in pairs for own, other in zip(one.steps, two.steps, strict=True)]),
        "round_ratios": [median(one) / median(other) for one, other in pairs],
        "peak_ratio": max(one.peak for one in ours) / max(one.peak for one in theirs),
        "same_tokens": [one.tokens for one in ours] == [one.tokens for one in theirs],
        "trl_step_s": statistics.median(seconds for one in theirs for seconds in one.steps),
        "bench": bodies[0],
    }


def clustertune(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """One benchmark; its document."""
    command = [sys.executable, "-m", "clustertune", "bench", *words, "--run-dir", str(folder), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Failed(f"clustertune bench ended with {done.returncode}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def plain_trl(folder: Path, arguments: argparse.Namespace, out: Path) -> Training:
    """One training by TRL's own trainer on what a benchmark's run folder holds, as ``accelerate launch`` starts it."""
    run = RunDir(folder)
    resolved = run.resolved()
    settings = {
        "sft": None if arguments.defaults else dict(resolved.train_args),
        "batch": {key: resolved.train_args[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps")},
        "max_length": resolved.train_args["max_length"],
        "seed": resolved.train_args["seed"],
        "bf16": resolved.distribution.mixed_precision == "bf16",
        "lora": resolved.lora,
        "chat_template": resolved.chat_template,
        "model": str(Chain(run, resolved).base_folder().absolute()),
        "data": str((run.data / "train.jsonl").absolute()),
        "max_steps": arguments.warmup + arguments.steps,
    }
    out.mkdir(parents=True)
    (out / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
    program = [str(out / "settings.json"), str(out)]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run.accelerate_file.absolute()),
        "--num_processes", str(resolved.world_size), "--num_machines", "1", "--main_process_port", "0",
        "--log_dir", os.devnull, str(Path(__file__).absolute()), *program,
    ]  # fmt: skip
    # The model is a folder; the user's tokens are none of another program's business.
    known = {key: value for key, value in os.environ.items() if key not in secrets.SECRET}
    with (out / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={"HF_HUB_OFFLINE": "1", **known},
        )  # fmt: skip
        try:
            code = child.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if child.poll() is None:
                end(child, 15)
    if code:
        lines = [line.strip() for line in (out / "log.txt").read_text(errors="replace").splitlines() if "Error: " in line]
        own = [line for line in lines if "ChildFailedError" not in line]
        raise Failed(f"TRL ended with {code}: {(own or lines or ['it left no message'])[-1][:300]} ({out / 'log.txt'})")
    return read_ranks(out, resolved.world_size, arguments.warmup)


# --- figures ------------------------------------------------------------------------------------------------------------


def read_body(body: Mapping[str, Any]) -> Training:
    """Of the document of ``clustertune bench``."""
    return Training(body["steps_s"], body["tokens"], body["peak"]["allocated_gib"] or body["peak"]["rss_gib"])


def read_ranks(folder: Path, ranks: int, warmup: int) -> Training:
    """What the ranks of TRL left."""
    documents = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    lines = documents[0]["lines"][warmup - 1 :]
    times = [after[0] - before[0] for before, after in pairwise(lines)]
    return Training(times, lines[-1][1] - lines[0][1], max(one["peak"] for one in documents) / 2**30)


def median(training: Training) -> float:
    """Seconds of the median step."""
    return statistics.median(training.steps)


def interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """The median and its 95 % interval, by the order statistics that the binomial distribution names (no assumption on the
    distribution of the values; Conover, Practical Nonparametric Statistics, 3.2). Below six values there is no interval.
    """
    count, ordered, below, rank = len(values), sorted(values), 0.0, 0
    for number in range(count):  # the largest rank with P(Binomial(n, 1/2) < rank) <= 2.5 %
        below += math.comb(count, number) / 2**count
        if below > 0.025:
            break
        rank = number + 1
    low, high = (ordered[rank - 1], ordered[count - rank]) if rank else (None, None)
    return {"median": statistics.median(values), "low": low, "high": high, "n": count}


# --- a rank of TRL ------------------------------------------------------------------------------------------------------


def sft_arguments(settings: Mapping[str, Any], *, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of ``SFTConfig`` on this device."""
    if settings["sft"] is not None:
        from trl import SFTConfig

        from clustertune.training import build

        fitted = build.fit_to_device(settings["sft"], cuda=cuda)[0]
        return {k: v for k, v in fitted.items() if k in SFTConfig.__dataclass_fields__ and k != "pad_token"} | NOTHING_ELSE
    requested = {**settings["batch"], "max_length": settings["max_length"], "seed": settings["seed"], **NOTHING_ELSE}
    if not cuda:
        requested |= {"use_cpu": True, "bf16": settings["bf16"]}
    return requested


def train(settings: Path, out: Path) -> None:
    """Train as many steps as the settings say, in one rank, which leaves its figures in ``out``."""
    import torch

    body = json.loads(settings.read_text())
    cuda = torch.cuda.is_available()
    if body["sft"] is not None and not cuda and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from clustertune.training import build  # accelerate follows the recipe's file on CPUs too, as bench's ranks do

        build.use_cpu()
        build.install_cpu_fsdp()

    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.training import packing
    from clustertune.training.figures import peak_memory_bytes

    class Times(TrainerCallback):  # type: ignore[misc]
        """When each step's line was logged, and the tokens until then."""

        lines: list[tuple[float, float]] = []  # noqa: RUF012 - one object of it is made

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **more: Any) -> None:  # noqa: ARG002
            if "loss" in logs:
                self.lines.append((time.time(), logs["num_tokens"]))

    tokenizer = None
    if body["sft"] is not None:
        packing.register()  # the recipe's attention may be this project's
        tokenizer = load_tokenizer(body["model"], None, body["chat_template"], body["sft"])
    elif body["chat_template"]:
        tokenizer = AutoTokenizer.from_pretrained(body["model"])
        tokenizer.chat_template = body["chat_template"]
    trainer = SFTTrainer(
        model=body["model"],
        args=SFTConfig(str(out), **sft_arguments(body, cuda=cuda) | {"max_steps": body["max_steps"], "logging_steps": 1}),
        train_dataset=load_dataset("json", data_files=body["data"], split="train").select_columns(["messages"]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**body["lora"]) if body["lora"] else None,
    )
    times = Times()
    trainer.add_callback(times)
    trainer.train()
    document = {"lines": times.lines, "peak": peak_memory_bytes()}
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(document) + "\n")


# --- the command --------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for ``clustertune bench``."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_trl", description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="a recipe folder, or its name below recipes/")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each training; default 12")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps; default 3")
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each program; default 2")
    parser.add_argument("--defaults", action="store_true", help="TRL with its defaults, not the recipe's arguments")
    parser.add_argument("--work", type=Path, help="new folder of the runs, for the logs; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where a program failed."""
    parsed, bench = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as temporary:
        try:
            body = compare(parsed, bench, (parsed.work or Path(temporary)).absolute())
        except Failed as reason:
            say(f"error: {reason}")
            return 1
    ratio = body["ratio"]
    around = f"95 % {ratio['low']:.3f} to {ratio['high']:.3f}" if ratio["low"] is not None else "too few pairs for an interval"
    say(f"step time, clustertune over {body['against']}: {ratio['median']:.3f} ({around}, {ratio['n']} pairs)")
    same = "yes" if body["same_tokens"] else "no"
    say(f"peak memory, clustertune over TRL: {body['peak_ratio']:.3f}; the same tokens: {same}")
    if parsed.json:
        sys.stdout.write(json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if os.environ.get("RANK") is not None:
        train(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(main())
