"""A base that is quantised: which strategy can train over it, checked before a byte of its weights is read.

FSDP2 casts every floating parameter to the compute dtype as it gathers it, float8 too (torch 2.13, ``_fsdp_param.py``), and
tensor parallelism splits weights without their scales: both would train on other weights, without a message. transformers takes
the quantisation of the checkpoint's own ``config.json``, of which the recipe need not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.manifest import read_object
from clustertune.recipe import quantization
from clustertune.recipe.architecture import contradictions
from clustertune.resolve.models import PLAIN_TEXT
from clustertune.resolve.resolved import Resolved

CONFIG = "config.json"
RECIPE_KEY = "train.model_init_kwargs.quantization_config"
FIX = (
    "take the weights of this model that are not quantised; 4 bits by bitsandbytes, of LoRA's base, are the recipe's to ask "
    f"for ({RECIPE_KEY}: load_in_4bit: true)"
)


FIX_NAME = "take config.json as the model's makers wrote it, or a release of transformers that knows the name"
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Keys with which transformers loads code from a repository, where they hold its name (integrations/hub_kernels.py)."""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def check(source: str, revision: str | None, resolved: Resolved) -> None:
    """Raise UserError where the base is another than the recipe's model.json says, or where it, or what the recipe makes of it,
    is quantised in a way that the run cannot train over.

    ``source``: the model's folder or Hub id.
    """
    file = _config_file(source, revision)
    config = _read(file)
    if differ := contradictions(resolved.architecture, config):
        fix = f"copy these keys from {file} into it, or name the model that it describes"
        raise UserError(Problem(f"not the sizes of the base: {differ}", file=f"{resolved.name}/model.json", fix=fix))
    if lacking := names_what_is_not_here(config):
        key, text = lacking
        raise UserError(Problem(text, file=str(file), key=key, fix=FIX_NAME))
    stored, asked = _stored(config), quantization.of(resolved.train_args)
    reason = why_not(stored, asked, parted_by(resolved), lora=resolved.lora is not None)
    reason = reason or quantization.cast_away(stored or asked or {}, resolved.train_args, resolved.distribution.type)
    if reason is None:
        _refuse_wrapper(config, file, resolved)
        return
    if stored is None:
        raise UserError(Problem(reason, key=RECIPE_KEY, fix=FIX))
    raise UserError(Problem(reason, file=str(file), key="quantization_config", fix=FIX))


def names_what_is_not_here(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """A key of a config.json and what is wrong with it, where it names code of a repository, which is never run, or an
    activation or a rotary embedding that the installed transformers lacks, which ends in a bare KeyError.
    """
    from transformers.activations import ACT2CLS
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING_NAMES:  # Phi-3 and others are known without it
        return (
            "auto_map",
            "names code of the folder, which is never run, and transformers here knows no such architecture",
        )
    for body in (config, config.get("text_config")):
        if not isinstance(body, Mapping):
            continue
        for key in KERNELS:
            if "/" in str(body.get(key)):
                return key, f"{body[key]!r} is a kernel of the Hub, code that is never run"
        for key in ACTIVATIONS:
            if isinstance(body.get(key), str) and body[key] not in ACT2CLS:
                return key, f"transformers here knows no activation {body[key]!r}"
        for key in ("rope_parameters", "rope_scaling"):
            rope = body.get(key)
            kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
            if isinstance(kind, str) and kind not in (*ROPE_INIT_FUNCTIONS, "default", "mrope"):
                return key, f"transformers here knows no rotary embedding {kind!r}"
    return None


def _refuse_wrapper(config: Mapping[str, Any], file: Path | None, resolved: Resolved) -> None:
    """A model with pictures around the recipe's text model: LoRA's names match modules of the outer parts too."""
    kind = config.get("model_type")
    around = isinstance(config.get("text_config"), dict) or kind in PLAIN_TEXT
    if around and kind and kind != resolved.architecture.get("model_type"):
        outer = ", ".join(config.get("architectures") or [str(kind)])
        text = f"the base is a {outer}, and the recipe describes its text model"
        where = file.parent if file is not None else "FOLDER"
        fix = (
            f"clustertune text-model {where} OUT saves its {resolved.architecture['architectures'][0]}: name OUT in model.path"
        )
        raise UserError(Problem(text, file=str(file), key="text_config", fix=fix))


def parted_by(resolved: Resolved) -> str | None:
    """What parts the weights over ranks; None where each rank has them whole."""
    used = resolved.distribution
    if used.tp > 1:
        return "tensor parallelism"
    if used.is_deepspeed:
        return "DeepSpeed ZeRO-3" if used.zero_stage == 3 else None
    return "FSDP" if used.is_fsdp else None


def why_not(stored: Mapping[str, Any] | None, asked: Mapping[str, Any] | None, parted: str | None, *, lora: bool) -> str | None:
    """Why a base is not trained over; None where it is. ``stored``, ``asked``: config.json's and the recipe's quantisation."""
    config = stored or asked
    if config is None:
        return None
    name = quantization.method(config)
    if stored and asked:
        return f"the weights are quantised already ({name}), the recipe asks for {quantization.method(asked)}: not both"
    if parted is not None and (name != "bitsandbytes" or not config.get("load_in_4bit") or parted == "tensor parallelism"):
        return f"{name} weights: {parted} casts or splits them without their scales and would train on other weights"
    if stored is None:  # what else the recipe asks for was looked at when it was resolved
        return None
    storage = str(stored.get("bnb_4bit_quant_storage", "uint8"))
    if parted == "FSDP" and "float" not in storage:
        return f"bnb_4bit_quant_storage is {storage}: FSDP would keep the whole base on every rank"
    return _untrainable(stored, name) if lora else f"{name} weights are not trained themselves, and there is no lora section"


def _untrainable(stored: Mapping[str, Any], name: str) -> str | None:
    """What transformers says about adapters over such weights."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        trainable = AutoHfQuantizer.from_config(dict(stored), pre_quantized=True).is_trainable
        if callable(trainable):  # fp_quant's is not a property (transformers 5.23)
            trainable = trainable()
    except (ImportError, ValueError, TypeError, AttributeError) as error:  # no such method, no such package, other fields
        return f"transformers does not load {name} weights here ({str(error).splitlines()[0]})"
    return None if trainable else f"transformers does not train over {name} weights"


def folder(source: str, revision: str | None) -> Path | None:
    """Where the base's files lie: the folder, or the snapshot in the Hub's cache; None where it is not there yet."""
    file = _config_file(source, revision)
    return file.parent if file is not None and file.is_file() else None


def _config_file(source: str, revision: str | None) -> Path | None:
    """The base's config.json; None where it is not available, which transformers tells when it loads the model."""
    if Path(source).is_dir():
        return Path(source, CONFIG)
    from transformers.utils import cached_file

    try:
        path = cached_file(source, CONFIG, revision=revision)
    except (OSError, ValueError):
        return None
    return Path(path) if path else None


def _read(file: Path | None) -> dict[str, Any]:
    """A config.json; empty where there is none that can be read, which transformers tells when it loads the model."""
    return read_object(file) if file is not None else {}


def _stored(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's own quantisation, of the model or of its text part."""
    parts = [config, config.get("text_config")]
    configs = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    return next((dict(config) for config in configs if isinstance(config, dict) and config), None)
