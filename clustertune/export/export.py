"""``clustertune export``: the trained tensors of a checkpoint as a PEFT adapter, or as a model folder where all were trained.

Which tensors an adapter must hold is decided by PEFT itself, on a model without memory. The architecture is built on the meta
device and PEFT injects the recipe's ``LoraConfig`` into it, so that target matching, rank patterns, ``modules_to_save`` and
bias rules are those of the installed PEFT and not a copy of them. Llama-3.1-405B with r 32 on q, k, v, o: 1,008 tensors and
404,619,264 parameters in 1.3 s on one core.

A model folder is laid out as ``save_pretrained`` does it, from shards. One output file at a time is in memory. Names are the
published ones: transformers 5 fuses the experts of a mixture when it loads it, and its own conversion takes them apart again.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.checkpoint.store import require_own
from clustertune.console import byte_progress, say
from clustertune.errors import Problem, UserError, raise_if, storage_error
from clustertune.export import companions
from clustertune.lock import held
from clustertune.manifest import (
    MANIFEST,
    Manifest,
    file_mode,
    find_problem,
    find_problems,
    fsync_path,
    hash_file,
    list_files,
    read_json,
    read_manifest,
    read_whole,
    seal,
)
from clustertune.recipe import quantization
from clustertune.resolve.resolved import Resolved
from clustertune.tensorfile import FLOATS, read_header

if TYPE_CHECKING:
    import torch

    from clustertune.export.tensor_sources import Source, StoredTensor


ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
KIND = "adapter"
MODEL_KIND = "merged"
"""A model folder that can be scored and served; a merge makes the same kind."""
NAMES = {"adapter": "adapter", "merged": "model"}
"""What people call the kinds of an export."""
LOCK = "lock"
SHARD_BYTES = 5_000_000_000
"""Bytes of one output file at most; transformers' own figure."""
BESIDE = (companions.GENERATION, *companions.TEXTS)
"""Files of the base that go with the weights beside its tokenizer."""
_MODEL_FILE = re.compile(r"(model.*\.safetensors(\.index\.json)?|config\.json)$")
_LAYER = re.compile(r"^.*?\.\d+\.")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_ADAPTER_NAME = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
_KEPT_MODULE = re.compile(r"\.modules_to_save\.default(?=\.)")
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""``init_lora_weights`` under which the frozen base stays what was downloaded. The others (pissa, olora, loftq, corda, ...)
subtract the initial product from the base weights, so their A and B mean nothing on the published base."""


def export(checkpoint: Path, out: Path, base: Path | None = None) -> dict[str, Any]:
    """Write the adapter of one checkpoint folder, and the tokenizer and the stop tokens of the training, to ``out``; a summary.

    ``base``: the base model's folder, whose tokenizer it was; None leaves it out where the training changed neither its EOS
    nor its chat template.

    The summary holds ``out``, ``step``, ``tensors``, ``parameters``, ``bytes`` (of the adapter file), ``seconds``,
    ``reused`` (the same checkpoint had been exported there before) and ``warnings``.

    Memory is that of the adapter. Files of the checkpoint without adapter tensors are not opened; those with them are
    hashed in full before anything is taken from them.

    Raises UserError with every problem of the checkpoint at once, before anything is written; where ``out`` holds
    anything else; and with exit code 73 where the storage fails.
    """

    def prepare(manifest: Manifest, trained: Resolved) -> Write:
        tensors, expected, warnings = collect(checkpoint, manifest, trained)
        step = int(manifest.meta["step"])
        learnt = any(bool(t.any()) for name, t in tensors.items() if _starts_at_zero(name))
        if step > 0 and not learnt:
            warnings.append(f"every lora_B is zero at step {step}: nothing was learnt, the adapter changes nothing")

        def write(stage: Path) -> dict[str, Any]:
            _write(stage, tensors, expected)
            ids = write_tokenizer(checkpoint, base, stage, trained, (companions.GENERATION,))
            if base is not None and ids is not None:
                companions.write_generation(base, stage, ids)
            return {
                quantization.BASE: _base_quantization(trained),
                "tensors": len(tensors),
                "parameters": sum(tensor.numel() for tensor in tensors.values()),
                "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
                "warnings": warnings,
            }

        return write

    return export_as(KIND, checkpoint, out, is_adapter_file, prepare)


def is_adapter_file(name: str) -> bool:
    """Whether an export writes a file of this name into an adapter's folder: weights, configuration, tokenizer, and where an
    answer ends."""
    return name in (*ADAPTER_FILES, companions.GENERATION) or companions.is_tokenizer(name)


def write_tokenizer(
    checkpoint: Path, base: Path | None, stage: Path, trained: Resolved, extra: Iterable[str] = ()
) -> dict[str, int] | None:
    """Write the tokenizer that trained, and the base's files that match ``extra``, into ``stage``.

    Returns the ids of its EOS and its padding by their names in ``config.json``; None where ``base`` has no tokenizer.
    Raises UserError where the training had another EOS or template than a base that is not there.
    """
    files = companions.copy_tokenizer(base, stage, extra) if base is not None else {}
    if base is not None and {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(files):
        return companions.write_trained(base, stage, trained)
    if trained.chat_template is not None or trained.train_args["eos_token"] is not None or trained.template_arguments:
        text = (
            "the base model's tokenizer is not there, and the training gave it another EOS or chat template, or its arguments"
        )
        raise UserError(text, file=str(base or checkpoint), key="--base", fix="name the base model's folder with --base")
    return None


Write = Callable[[Path], dict[str, Any]]
"""Writes the files of an export into a staging folder and returns what its manifest says about them."""


def export_as(
    kind: str,
    checkpoint: Path,
    out: Path,
    is_ours: Callable[[str], bool],
    prepare: Callable[[Manifest, Resolved], Write],
) -> dict[str, Any]:
    """Publish an export of one checkpoint in ``out``, or find it there. Returns the summary (see :func:`export`).

    ``prepare`` reads and checks the checkpoint; what it returns writes. ``is_ours``: see :func:`find_published`.
    """
    started = time.monotonic()
    try:
        manifest = verify(checkpoint)
        sha = hash_file(checkpoint / MANIFEST).sha256
        if (published := find_published(out, kind, checkpoint, sha, is_ours)) is not None:
            say(f"already exported: {out}")
            return _summary(out, published, started, reused=True)
        trained = read_recipe(checkpoint)
        write = prepare(manifest, trained)
    except OSError as error:
        raise storage_error(error, "reading the checkpoint", checkpoint) from error
    try:
        with staging(out) as stage:
            # Again, now that no other export can be writing: the first look may be minutes old.
            if (published := find_published(out, kind, checkpoint, sha, is_ours)) is not None:
                return _summary(out, published, started, reused=True)
            meta = {
                "step": int(manifest.meta["step"]),
                "checkpoint": {"name": checkpoint.resolve().name, "manifest_sha256": sha},
                "recipe": trained.name,
                **write(stage),
            }
            for warning in meta["warnings"]:
                say(f"warning: {warning}")
            for file in _staged(stage):
                file.chmod(file_mode())
                fsync_path(file)
            # Moved one by one (a directory rename is not a commit on a mergerfs pool), the manifest last.
            out.mkdir(parents=True, exist_ok=True)
            for file in _staged(stage):
                file.replace(out / file.name)
            return _summary(out, seal(out, kind, meta), started, reused=False)
    except OSError as error:
        raise storage_error(error, f"writing the {NAMES[kind]}", out) from error


def collect(checkpoint: Path, manifest: Manifest, trained: Resolved) -> tuple[dict[str, torch.Tensor], Expected, list[str]]:
    """The checked adapter tensors under PEFT's names, sorted; what was expected; and warnings.

    Raises UserError naming every tensor that is missing, extra, of another shape, not floating point or not finite, and
    every shard whose content is not what the manifest says.
    """
    from clustertune.export.tensor_sources import open_source

    if trained.lora is None:
        text = "the run trained all parameters: there is no adapter to export"
        raise UserError(text, file=str(checkpoint / "recipe.json"), key="lora")
    expected = build_expected(trained.architecture, trained.lora, trained.recipe.model.name, trained.recipe.model.revision)
    source = open_source(checkpoint, manifest)
    matched, problems, warnings = _match(source, expected, checkpoint)
    files, misplaced = source.files_of(stored.key for stored in matched.values())
    problems += misplaced
    verify_files(checkpoint, manifest, files, problems)
    tensors = source.read(matched)
    bad = [
        Problem(f"{name} has {count_bad(tensor)} of {tensor.numel()} values that are NaN or infinite", file=str(checkpoint))
        for name, tensor in sorted(tensors.items())
        if count_bad(tensor)
    ]
    raise_if(bad or find_lost(tensors, int(manifest.meta.get("world_size", 1)), str(checkpoint)))
    return {name: tensors[name].contiguous() for name in sorted(tensors)}, expected, warnings


def find_lost(tensors: Mapping[str, torch.Tensor], ranks: int, where: str) -> list[Problem]:
    """The adapter's matrices in which what one of ``ranks`` held is zero: its shard was not gathered (axolotl #3772).

    FSDP and ZeRO part a matrix by rows, tensor parallelism by rows or columns. What PEFT draws at random (A; B of an embedding)
    has no zero row or column at all, whatever the number of ranks. What it begins with zeros has them where nothing was learnt:
    tokens that no text holds, experts that got no token, or all of it at a learning rate of 0.
    """
    learnt = any(bool(tensor.any()) for name, tensor in tensors.items() if _starts_at_zero(name))
    problems = []
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or 0 in tensor.shape:
            continue
        for axis, what in enumerate(("rows", "columns")):
            size = tensor.shape[axis]
            if _starts_at_zero(name):
                # The vocabulary of an embedding's A, and the experts' columns of a B, may be untouched.
                if not learnt or (axis == 1 and ("lora_embedding_A" in name or "experts" in name)):
                    continue
                if "experts" in name and not bool(tensor.any()):
                    continue
                least = -(-size // ranks)
            else:
                least = 1 if ".lora_" in name else max(128, -(-size // ranks))
            longest = _longest_run(~tensor.ne(0).any(dim=1 - axis))
            if longest >= least:
                text = f"{name}: {longest} of {size} {what} in a row are zero, as if a rank's shard was not gathered"
                problems.append(Problem(text, file=where, fix="export an earlier checkpoint, or train again"))
                break
    return problems


def _starts_at_zero(name: str) -> bool:
    """Whether PEFT begins with zeros in a tensor of the adapter (peft 0.20, ``LoraLayer.reset_lora_parameters``)."""
    return ".lora_B" in name or ".lora_embedding_A" in name


def _longest_run(flags: torch.Tensor) -> int:
    """The most neighbours that are true, of a tensor of one dimension."""
    longest = run = 0
    for flag in flags.tolist():
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def verify_files(checkpoint: Path, manifest: Manifest, files: Iterable[str], problems: list[Problem]) -> None:
    """Hash the files that are about to be read. Raises UserError with ``problems`` and all that differ from the manifest."""
    records = {name: manifest.files[name] for name in files}
    with byte_progress() as bar:
        task = bar.add_task("verify shards", total=sum(record.size for record in records.values()))
        for name, record in records.items():
            if problem := find_problem(checkpoint / name, record):
                problems = [*problems, problem]
            bar.advance(task, record.size)
    raise_if(problems)


def _match(source: Source, expected: Expected, checkpoint: Path) -> tuple[dict[str, StoredTensor], list[Problem], list[str]]:
    """Lay what is stored over what is expected."""

    matched: dict[str, StoredTensor] = {}
    problems, base = [], []
    where = str(checkpoint)
    for stored in source.stored:
        name = normalise(stored.key)
        if name in matched:
            problems.append(Problem(f"{name} is stored twice, as {matched[name].key} and as {stored.key}", file=where))
        elif name in expected.tensors:
            matched[name] = stored
        elif name in expected.base or name.endswith(".original_module.weight"):
            base.append(name)
        else:
            problems.append(Problem(f"{stored.key} belongs to no module that the recipe trains", file=where))
    for name, shape in expected.tensors.items():
        if name not in matched:
            problems.append(Problem(f"{name} {list(shape)} is missing", file=where))
        elif matched[name].shape != shape:
            problems.append(Problem(f"{name} has shape {list(matched[name].shape)}, expected {list(shape)}", file=where))
        elif not matched[name].floating:
            problems.append(Problem(f"{name} has dtype {matched[name].dtype}, expected a floating point one", file=where))
    warnings = []
    if base:
        named = ", ".join(sorted(base)[:3]) + (", ..." if len(base) > 3 else "")
        warnings.append(f"{len(base)} tensors of the base model are in the checkpoint and were left there: {named}")
    return matched, problems, warnings


def read_recipe(checkpoint: Path) -> Resolved:
    """``recipe.json`` of a checkpoint. Raises UserError where it is not a resolved recipe."""
    path = checkpoint / "recipe.json"
    try:
        return Resolved.from_dict(json.loads(read_whole(path)))
    except OSError as error:
        raise UserError(f"unreadable: {error.strerror or error}", file=str(path)) from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a resolved recipe: {type(error).__name__} {error}", file=str(path)) from None


def _base_quantization(trained: Resolved) -> str:
    """How the base was stored while it was trained: ``bitsandbytes nf4``, ..., or ``none``."""
    requested = quantization.of(trained.train_args) or trained.architecture.get("quantization_config")
    return quantization.label(requested) if requested else "none"


def verify(checkpoint: Path) -> Manifest:
    """Every file there with its size, ``recipe.json`` with its hash; the shards are hashed when it is known which are read.

    Raises UserError, also where others can write to the checkpoint.
    """
    problems = find_problems(checkpoint, "checkpoint", hashes=False)
    raise_if(problems)
    require_own(checkpoint)
    manifest = read_manifest(checkpoint, "checkpoint")
    recipe = checkpoint / "recipe.json"
    if "recipe.json" not in manifest.files:
        problems.append(Problem("missing", file=str(recipe)))
    elif problem := find_problem(recipe, manifest.files["recipe.json"]):
        problems.append(problem)
    if not isinstance(manifest.meta.get("step"), int):
        problems.append(Problem("the manifest names no step", file=str(checkpoint / MANIFEST), key="meta.step"))
    raise_if(problems)
    return manifest


def _write(stage: Path, tensors: Mapping[str, torch.Tensor], expected: Expected) -> None:
    """Both files, with the same bytes for the same tensors whenever and wherever they are written."""
    from safetensors.torch import save_file

    weights, config = (stage / name for name in ADAPTER_FILES)
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    config.write_text(json.dumps(expected.config, indent=2, sort_keys=True) + "\n")


def count_bad(tensor: torch.Tensor) -> int:
    return int((~tensor.isfinite()).sum())


def _summary(out: Path, manifest: Manifest, started: float, *, reused: bool) -> dict[str, Any]:
    return {
        "out": str(out),
        **{key: manifest.meta[key] for key in ("step", "tensors", "parameters")},
        "bytes": sum(record.size for name, record in manifest.files.items() if name.endswith(".safetensors")),
        "seconds": round(time.monotonic() - started, 3),
        "reused": reused,
        "warnings": list(manifest.meta["warnings"]),
    }


# -- what an adapter must hold -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What PEFT saves for one architecture and one LoRA configuration."""

    tensors: dict[str, tuple[int, ...]]
    """Name as ``save_pretrained`` writes it -> shape."""
    base: frozenset[str]
    """Names of the frozen tensors, which a checkpoint of the whole model holds as well."""
    config: dict[str, Any]
    """``adapter_config.json`` as PEFT would write it: sets as sorted lists, ``inference_mode`` true."""


