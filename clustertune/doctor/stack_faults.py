"""Releases with known faults: which, when they hurt, what is seen, and where people met it.

Ranges marked "read" were read in the releases themselves (the wheels), the others are the threads' own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping

from packaging.version import InvalidVersion, Version

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Check, Seen, described, rule_of
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.host.system import GIB
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.recipe.parameters import weight_bytes
from clustertune.recipe.tasks import PUNKT, needed
from clustertune.resolve import kernels

COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt, ">=": operator.ge}


def holds(version: str, ranges: str) -> bool:
    """Whether a version lies in ``>=1.2,<1.4``; False for what is not a version.

    Local parts (``+cpu``, ``+cu130``) do not count. A release candidate of 1.4 lies below 1.4, which ``SpecifierSet`` denies
    (PEP 440): it has the faults of the releases before it.
    """
    try:
        found = Version(Version(version).public)
    except InvalidVersion:
        return False
    parts = [re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*", part) for part in ranges.split(",")]
    return all(part is not None and COMPARE[part[1]](found, Version(part[2])) for part in parts)


def lora(context: RecipeContext) -> bool:
    return context.recipe.lora is not None


def fsdp2(context: RecipeContext) -> bool:
    return context.resolved.distribution.kind == "FSDP2"


def _mixed(context: RecipeContext) -> bool:
    return context.resolved.distribution.mixed_precision != "no"


def _gpus(context: RecipeContext) -> bool:
    return context.cluster.compute.gpus > 0 and context.resolved.world_size > 1


_ZEROED = ">=5.7"
"""Releases of the fault every-rank-loads-all that fill what they allocate (torch.zeros_like; empty_like before: read in 5.5.4,
5.7.0), so that it is resident for certain."""
NCCL = "nccl"
"""Stands for nvidia-nccl-cu12 and nvidia-nccl-cu13, whichever is there."""


def stack_unseen(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: whether the ranks' packages can be seen from here

    Why: the versions in the image count, and those on this machine may differ
    See: https://apptainer.org/docs/user/latest/
    """
    if not context.versions:
        yield Seen(UNKNOWN, f"the versions are those of {context.versions_of}", where=context.resolved.name)


FAULTS: list[tuple[str, str]] = []
"""The ids of the rules about releases, each with the versions that have its fault."""


def fault(
    key: str, package: str, ranges: str, status: str, *, what: str = "", fix: str = ""
) -> Callable[[Callable[[RecipeContext], object]], Check]:
    """Makes a rule of a function that says whether a recipe meets a fault of some releases, perhaps with status and more words.

    The docstring's first line is what is seen, its other fields are those of every rule. ``what`` and ``fix`` take their place
    where another library's key stands in them. ``package``: :data:`NCCL` for either of NCCL's.
    """
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if package == NCCL else (package,)
    FAULTS.append((key, ranges))

    def make_rule(meets: Callable[[RecipeContext], object]) -> Check:
        seen, why, link, remedy = described(meets.__doc__ or "")
        seen = seen if seen[1:2].isupper() else seen[:1].lower() + seen[1:]

        def look(context: RecipeContext) -> Iterator[Seen]:
            for name in names:
                version = context.version(name)
                if version is None or not holds(version, ranges) or not (met := meets(context)):
                    continue
                judged, more = met if isinstance(met, tuple) else (status, "")
                yield Seen(judged, f"{name} {version}: {what or seen}{more}", where=context.versions_of)

        return rule_of(key, f"{package} {ranges}", why, link, fix or remedy, look=look, subject=RECIPE)

    return make_rule


FULL_FIX = f"accelerate 1.15 or later, or {acc.key_of('state_dict_type')}: SHARDED_STATE_DICT"


@fault("adapter-of-rank-0-only", "accelerate", "<1.15", FAIL, fix=FULL_FIX)
def adapter_of_rank_0(c: RecipeContext) -> bool:
    """A FULL_STATE_DICT checkpoint of a LoRA under FSDP2 holds the slice of rank 0 only.

    Why: a resumed run continues with all other ranks' part of the adapter at its initial values, without a message
    See: https://github.com/huggingface/accelerate/pull/4206
    """
    return fsdp2(c) and lora(c) and c.resolved.distribution.state_dict == "FULL_STATE_DICT"


