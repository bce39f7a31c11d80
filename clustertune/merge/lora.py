"""The adapter's folder against the base: which tensor is updated by which A and B, which is replaced, and what does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from clustertune import bounded
from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.manifest import MANIFEST, SHA256, FileRecord, find_problems, hash_file, read_json, read_manifest
from clustertune.merge.base import EMBEDDINGS, Base, identity
from clustertune.recipe.findings import Found, as_problems, schema_findings
from clustertune.recipe.layers import Document
from clustertune.recipe.native_rules import LORA_VARIANTS
from clustertune.recipe.sections import Number, Positive
from clustertune.tensorfile import FLOATS, Tensor, read_header

if TYPE_CHECKING:
    from clustertune.training.loading_sources import ParameterSource

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
"""Per dtype its unsigned form and the exponent's bits, which are all set in NaN and infinity and in nothing else."""
_KEY = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.(?P<part>lora_A|lora_B|base_layer)\.weight)?")
_FOREIGN = re.compile(r"\.(lora_embedding_[AB]|lora_magnitude_vector|lora_B\.bias|base_layer\.bias)\b")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN = 5
_OTHER_MODEL = "adapter and base belong to different models, or r is wrong"
_RESIZED = "a resized vocabulary cannot be merged: resize the base first"


@dataclass(frozen=True)
class Update:
    """``W + scaling * B @ A`` for one base tensor: A is (r, in), B is (out, r)."""

    a: Tensor
    b: Tensor
    scaling: float
    weight: Tensor
    """W: the base's, or the adapter's own copy, which PEFT saves with a LoRA on the output head and prefers when it loads."""
    experts: int = 0
    """Experts that A (experts x r, in) and B (out, r x experts) hold; 0: a linear module's."""
    expert: int | None = None
    """The one whose matrix this tensor is; None: the tensor is a linear module's, or that of all experts (experts, out, in)."""
    row: int = 0
    """The row of B for the tensor's first one: gate and up projection are one parameter, and two tensors in many files."""

    @property
    def rank(self) -> int:
        return self.a.shape[0] // max(1, self.experts)

    def matrices(self, tensor: Tensor) -> Iterator[tuple[Tensor, Update]]:
        """The matrices of ``tensor``, which is this update's, in the order of their bytes."""
        if len(tensor.shape) == 2:
            yield tensor, self
            return
        size = tensor.size // self.experts
        for expert in range(self.experts):
            part = replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, size=size)
            yield part, replace(self, weight=part, expert=expert)


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits its base, by name of the base tensor."""

    folder: Path
    settings: LoraSettings
    updates: dict[str, Update]
    replaced: dict[str, Tensor]
    sha256: dict[str, str]
    identity: dict[str, list[Any]]
    """Of both files, when they were read."""
    warnings: list[str] = field(default_factory=list)


def is_finite(values: Any, dtype: str) -> bool:
    """Whether a buffer of BF16, F16 or F32 contains neither NaN nor infinity.

    Of numbers of one sign those are the largest in their bits: two maxima cost a tenth of torch's ``isfinite().all()``.
    """
    import numpy as np

    unsigned, exponent = EXPONENTS[dtype]
    bits = np.frombuffer(values, unsigned)
    if not bits.size:
        return True
    negative = exponent | 1 << (8 * bits.itemsize - 1)
    return int(bits.view(unsigned.replace("u", "i")).max()) < exponent and int(bits.max()) < negative


def _shown(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(sorted(names)[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


class _Fit:
    """An adapter's tensors laid over a base. Each method finds one kind of fault; all of them are reported at once."""

    def __init__(self, settings: LoraSettings, tensors: list[Tensor], folder: Path) -> None:
        self.settings, self.file, self.config = settings, str(folder / WEIGHTS), str(folder / CONFIG)
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.updates: dict[str, Update] = {}
        self.factors: dict[str, dict[str, Tensor]] = {}
        """A, B and PEFT's own copy of the weight, by module."""
        self.saved: dict[str, Tensor] = {}
        """Tensors of saved modules, by name in the base."""
        strange = []
        for tensor in tensors:
            match = None if _FOREIGN.search(tensor.name) else _KEY.fullmatch(tensor.name)
            if match is None or ".lora_" in match["module"]:
                strange.append(tensor.name)
            elif match["part"]:
                self.factors.setdefault(match["module"], {})[match["part"]] = tensor
            else:
                self.saved[match["module"]] = tensor
        fix = "LoRA on embeddings, DoRA vectors and the like cannot be merged here"
        self._wrong_names("tensors that are neither LoRA A/B of a linear layer nor a saved module: {}", strange, fix=fix)

    def _wrong(self, text: str, file: str | None = None, *, key: str | None = None, fix: str | None = None) -> None:
        self.problems.append(Problem(text, file or self.file, key, fix))

    def _wrong_names(self, text: str, names: list[str], *, fix: str | None = None) -> None:
        if names:
            self._wrong(text.format(_shown(names)), fix=fix)

    def _is_float(self, tensor: Tensor) -> bool:
        if tensor.dtype not in FLOATS:
            self._wrong(f"{tensor.name} of the base is {tensor.dtype}: not a plain float", str(tensor.file))
        return tensor.dtype in FLOATS

    def find_updates(self, base: Base) -> None:
        """Linear modules: A and B together, selected by the config, and of the base's shape."""
        absent, unselected = [], []
        for module, pair in self.factors.items():
            weight = base.tensors.get(f"{module}.weight")
            if lacks := {"lora_A", "lora_B"} - set(pair):
                self._wrong(f"{module} has {', '.join(sorted(pair))} but no {', '.join(sorted(lacks))}")
                continue
            if not self.settings.selects(module):
                unselected.append(module)
            if weight is None:
                absent.append(module)
                continue
            a, b, rank = pair["lora_A"], pair["lora_B"], self.settings.rank(module)
            own = pair.get("base_layer", weight)
            if len(weight.shape) != 2:
                self._wrong(f"{weight.name} of the base has shape {list(weight.shape)}: not a linear layer")
            elif a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
                have = f"A {list(a.shape)} and B {list(b.shape)}"
                self._wrong(f"{module}: {have} do not fit rank {rank} and the base's {list(weight.shape)}", fix=_OTHER_MODEL)
            elif self._is_float(weight) and (own.shape, own.dtype) != (weight.shape, weight.dtype):
                have = f"{own.dtype} {list(own.shape)}, the base's is {weight.dtype} {list(weight.shape)}"
                self._wrong(f"{own.name} is {have}", fix=_RESIZED)
            self.updates[weight.name] = Update(a, b, self.settings.scaling(module), own)
        self._wrong_names("the base has no {}", absent, fix="give the base that the adapter was trained on")
        fix = "adapter_config.json and the tensors come from different runs"
        self._wrong_names("target_modules does not select {}, for which there are tensors", unselected, fix=fix)

    def check_coverage(self, base: Base) -> None:
        """What the config announces and the tensors do not hold: an interrupted or empty export."""
        settings = self.settings
        if settings.target_modules != r".*":
            linear = [n.removesuffix(".weight") for n, t in base.tensors.items() if n.endswith(".weight") and len(t.shape) == 2]
            lacking = [module for module in linear if settings.selects(module) and module not in self.factors]
            self._wrong_names("no tensors for {}, which target_modules selects", lacking)
        if isinstance(settings.target_modules, list):
            modules = [n.rpartition(".")[0] for n in base.tensors]
            for target in settings.target_modules:
                if not any(m == target or m.endswith(f".{target}") for m in modules):
                    self._wrong(f"the base has no module {target!r}", key="target_modules")
        unsaved = [name for name in base.tensors if settings.saves(name) and name not in self.saved]
        self._wrong_names("no tensors for {}, which modules_to_save names", unsaved)

    def check_replacements(self, base: Base) -> None:
        """Tensors that are saved whole; and embeddings that the base has once."""
        for name, tensor in self.saved.items():
            target = base.tensors.get(name)
            if target is None:
                self._wrong(f"the base has no tensor {name} to replace")
            elif target.shape != tensor.shape:
                self._wrong(f"{name} has shape {list(tensor.shape)}, the base's has {list(target.shape)}", fix=_RESIZED)
            elif name.removesuffix(".weight") in self.factors:
                self._wrong(f"{name} is both saved whole and updated by LoRA")
            else:
                self._is_float(target)
        touched = [n for n in (*self.saved, *(f"{m}.weight" for m in self.factors)) if EMBEDDINGS.search(n)]
        if base.tied and touched:
            text = f"input and output embeddings are one tensor, the adapter changes {_shown(touched)} alone"
            fix = "untie the base first: load it with tie_word_embeddings=False, copy the head, save it"
            self._wrong(text, str(base.folder / "config.json"), key="tie_word_embeddings", fix=fix)

    def check_provenance(self, base: Base) -> None:
        """The base that the adapter names: another revision is an error, another name a warning."""
        given, revision, named = base.folder.absolute(), self.settings.revision, self.settings.base_name
        folder = given.resolve()
        known = folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None
        names = {given.name, folder.name, str(base.config.get("_name_or_path", "")).rstrip("/").rpartition("/")[2]}
        names |= {part.rpartition("--")[2] for part in folder.parts if part.startswith("models--")}
        if known and revision and _COMMIT.fullmatch(revision) and revision != known:
            fix = "give the base of that revision"
            self._wrong(f"trained on revision {revision}, the base is {known}", self.config, key="revision", fix=fix)
        elif named and named.rstrip("/").rpartition("/")[2] not in names:
            text = f"trained on {named!r}, merged into {base.folder.name!r}; names and shapes fit, contents are not compared"
            self.warnings.append(f"{self.config}: {text}")
        if ambiguous := self.settings.ambiguous(self.factors):
            text = f"several patterns with different values match {_shown(ambiguous)}; the first in the file counts, as in PEFT"
            self.warnings.append(f"{self.config}: {text}")

    # LoRA on fused experts (``target_parameters``): which tensors of the base's files take which part of A and B.
    #
    # transformers 5 keeps all experts of a layer in one parameter (experts, out, in). Files mostly hold one matrix for each
    # expert, gate and up projection apart. Which is which is asked of transformers' own rules, as the training does when it
    # loads them.

    def find_experts(self, base: Base) -> None:
        """The updates of the base's experts; their factors are no linear module's any more.

        PEFT wraps the holder of a parameter once for each parameter that is targeted, in their order, so that the first one's
        factors lie innermost (peft 0.20, ``_inject_parameters``).
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from clustertune.training.loading_sources import Unfollowed, find

        shown = str(base.folder / "config.json")
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**base.config))
            sources = find(model, base.tensors).by_name
        except UserError as error:
            self.problems += error.problems
            return
        except (Unfollowed, ValueError, TypeError, KeyError, AttributeError) as error:
            self._wrong(f"transformers does not say where its experts lie: {error}", shown)
            return
        for holder, module in model.named_modules():
            parameters = [name for name, _ in module.named_parameters(recurse=False)]
            names = [name for name in parameters if self.settings.selects_parameter(f"{holder}.{name}")]
            for depth, name in enumerate(reversed(names)):
                parameter, inner = f"{holder}.{name}", holder + depth * ".base_layer"
                pair, shape = self.factors.pop(inner, {}), tuple(getattr(module, name).shape)
                shape = (1, *shape) if len(shape) == 2 else shape  # a router is one matrix
                if len(shape) != 3 or getattr(module, "is_transposed", False):
                    self._wrong(f"{parameter} {list(shape)}: not experts of (out, in)", key="target_parameters")
                elif self._fits_experts(parameter, inner, pair, shape):
                    self._update_experts(parameter, pair, shape, _parts(sources[parameter], shape[1]), shown)
        for target in self.settings.target_parameters:
            if not any(name == target or name.endswith(f".{target}") for name in sources):
                self._wrong(f"the base has no parameter {target!r}", key="target_parameters")

    def _fits_experts(self, parameter: str, inner: str, pair: Mapping[str, Tensor], shape: Sequence[int]) -> bool:
        rank = self.settings.rank(parameter)
        expected = {"lora_A": (shape[0] * rank, shape[2]), "lora_B": (shape[1], shape[0] * rank)}
        if {part: tensor.shape for part, tensor in pair.items()} == expected:
            return True
        has = {part: list(tensor.shape) for part, tensor in pair.items()} or "nothing"
        self._wrong(f"{parameter} has {has}, rank {rank} asks for {expected}", key=f"{inner}.lora_A", fix=_OTHER_MODEL)
        return False

    def _update_experts(
        self, parameter: str, pair: Mapping[str, Tensor], shape: Sequence[int], parts: list[_Part], shown: str
    ) -> None:
        if not parts:
            self._wrong(f"{parameter}: its form in the files is not merged", shown)
        for tensor, expert, row in parts:
            self._is_float(tensor)
            scaling = self.settings.scaling(parameter)
            self.updates[tensor.name] = Update(pair["lora_A"], pair["lora_B"], scaling, tensor, shape[0], expert, row)


_Part = tuple[Tensor, int | None, int]


def _parts(source: ParameterSource, rows: int) -> list[_Part]:
    """The tensors of one parameter, each with its expert and its first row of that; expert None: one tensor holds all of them.

    Empty where a tensor of the files is not a run of rows of one expert.
    """
    if source.converter is None:
        return [(source.parts[0][2], None, 0)]
    parts, row = list[_Part](), 0
    for tensor in source.experts() or ():
        parts.append((tensor, row // rows, row % rows))
        row += tensor.shape[0]
    return parts


def _read_files(folder: Path) -> tuple[LoraSettings, list[Tensor], dict[str, str]]:
    """Settings, tensors and the digests of both files, which are those of the folder's manifest where it has one."""
    if not folder.is_dir():
        raise UserError("no such folder", file=str(folder))
    problems: list[Problem] = []
    settings, tensors = None, list[Tensor]()
    with collect_problems(problems):
        settings = read_settings(read_json(folder / CONFIG), folder / CONFIG)
    weights = folder / WEIGHTS
    try:
        tensors = read_header(weights).tensors
        if not tensors:
            problems.append(Problem("contains no tensors: the adapter is empty", file=str(weights), fix="export it again"))
        odd = [t.name for t in tensors if t.dtype not in FLOATS]
        if odd:
            problems.append(Problem(f"neither float32, float16 nor bfloat16: {_shown(odd)}", file=str(weights)))
    except FileNotFoundError:
        pickled = (folder / "adapter_model.bin").exists()
        message = "missing; adapter_model.bin is a pickle and is not loaded" if pickled else "missing"
        problems.append(Problem(message, file=str(weights), fix="save the adapter with safetensors" if pickled else None))
    except (OSError, ValueError) as error:
        problems.append(Problem(str(error), file=str(weights), fix="export the adapter again"))
    compared = dict[str, FileRecord]()
    if (folder / MANIFEST).exists():
        differing = find_problems(folder, allow_extra=True)
        problems, compared = problems + differing, {} if differing else read_manifest(folder).files
    if problems or settings is None:
        raise UserError(problems)
    known = {name: record for name, record in compared.items() if record.algorithm == SHA256}
    return settings, tensors, {name: (known.get(name) or hash_file(folder / name)).sha256 for name in (CONFIG, WEIGHTS)}


