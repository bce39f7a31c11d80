"""The adapter's folder against the base: which tensor is updated by which A and B, which is replaced, and what does not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, find_problems, hash_file
from clustertune.merge.base import EMBEDDINGS, Base, read_json
from clustertune.merge.lora_config import LoraSettings, read_settings
from clustertune.merge.streams import CHUNK, read_exactly
from clustertune.tensorfile import Tensor, read_header

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FLOATS = {"BF16", "F16", "F32"}
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
"""Per dtype its unsigned form and the exponent's bits, which are all set in NaN and infinity and in nothing else."""
_KEY = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.(?P<part>lora_A|lora_B|base_layer)\.weight)?")
_FOREIGN = re.compile(r"\.(lora_embedding_[AB]|lora_magnitude_vector|lora_B\.bias|base_layer\.bias)\b")
_SHOWN = 5


@dataclass(frozen=True)
class Update:
    """``W + scaling * B @ A`` for one base tensor: A is (r, in), B is (out, r)."""

    a: Tensor
    b: Tensor
    scaling: float
    weight: Tensor
    """W: the base's, or the adapter's own copy, which PEFT saves with a LoRA on the output head and prefers when it loads."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits its base, by name of the base tensor."""

    folder: Path
    settings: LoraSettings
    updates: dict[str, Update]
    replaced: dict[str, Tensor]
    sha256: dict[str, str]
    warnings: list[str] = field(default_factory=list)