@fault("frozen-base-in-float32", "accelerate", "<1.13", FAIL)  # read: 1.12.0
def frozen_base(c: RecipeContext) -> bool:
    """FSDP2 casts the frozen base to float32 too: twice the memory of bfloat16 weights.

    Why: a LoRA run that should fit is out of memory
    Fix: accelerate 1.13 or later
    See: https://github.com/huggingface/accelerate/pull/3848
    """
    return fsdp2(c) and lora(c) and _mixed(c)


@fault("no-float32-master", "accelerate", ">=1.13,<1.14", FAIL)  # read: 1.13.0, 1.14.0
def no_master(c: RecipeContext) -> bool:
    """FSDP2 keeps the trained weights in the type they were loaded in: the cast to float32 is lost.

    Why: updates smaller than bfloat16's rounding are lost, and the loss stays higher, without a message
    Fix: accelerate 1.14 or later
    See: https://github.com/huggingface/accelerate/issues/3979
    """
    init = c.args.get("model_init_kwargs") or {}
    return fsdp2(c) and not lora(c) and _mixed(c) and str(init.get("dtype", "")) in ("bfloat16", "float16")


LOADS_ALL = f"{acc.key_of('cpu_ram_efficient_loading')} does not spare the other ranks: each makes the whole model in RAM"


@fault("every-rank-loads-all", "transformers", ">=5.0,<5.23", WARN, what=LOADS_ALL)
def loads_all(c: RecipeContext) -> object:
    """The node holds the whole model for each of its ranks.

    Why: the node runs out of RAM while loading, or stands still for long after it
    Fix: transformers 5.23 or 4.57, or RAM for ranks per node x model
    See: https://github.com/huggingface/transformers/issues/43749
    """
    weights, ranks = weight_bytes(c.resolved.architecture), c.recipe.slurm.gpus_per_node
    need, room = (weights or 0) * ranks, c.cluster.compute.memory_gb * GIB
    if not c.is_real or not c.resolved.distribution.efficient_loading or (weights is not None and need <= room):
        return False
    text = f"; {ranks} ranks x {(weights or 0) / 1e9:,.0f} GB are {need / 1e9:,.0f} GB, a node has {room / 1e9:,.0f} GB"
    certain = holds(c.version("transformers") or "", _ZEROED)
    return (FAIL if certain else WARN, text) if weights is not None else True


@fault("offline-asks-the-hub", "transformers", ">=4.57.2,<4.57.4", FAIL)  # read: 4.57.3 to 4.57.6
def asks_the_hub(c: RecipeContext) -> bool:
    """Loading a tokenizer by its name asks the Hub even with HF_HUB_OFFLINE=1, and fails.

    Why: a job without network ends although everything is in the cache
    Fix: transformers 4.57.4 or later, or model.path
    See: https://github.com/huggingface/transformers/issues/44843
    """
    return c.is_real and c.offline


@fault("packed-see-each-other", "transformers", "<4.53.1", FAIL)  # read: 4.53.0 and 4.53.1
def packed_unmasked(c: RecipeContext) -> bool:
    """Packed conversations see each other: only flash attention keeps them apart.

    Why: a higher loss: each conversation is trained with the ones packed before it as context
    Fix: transformers 4.53.1 or later, attn_implementation: flash_attention_2, or train.packing=false
    See: https://github.com/huggingface/transformers/pull/39194
    """
    named = str((c.args.get("model_init_kwargs") or {}).get("attn_implementation", "sdpa"))
    return bool(c.args.get("packing")) and "flash" not in named


@fault("accumulated-loss", "transformers", "<4.46", FAIL)
def accumulated(c: RecipeContext) -> bool:
    """The loss of accumulated micro batches is averaged per micro batch, not per token.

    Why: loss and gradients differ from those of the same batch without accumulation
    Fix: transformers 4.46 or later, or a batch without accumulation
    See: https://github.com/huggingface/transformers/pull/34191
    """
    return int(c.args["gradient_accumulation_steps"]) > 1


@fault("nccl-hang-arm", NCCL, "<2.29.3", WARN)
def hang_on_arm(c: RecipeContext) -> bool:
    """On ARM hosts (GH200, GB200) a collective may hang for ever: NCCL compiled with gcc before 10 loses proxy slots.

    Why: all ranks stand at full load without an error or a time-out
    Fix: NCCL 2.29.3 or later
    See: https://github.com/marin-community/marin/pull/8038
    """
    return _gpus(c) and c.arch == "aarch64"