def read_adapter(folder: Path, base: Base | None) -> Adapter:
    """Read an adapter and fit it to ``base`` (None: the base is broken, check the adapter alone).

    Raises UserError with every problem found; nothing is written.
    """
    files = [folder / name for name in (CONFIG, WEIGHTS) if (folder / name).is_file()]
    before = identity(files)
    settings, tensors, digests = _read_files(folder)
    fit = _Fit(settings, tensors, folder)
    if base is not None:
        modules = {name.rpartition(".")[0] for name in (*base.tensors, *(tensor.name for tensor in tensors))}
        if not bounded.patterns_end(lambda name: (settings.selects(name), settings.scaling(name)), modules | set(fit.factors)):
            text = f"matching the model's modules with its patterns takes more than {bounded.PATTERN_SECONDS:g} s"
            fix = "write target_modules, rank_pattern and alpha_pattern without nested repetitions, or list the names"
            raise UserError(text, file=str(folder / CONFIG), key="target_modules", fix=fix)
        if settings.target_parameters:
            fit.find_experts(base)
        fit.find_updates(base)
        fit.check_coverage(base)
        fit.check_replacements(base)
        fit.check_provenance(base)
    raise_if(fit.problems)
    return Adapter(folder, settings, fit.updates, fit.saved, digests, before, fit.warnings)


