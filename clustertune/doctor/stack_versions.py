"""The installed packages: releases with known faults, what differs from the pins, what the recipe needs and is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Seen, register, rule
from clustertune.config import accelerate_file as acc
from clustertune.config import kernels
from clustertune.config.parameters import weight_bytes
from clustertune.doctor import stack_faults
from clustertune.doctor.recipe_context import Context, plain
from clustertune.doctor.stack_faults import FAULTS, NCCL, Fault, holds

GIB = 1 << 30
_ZEROED = ">=5.7"
"""Releases of the fault every-rank-loads-all that fill what they allocate (torch.zeros_like; empty_like before: read in 5.5.4,
5.7.0), so that it is resident for certain."""


@rule("stack-unseen", RECIPE)
def unseen(context: Context) -> Iterator[Seen]:
    """Looks at: whether the ranks' packages can be seen from here

    Why: the versions of the image decide, and those of this machine may be others
    See: https://apptainer.org/docs/user/latest/
    """
    if not context.versions:
        text = f"the versions are those of {context.versions_of}"
        yield Seen(UNKNOWN, text, where=context.resolved.name)


def _known_fault(fault: Fault) -> Callable[[Context], Iterator[Seen]]:
    """The function that looks whether the recipe meets one fault of the table."""
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if fault.package == NCCL else (fault.package,)

    def look(context: Context) -> Iterator[Seen]:
        for name in names:
            version = context.version(name)
            if version is None or not holds(version, fault.ranges) or not fault.when(context):
                continue
            judged: tuple[str, str] | None = (fault.status, "")
            if fault.rule.id == "every-rank-loads-all":
                judged = _ranks_load(context, version)
            if judged is not None:
                yield Seen(judged[0], f"{name} {version}: {fault.what}{judged[1]}", where=context.versions_of)

    return look


for _fault in FAULTS:
    register(_fault.rule, _known_fault(_fault), RECIPE)


def _ranks_load(context: Context, version: str) -> tuple[str, str] | None:
    """Status and arithmetic of ranks that each make the whole model in RAM; None where a node has room for it."""
    weights, ranks = weight_bytes(context.resolved.architecture), context.resolved.recipe.slurm.gpus_per_node
    room = context.cluster.compute.memory_gb * GIB
    if weights is None:
        return WARN, ""
    need = weights * ranks
    if need <= room:
        return None
    status = FAIL if holds(version, _ZEROED) else WARN
    return status, f"; {ranks} ranks x {weights / 1e9:,.0f} GB are {need / 1e9:,.0f} GB, a node has {room / 1e9:,.0f} GB"


@rule("versions-differ", RECIPE)
def pinned(context: Context) -> Iterator[Seen]:
    """Looks at: installed versions against containers/versions.env

    Why: what was tested together is not what runs: keys, defaults and files of another release
    Fix: make setup, or build the image anew; or move the pins with the reason beside them
    See: https://github.com/huggingface/trl/pull/4983
    """
    # The reference image has an older stack, whole: it is held against its own pins.
    differ = min((_differences(context, pins) for pins in (context.pins, context.reference_pins) if pins), key=len, default=[])
    if differ:
        yield Seen(WARN, ", ".join(differ), where=context.versions_of)


def _differences(context: Context, pins: Mapping[str, str]) -> list[str]:
    seen = {name: context.version(name) for name in pins}
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    others = {name: version for name, version in seen.items() if version and version.partition("+")[0] != pins[name]}
    return [f"{name} {version} (pinned {pins[name]})" for name, version in sorted(others.items())]


@rule("package-missing", RECIPE)
def missing(context: Context) -> Iterator[Seen]:
    """Looks at: packages that the recipe asks for

    Why: the ranks end at their start, after the queue
    See: https://huggingface.co/docs/transformers/installation
    """
    if not context.versions:
        return
    for key, value, packages in _wanted(context):
        if not any(context.version(name) for name in packages):
            named = " or ".join(packages)
            fix = f"install {packages[0]} in {context.versions_of}, or leave {key} out"
            yield Seen(FAIL, f"{key}={value} needs {named}, which is not installed", fix)


def _wanted(context: Context) -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Key, value and the packages of which one must be there."""
    args = context.resolved.train_args
    # Without GPUs the run leaves these kernels out: clustertune/training/build.py.
    yield from kernels.needed(args, gpus=bool(context.cluster.compute.gpus))
    if context.resolved.distribution.is_deepspeed:
        yield f"accelerate.{acc.TYPE}", "DEEPSPEED", ("deepspeed",)
    packages = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel", "fbgemm_fp8": "fbgemm-gpu"}
    method = stack_faults.quantized_by(context)
    if method in packages:
        yield "train.model_init_kwargs.quantization_config", method, (plain(packages[str(method)]),)
    optim = str(args.get("optim", ""))
    if "bnb" in optim or "8bit" in optim or "paged" in optim:
        yield "train.optim", optim, ("bitsandbytes",)
    elif "torchao" in optim or optim.endswith("4bit"):
        yield "train.optim", optim, ("torchao",)
    for tracker in _trackers(args.get("report_to")):
        if tracker in ("wandb", "tensorboard", "mlflow", "trackio"):
            yield "train.report_to", tracker, (tracker,)


def _trackers(given: object) -> list[str]:
    return [given] if isinstance(given, str) else [str(item) for item in given] if isinstance(given, list) else []
