"""Each rank reads what it keeps of the base model: no whole copy of it anywhere, and nothing of it is sent.

FSDP2: accelerate 1.15 has a model loaded whole and then broadcast by rank 0 (``fsdp_cpu_ram_efficient_loading: true``): 810 GB
in one process for a model of 405B parameters. Two functions of the stack are replaced where the recipe's accelerate file asks
for just that, everything else stays theirs:

* transformers' ``_load_pretrained_model`` leaves the parameters :func:`empty_storage`, having looked up where each comes from;
* accelerate's ``fsdp2_load_full_state_dict``, called with the sharded model, fills each rank's part from the files. What is
  not in them (LoRA's matrices, drawn from the same seed) is broadcast from rank 0 as before.

A base in 4 bits (bitsandbytes): transformers 5.23 quantises all of it in every rank, on its GPU: 215 GB of it for a model of
405B parameters. NF4 and FP4 scale blocks of 64 elements by their largest one (arXiv 2305.14314), so a rank's elements need no
others but those of the blocks at its two ends, bit for bit. The scales themselves every rank needs for the products of whole
layers: they are gathered, and quantised in their turn where the recipe asks for it (double quantisation).

DeepSpeed's ZeRO-3, which parts a model while it is made: transformers 5.23 has rank 0 map the files and broadcast every
parameter, of which each rank keeps its part (``integrations/deepspeed.py``, ``_load_state_dict_into_zero3_model``); before that
DeepSpeed 0.19 broadcasts every parameter as it makes it, when it has no values yet (``zero.Init._zero_init_param``). Each
rank's part, a run of elements of the flattened parameter, the last one padded, is filled in the first of the two functions
above; it is on the GPU, in host memory or in a file on NVMe.

What rows cannot say (:func:`clustertune.resolve.resolved.why_whole`) is loaded the old way, with a note.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import agree
from clustertune.recipe import accelerate_file as acc
from clustertune.replaced import replaced
from clustertune.resolve.resolved import IN_FLIGHT, Distribution
from clustertune.training.base_weights import reported
from clustertune.training.collectives import Group
from clustertune.training.figures import Startup
from clustertune.training.loading_sources import SHOWN, ParameterSource, RowReader, Sources, Unfollowed, find, survey

THREADS = IN_FLIGHT - 1
"""Reads at a time in one rank; transformers' own figure (``GLOBAL_WORKERS``): more make storage slower."""
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""What ``accelerate launch`` makes of ``fsdp_cpu_ram_efficient_loading``; accelerate and transformers read it late."""
_HELD = ("model", "state_dict", "checkpoint_files", "load_config")
"""The parameters of transformers' ``_load_pretrained_model`` that are used here."""
_ZERO = "deepspeed.runtime.zero.partition_parameters"
_NESTED_BLOCK = 256
"""Scales to one scale of theirs (bitsandbytes/functional.py, quantize_4bit)."""