# --- lora config ----------------------------------------------------------------------------------------------------------

# ``adapter_config.json``: which settings leave the arithmetic ``W + scaling * B A`` as it is, and what they select.
#
# An allow-list: a key that is not known here, or that holds another value than the plain one, is refused by name. A setting
# that was ignored would give a model that is wrong by a little and looks right.

_NEUTRAL = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
"""Read here, or without influence on merged weights: a dropout, what only initialised A and B, provenance."""

_PLAIN_ONLY = {
    **LORA_VARIANTS,
    "bias": "trained biases",
    "ensure_weight_tying": "tied adapters",
    "fan_in_fan_out": "transposed (Conv1D) layers",
}
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""The initialisations that touch A and B only. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights too,
and MiCA is a variant of the layer (peft 0.20 ``tuners/lora/layer.py``)."""
_ABSENT: tuple[Any, ...] = (None, False, "none", [], {})
_MERGE_WITH_PEFT = "merge it with PEFT's merge_and_unload"


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def _names(value: object) -> object:
    """A list of names, or a pattern; PEFT's word for all linear modules becomes one."""
    if isinstance(value, str):
        return r".*" if value.lower() == "all-linear" else _regex(value)
    if value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return value
    raise ValueError("is neither a list of names nor a regular expression")


def _listed(value: object) -> object:
    return [] if value is None else value if isinstance(value, list) else [value]