def normalise(key: str) -> str:
    """The name that PEFT saves, from a checkpoint's key.

    ``{"model": state_dict}`` is flattened by torch DCP to ``model.base_model...``; FSDP1, activation checkpointing and
    torch.compile may leave their wrappers in it, and a plain ``state_dict()`` keeps the adapter's name ``default``.
    """
    name = _WRAPPERS.sub("", key)
    if name.startswith("model.base_model."):
        name = name.removeprefix("model.")
    return _KEPT_MODULE.sub("", _ADAPTER_NAME.sub(r"\1", name))


def build_expected(architecture: Mapping[str, Any], lora: Mapping[str, Any], model_name: str, revision: str | None) -> Expected:
    """Names and shapes for a HF ``config.json`` mapping and ``LoraConfig`` fields. Needs no weights and no network.

    Raises UserError where transformers or PEFT refuse the architecture or the LoRA settings.
    """
    import warnings

    import torch
    from huggingface_hub.errors import StrictDataclassError
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    start = lora["init_lora_weights"]
    if start not in _KEEPS_THE_BASE:
        raise UserError(
            f"init_lora_weights {start!r} changes the base weights, so the adapter does not fit the published base",
            file="recipe.json",
            key="lora.init_lora_weights",
            fix="train with init_lora_weights: true, gaussian, orthogonal or eva",
        )
    try:
        # The initial values are of no interest here, and "eva" and "orthogonal" cannot be computed without data.
        config = LoraConfig(**{**lora, "init_lora_weights": True})
        with warnings.catch_warnings(), torch.device("meta"):
            # PEFT looks for the base's config.json to compare vocabulary sizes and warns that a meta model has none.
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
            model = get_peft_model(base, config, low_cpu_mem_usage=True)
            saved = get_peft_model_state_dict(model)
            everything = model.state_dict()
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        message = " ".join(str(error).split())[:500]
        raise UserError(f"the architecture and the LoRA settings do not go together: {message}", file="recipe.json") from None
    tensors = {normalise(name): tuple(tensor.shape) for name, tensor in sorted(saved.items())}
    frozen = frozenset(normalise(name) for name in everything) - tensors.keys()
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path, config.revision = model_name, revision
    config.init_lora_weights = start
    return Expected(tensors, frozen, _as_json(config.to_dict()))


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values; sets become sorted lists, because the order of a set changes from process to process."""
    plain = {key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in settings.items()}
    return dict(json.loads(json.dumps(plain, sort_keys=True)))


# -- a model all of whose parameters were trained -----------------------------------------------------------------------------


def export_model(checkpoint: Path, out: Path, base: Path | None) -> dict[str, Any]:
    """Write the model of one checkpoint to ``out`` and return a summary (as :func:`clustertune.export.export.export`).

    ``base``: the base model's folder. Each tensor is written in the type that it has there, though training keeps float32, and
    the base's tokenizer goes with the weights; None leaves that out, with a warning.
    Raises UserError with everything that is wrong with the checkpoint; where ``out`` holds anything else; exit code 73 where
    the storage fails.
    """

    def prepare(manifest: Manifest, trained: Resolved) -> Write:
        return _ModelExport(checkpoint, manifest, trained, base).write

    return export_as(MODEL_KIND, checkpoint, out, _is_model_file, prepare)


class _ModelExport:
    """One checkpoint on its way into a model folder."""

    def __init__(self, checkpoint: Path, manifest: Manifest, trained: Resolved, base: Path | None) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from clustertune.export.tensor_sources import open_source

        self.checkpoint, self.base, self.trained = checkpoint, base, trained
        self.config = AutoConfig.for_model(**trained.architecture)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config)
        dtype, by_name = read_types(base) if base is not None else (None, {})
        self.dtype: torch.dtype = getattr(torch, dtype or _type_of(trained))
        self.dtypes: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in by_name.items()}
        """The types of the base's tensors, by their published names; of any other tensor it is :attr:`dtype`."""
        self.source = open_source(checkpoint, manifest, whole=True)
        self.matched = self._match()
        files, problems = self.source.files_of(stored.key for stored in self.matched.values())
        verify_files(checkpoint, manifest, files, problems)

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as the source has them, without those of tied parameters."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}
        if self.source.published:
            state = revert_weight_conversion(self.model, state)
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    def _match(self) -> dict[str, StoredTensor]:
        """Every parameter of the architecture among what is stored; a tied one may be stored under both of its names."""
        matched, problems, where = {}, [], str(self.checkpoint)
        expected, known = self._expected(), set(self.model.state_dict())
        for stored in self.source.stored:
            clean = _WRAPPERS.sub("", stored.key)
            name = clean if self.source.published else clean.removeprefix("model.")  # torch flattens {"model": state_dict}
            if name in expected:
                matched[name] = stored
            elif name not in known:
                problems.append(Problem(f"{stored.key} is not a parameter of the recipe's architecture", file=where))
        for name, shape in expected.items():
            if name not in matched:
                problems.append(Problem(f"{name} {list(shape)} is missing", file=where))
            elif matched[name].shape != shape:
                problems.append(Problem(f"{name} has shape {list(matched[name].shape)}, expected {list(shape)}", file=where))
        raise_if(problems)
        return {name: matched[name] for name in expected}

    def write(self, stage: Path) -> dict[str, Any]:
        """All files; returns what the manifest says. Raises UserError where a value is not finite."""
        from safetensors.torch import save_file

        groups = list(self._groups())
        index: dict[str, str] = {}
        parameters, problems, dtypes = 0, list[Problem](), set[str]()
        size = sum(self._size(name) for name in self.matched)
        with byte_progress() as bar:
            task = bar.add_task("export model", total=size)
            for number, names in enumerate(groups, 1):
                file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
                tensors = self._read(names, problems)
                parameters += sum(tensor.numel() for tensor in tensors.values())
                index |= dict.fromkeys(tensors, file)
                dtypes |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
                save_file(tensors, stage / file, metadata={"format": "pt"})
                del tensors
                bar.advance(task, sum(self._size(name) for name in names))
        raise_if(problems)
        if len(groups) > 1:
            body = {"metadata": {"total_size": size}, "weight_map": index}
            (stage / "model.safetensors.index.json").write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
        self.config.architectures = [type(self.model).__name__]
        self.config.dtype = self.dtype
        ids = write_tokenizer(self.checkpoint, self.base, stage, self.trained, BESIDE)
        warnings = [] if ids is not None else ["no tokenizer was found: copy the base model's beside the weights"]
        self._write_configs(stage, ids or {})
        return {"tensors": len(index), "parameters": parameters, "dtypes": sorted(dtypes), "warnings": warnings}

    def _write_configs(self, stage: Path, ids: dict[str, int]) -> None:
        """``config.json``, which keeps the base's keys, and ``generation_config.json``, with the EOS and padding ``ids``."""
        made = json.loads(self.config.to_json_string())
        config, generation, own = dict(made), None, {}
        if self.base is not None and os.path.lexists(self.base / "config.json"):
            own = read_json(self.base / "config.json")
            config = own if "model_type" in own else {**made, **own}
            config |= {key: made[key] for key in ("architectures", "dtype")}
        if "torch_dtype" in own or "dtype" not in own:  # transformers before 4.56, and servers built on it, read this one alone
            config["torch_dtype"] = config["dtype"]
        if (stage / companions.GENERATION).is_file():
            generation = read_json(stage / companions.GENERATION)
        config, aligned = companions.aligned_configs(config, generation, ids)
        (stage / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if aligned != generation:
            (stage / companions.GENERATION).write_text(json.dumps(aligned, indent=2, sort_keys=True) + "\n")

    def _read(self, names: list[str], problems: list[Problem]) -> dict[str, torch.Tensor]:
        """Some parameters in the published types, under their published names."""
        import torch

        read = self.source.read({name: self.matched[name] for name in names})
        if not self.source.published:
            from transformers.core_model_loading import revert_weight_conversion

            read = revert_weight_conversion(self.model, read)
        made = {}
        for name in list(read):
            tensor = read.pop(name)
            dtype = self.dtypes.get(name, self.dtype) if tensor.is_floating_point() else tensor.dtype
            # A copy: views of one fused tensor share its memory, which safetensors refuses.
            made[name] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
            if dtype.is_floating_point and (bad := count_bad(made[name])):  # float16 holds nothing beyond 65,504
                text = f"{name} has {bad} of {tensor.numel()} values that are NaN or infinite as {dtype}"
                problems.append(Problem(text, file=str(self.checkpoint)))
        return made

    def _size(self, name: str) -> int:
        """Bytes in the output: of a tensor that is published in parts the model's type counts."""
        return math.prod(self.matched[name].shape) * int(self.dtypes.get(name, self.dtype).itemsize)

    def _groups(self) -> Iterator[list[str]]:
        """The names for each output file: whole layers, as what is fused belongs to one."""
        group: list[str] = []
        size = 0
        for unit in _units(self.matched):
            more = sum(self._size(name) for name in unit)
            if group and size + more > SHARD_BYTES:
                yield group
                group, size = [], 0
            group, size = [*group, *unit], size + more
        yield group


def read_types(base: Path) -> tuple[str | None, dict[str, str]]:
    """The type that a model's ``config.json`` names (None: it names none), and each tensor's of its safetensors files.

    Names are torch's. A tensor of another type than float32, float16 and bfloat16 is left out.
    Raises UserError where a file cannot be read.
    """
    file = base / "config.json"
    try:
        config = read_json(file) if os.path.lexists(file) else {}
        types = dict[str, str]()
        for file in sorted(base.glob("*.safetensors")):
            types |= {tensor.name: tensor.dtype for tensor in read_header(file).tensors}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"unreadable: {error}", file=str(file), fix="look at the base model's folder") from None
    named = config.get("dtype") or config.get("torch_dtype")
    by_name = {name: FLOATS[dtype] for name, dtype in types.items() if dtype in FLOATS}
    commonest = max(set(by_name.values()), key=list(by_name.values()).count, default=None)
    return (named if named in FLOATS.values() else commonest), by_name


