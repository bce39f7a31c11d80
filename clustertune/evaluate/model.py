"""What keeps a model folder from being scored, found in seconds and not after the weights are loaded.

And how a loaded model answers: the settings of its ``generation_config.json`` that any model may bring, and none beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.console import say
from clustertune.data import rendering
from clustertune.data.tokenizer import BoundedTokenizer, open_tokenizer, render_turn
from clustertune.errors import ExitCode, Problem, UserError, collect_problems
from clustertune.export import companions
from clustertune.manifest import read_json, read_whole
from clustertune.merge.base import read_base
from clustertune.recipe import quantization
from clustertune.recipe.architecture import implausible
from clustertune.training import base_model
from clustertune.training.base_weights import read_weights


@dataclass(frozen=True)
class Backend:
    """What answered; two evaluations by different ones are never mixed in one result."""

    name: str
    """``hf``: one process of transformers; ``vllm``: servers."""
    version: str
    """Of transformers or of vLLM."""
    dtype: str
    """Type of the weights, without ``torch.``; ``auto``: the model's configuration does not say."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    servers: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are loaded."""

    folder: Path
    tokenizer: Any
    max_length: int
    """Tokens of prompt and answer together, as lm-eval resolves it."""
    dtype: str
    """Type of the weights that the configuration names, without ``torch.``; ``auto``: it names none."""
    quantization: str | None
    """How the weights are stored, where not as ``dtype`` says: ``bitsandbytes nf4``, ``fp8``, ..."""
    tokenizer_folder: Path
    """Whose tokenizer and template are used; the model's own, or those of the model that it is compared with."""
    fingerprint: str
    """Changes when the model does: the manifest's digest where there is one, else names, sizes and times of the weights;
    and the content of every small file (configuration, tokenizer, template)."""

    def within_limits(self) -> BoundedTokenizer:
        """The tokenizer in a child with limits, as a context."""
        return BoundedTokenizer(self.tokenizer, str(self.tokenizer_folder))

    @property
    def template_sha(self) -> str:
        """lm-eval's ``chat_template_sha``."""
        return hashlib.sha256(self.tokenizer.chat_template.encode()).hexdigest()

    @property
    def header(self) -> rendering.Header:
        """What the training gave the chat template, and the day that it prints."""
        return rendering.header(self.tokenizer.chat_template)


def check_model(
    folder: Path,
    max_gen_toks: int | None,
    tokenizer_folder: Path | None = None,
    *,
    chat: bool = True,
    day: str | None = None,
) -> tuple[ModelFacts | None, list[Problem]]:
    """Everything wrong with a model folder at once; facts where nothing is.

    ``max_gen_toks``: tokens of an answer, None: the task's own. ``tokenizer_folder``: whose tokenizer is used, None: the
    model's. ``chat``: its template is needed. ``day``: what a template prints that reads the clock and has no day of its own.
    """
    tokenizer_path = tokenizer_folder or folder
    if not folder.is_dir():
        return None, [Problem("no such folder", file=str(folder), fix="give the folder of a model in Hugging Face's layout")]
    refused = _check_config(folder)
    problems = refused + _check_generation(folder) + check_weights(folder)
    with collect_problems(problems):  # transformers passes over a pipe or a link to nothing, and answers otherwise
        companions.matching(tokenizer_path, (*companions.TOKENIZER, *companions.CHAT))
    with collect_problems(problems):
        companions.matching(folder, (companions.GENERATION,))
    with collect_problems(problems):
        problems += manifest.DigestComparison(folder).problems  # the weights are compared while they are loaded
    tokenizer = None
    if not refused or not (folder / "config.json").exists():  # transformers reads it for a tokenizer too, and would blame that
        tokenizer, faults = _load_tokenizer(tokenizer_path, chat)
        if tokenizer is not None:
            tokenizer.chat_template = rendering.pinned(tokenizer.chat_template, day)
        problems += faults
    if problems:
        return None, _unique(problems, folder)
    max_length, dtype, problems = _resolve_length(folder, tokenizer, max_gen_toks or 0)
    if problems:
        return None, problems
    fingerprint = _fingerprint(folder)
    if tokenizer_path != folder:
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
        used = [manifest.hash_file(tokenizer_path / name).sha256 for name in names if (tokenizer_path / name).is_file()]
        fingerprint = hashlib.sha256(" ".join([fingerprint, *used]).encode()).hexdigest()
    return ModelFacts(folder, tokenizer, max_length, dtype, _quantization(folder), tokenizer_path, fingerprint), []


def _quantization(folder: Path) -> str | None:
    """What the model's configuration says about how its weights are stored."""
    config = json.loads(read_whole(folder / "config.json")).get("quantization_config")
    return quantization.label(config) if isinstance(config, dict) else None


def trained_on(model: Path, adapter: Path | None) -> str | None:
    """How the base was stored that the adapter of a model was trained on: ``bitsandbytes nf4``, ..., ``none`` (not quantised),
    ``unknown``; None where there is no adapter.

    Exports say it in their manifest, and merges repeat it.
    """
    folder = adapter or model
    meta = manifest.read_manifest(folder).meta if (folder / manifest.MANIFEST).exists() else {}
    recorded = meta if adapter else meta.get("adapter")
    return str(recorded.get(quantization.BASE, "unknown")) if isinstance(recorded, dict) else None


def check_adapter(model: Path, adapter: Path) -> list[Problem]:
    """Whether a LoRA adapter fits a model: its names, its shapes, and the revision that it was trained on."""
    from clustertune.merge.lora import read_adapter

    try:
        fitted = read_adapter(adapter, None if _quantization(model) else read_base(model))  # PEFT compares with packed weights
    except UserError as error:
        return error.problems
    for warning in fitted.warnings:
        say(f"warning: {warning}")
    return []