_Pattern = Annotated[str, AfterValidator(_regex)]
_Empty = BeforeValidator(lambda value: value or {})
_Names = Annotated[str | list[str] | None, BeforeValidator(_names)]
_Listed = BeforeValidator(_listed)


class LoraSettings(BaseModel):
    """The part of ``adapter_config.json`` that decides which weight becomes what."""

    model_config = ConfigDict(frozen=True, strict=True)

    r: Positive = 8
    alpha: Number = Field(8.0, alias="lora_alpha")
    rslora: bool | None = Field(False, alias="use_rslora")
    rank_pattern: Annotated[dict[_Pattern, Positive], _Empty] = {}
    alpha_pattern: Annotated[dict[_Pattern, Number], _Empty] = {}
    target_modules: _Names = None
    exclude_modules: _Names = None
    modules_to_save: Annotated[list[str], _Listed] = []
    layers: Annotated[list[int], _Listed] = Field([], alias="layers_to_transform")
    layers_pattern: Annotated[list[_Pattern], _Listed] = []
    target_parameters: Annotated[list[str], _Listed] = []
    base_name: str | None = Field(None, alias="base_model_name_or_path")
    revision: str | None = None

    def rank(self, module: str) -> int:
        """Rank of one module; as in PEFT the first pattern that matches the end of its name wins."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA (https://arxiv.org/abs/2312.03732)."""
        alpha, rank = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def ambiguous(self, modules: Iterable[str]) -> list[str]:
        """Modules that several patterns match with different values.

        The first one wins, in training by the order in which they were given, and here, as in PEFT, by that of the file,
        which PEFT sorts by name (peft 0.20 ``PeftConfigMixin.save_pretrained``).
        """
        names = []
        for module in modules:
            for patterns in (self.rank_pattern, self.alpha_pattern):
                if len({value for p, value in patterns.items() if _matches(p, module)}) > 1:
                    names.append(module)
                    break
        return names

    def saves(self, name: str) -> bool:
        """Whether the tensor ``name`` belongs to a module of ``modules_to_save``."""
        return any(re.match(rf"(^|.*\.){re.escape(m)}($|\..*)", name) for m in self.modules_to_save)

    def selects_parameter(self, name: str) -> bool:
        """Whether PEFT would put a LoRA layer around the parameter ``name`` (peft 0.20 ``_inject_parameters``)."""
        return _named(self.target_parameters, name)

    def selects(self, module: str) -> bool:
        """Whether PEFT would put a LoRA layer on ``module`` (peft 0.20 ``check_target_module_exists``)."""
        if _named(self.exclude_modules, module) or self.saves(module):
            return False
        if not _named(self.target_modules, module):
            return False
        if isinstance(self.target_modules, str) or module in (self.target_modules or ()) or not self.layers:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        match = next((m for p in patterns if (m := re.match(rf".*?\.{p}\.(\d+)\.", module))), None)
        return match is not None and int(match[1]) in self.layers


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _first_match(patterns: Mapping[str, Any], module: str) -> str:
    return next((p for p in patterns if _matches(p, module)), module)