class Loading:
    """The replaced functions, for the length of one attempt: :meth:`install`, make and prepare the model, :meth:`remove`."""

    def __init__(self, distribution: Distribution, startup: Startup, group: Group | None = None) -> None:
        from accelerate.utils import str_to_bool

        # The rank's environment may differ from the file: then accelerate does not fill empty storage.
        efficient = distribution.kind == "FSDP2" and distribution.efficient_loading
        self._efficient = efficient and str_to_bool(os.environ.get(EFFICIENT, "true")) == 1
        self._unfit = ""
        self._is_split = distribution.tp > 1
        self.startup, self._group = startup, group or Group()
        self._reader = RowReader()
        self._model: Any = None
        self._sources: Sources | None = None
        self._replaced, self._sending = ExitStack(), ExitStack()
        self.notes: list[str] = []

    def install(self) -> Loading:
        """Replace the functions in this process, until :meth:`remove`."""
        from accelerate import accelerator
        from accelerate.utils import fsdp_utils
        from transformers import PreTrainedModel

        load, fill = PreTrainedModel._load_pretrained_model, fsdp_utils.fsdp2_load_full_state_dict
        prepare = accelerator.fsdp2_prepare_model
        if not set(_HELD) <= set(inspect.signature(load).parameters):
            self._unfit = "this transformers loads models in another way"
        here = self._replaced.enter_context
        here(replaced(PreTrainedModel, _load_pretrained_model=staticmethod(self._loader(load))))
        finalize = PreTrainedModel._finalize_model_loading
        here(replaced(PreTrainedModel, _finalize_model_loading=staticmethod(self._finalizer(finalize))))
        here(replaced(fsdp_utils, fsdp2_load_full_state_dict=self._filler(fill)))
        here(replaced(accelerator, fsdp2_prepare_model=self._preparer(prepare)))
        self._sending.enter_context(send_nothing_empty())
        return self

    def remove(self) -> None:
        """Put the functions back; nothing is left open."""
        self._sending.close()
        self._replaced.close()
        self._reader.close()
        self._model = self._sources = None

    # -- from_pretrained --------------------------------------------------------------------------------------------

    def _loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(
            model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *rest: Any, **more: Any
        ) -> Any:
            self._sending.close()
            parted = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())  # made under Init
            efficient, take = (True, self._take_parts) if parted else (self._efficient, self._hold)
            reason = self._reason(state_dict, checkpoint_files, load_config) or (why_not_parts(model) if parted else None)
            with self.startup.part("reading"):
                files = [Path(file) for file in checkpoint_files or ()]
                try:
                    if efficient and reason is None:
                        return take(model, files, load_config), None
                    self._compare(model, files, load_config)
                except Unfollowed as error:
                    reason = reason or str(error)
                size = sum(Path(file).stat().st_size for file in checkpoint_files or ())
                if efficient and dist.is_initialized():  # one process has nothing to part
                    who = "rank 0, which sends it" if parted else "each rank"
                    self.notes.append(f"the base model ({size / 1e9:,.1f} GB) is read whole by {who}: {reason}")
                if self._is_split and dist.is_initialized():
                    # Else rank 0 alone has it, and accelerate, not yet made, sends it: but each rank splits what it has.
                    # Also where the file leaves the key out, which accelerate launch reads as true.
                    os.environ[EFFICIENT] = "false"
                self.startup.read_bytes += size
                return original(model, state_dict, checkpoint_files, load_config, *rest, **more)

        return load

    def _reason(self, state_dict: Any, files: list[str] | None, load_config: Any) -> str | None:
        if self._unfit:
            return self._unfit
        if not dist.is_initialized():
            return "there is one rank only"
        if load_config.hf_quantizer is not None and (reason := why_not_4_bits(load_config.hf_quantizer)):
            return reason
        if state_dict is not None or not files or not all(str(file).endswith(".safetensors") for file in files):
            return "its weights are not in safetensors files"
        return None

    def _hold(self, model: Any, files: list[Path], load_config: Any) -> Any:
        """Leave the model without weights; returns what transformers counts as loaded."""
        if not all(parameter.is_meta for parameter in model.parameters()):
            raise Unfollowed("transformers made it with its weights")
        sources = self._find(model, files, load_config, model.state_dict())
        made = [_without_values(model, name, source) for name, source in sources.by_name.items()]
        for module, own, value in made:  # all or none: what cannot be made is loaded by transformers, as it was
            put(module, own, value)
            value._is_hf_initialized = True  # else transformers draws random values for it
        self._sources = sources
        return self._record(model, sources)

    def _take_parts(self, model: Any, files: list[Path], load_config: Any) -> Any:
        """Fill what ZeRO-3 keeps in this rank; returns what transformers counts as loaded."""
        named = model.state_dict(keep_vars=True)
        shapes = {n: torch.empty(getattr(v, "ds_shape", v.shape), dtype=v.dtype, device="meta") for n, v in named.items()}
        sources = self._find(model, files, load_config, shapes)
        self._model = model
        likes = {name: named[name] for name in _once({name: id(named[name]) for name in sources.by_name})}
        self._each({name: sources.by_name[name] for name in likes}, likes, lambda name, part: fill_part(likes[name], part))
        return self._record(model, sources)

    def _compare(self, model: Any, files: list[Path], load_config: Any) -> None:
        """Hold the files' headers against the model before transformers reads them. What is quantised in the files, or is in
        no safetensors files, is judged once transformers has loaded it (:meth:`_finalizer`).
        """
        quantiser = load_config.hf_quantizer
        if self._unfit or not files or not all(file.suffix == ".safetensors" for file in files):
            return
        if quantiser is not None and quantiser.pre_quantized:
            return
        named = model.state_dict(keep_vars=True)
        shapes = {n: torch.empty(getattr(v, "ds_shape", v.shape), dtype=v.dtype, device="meta") for n, v in named.items()}
        # Its rules note that they were used: transformers is to find its own as they were.
        self._find(model, files, SimpleNamespace(sharded_metadata=load_config.sharded_metadata, weight_mapping=None), shapes)

    def _finalizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
            source = str(load_config.pretrained_model_name_or_path)
            try:
                info = original(model, load_config, loading_info)
            except RuntimeError as error:  # its words for other shapes
                if problems := reported(source, loading_info):
                    raise UserError(problems) from error
                raise
            raise_if(reported(source, info))
            complete_names(model)
            return info

        return finalize

    def _find(self, model: Any, files: list[Path], load_config: Any, expected: Mapping[str, torch.Tensor]) -> Sources:
        """What :func:`find` says, agreed on: a node's own copy of the files may differ, and no rank may continue alone."""
        sources, problems, other = None, [], ""
        try:
            sources = find(model, survey(files, (load_config.sharded_metadata or {}).get("weight_map")), load_config, expected)
        except UserError as error:
            problems = error.problems
        except Unfollowed as error:
            other = str(error)
        except (ImportError, AttributeError, TypeError) as error:  # another version's functions, other arguments
            other = f"this transformers maps names in another way ({error})"
        agree(problems, self._group)
        reasons = [reason for reason in self._group.gather(other) if reason]
        if sources is None or reasons:
            raise Unfollowed(reasons[0])
        return sources

    def _record(self, model: Any, sources: Sources) -> Any:
        """transformers' record of a loading, and what it keeps of it at the model."""
        from transformers.utils.loading_report import LoadStateDictInfo

        if sources.extra:
            names = ", ".join(tensor.name for tensor in sources.extra[:SHOWN])
            more = f" and {len(sources.extra) - SHOWN} more" if len(sources.extra) > SHOWN else ""
            self.notes.append(f"{sources.extra[0].file}: the model has no place for {names}{more}; not read")
        model._weight_conversions = sources.conversions
        self._model, self.startup.loading = model, "slices"
        return LoadStateDictInfo(
            missing_keys=set(sources.missing),
            unexpected_keys={tensor.name for tensor in sources.extra},
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )

    # -- prepare ----------------------------------------------------------------------------------------------------

    def upcast(self, model: Any, precision: str) -> None:
        """Make trained parameters without data float32 where accelerate would (``fsdp2_prepare_model``): its cast fills them.

        ``precision``: accelerate's ``mixed_precision``.
        """
        if self._sources is None or precision == "no":
            return
        for parameter in model.parameters():
            # A DTensor was made in float32 when it was split: clustertune/training/parallelism.py.
            if parameter.requires_grad and is_empty_storage(parameter) and not isinstance(parameter, DTensor):
                parameter.data = empty_storage(parameter.shape, torch.float32)

    def _filler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fill(accelerator: Any, model: Any, full_sd: dict[str, Any], cpu_offload: bool = False) -> Any:
            if self._sources is None:
                return original(accelerator, model, full_sd, cpu_offload=cpu_offload)
            with self.startup.part("reading"):
                self._fill(accelerator.device, model, full_sd, cpu_offload=cpu_offload)
            return model

        return fill

    def _fill(self, device: torch.device, model: Any, state: Mapping[str, Any], *, cpu_offload: bool) -> None:
        """Give a sharded model without data this rank's part of every value, in place."""
        empty = model.state_dict()
        shared = {clean(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        sources = self._by_parameter(empty, shared)
        identity = {name: shared.get(clean(name), id(name)) for name in empty}
        firsts = _once(identity)
        chosen = {name: sources[name] for name in firsts if name in sources}
        lost = [n for n in firsts if n not in sources and is_empty_storage(state[n])] if dist.get_rank() == 0 else []
        fix = f"{acc.key_of('cpu_ram_efficient_loading')}: false"
        made: dict[int, Any] = {}

        def take(name: str, part: torch.Tensor) -> None:
            made[identity[name]] = placed(part, empty[name], device, cpu_offload=cpu_offload)

        self._each(chosen, empty, take, [Problem("no weight file holds it", key=name, fix=fix) for name in lost])
        for name in firsts:
            if name not in sources:
                like = empty[name]
                full = broadcast(state[name], like, device)
                take(name, full[region(like)].clone() if isinstance(like, DTensor) else full)
        model.load_state_dict({name: made[one] for name, one in identity.items()}, assign=True)

    def _preparer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """accelerate keeps a base in 4 bits where it is and does not fill it: that is done here, around the whole of it."""

        def prepare(accelerator: Any, model: Any) -> Any:
            if self._sources is None or not any(is_packed(p) for p in model.parameters()):
                return original(accelerator, model)
            held = to_meta(model, self._sources.by_name)
            model = original(accelerator, model)
            offload = accelerator.state.fsdp_plugin.cpu_offload
            with self.startup.part("reading"):
                self._fill_held(held, accelerator.device, cpu_offload=type(offload).__name__ == "CPUOffloadPolicy")
            return model

        return prepare

    def _fill_held(self, held: list[tuple[str, torch.nn.Module, str, Any]], device: torch.device, *, cpu_offload: bool) -> None:
        """Fill what :func:`to_meta` put there and FSDP has sharded since, module by module."""
        likes = {name: module._parameters[own] for name, module, own, _ in held}
        packed = {name: (module, parameter) for name, module, _, parameter in held if is_packed(parameter)}
        sources = self._by_parameter(likes, {clean(name): id(like) for name, like in likes.items()})
        chosen = {name: sources[name] for name in _once({n: id(like) for n, like in likes.items()}) if name in sources}
        problems = [Problem("no weight file holds it", key=name) for name in likes if name not in sources]
        made: dict[int, Any] = {}

        def part(name: str, source: ParameterSource, like: Any) -> Any:
            try:
                if name not in packed:
                    return self._part(name, source, like)
                begin, end = blocks(source, like, packed[name][1])
                return source.elements(plain(name), self._reader, self._model, begin, end)
            except UserError as error:  # the others wait for this rank's scales: it continues until all can end together
                problems.extend(error.problems)
                return None

        def take(name: str, value: Any) -> None:
            like, source, local = likes[name], chosen[name], value
            if name in packed:
                module, parameter = packed[name]
                begin, end = blocks(source, like, parameter)
                elements = torch.zeros(end - begin, dtype=source.dtype) if value is None else value
                local, scales = quantise(elements.to(device), source, like, parameter)
                module.quant_state = state_of(scales, source, like, parameter)
            if local is not None:
                made[id(like)] = torch.nn.Parameter(placed(local, like, device, cpu_offload=cpu_offload), like.requires_grad)

        self._each(chosen, likes, take, problems, part)
        for name, module, own, _ in held:
            put(module, own, made[id(likes[name])])

    def _by_parameter(self, empty: Mapping[str, Any], shared: Mapping[str, int]) -> dict[str, ParameterSource]:
        """The source of every entry of the state dict that the files hold, under whichever of a tied parameter's names."""
        assert self._sources is not None
        by_name = {name: source for name in empty if (source := self._sources.by_name.get(plain(name))) is not None}
        tied = {shared[clean(name)]: source for name, source in by_name.items() if clean(name) in shared}
        either = {name: by_name.get(name) or tied.get(shared.get(clean(name), 0)) for name in empty}
        return {name: source for name, source in either.items() if source is not None}

    def _each(
        self,
        chosen: Mapping[str, ParameterSource],
        likes: Mapping[str, Any],
        take: Callable[[str, Any], None],
        problems: list[Problem] | None = None,
        part: Callable[[str, ParameterSource, Any], Any] | None = None,
    ) -> None:
        """Read this rank's part of each parameter, hand it to ``take``, and have all ranks agree on what is wrong."""
        problems = problems if problems is not None else []
        try:
            for name, value in self._read(chosen, likes, part or self._part):
                take(name, value)
        except UserError as error:
            problems += error.problems
        agree(problems, self._group)
        self.startup.read_bytes += self._reader.bytes
        self._reader.bytes = 0
        self._reader.close()

    def _read(
        self, sources: Mapping[str, ParameterSource], likes: Mapping[str, Any], part: Callable[[str, ParameterSource, Any], Any]
    ) -> Iterator[tuple[str, Any]]:
        """This rank's part of each parameter, in order, read a few at a time so that memory stays at a few parts."""
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[tuple[str, Future[Any]]] = deque()
            rest = iter(sources.items())
            try:
                while True:
                    for name, source in rest:
                        waiting.append((name, pool.submit(part, name, source, likes[name])))
                        if len(waiting) > THREADS:
                            break
                    if not waiting:
                        return
                    first, future = waiting.popleft()
                    yield first, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def _part(self, name: str, source: ParameterSource, like: Any) -> torch.Tensor:
        """What this rank keeps, on the CPU: elements of what ZeRO-3 split, rows of what FSDP2 did, else all."""
        if hasattr(like, "ds_tensor"):
            return source.elements(name, self._reader, self._model, *own_elements(like))
        if not isinstance(like, DTensor):
            return source.read(plain(name), self._reader, self._model, 0, source.shape[0] if source.shape else 1)
        rows = source.read(plain(name), self._reader, self._model, *span(like))
        # Columns, of what tp splits by its inputs: the ranks of a node read the same rows, which its page cache holds.
        return rows[(slice(None), *region(like)[1:])].contiguous() if rows.dim() > 1 else rows


def complete_names(model: Any) -> None:
    """Have a model answer to the names by which TRL's loss reads it: ``base_model``, the part below the head, and the number of
    experts. Llama4ForCausalLM of transformers 5.23 names a part that it has not; its configuration has ``num_local_experts``.
    """
    if not hasattr(model, model.base_model_prefix) and hasattr(model, "model"):
        model.base_model_prefix = "model"
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        type(config).attribute_map = {**type(config).attribute_map, "num_experts": "num_local_experts"}


def _once(identity: Mapping[str, int]) -> list[str]:
    """The names of what has several, tied weights, once: the first of each."""
    first: dict[int, str] = {}
    return [name for name, one in identity.items() if first.setdefault(one, name) == name]


def _without_values(model: Any, name: str, source: ParameterSource) -> tuple[torch.nn.Module, str, Any]:
    """A parameter or buffer of the model, as it is to be but without storage; with its module and its name there."""
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    before = getattr(module, own)
    if is_packed(before):
        return module, own, packed(before, source.shape)
    value = empty_storage(source.shape, source.dtype)
    if own in module._parameters:
        value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
    return module, own, value


# -- parameters without values, their names, and a rank's part of them ------------------------------------------------


def empty_storage(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that takes no memory: one element, repeated.

    Not on the meta device: PEFT puts an adapter where its base is and its values would be lost, and accelerate finds the
    optimizer's parameters again by their addresses.
    """
    return torch.zeros((), dtype=dtype).expand(shape)


def empty_part(shape: torch.Size, dtype: torch.dtype, mesh: Any, placement: Placement) -> DTensor:
    """A DTensor over a mesh of one dimension whose part here is :func:`empty_storage`.

    Not by ``DTensor.from_local``, which moves the part to the mesh's device: there it would take its memory.
    """
    local, _ = compute_local_shape_and_global_offset(shape, mesh, [placement])
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    return DTensor(empty_storage(local, dtype), DTensorSpec(mesh, (placement,), meta), requires_grad=False)


def is_empty_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values of its own: :func:`empty_storage`, or on the meta device. Of a DTensor: its part here."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return bool(tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size())


def put(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Make ``value`` the parameter or buffer ``name`` of a module that has one of that name."""
    (module._parameters if name in module._parameters else module._buffers)[name] = value


def clean(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def plain(name: str) -> str:
    """A parameter's name in the model as transformers made it, from its name in what PEFT made of that."""
    name = clean(name).removeprefix("base_model.model.")
    # Several where LoRA is on several bare parameters of one module: each has a wrapper.
    return re.sub(r"(\.base_layer)+\.|\.original_module\.|\.modules_to_save\.default\.", ".", name)


def region(like: DTensor) -> tuple[slice, ...]:
    """What this rank keeps of the whole, in each dimension. FSDP2 parts what is split over tp already: still one piece."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def span(like: DTensor) -> tuple[int, int]:
    """The rows of the whole that this rank keeps."""
    slices = region(like)
    return (slices[0].start, slices[0].stop) if slices else (0, 1)


def broadcast(tensor: torch.Tensor, like: Any, device: torch.device) -> torch.Tensor:
    """Rank 0's value, on all ranks; small: what the files do not hold is what is trained beside the base.

    A collective of the group that ``tensor`` is split over, too.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    empty = torch.empty(like.shape, dtype=like.dtype, device=device)
    full = empty if is_empty_storage(tensor) else tensor.detach().to(device=device, dtype=like.dtype).contiguous()
    dist.broadcast(full, src=0)
    return full


def placed(local: torch.Tensor, like: Any, device: torch.device, *, cpu_offload: bool) -> Any:
    """A rank's part as the sharded model holds it."""
    local = local.to(dtype=like.dtype).contiguous()
    if not isinstance(like, DTensor):
        return local.to("cpu" if cpu_offload else device)
    local = local.to(device)
    tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return tensor.to("cpu") if cpu_offload else tensor


# -- ZeRO-3 ----------------------------------------------------------------------------------------------------------------


def why_not_parts(model: torch.nn.Module) -> str | None:
    """Why the parts of such a model are left to transformers; None where they can be filled here."""
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_tensor"):
            return "ZeRO-3 has not split all of it"
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            return "zero_hpz_partition_size keeps a second part of it in each node"
    return None


def own_elements(parameter: Any) -> tuple[int, int]:
    """The elements of a parameter that this rank keeps, first and one after the last; without padding."""
    size = parameter.ds_tensor.ds_numel
    begin = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return begin, min(begin + size, parameter.ds_numel)


def fill_part(like: Any, value: torch.Tensor) -> None:
    """Put what was read of a parameter or buffer into its place, as the dtype that it has there."""
    with torch.no_grad():
        if not hasattr(like, "ds_tensor"):
            like.copy_(value.reshape(like.shape))
        elif str(getattr(like.ds_tensor.final_location, "value", like.ds_tensor.final_location)) == "nvme":
            like.ds_tensor.data = like.nvme_swapper.get_buffer(like, like.ds_tensor.ds_numel).data
            _fill_flat(like.ds_tensor, value)
            like.nvme_swapper.swap_out_and_release([like])
        else:
            _fill_flat(like.ds_tensor, value)
    like._is_hf_initialized = True  # else transformers draws random values for it


def _fill_flat(part: torch.Tensor, value: torch.Tensor) -> None:
    part[: value.numel()].copy_(value)
    part[value.numel() :].zero_()  # padding, which DeepSpeed leaves as the memory was: two runs' states would differ in it


def send_nothing_empty() -> AbstractContextManager[None]:
    """Parameters that ``zero.Init`` makes inside are split without a broadcast.

    To be left before PEFT's matrices are split: they have values, and by then the same object splits them.
    """
    init = getattr(sys.modules.get(_ZERO), "Init", None)
    original = getattr(init, "_zero_init_param", None)
    if init is None or original is None or not hasattr(init, "_convert_to_deepspeed_param"):
        return nullcontext()

    def split(self: Any, parameter: Any) -> None:
        if self.module is not None:
            original(self, parameter)
            return
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return replaced(init, _zero_init_param=split)


# -- 4 bits ----------------------------------------------------------------------------------------------------------------


def why_not_4_bits(quantizer: Any) -> str | None:
    """Why a base that transformers' ``quantizer`` is for is not read by rows; None where it is."""
    config = quantizer.quantization_config
    if type(quantizer).__name__ != "Bnb4BitHfQuantizer" or quantizer.pre_quantized:
        return f"{getattr(config, 'quant_method', 'quantised')} weights are not parted by rows"
    if not config.bnb_4bit_quant_storage.is_floating_point:
        return "bnb_4bit_quant_storage is not a floating point dtype, without which FSDP does not shard it"
    return None


def is_packed(parameter: Any) -> bool:
    """Whether a parameter is bitsandbytes' of 4 bits."""
    return type(parameter).__name__ == "Params4bit"


def packed(parameter: Any, shape: tuple[int, ...], *, device: str = "cpu") -> Any:
    """A parameter of bitsandbytes without values, for a weight of ``shape``, with all that was asked of ``parameter``.

    ``device`` meta: one that FSDP shards. Raises Unfollowed where it does not fill whole elements of its storage.
    """
    size, storage = math.prod(shape), parameter.quant_storage
    if size % (2 * storage.itemsize):
        raise Unfollowed(f"a weight of shape {list(shape)} does not fill whole elements of {storage}")
    length = (size // (2 * storage.itemsize), 1)
    value = torch.empty(length, dtype=storage, device="meta") if device == "meta" else empty_storage(length, storage)
    others = {
        key: attribute for key, attribute in parameter.__dict__.items() if key not in ("data", "requires_grad", "bnb_quantized")
    }
    return type(parameter)(value, requires_grad=False, **{**others, "bnb_quantized": True})


def to_meta(model: Any, names: Collection[str]) -> list[tuple[str, torch.nn.Module, str, Any]]:
    """Put what is to be read, or has no values, on the meta device, where FSDP leaves it, ties kept.

    ``names``: what is to be read, as the model without PEFT names it.

    Returns each such entry: its name in the model, the module and the name there, and the parameter as it was.
    """
    made: dict[int, Any] = {}
    parameters = []
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            if parameter is None or not (plain(full) in names or is_empty_storage(parameter)):
                continue
            if id(parameter) not in made:
                shape = tuple(parameter.shape)
                made[id(parameter)] = (
                    packed(parameter, (math.prod(shape) * 2 * parameter.quant_storage.itemsize,), device="meta")
                    if is_packed(parameter)
                    else torch.nn.Parameter(torch.empty_like(parameter, device="meta").contiguous(), parameter.requires_grad)
                )
            put(module, name, made[id(parameter)])
            parameters.append((full, module, name, parameter))
    return parameters


def _elements(like: DTensor, parameter: Any) -> tuple[int, int]:
    each = 2 * parameter.quant_storage.itemsize
    first, last = span(like)
    return first * each, last * each


def blocks(source: ParameterSource, like: DTensor, parameter: Any) -> tuple[int, int]:
    """Elements from the begin of the first block to the end of the last one that hold any of this rank's."""
    first, last = _elements(like, parameter)
    if first >= last:
        return 0, 0
    block = parameter.blocksize
    return first // block * block, min(-(-last // block) * block, math.prod(source.shape))


def quantise(
    elements: torch.Tensor, source: ParameterSource, like: DTensor, parameter: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the elements of :func:`blocks`, on the device where they lie: this rank's rows of the packed weight, in the
    storage dtype, and the float32 scales of the blocks that begin in its rows.
    """
    from bitsandbytes import functional

    storage, block = parameter.quant_storage, parameter.blocksize
    first, last = _elements(like, parameter)
    begin, _ = blocks(source, like, parameter)
    if first >= last:
        return torch.empty((0, 1), dtype=storage, device=elements.device), torch.empty(0, device=elements.device)
    quantised, state = functional.quantize_4bit(
        elements, blocksize=block, compress_statistics=False, quant_type=parameter.quant_type, quant_storage=torch.uint8
    )
    values = quantised.reshape(-1)[(first - begin) // 2 : (last - begin) // 2].clone().view(storage).reshape(-1, 1)
    mine, after = (-(-edge // block) for edge in (first, last))
    return values, state.absmax[mine - begin // block : after - begin // block].clone()


def state_of(scales: torch.Tensor, source: ParameterSource, like: DTensor, parameter: Any) -> Any:
    """bitsandbytes' ``QuantState`` of the whole weight, from every rank's own scales. A collective of the shard's group."""
    import bitsandbytes.functional as bnb

    functional: Any = bnb  # without annotations
    absmax = _gathered(scales, like, parameter)
    options = {
        "shape": torch.Size(source.shape),
        "dtype": source.dtype,
        "blocksize": parameter.blocksize,
        "code": functional.get_4bit_type(parameter.quant_type, device=absmax.device),
        "quant_type": parameter.quant_type,
    }
    if not parameter.compress_statistics:
        return functional.QuantState(absmax=absmax, **options)
    offset = absmax.mean()
    nested, state = functional.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
    return functional.QuantState(absmax=nested, offset=offset, state2=state, **options)


def _gathered(scales: torch.Tensor, like: DTensor, parameter: Any) -> torch.Tensor:
    """The scales of all blocks, in order: each rank of the shard's group has those that begin in its rows."""
    axis = next(i for i, placement in enumerate(like.placements) if isinstance(placement, Shard))
    group, ranks = like.device_mesh.get_group(axis), like.device_mesh.size(axis)
    each, rows = 2 * parameter.quant_storage.itemsize, like.shape[0]
    chunk = -(-rows // ranks)  # as torch.chunk parts them, which FSDP takes
    edges = [-(-min(rank * chunk, rows) * each // parameter.blocksize) for rank in range(ranks + 1)]
    counts = [after - before for before, after in pairwise(edges)]
    padded = scales.new_zeros(max(counts))
    padded[: len(scales)] = scales
    boxes = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(boxes, padded, group=group)
    return torch.cat([box[:count] for box, count in zip(boxes, counts, strict=True)])
