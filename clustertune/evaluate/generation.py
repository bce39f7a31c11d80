"""How a loaded model answers: the settings of its ``generation_config.json`` that any model may bring, and none beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertune.console import say
from clustertune.errors import ExitCode, UserError
from clustertune.export.companions import read_json


def _number(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    """Above ``low`` and at most ``high``; NaN is not."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low < value <= high


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


KEPT: dict[str, Callable[[Any], bool]] = {
    "do_sample": lambda value: isinstance(value, bool),
    "temperature": _number(0),
    "top_k": _count,
    "top_p": _number(0, 1),
    "min_p": _number(-1e-9, 1),
    "typical_p": _number(0, 1),
    "repetition_penalty": _number(0),
    "no_repeat_ngram_size": _count,
}
"""What is taken from a model's file, and which values. What selects another way of decoding (beams, contrastive search,
assistants, several answers), code or a cache of its own is left out: the caller decides on these, and lm-eval's tasks are
greedy. Lengths are the caller's too."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FILE = "generation_config.json"


def settings_of(folder: Path, tokenizer: Any) -> Any:
    """transformers' ``GenerationConfig`` of a model folder, without what does not hold here; a note says what that is.

    A token id that the vocabulary lacks is replaced with the tokenizer's. What the file lacks may stand in
    ``config.json``. Raises UserError for a file that is no JSON object.
    """
    from transformers import GenerationConfig

    path = folder / FILE
    own = read_json(path) if path.exists() else {}
    config = read_json(folder / "config.json")
    values = own or config
    kept = {key: values[key] for key, is_valid in KEPT.items() if key in values and is_valid(values[key])}
    if not kept.get("do_sample"):  # transformers warns of what only sampling reads
        kept = {key: kept[key] for key in ("repetition_penalty", "no_repeat_ngram_size") if key in kept}
    for key in TOKENS:
        ids: Any = own.get(key, config.get(key))
        listed: list[Any] = ids if isinstance(ids, list) and ids else [ids]
        kept[key] = ids if all(_count(one) and one < len(tokenizer) for one in listed) else getattr(tokenizer, key)
    usual = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    left = [key for key in own if key not in kept and not _changes_nothing(key, own[key], usual)]
    left += [key for key in TOKENS if own.get(key) not in (None, kept[key])]
    if left:
        say(f"note: {path}: not used here: {', '.join(sorted(set(left)))}")
    return GenerationConfig(**kept)


_NO_TEXT = ("transformers_version", "max_length", "max_new_tokens", "use_cache", "return_dict_in_generate")
"""What says nothing of the words of an answer: lengths are the caller's, a cache only saves time."""


def _changes_nothing(key: str, value: Any, usual: Mapping[str, Any]) -> bool:
    """Whether an answer is the same without a key of the file: it holds anyway, or says what is returned beside the text."""
    if key in KEPT:
        return value is None or KEPT[key](value)
    return value is None or key.startswith(("_", "output_")) or key in _NO_TEXT or (key in usual and value == usual[key])


def check_answers(model: Any, folder: Path) -> None:
    """Raise UserError where a loaded model would answer with noise, which would be scored: a weight is NaN or infinite, or the
    scores of the next token are; and where it cannot compute at all."""
    import torch

    bad = [name for name, weight in model.named_parameters() if _is_broken(weight)]
    fix = "copy the model again; of a training, take an earlier checkpoint"
    if bad:
        text = f"{len(bad)} tensors hold NaN or infinity, such as {bad[0]}"
        raise UserError(text, ExitCode.FAILED, file=str(folder), fix=fix)
    try:
        with torch.no_grad():
            scores = model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=model.device)).logits
    except torch.OutOfMemoryError:
        raise
    # Whatever a configuration that contradicts the weights makes a library raise.
    except Exception as error:
        raise refused(error, folder, "it does not compute") from error
    if scores.isnan().any():
        raise UserError("its scores of the next token are NaN", ExitCode.FAILED, file=str(folder), fix=fix)


def refused(error: Exception, folder: Path, what: str) -> UserError:
    """The first line of what a library says of a model, with the key of ``config.json`` whose value it names."""
    line = str(error).strip().partition("\n")[0]
    config = read_json(folder / "config.json")
    key = next((key for key, value in config.items() if isinstance(value, str) and value and repr(value)[1:-1] in line), None)
    key = key or ("quantization_config" if "quantization_config" in config else None)
    fix = "install what is named, or take a config.json of the model's makers"
    text = f"{what}: {type(error).__name__}{': ' if line else ''}{line}"
    return UserError(text, ExitCode.FAILED, file=str(folder / "config.json"), key=key, fix=fix)


def _is_broken(weight: Any) -> bool:
    """Whether a tensor holds NaN or infinity. Its sum, in float32, needs no memory beside it."""
    import torch

    if weight.device.type == "meta" or not weight.is_floating_point() or weight.element_size() < 2:
        return False
    return not torch.isfinite(weight.detach().sum(dtype=torch.float32)).item()
