"""``plan --simulate``: what can be simulated, the child process that does it, and what it counted beside the plan."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.plan.machine import PlanMachine
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.resolve.resolved import Resolved
from clustertune.simulate import guard

CAPABILITY = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
              "blackwell-gddr": (12, 0)}  # fmt: skip
"""By the generation of :class:`PlanMachine`."""
FEW, EACH_NODE = ("first", "last"), "each-node"


def refusals(resolved: Resolved) -> Iterator[Problem]:
    """What fake tensors cannot run, a sentence each."""
    used, file = resolved.distribution, f"{resolved.name}/{resolved.accelerate_file}"
    if used.kind == "Megatron" or used.is_deepspeed:
        engine = "Megatron-Core" if used.kind == "Megatron" else "DeepSpeed"
        yield Problem(f"{engine} allocates behind torch's dispatcher and cannot be simulated", file=file, fix=_INSTEAD)
    elif used.kind not in ("FSDP2", "NO") and used.world_size > 1:
        yield Problem(f"{used.kind} reduces in C++ code that needs data, and cannot be simulated", file=file, fix=_INSTEAD)
    if resolved.is_grpo:
        text = "trainer: grpo: answers cannot be generated without data"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", fix=_INSTEAD)
    if used.compiled:
        fix = f"simulate it uncompiled: accelerate.{acc.COMPILER}=null"
        yield Problem("code that Inductor compiles cannot be simulated", file=file, fix=fix)
    config = quantization.of(resolved.train_args)
    if config is not None:
        key = "train.model_init_kwargs.quantization_config"
        text = f"the kernels of {quantization.method(config)} need data and cannot be simulated"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", key=key, fix="plan it without --simulate")
    if resolved.train_args["use_liger_kernel"]:
        text = "Liger's Triton kernels cannot be simulated"
        yield Problem(text, file=f"{resolved.name}/recipe.yaml", key="train.use_liger_kernel", fix="simulate it with false")


_INSTEAD = "plan it without --simulate"


def with_depth(resolved: Resolved, depth: int) -> Resolved:
    """The same recipe with so many layers of its own width. Lists with an entry a layer are cut as well."""
    layers = int(resolved.architecture["num_hidden_layers"])
    if not 1 <= depth <= layers:
        text = f"{depth}: {resolved.name} has {layers} layers, so the depth is a number from 1 to {layers}"
        raise UserError(text, file="command line", key="--depth", fix="leave it out for all layers")
    body = {
        key: value[:depth] if isinstance(value, list) and len(value) == layers else value
        for key, value in resolved.architecture.items()
    }
    return replace(resolved, architecture={**body, "num_hidden_layers": depth})


def read_ranks(text: str | None, resolved: Resolved) -> list[int]:
    """``0,8,15``, or any of ``first``, ``last`` and ``each-node``; the first rank where nothing is said."""
    world, on_node = resolved.world_size, resolved.distribution.ranks_per_node
    found: list[int] = []
    for part in (text or "first").split(","):
        word = part.strip()
        if word == EACH_NODE:
            found += range(0, world, on_node)
        elif word in FEW:
            found.append(0 if word == "first" else world - 1)
        elif word.isdecimal() and int(word) < world:
            found.append(int(word))
        else:
            raise UserError(
                f"{word!r} is no rank from 0 to {world - 1}", file="command line", key="--ranks",
                fix=f"write numbers, {', '.join(FEW)} or {EACH_NODE}, joined by commas",
            )  # fmt: skip
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Simulation:
    """What was counted, by rank."""

    resolved: Resolved
    """As it was simulated: with the depth that was asked for."""
    ranks: dict[int, dict[str, Any]]
    note: str
    """What this machine could not do."""

    @property
    def first(self) -> dict[str, Any]:
        """The rank that is compared with the plan."""
        return next(iter(self.ranks.values()))


def simulate(
    resolved: Resolved, machine: PlanMachine, *, ranks: Sequence[int] = (0,), tell: Callable[[dict[str, Any]], None]
) -> Simulation:
    """Simulate ranks of a recipe in a child process, one after the other. ``tell`` gets the child's lines of progress.

    Raises UserError: what cannot be simulated, and what failed, with the line of the project that is nearest to it.
    """
    raise_if(refusals(resolved))
    library, why = guard.build()
    with tempfile.TemporaryDirectory(prefix="clustertune-simulate-") as folder:
        found = _run(Path(folder), specification(resolved, machine, ranks, library), tell)
    note = "" if library is not None else f"{why}: tensors are called cpu, and a wrong device is not found"
    return Simulation(resolved, found, note)


def specification(resolved: Resolved, machine: PlanMachine, ranks: Sequence[int], library: Path | None) -> dict[str, Any]:
    """What the child process reads. ``library``: the guard's; None: tensors are called cpu."""
    on_node = min(resolved.world_size, resolved.distribution.ranks_per_node)
    return {
        "resolved": resolved.as_dict(),
        "library": None if library is None else str(library),
        "world": resolved.world_size,
        "ranks": [{"rank": rank, "local": rank % on_node, "on_node": on_node} for rank in ranks],
        "gpu": {
            "name": machine.gpu,
            "memory": machine.usable_bytes,
            "capability": CAPABILITY[machine.generation],
            "flops_per_s": machine.peak_flops,
            "bytes_per_s": machine.hbm_bytes_per_s,
        },
    }


def progress(body: dict[str, Any]) -> str:
    """One line of progress for a person."""
    if "layer" in body:
        return f"rank {body['rank']}: step {body['step']}, {body['moment']}: layer {body['layer']} of {body['layers']}"
    return f"rank {body['rank']}: {body['progress']}"


def _run(folder: Path, spec: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[int, dict[str, Any]]:
    file, log = folder / "spec.json", folder / "log"
    file.write_text(json.dumps(spec))
    found: dict[int, dict[str, Any]] = {}
    problems: list[Problem] = []
    command = [sys.executable, "-m", "clustertune.simulate.child", str(file)]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                body = json.loads(line)
                if "found" in body:
                    found[int(body["rank"])] = body["found"]
                elif "resumed" in body:
                    found[int(body["rank"])]["resume"] = body["resumed"]
                elif "error" in body or "signal" in body:
                    problems.append(_failed(body))
                else:
                    tell(body)
        except BaseException:
            child.kill()
            raise
    if not problems and len(found) < len(spec["ranks"]):
        last = [line for line in log.read_text().splitlines() if line.strip()]
        problems.append(Problem(f"the simulation ended: {last[-1] if last else child.returncode}", file="--simulate"))
    raise_if(problems, ExitCode.FAILED)
    return found


def _failed(body: dict[str, Any]) -> Problem:
    rank = body["rank"]
    if "signal" in body:
        return Problem(f"rank {rank} was ended by signal {body['signal']}", file="--simulate", fix="is there memory for it?")
    return Problem(f"rank {rank} fails ({body['during']}): {body['error']}", file=body["where"] or "--simulate")
