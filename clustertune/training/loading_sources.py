"""Which tensors of the checkpoint make up which parameter, by transformers' own rules, before anything is read; and their rows.

The files' names are not always the model's: transformers renames, stacks experts and splits fused tensors while it loads
(``transformers/core_model_loading.py``). The same rules are asked here for their answer alone, on tensors without data.

Rows are read plainly: only the bytes that are asked for, none of them mapped. A mapped file counts as resident memory of
the process that touches it, and over NFS or FUSE each page is a request of its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clustertune.checkpoint.shards import DTYPES
from clustertune.errors import Problem, UserError, raise_if, storage_error
from clustertune.tensorfile import FETCH, CutShort, OpenFiles, Tensor, read_headers
from clustertune.training.missing_weights import SAME_COPY, by_cause

_NO_WEIGHTS = {"C64", "U16", "U32", "U64"}
"""Types of a checkpoint's values that weights do not have: packed integers would be read as numbers."""
SHOWN = 3
"""Names of tensors that a note shows; an error shows all."""


def survey(paths: Iterable[Path], index: Mapping[str, str] | None = None, *, packed: bool = False) -> dict[str, Tensor]:
    """Every tensor of the files, by name, from their headers alone.

    ``index``: tensor name -> file name, of the checkpoint's own index. ``packed``: they are quantised, so that any type may
    stand there. Raises UserError with all that is wrong with them.
    """
    tensors = {tensor.name: tensor for header in read_headers(paths, index).values() for tensor in header.tensors}
    weights = [] if packed else tensors.values()
    odd = [tensor for tensor in weights if tensor.dtype not in DTYPES or tensor.dtype in _NO_WEIGHTS]
    raise_if(Problem(f"has the dtype {t.dtype}", file=str(t.file), key=t.name, fix="another copy") for t in odd)
    return tensors