@fault("nccl-hang-2-29-2", NCCL, ">=2.29.2,<2.29.3", FAIL)
def hang_of_one_release(c: RecipeContext) -> bool:
    """This release hangs.

    Why: a regression that NCCL 2.29.3 fixes; PyTorch left 2.29.2 out for it
    Fix: NCCL 2.29.3 or later
    See: https://github.com/pytorch/pytorch/pull/174338
    """
    return _gpus(c)


@fault("nccl-2-28", NCCL, ">=2.28.3,<2.28.9", WARN)
def hang_of_2_28(c: RecipeContext) -> bool:
    """NVIDIA's resiliency extension says to avoid 2.28.3 to 2.28.8.

    Why: aborting and restarting communicators inside a process fails in these releases
    Fix: NCCL 2.28.9 or later
    See: https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md
    """
    return _gpus(c)


@fault("checkpoint-runs-code", "torch", "<2.6", WARN)
def runs_code(_: RecipeContext) -> bool:
    """torch.load with weights_only=True can run code from the file (CVE-2025-32434).

    Why: a checkpoint or an adapter from someone else can run any code as your user
    Fix: torch 2.6 or later
    See: https://github.com/pytorch/pytorch/security/advisories/GHSA-53q9-r3pm-6pq6
    """
    return True


@fault("punkt-format", "nltk", "<3.8.2", WARN)
def punkt_format(c: RecipeContext) -> bool:
    """Reads the pickled punkt, not punkt_tab.

    Why: a task asks for punkt_tab, which this release does not know: it fails after all answers are generated
    Fix: nltk 3.9 or later
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/2266
    """
    return bool(needed(c.recipe.eval.tasks, PUNKT))


# --- what is installed ----------------------------------------------------------------------------------------------------


def quantized_by(context: RecipeContext) -> str | None:
    """The method that quantises the base; None: none."""
    config = quantization.of(context.args)
    return quantization.method(config) if config else None


def versions_differ(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: installed versions against containers/versions.env

    Why: what was tested together is not what runs: keys, defaults and files of another release
    Fix: make setup, or build the image again; or move the pins with the reason beside them
    See: https://github.com/huggingface/trl/pull/4983
    """
    # The reference image has an older stack, whole: it is held against its own pins.
    differ = min((_differences(context, pins) for pins in (context.pins, context.reference_pins) if pins), key=len, default=[])
    if differ:
        yield Seen(WARN, ", ".join(differ), where=context.versions_of)


def _differences(context: RecipeContext, pins: Mapping[str, str]) -> list[str]:
    seen = {name: context.version(name) for name in pins}
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    others = {name: version for name, version in seen.items() if version and version.partition("+")[0] != pins[name]}
    return [f"{name} {version} (pinned {pins[name]})" for name, version in sorted(others.items())]


def package_missing(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: packages that the recipe asks for

    Why: the ranks end at their start, after the queue
    See: https://huggingface.co/docs/transformers/installation
    """
    for key, value, packages in _wanted(context) if context.versions else ():
        if not any(context.version(name) for name in packages):
            fix = f"install {packages[0]} in {context.versions_of}, or leave {key} out"
            yield Seen(FAIL, f"{key}={value} needs {' or '.join(packages)}, which is not installed", fix)


def _wanted(context: RecipeContext) -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Key, value and the packages of which one must be there."""
    args = context.args
    # Without GPUs the run leaves these kernels out: clustertune/training/build.py.
    yield from kernels.needed(args, gpus=bool(context.cluster.compute.gpus))
    if context.resolved.distribution.is_deepspeed:
        yield f"accelerate.{acc.TYPE}", "DEEPSPEED", ("deepspeed",)
    packages = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel", "fbgemm_fp8": "fbgemm-gpu"}
    method = quantized_by(context)
    if method in packages:
        yield "train.model_init_kwargs.quantization_config", method, (packages[str(method)],)
    optim = str(args["optim"])
    if "bnb" in optim or "8bit" in optim or "paged" in optim:
        yield "train.optim", optim, ("bitsandbytes",)
    elif "torchao" in optim or optim.endswith("4bit"):
        yield "train.optim", optim, ("torchao",)
    if "wandb" in trackers(args.get("report_to")):
        yield "train.report_to", "wandb", ("wandb",)


def trackers(given: object) -> list[str]:
    return [given] if isinstance(given, str) else [str(item) for item in given] if isinstance(given, list) else []