def _type_of(trained: Resolved) -> str:
    """Type of a model's published weights where no base says it: the architecture's own, else what was computed in."""
    stated = trained.architecture.get("dtype") or trained.architecture.get("torch_dtype")
    return str(stated or {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}[trained.distribution.mixed_precision])


def _units(names: Iterable[str]) -> list[list[str]]:
    units: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        units.setdefault(layer[0] if layer else name, []).append(name)
    return list(units.values())


def _is_model_file(name: str) -> bool:
    """Whether an export that was killed leaves such a file."""
    return bool(_MODEL_FILE.match(name)) or companions.is_tokenizer(name) or any(fnmatch(name, pattern) for pattern in BESIDE)


# --- publish ---------------------------------------------------------------------------------------------------------------

# Where an export goes: nothing that is there is overwritten, and one export at a time writes beside it.


def find_published(out: Path, kind: str, checkpoint: Path, source_sha: str, is_ours: Callable[[str], bool]) -> Manifest | None:
    """The manifest of an export of the same checkpoint that lies whole in ``out``, None where ``out`` is free.

    ``is_ours`` knows the files that an export leaves which was killed ahead of its manifest. Raises UserError where ``out``
    holds anything else: nothing published is overwritten.
    """
    if not out.exists():
        return None
    elsewhere = "give another --out, or remove it yourself"
    if not out.is_dir():
        raise UserError("is a file", file=str(out), fix=elsewhere)
    if not (out / MANIFEST).exists():
        foreign = [name for name in list_files(out) if not is_ours(name) and not name.startswith(f".{MANIFEST}.")]
        if foreign:
            raise UserError(f"is not empty: {', '.join(foreign[:5])}", file=str(out), fix=elsewhere)
        return None
    manifest = read_manifest(out)
    source = manifest.meta.get("checkpoint", {})
    if manifest.kind != kind or source.get("manifest_sha256") != source_sha:
        other = NAMES.get(manifest.kind, manifest.kind)
        message = f"holds the {other} of {source.get('name')} (step {manifest.meta.get('step')}), not that of {checkpoint}"
        raise UserError(message, file=str(out), fix=elsewhere)
    if problems := find_problems(out, kind, allow_extra=True):
        damaged = Problem(f"the {NAMES[kind]} that was exported here is damaged", file=str(out), fix=elsewhere)
        raise UserError([*problems, damaged])
    return manifest


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A sibling folder of ``out`` that no reader takes for an export, for one export at a time, gone afterwards."""
    stage = out.resolve().with_name(f".{out.resolve().name}.exporting")
    with held(stage / LOCK, "is exporting into it", shown=out, fix="wait for it, then run the same command again"):
        try:
            yield stage
        finally:
            # The lock last: from then on the folder may be the next export's.
            for file in [*_staged(stage), stage / LOCK]:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                stage.rmdir()


def _staged(stage: Path) -> list[Path]:
    """The files of a staging folder, sorted."""
    return sorted(file for file in stage.iterdir() if file.name != LOCK)