def _named(modules: str | list[str] | None, module: str) -> bool:
    if not modules:
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return module in modules or any(module.endswith(f".{name}") for name in modules)


def _find_variants(body: Mapping[str, Any]) -> Iterator[Found]:
    """What changes the arithmetic, or may."""
    if (kind := body.get("peft_type")) != "LORA":
        yield ("peft_type",), f"{kind!r}: only LORA can be merged here", _MERGE_WITH_PEFT
        return
    for key, value in body.items():
        if key in _PLAIN_ONLY and value not in _ABSENT:
            yield (key,), f"{value!r}: {_PLAIN_ONLY[key]} cannot be merged", _MERGE_WITH_PEFT
        elif key not in _PLAIN_ONLY and key not in _NEUTRAL and value not in _ABSENT:
            yield (key,), f"unknown setting with value {value!r}: it may change the arithmetic", _MERGE_WITH_PEFT
    if (init := body.get("init_lora_weights", True)) not in _PLAIN_INITS:
        yield (
            ("init_lora_weights",),
            f"{init!r} changes the base's weights as well",
            "convert the adapter to a plain LoRA first",
        )
    if not body.get("target_modules") and not body.get("target_parameters"):
        yield ("target_modules",), "names no module", None


def read_settings(body: dict[str, Any], file: Path) -> LoraSettings:
    """Check ``adapter_config.json`` (already parsed; ``file`` only for messages). Raises UserError with every problem."""
    faults = list(_find_variants(body))
    try:
        settings = LoraSettings.model_validate(body)
    except ValidationError as error:
        faults += schema_findings(LoraSettings, error)
    if faults:
        raise UserError(as_problems(faults, Document(str(file), body)))
    return settings
