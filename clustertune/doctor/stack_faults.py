"""Releases with known faults: which, when they hurt, what is seen, and where people met it.

Ranges marked "read" were read in the releases themselves (the wheels), the others are the threads' own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from clustertune.check.rule import FAIL, WARN, Rule
from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.doctor.recipe_context import Context

COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt, ">=": operator.ge}


def holds(version: str, ranges: str) -> bool:
    """Whether a version lies in ``>=1.2,<1.4``; False for what is no version.

    Local parts (``+cpu``, ``+cu130``) do not count. A release candidate of 1.4 lies below 1.4, which ``SpecifierSet`` denies
    (PEP 440): it has the faults of the releases before it.
    """
    try:
        found = Version(Version(version).public)
    except InvalidVersion:
        return False
    parts = [re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*", part) for part in ranges.split(",")]
    return all(part is not None and COMPARE[part[1]](found, Version(part[2])) for part in parts)


@dataclass(frozen=True)
class Fault:
    """One fault of some releases."""

    package: str
    ranges: str
    """``>=1.2,<1.4``: all parts hold."""
    when: Callable[[Context], bool]
    """Whether this recipe meets it."""
    status: str
    what: str
    """What is seen."""
    rule: Rule


def _scores_ifeval(context: Context) -> bool:
    return "ifeval" in context.resolved.recipe.eval.tasks


def lora(context: Context) -> bool:
    return context.resolved.recipe.lora is not None


def fsdp2(context: Context) -> bool:
    return context.resolved.distribution.kind == "FSDP2"


def fsdp1(context: Context) -> bool:
    return context.resolved.distribution.kind == "FSDP1"


def _mixed(context: Context) -> bool:
    return context.resolved.distribution.mixed_precision != "no"


def _fsdp_recomputes(context: Context) -> bool:
    return context.resolved.distribution.recompute.by == "fsdp"


def _loads_on_rank_0(context: Context) -> bool:
    return context.is_real and context.resolved.distribution.efficient_loading


def _packs_without_flash(context: Context) -> bool:
    args = context.resolved.train_args
    named = str((args.get("model_init_kwargs") or {}).get("attn_implementation", "sdpa"))
    return bool(args.get("packing")) and "flash" not in named


def _accumulates(context: Context) -> bool:
    return int(context.resolved.train_args.get("gradient_accumulation_steps") or 1) > 1


def _gpus(context: Context) -> bool:
    return context.cluster.compute.gpus > 0 and context.resolved.world_size > 1


def _arm(context: Context) -> bool:
    return _gpus(context) and context.arch == "aarch64"


def _full_bf16(context: Context) -> bool:
    init = context.resolved.train_args.get("model_init_kwargs") or {}
    return fsdp2(context) and not lora(context) and _mixed(context) and str(init.get("dtype", "")) in ("bfloat16", "float16")


def _always(_context: Context) -> bool:
    return True


NCCL = "nccl"
"""Stands for nvidia-nccl-cu12 and nvidia-nccl-cu13, whichever is there."""


def _fault(
    key: str, package: str, ranges: str, when: Callable[[Context], bool], status: str, what: str, why: str, fix: str, link: str
) -> Fault:
    return Fault(package, ranges, when, status, what, Rule(key, f"{package} {ranges}", why, link, fix))


FAULTS = (
    _fault(
        "adapter-of-rank-0-only", "accelerate", "<1.15",
        lambda c: fsdp2(c) and lora(c) and c.resolved.distribution.state_dict == "FULL_STATE_DICT", FAIL,
        "a FULL_STATE_DICT checkpoint of a LoRA under FSDP2 holds the slice of rank 0 only",
        "a resumed run goes on with all other ranks' part of the adapter at its initial values, without a message",
        f"accelerate 1.15 or later, or {acc.key_of('state_dict_type')}: SHARDED_STATE_DICT",
        "https://github.com/huggingface/accelerate/pull/4206",
    ),
    _fault(
        "frozen-base-in-float32", "accelerate", "<1.13", lambda c: fsdp2(c) and lora(c) and _mixed(c), FAIL,
        "FSDP2 casts the frozen base to float32 too: twice the memory of bfloat16 weights",  # read: 1.12.0
        "a LoRA run that fits under FSDP1 is out of memory under FSDP2",
        "accelerate 1.13 or later",
        "https://github.com/huggingface/accelerate/pull/3848",
    ),
    _fault(
        "no-float32-master", "accelerate", ">=1.13,<1.14", _full_bf16, FAIL,
        "FSDP2 keeps the trained weights in the type they were loaded in: the cast to float32 is lost",  # read: 1.13.0, 1.14.0
        "updates smaller than bfloat16's rounding are lost, and the loss stays higher, without a message",
        "accelerate 1.14 or later",
        "https://github.com/huggingface/accelerate/issues/3979",
    ),
    _fault(
        "empty-adapter", "peft", ">=0.21.0,<=0.21.2", lambda c: lora(c) and (fsdp1(c) or _fsdp_recomputes(c)), FAIL,
        "the saved adapter is empty under FSDP1 and under FSDP's activation checkpointing",
        "PEFT looks its keys up by names with _fsdp_wrapped_module or _checkpoint_wrapped_module in them and finds none: "
        "the adapter is lost, without a message",
        "the release that containers/versions.env pins",
        "https://github.com/huggingface/peft/issues/970",
    ),
    _fault(
        "every-rank-loads-all", "transformers", ">=5.0,<5.23", _loads_on_rank_0, WARN,
        f"{acc.key_of('cpu_ram_efficient_loading')} does not spare the other ranks: each makes the whole model in RAM",
        "the node runs out of RAM while loading, or stands still for long after it",
        "transformers 5.23 or 4.57, or RAM for ranks per node x model",
        "https://github.com/huggingface/transformers/issues/43749",
    ),
    _fault(
        "offline-asks-the-hub", "transformers", ">=4.57.2,<4.57.4", lambda c: c.is_real and c.offline, FAIL,
        "loading a tokenizer by its name asks the Hub even with HF_HUB_OFFLINE=1, and fails",  # read: 4.57.3 to 4.57.6
        "a job without network ends although everything is in the cache",
        "transformers 4.57.4 or later, or model.path",
        "https://github.com/huggingface/transformers/issues/44843",
    ),
    _fault(
        "packed-see-each-other", "transformers", "<4.53.1", _packs_without_flash, FAIL,
        "packed conversations see each other: only flash attention keeps them apart",  # read: 4.53.0 and 4.53.1
        "a higher loss: each conversation is learnt with strangers in front of it",
        "transformers 4.53.1 or later, attn_implementation: flash_attention_2, or train.packing=false",
        "https://github.com/huggingface/transformers/pull/39194",
    ),
    _fault(
        "accumulated-loss", "transformers", "<4.46", _accumulates, FAIL,
        "the loss of accumulated micro batches is averaged per micro batch, not per token",
        "another loss and other gradients than the same batch at once",
        "transformers 4.46 or later, or a batch without accumulation",
        "https://github.com/huggingface/transformers/pull/34191",
    ),
    _fault(
        "nccl-hang-arm", NCCL, "<2.29.3", _arm, WARN,
        "on ARM hosts (GH200, GB200) a collective may hang for ever: NCCL compiled with gcc before 10 loses proxy slots",
        "all ranks stand at full load without an error or a time-out",
        "NCCL 2.29.3 or later",
        "https://github.com/marin-community/marin/pull/8038",
    ),
    _fault(
        "nccl-hang-2-29-2", NCCL, ">=2.29.2,<2.29.3", _gpus, FAIL,
        "this release hangs",
        "a regression that NCCL 2.29.3 fixes; PyTorch left 2.29.2 out for it",
        "NCCL 2.29.3 or later",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    _fault(
        "nccl-2-28", NCCL, ">=2.28.3,<2.28.9", _gpus, WARN,
        "NVIDIA's resiliency extension says to avoid 2.28.3 to 2.28.8",
        "aborting and restarting communicators inside a process fails in these releases",
        "NCCL 2.28.9 or later",
        "https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md",
    ),
    _fault(
        "checkpoint-runs-code", "torch", "<2.6", _always, WARN,
        "torch.load with weights_only=True can run code from the file (CVE-2025-32434)",
        "a checkpoint or an adapter of somebody else's runs what it likes as you",
        "torch 2.6 or later",
        "https://github.com/pytorch/pytorch/security/advisories/GHSA-53q9-r3pm-6pq6",
    ),
    _fault(
        "punkt-format", "nltk", "<3.8.2", _scores_ifeval, WARN,
        "reads the pickled punkt, not punkt_tab",
        "the task ifeval asks for punkt_tab, which this release does not know: it fails after all answers are generated",
        "nltk 3.9 or later",
        "https://github.com/EleutherAI/lm-evaluation-harness/issues/2266",
    ),
)  # fmt: skip
"""The table. A line more is a rule more: the tests take each line and need a case for it."""


def quantized_by(context: Context) -> str | None:
    """The method that quantises the base; None: none."""
    config = quantization.of(context.resolved.train_args)
    return quantization.method(config) if config else None