class RowReader(OpenFiles):
    """Reads rows and counts bytes, which stay when the files are closed. May be used by several threads."""

    bytes = 0

    def rows(self, tensor: Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows ``begin`` to ``end`` of the first dimension (all of them by default), in the file's dtype, on the CPU.

        Raises UserError where the file ends early or cannot be read.
        """
        row = math.prod(tensor.shape[1:])
        end = tensor.shape[0] if end is None and tensor.shape else 1 if end is None else end
        shape = (max(end - begin, 0), *tensor.shape[1:]) if tensor.shape else ()
        return self.flat(tensor, begin * row, end * row).reshape(shape)

    def flat(self, tensor: Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end``, counted through all dimensions; otherwise as :meth:`rows`."""
        each = DTYPES[tensor.dtype].itemsize
        raw = torch.empty(max(end - begin, 0) * each, dtype=torch.uint8)
        if raw.numel():
            self._fill(raw, tensor, begin * each)
        return raw.view(DTYPES[tensor.dtype])

    def _fill(self, raw: torch.Tensor, tensor: Tensor, skip: int) -> None:
        size = raw.numel()
        # Not through numpy: torch never resizes the storage of a tensor that numpy has seen, and FSDP frees by resizing.
        view = memoryview((ctypes.c_ubyte * size).from_address(raw.data_ptr())).cast("B")
        try:
            self.read(tensor.file, view, tensor.offset + skip)
        except CutShort:
            text = "the file ends before this tensor: it was cut since its header was read"
            raise UserError(Problem(text, file=str(tensor.file), key=tensor.name, fix=FETCH)) from None
        except OSError as error:
            raise storage_error(error, "the base model was not read", tensor.file) from None
        with self.guard:
            self.bytes += size


class Unfollowed(Exception):
    """transformers would load it, but not by rows: callers leave the loading to transformers."""


@dataclass(eq=False)
class ParameterSource:
    """Where the values of one parameter come from."""

    dtype: torch.dtype
    """What transformers loads it as."""
    shape: tuple[int, ...]
    parts: list[tuple[str, str, Tensor]] = field(default_factory=list)
    """Pattern of the converter, name and place of the tensor in the files; in the order in which the converter takes them."""
    converter: Any = None
    """transformers' ``WeightConverter``, None where one tensor is the parameter."""
    first: str = ""
    """The parameter that the converter is called for; it may give others beside it."""

    @property
    def stacked(self) -> bool:
        """Row ``i`` of the parameter is made of the ``i``-th tensors alone: one expert after the other."""
        if self.converter is None:
            return False
        merge, *rest = self.converter.operations
        flat = all(len(tensor.shape) == len(self.shape) - 1 for _, _, tensor in self.parts)
        along = type(merge).__name__ == "MergeModulelist" and merge.dim == 0
        return flat and along and all(type(op).__name__ == "Concatenate" and op.dim > 0 for op in rest)

    def read(self, name: str, reader: RowReader, model: Any, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin`` to ``end`` of the parameter ``name``, on the CPU, as :attr:`dtype`.

        Reads no more than these where the files allow it; a tensor that is split or turned while loading is read whole.
        """
        if self.converter is None:
            return reader.rows(self.parts[0][2], begin, end).to(self.dtype)
        if self.stacked:
            if begin >= end:
                return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
            lists = {pattern: [t for p, _, t in self.parts if p == pattern] for pattern, _, _ in self.parts}
            parts = [(pattern, tensor) for pattern, tensors in lists.items() for tensor in tensors[begin:end]]
            return self.convert([(p, reader.rows(t).to(self.dtype)) for p, t in parts], model)[name]
        converted = self.convert([(p, reader.rows(t).to(self.dtype)) for p, _, t in self.parts], model)[name]
        return converted[begin:end].clone()

    def elements(self, name: str, reader: RowReader, model: Any, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end`` of the parameter, counted through all its dimensions; otherwise as :meth:`read`."""
        if self.converter is None:
            return reader.flat(self.parts[0][2], begin, end).to(self.dtype)
        if (experts := self.experts()) is not None:
            pieces, skip = [torch.empty(0, dtype=self.dtype)], 0
            for tensor in experts:  # each is a run of elements; what lies before or after the part is not read
                count = math.prod(tensor.shape)
                first, last = max(begin - skip, 0), min(end - skip, count)
                if first < last:
                    pieces.append(reader.flat(tensor, first, last).to(self.dtype))
                skip += count
            return torch.cat(pieces)
        row = max(1, math.prod(self.shape[1:]))
        first = begin // row
        rows = self.read(name, reader, model, first, -(-end // row))
        return rows.reshape(-1)[begin - first * row : end - first * row]

    def experts(self) -> list[Tensor] | None:
        """The tensors that stand one after the other in a stacked parameter; None where they are joined otherwise."""
        rest = self.converter.operations[1:]
        if not self.stacked or len(rest) > 1 or any(op.dim != 1 for op in rest):
            return None
        lists = [[t for p, _, t in self.parts if p == pattern] for pattern in self.converter.source_patterns]
        return [tensor for expert in zip(*(tensors for tensors in lists if tensors), strict=True) for tensor in expert]

    def convert(self, values: list[tuple[str, torch.Tensor]], model: Any) -> dict[str, torch.Tensor]:
        """What transformers makes of the tensors of the files: parameters by name."""
        converter = deepcopy(self.converter)
        for index, (pattern, value) in enumerate(values):
            converter.add_tensor(self.first, str(index), pattern, value)
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class Sources:
    """The whole answer for one model."""

    by_name: dict[str, ParameterSource]
    missing: set[str]
    """Names of the model that no file holds; tied ones among them."""
    extra: list[Tensor]
    """Tensors that the model has no place for, and that its class does not say to pass over."""
    conversions: list[Any]
    """Rules that were used: transformers undoes them when it saves."""


def find(
    model: Any, tensors: Mapping[str, Tensor], load_config: Any = None, expected: Mapping[str, torch.Tensor] | None = None
) -> Sources:
    """Map the files to a model that has no values yet.

    ``load_config``: transformers' ``LoadStateDictConfig``; None: nothing is loaded into the model. ``expected``: its state
    dict, in the shapes of the whole. Raises UserError with every tensor that is missing or has another shape than the
    model, Unfollowed where a rule cannot be applied to tensors without data.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    expected = model.state_dict() if expected is None else expected
    mapping = getattr(load_config, "weight_mapping", None)
    rules = get_model_conversion_mapping(model) if mapping is None else mapping
    dtypes = getattr(load_config, "dtype_plan", None) or {}
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, ParameterSource] = {}
    extra = []
    for original in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(original, renamings, converters, prefix, expected)
        if name not in expected and original in expected:
            name, pattern = rename_source_key(original, [], [], base_model_prefix=prefix, meta_state_dict=expected)
        if name not in expected:
            extra.append((name, tensors[original]))
            continue
        if name not in sources:
            dtype = _dtype(name, expected[name], dtypes)
            rule = deepcopy(by_pattern[pattern]) if pattern is not None else None
            sources[name] = ParameterSource(dtype, tuple(expected[name].shape), [], rule, name)
        sources[name].parts.append((pattern or original, original, tensors[original]))
    vocabulary = _other_vocabulary(sources, expected, model)
    problems = _misshapen(sources, expected, model) if vocabulary is None else [vocabulary]
    missing = set(expected) - set(sources)
    lacking, passed = _unexplained(model, missing, [name for name, _ in extra])
    problems += [_missing(name, tensors) for name in sorted(lacking)]
    if problems:
        surplus = {tensor.name: tensor for _, tensor in extra}
        layers = getattr(model.config, "num_hidden_layers", None)
        raise UserError(by_cause(problems, lacking, surplus, sources, layers))
    used = [rule for rule in rules if rule.was_used()]
    return Sources(sources, missing, [tensor for name, tensor in extra if name in passed], used)


def find_packed(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """The same for weights that are quantised, of which the names alone say something: ``q_proj.qweight`` is ``q_proj``'s.

    Raises UserError with every parameter of whose module the files hold nothing.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    expected = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamed = {name: rename_source_key(name, renamings, converters, model.base_model_prefix, expected)[0] for name in tensors}
    by_module = {each.rpartition(".")[0] for each in renamed.values()}
    # Also a module around those of the files: experts that the model stacks are stored one by one.
    around = {".".join(parts[:at]) for each in by_module for parts in [each.split(".")] for at in range(1, len(parts) + 1)}
    missing = {name for name in expected if name.rpartition(".")[0] not in around}
    known = {name.rpartition(".")[0] for name in expected}
    extra = {name: tensor for name, tensor in tensors.items() if renamed[name].rpartition(".")[0] not in known}
    lacking, _ = _unexplained(model, missing, list(extra))
    if lacking:
        problems = [_missing(name, tensors) for name in sorted(lacking)]
        layers = getattr(model.config, "num_hidden_layers", None)
        raise UserError(by_cause(problems, lacking, extra, set(expected) - missing, layers))


def _dtype(name: str, parameter: torch.Tensor, planned: Mapping[str, torch.dtype]) -> torch.dtype:
    """What transformers loads a parameter as: the model's, but for what its class keeps in another (``dtype_plan``)."""
    if planned:
        from transformers.core_model_loading import build_glob_alternation

        pattern, by_group, _ = build_glob_alternation(list(planned))
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            return planned[by_group[match.lastgroup]]
    return parameter.dtype


def _other_vocabulary(
    sources: Mapping[str, ParameterSource], expected: Mapping[str, torch.Tensor], model: Any
) -> Problem | None:
    """The one reason, where embeddings of another number of rows are all that has another shape."""
    size, rows = getattr(model.config, "vocab_size", None), set[int]()
    differ = []
    for name, source in sources.items():
        have, want = tuple(source.parts[0][2].shape), tuple(expected[name].shape)
        if source.converter is not None or have == want:
            continue
        if not have or not want or want[0] != size or have[1:] != want[1:]:
            return None
        rows.add(have[0])
        differ.append(source.parts[0])
    if len(rows) != 1:
        return None
    names = " and ".join(original for _, original, _ in differ)
    text = f"{size}, and {names} of the files has {rows.pop()} rows"
    return Problem(text, file=str(differ[0][2].file.with_name("config.json")), key="vocab_size", fix=SAME_COPY)


def _misshapen(sources: dict[str, ParameterSource], expected: Mapping[str, torch.Tensor], model: Any) -> list[Problem]:
    """Parameters that the files would fill with another shape; what a converter makes beside its first one is added."""
    problems = []
    for first, source in list(sources.items()):
        if source.converter is None:
            made = {first: tuple(source.parts[0][2].shape)}
            if len(source.parts) > 1:
                names = " and ".join(original for _, original, _ in source.parts)
                problems.append(Problem(f"{names} of the files are one parameter of the model", key=first, fix=FETCH))
        else:
            made = _dry(source, model)
        for name, shape in made.items():
            if name not in expected:
                continue
            if shape != tuple(expected[name].shape):
                message = f"has shape {list(shape)}, the model's config asks for {list(expected[name].shape)}"
                problems.append(Problem(message, file=str(source.parts[0][2].file), key=source.parts[0][1], fix=SAME_COPY))
            if name != first:
                sources[name] = ParameterSource(source.dtype, shape, source.parts, source.converter, first)
    return problems


def _dry(source: ParameterSource, model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes that a converter makes of the files' shapes."""
    empty = [
        (pattern, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")) for pattern, _, tensor in source.parts
    ]
    try:
        return {name: tuple(value.shape) for name, value in source.convert(empty, model).items()}
    except Exception as error:
        raise Unfollowed(f"transformers' rule for {source.first} cannot be followed without data ({error})") from error


def _unexplained(model: Any, missing: set[str], extra: list[str]) -> tuple[set[str], set[str]]:
    """What is missing and what is too much, less what the model's class passes over and what is tied to what is there."""
    from transformers.modeling_utils import LoadStateDictInfo

    empty: dict[str, Any] = {"mismatched_keys": set(), "error_msgs": [], "conversion_errors": {}, "skipped_pp_keys": set()}
    info = LoadStateDictInfo(missing_keys=set(missing), unexpected_keys=set(extra), **empty)
    model._adjust_missing_and_unexpected_keys(info)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    explained = {name for pair in tied.items() for name in pair if not set(pair) <= missing}
    return set(info.missing_keys) - explained, set(info.unexpected_keys)


def _missing(name: str, tensors: Mapping[str, Tensor]) -> Problem:
    files = {tensor.file for tensor in tensors.values()}
    where = (next(iter(files)) if len(files) == 1 else next(iter(files)).parent) if files else None
    return Problem("no weight file holds it", file=str(where) if where else None, key=name, fix=FETCH)