def _unique(problems: Iterable[Problem], folder: Path) -> list[Problem]:
    """A missing shard is seen by the index and by the manifest: one line each file is enough."""
    seen: dict[object, Problem] = {}
    for problem in problems:
        seen.setdefault(problem if problem.file == str(folder) else problem.file, problem)
    return list(seen.values())


def _check_config(folder: Path) -> list[Problem]:
    path = folder / "config.json"
    try:
        config = read_json(path)
    except UserError as error:
        if path.exists():
            return list(error.problems)
        fix = "an adapter must be merged first" if (folder / "adapter_config.json").exists() else "is this a model folder?"
        return [replace(problem, fix=fix) for problem in error.problems]
    if not isinstance(config.get("model_type"), str):
        return [Problem("does not say the architecture", file=str(path), key="model_type")]
    if problem := implausible(config):
        return [Problem(problem[1], file=str(path), key=problem[0], fix="take the file of the model's makers")]
    if lacking := base_model.names_what_is_not_here(config):
        return [Problem(lacking[1], file=str(path), key=lacking[0], fix=base_model.FIX_NAME)]
    return _accepted(folder)


def _accepted(folder: Path) -> list[Problem]:
    """Whether transformers accepts the configuration."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    # An architecture that the installed transformers does not know, or values its config class refuses.
    except Exception as error:
        text = " ".join(str(error).split()).partition("You can update Transformers")[0].strip()
        return [Problem(f"transformers does not accept it: {text}", file=str(folder / "config.json"))]
    return []


def _check_generation(folder: Path) -> list[Problem]:
    """A ``generation_config.json`` that is not an object; what its keys may say is settled once the model is loaded."""
    path = folder / "generation_config.json"
    try:
        read_json(path)
    except UserError as error:
        return list(error.problems) if path.exists() else []
    return []


def check_weights(folder: Path) -> list[Problem]:
    """Missing and truncated safetensors files, by their index and headers; the tensors are not read."""
    try:
        read_weights(folder)
    except UserError as error:
        return error.problems
    return []


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights' files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _load_tokenizer(folder: Path, chat: bool) -> tuple[Any, list[Problem]]:
    """The tokenizer; with ``chat``, its chat template renders a user's turn."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).exists() for name in names):
        return None, [Problem("has no tokenizer", file=str(folder), fix="copy the base model's tokenizer files there")]
    try:
        tokenizer = open_tokenizer(str(folder))
    except UserError as error:
        return None, list(error.problems)
    # transformers and tokenizers raise everything from OSError to a bare Exception on a damaged file.
    except Exception as error:
        return None, [Problem(f"its tokenizer does not load: {error}", file=str(folder))]
    return tokenizer, _check_template(tokenizer, folder) if chat else []


def _check_template(tokenizer: Any, folder: Path) -> list[Problem]:
    if not tokenizer.chat_template:
        fix = "add chat_template.jinja of the base model, or score plain text: --no-apply-chat-template"
        return [Problem("its tokenizer has no chat template", file=str(folder), key="eval.apply_chat_template", fix=fix)]
    marker = "How many shards are there?"
    try:
        text = render_turn(tokenizer, marker)
    except UserError as error:
        return [replace(problem, file=str(folder), key=None) for problem in error.problems]
    except ValueError as error:  # Jinja and the template's own raise_exception()
        return [Problem(f"its chat template does not render a user's turn: {error}", file=str(folder))]
    if marker not in text:
        return [Problem("its chat template drops the user's text", file=str(folder))]
    return []


def _resolve_length(folder: Path, tokenizer: Any, max_gen_toks: int) -> tuple[int, str, list[Problem]]:
    """The model's context in tokens, the type of its weights, and what is wrong."""
    from lm_eval.models.utils import resolve_max_length
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    length = int(resolve_max_length(config, tokenizer))
    dtype = str(config.dtype or "auto").removeprefix("torch.")
    if max_gen_toks < length:
        return length, dtype, []
    text = f"{max_gen_toks} tokens of answer leave no room for a prompt in this model's {length}"
    return length, dtype, [Problem(text, file=str(folder), key="eval.max_gen_toks", fix="lower it")]


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    sealed = (folder / manifest.MANIFEST).exists()
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        stat = path.stat()
        if path.suffix in (".json", ".jinja", ".model", ".txt"):
            part = manifest.hash_file(path).sha256
        elif sealed:
            continue
        else:
            part = f"{stat.st_size} {stat.st_mtime_ns}"
        digest.update(f"{path.name}\0{part}\0".encode())
    return digest.hexdigest()


ROOM = 1.3
"""Of a GPU's free memory, over the weights: the cache and the activations of a batch."""


def pick_device(requested: str | None, folder: Path) -> str:
    """The device that is asked for. ``auto``: all GPUs, else the CPU; None: one GPU where the weights fit."""
    import torch

    if requested not in (None, "auto"):
        return str(requested)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        return "cuda" if gpus else "cpu"
    return "cuda" if requested is None and ROOM * weight_bytes(folder) < torch.cuda.mem_get_info(0)[0] else "auto"


def check_device(device: str | None) -> list[Problem]:
    """lm-eval falls back to another device without a message; here a device that is not there is an error."""
    import torch

    known = {"cpu", "auto"}
    if torch.cuda.is_available():
        known |= {"cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    if device is None or device in known:
        return []
    return [Problem(f"no device {device!r} here", key="--device", fix=f"one of {', '.join(sorted(known))}")]


# --- how it answers ---------------------------------------------------------------------------------------------------


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
