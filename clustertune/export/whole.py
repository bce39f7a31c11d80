"""``clustertune export`` of a run that trained all parameters: a model folder as ``save_pretrained`` lays it out, from shards.

One output file at a time is in memory. Names are the published ones: transformers 5 fuses the experts of a mixture when it
loads it, and its own conversion takes them apart again.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.console import byte_progress
from clustertune.errors import Problem, UserError, raise_if
from clustertune.export import companions
from clustertune.export.export import (
    Write,
    count_bad,
    export_as,
    verify_files,
    write_tokenizer,
)
from clustertune.manifest import Manifest
from clustertune.resolve.resolved import Resolved
from clustertune.tensorfile import FLOATS, read_header

if TYPE_CHECKING:
    import torch

    from clustertune.export.tensor_sources import StoredTensor

KIND = "merged"
"""A model folder that can be scored and served; a merge makes the same kind."""
SHARD_BYTES = 5_000_000_000
"""Bytes of one output file at most; transformers' own figure."""
BESIDE = (companions.GENERATION, *companions.TEXTS)
"""Files of the base that go with the weights beside its tokenizer."""
_OWN = re.compile(r"(model.*\.safetensors(\.index\.json)?|config\.json)$")
_LAYER = re.compile(r"^.*?\.\d+\.")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def export_model(checkpoint: Path, out: Path, base: Path | None) -> dict[str, Any]:
    """Write the model of one checkpoint to ``out`` and return a summary (as :func:`clustertune.export.export.export`).

    ``base``: the base model's folder. Each tensor is written in the type that it has there, though training keeps float32, and
    the base's tokenizer goes with the weights; None leaves that out, with a warning.
    Raises UserError with everything that is wrong with the checkpoint; where ``out`` holds anything else; exit code 73 where
    the storage fails.
    """

    def prepare(manifest: Manifest, trained: Resolved) -> Write:
        return _Export(checkpoint, manifest, trained, base).write

    return export_as(KIND, checkpoint, out, _is_ours, prepare)


class _Export:
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
        self.wanted = self._match()
        files, problems = self.source.files_of(stored.key for stored in self.wanted.values())
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
        found, problems, where = {}, [], str(self.checkpoint)
        expected, known = self._expected(), set(self.model.state_dict())
        for stored in self.source.stored:
            clean = _WRAPPERS.sub("", stored.key)
            name = clean if self.source.published else clean.removeprefix("model.")  # torch flattens {"model": state_dict}
            if name in expected:
                found[name] = stored
            elif name not in known:
                problems.append(Problem(f"{stored.key} is not a parameter of the recipe's architecture", file=where))
        for name, shape in expected.items():
            if name not in found:
                problems.append(Problem(f"{name} {list(shape)} is missing", file=where))
            elif found[name].shape != shape:
                problems.append(Problem(f"{name} has shape {list(found[name].shape)}, expected {list(shape)}", file=where))
        raise_if(problems)
        return {name: found[name] for name in expected}

    def write(self, stage: Path) -> dict[str, Any]:
        """All files; returns what the manifest says. Raises UserError where a value is not finite."""
        from safetensors.torch import save_file

        groups = list(self._groups())
        index: dict[str, str] = {}
        parameters, problems, dtypes = 0, list[Problem](), set[str]()
        size = sum(self._size(name) for name in self.wanted)
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
        config, generation = dict(made), None
        if self.base is not None and os.path.lexists(self.base / "config.json"):
            own = companions.read_json(self.base / "config.json")
            config = own if "model_type" in own else {**made, **own}
            config |= {key: made[key] for key in ("architectures", "dtype")}
            config.pop("torch_dtype", None)
        if (stage / companions.GENERATION).is_file():
            generation = companions.read_json(stage / companions.GENERATION)
        config, aligned = companions.aligned_configs(config, generation, ids)
        (stage / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if aligned != generation:
            (stage / companions.GENERATION).write_text(json.dumps(aligned, indent=2, sort_keys=True) + "\n")

    def _read(self, names: list[str], problems: list[Problem]) -> dict[str, torch.Tensor]:
        """Some parameters in the published types, under their published names."""
        import torch

        read = self.source.read({name: self.wanted[name] for name in names})
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
        return math.prod(self.wanted[name].shape) * int(self.dtypes.get(name, self.dtype).itemsize)

    def _groups(self) -> Iterator[list[str]]:
        """The names for each output file: whole layers, as what is fused belongs to one."""
        group: list[str] = []
        size = 0
        for unit in _units(self.wanted):
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
        config = companions.read_json(file) if os.path.lexists(file) else {}
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


def _is_ours(name: str) -> bool:
    """Whether an export that was killed leaves such a file."""
    return bool(_OWN.match(name)) or companions.is_tokenizer(name) or any(fnmatch(name, pattern) for pattern in BESIDE)