def _shown(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(sorted(names)[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _sort_tensors(tensors: list[Tensor], file: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], list[Problem]]:
    """Tensors of the adapter by module and factor, the whole tensors by base name, and those of no known kind."""
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    strange = []
    for tensor in tensors:
        match = None if _FOREIGN.search(tensor.name) else _KEY.fullmatch(tensor.name)
        if match is None or ".lora_" in match["module"]:
            strange.append(tensor.name)
        elif match["part"]:
            factors.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            whole[match["module"]] = tensor
    problems = []
    if strange:
        message = f"tensors that are neither LoRA A/B of a linear layer nor a saved module: {_shown(strange)}"
        problems.append(Problem(message, file=file, fix="LoRA on embeddings, DoRA vectors and the like cannot be merged here"))
    return factors, whole, problems


def _find_updates(
    base: Base, settings: LoraSettings, factors: dict[str, dict[str, Tensor]], file: str
) -> tuple[dict[str, Update], list[Problem]]:
    updates, problems, absent, unselected = {}, [], [], []
    for module, pair in factors.items():
        weight = base.tensors.get(f"{module}.weight")
        if lacks := {"lora_A", "lora_B"} - set(pair):
            has = ", ".join(sorted(pair))
            problems.append(Problem(f"{module} has {has} but no {', '.join(sorted(lacks))}", file=file))
            continue
        if not settings.selects(module):
            unselected.append(module)
        if weight is None:
            absent.append(module)
            continue
        a, b, rank = pair["lora_A"], pair["lora_B"], settings.rank(module)
        own = pair.get("base_layer", weight)
        if len(weight.shape) != 2:
            problems.append(Problem(f"{weight.name} of the base has shape {list(weight.shape)}: not a linear layer", file=file))
        elif a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
            message = (
                f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit rank {rank} and the base's {list(weight.shape)}"
            )
            problems.append(Problem(message, file=file, fix="adapter and base belong to different models, or r is wrong"))
        elif weight.dtype not in FLOATS:
            problems.append(Problem(f"{weight.name} of the base is {weight.dtype}: not a plain float", file=str(weight.file)))
        elif (own.shape, own.dtype) != (weight.shape, weight.dtype):
            message = f"{own.name} is {own.dtype} {list(own.shape)}, the base's is {weight.dtype} {list(weight.shape)}"
            problems.append(Problem(message, file=file, fix="a resized vocabulary cannot be merged: resize the base first"))
        updates[weight.name] = Update(a, b, settings.scaling(module), own)
    if absent:
        problems.append(
            Problem(f"the base has no {_shown(absent)}", file=file, fix="give the base that the adapter was trained on")
        )
    if unselected:
        message = f"target_modules does not select {_shown(unselected)}, for which there are tensors"
        problems.append(Problem(message, file=file, fix="adapter_config.json and the tensors come from different runs"))
    return updates, problems


def _coverage_problems(
    base: Base, settings: LoraSettings, factors: dict[str, dict[str, Tensor]], whole: dict[str, Tensor], file: str
) -> list[Problem]:
    """What the config announces and the tensors do not hold: an interrupted or empty export."""
    problems = []
    if settings.target_modules != r".*":
        linear = [n.removesuffix(".weight") for n, t in base.tensors.items() if n.endswith(".weight") and len(t.shape) == 2]
        lacking = [module for module in linear if settings.selects(module) and module not in factors]
        if lacking:
            problems.append(Problem(f"no tensors for {_shown(lacking)}, which target_modules selects", file=file))
    if isinstance(settings.target_modules, tuple):
        modules = [n.rpartition(".")[0] for n in base.tensors]
        for target in settings.target_modules:
            if not any(m == target or m.endswith(f".{target}") for m in modules):
                problems.append(Problem(f"the base has no module {target!r}", file=file, key="target_modules"))
    unsaved = [name for name in base.tensors if settings.saves(name) and name not in whole]
    if unsaved:
        problems.append(Problem(f"no tensors for {_shown(unsaved)}, which modules_to_save names", file=file))
    return problems


def _replacement_problems(
    base: Base, whole: dict[str, Tensor], factors: dict[str, dict[str, Tensor]], file: str
) -> list[Problem]:
    problems = []
    for name, tensor in whole.items():
        target = base.tensors.get(name)
        if target is None:
            problems.append(Problem(f"the base has no tensor {name} to replace", file=file))
        elif target.shape != tensor.shape:
            message = f"{name} has shape {list(tensor.shape)}, the base's has {list(target.shape)}"
            problems.append(Problem(message, file=file, fix="a resized vocabulary cannot be merged: resize the base first"))
        elif name.removesuffix(".weight") in factors:
            problems.append(Problem(f"{name} is both saved whole and updated by LoRA", file=file))
        elif target.dtype not in FLOATS:
            problems.append(Problem(f"{name} of the base is {target.dtype}: not a plain float", file=str(target.file)))
    touched = [n for n in (*whole, *(f"{m}.weight" for m in factors)) if EMBEDDINGS.search(n)]
    if base.tied and touched:
        message = f"input and output embeddings are one tensor, the adapter changes {_shown(touched)} alone"
        fix = "untie the base first: load it with tie_word_embeddings=False, copy the head, save it"
        problems.append(Problem(message, file=str(base.folder / "config.json"), key="tie_word_embeddings", fix=fix))
    return problems


def _check_finite(tensors: list[Tensor], file: str) -> list[Problem]:
    """NaN or infinity anywhere in the adapter, found in blocks; without torch, which the copies need not wait for."""
    import numpy as np

    bad = []
    buffer = bytearray(CHUNK)
    for tensor in tensors:
        dtype, exponent = _EXPONENTS[tensor.dtype]
        with tensor.file.open("rb") as src:
            for start in range(0, tensor.size, CHUNK):
                view = memoryview(buffer)[: min(CHUNK, tensor.size - start)]
                read_exactly(src.fileno(), view, tensor.offset + start)
                if bool(((np.frombuffer(view, dtype) & exponent) == exponent).any()):
                    bad.append(tensor.name)
                    break
    fix = "the training has diverged: take an earlier checkpoint"
    return [Problem(f"NaN or infinity in {_shown(bad)}", file=file, fix=fix)] if bad else []


def _revision(folder: Path) -> str | None:
    """The commit of a folder of the Hub's cache (``snapshots/<40 hex>``)."""
    name = folder.resolve().name
    return name if folder.resolve().parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", name) else None


def _provenance(base: Base, settings: LoraSettings, file: str) -> tuple[list[str], list[Problem]]:
    known = _revision(base.folder)
    if known and settings.revision and re.fullmatch(r"[0-9a-f]{40}", settings.revision) and settings.revision != known:
        message = f"trained on revision {settings.revision}, the base is {known}"
        return [], [Problem(message, file=file, key="revision", fix="give the base of that revision")]
    said = settings.base_name
    names = {base.folder.resolve().name, str(base.config.get("_name_or_path", "")).rstrip("/").rpartition("/")[2]}
    names |= {part.rpartition("--")[2] for part in base.folder.resolve().parts if part.startswith("models--")}
    if said and said.rstrip("/").rpartition("/")[2] not in names:
        return [
            f"{file}: trained on {said!r}, merged into {base.folder.name!r}; names and shapes fit, contents are not compared"
        ], []
    return [], []


def _read_files(folder: Path) -> tuple[LoraSettings, list[Tensor]]:
    if not folder.is_dir():
        raise UserError(Problem("no such folder", file=str(folder)))
    problems: list[Problem] = []
    settings, tensors = None, list[Tensor]()
    try:
        settings = read_settings(read_json(folder / CONFIG), folder / CONFIG)
    except UserError as error:
        problems += error.problems
    weights = folder / WEIGHTS
    try:
        tensors = read_header(weights).tensors
        if not tensors:
            problems.append(Problem("holds no tensors: the adapter is empty", file=str(weights), fix="export it again"))
        odd = [t.name for t in tensors if t.dtype not in FLOATS]
        if odd:
            problems.append(Problem(f"neither float32, float16 nor bfloat16: {_shown(odd)}", file=str(weights)))
    except FileNotFoundError:
        pickled = (folder / "adapter_model.bin").exists()
        message = "missing; adapter_model.bin is a pickle and is not loaded" if pickled else "missing"
        problems.append(Problem(message, file=str(weights), fix="save the adapter with safetensors" if pickled else None))
    except (OSError, ValueError) as error:
        problems.append(Problem(str(error), file=str(weights), fix="export the adapter again"))
    if (folder / MANIFEST).exists():
        problems += find_problems(folder, allow_extra=True)
    if problems or settings is None:
        raise UserError(problems)
    return settings, tensors


def read_adapter(folder: Path, base: Base | None) -> Adapter:
    """Read an adapter and fit it to ``base`` (None: the base is broken, check the adapter alone).

    Raises UserError with every problem found; nothing is written.
    """
    settings, tensors = _read_files(folder)
    file = str(folder / WEIGHTS)
    factors, whole, problems = _sort_tensors(tensors, file)
    problems += _check_finite(tensors, file)
    updates: dict[str, Update] = {}
    warnings: list[str] = []
    if base is not None:
        updates, found = _find_updates(base, settings, factors, file)
        problems += found
        problems += _coverage_problems(base, settings, factors, whole, file)
        problems += _replacement_problems(base, whole, factors, file)
        warnings, found = _provenance(base, settings, str(folder / CONFIG))
        problems += found
        if ambiguous := settings.ambiguous(factors):
            message = (
                f"several patterns with different values match {_shown(ambiguous)}; the first in the file counts, as in PEFT"
            )
            warnings.append(f"{folder / CONFIG}: {message}")
    if problems:
        raise UserError(problems)
    digests = {name: hash_file(folder / name).sha256 for name in (CONFIG, WEIGHTS)}
    return Adapter(folder, settings, updates, whole, digests, warnings)
