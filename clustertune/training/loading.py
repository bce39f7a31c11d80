"""FSDP2 without a whole copy of the model anywhere: each rank reads the rows that it keeps.

accelerate 1.15 has a model loaded whole and then broadcast by rank 0 (``fsdp_cpu_ram_efficient_loading: true``): 810 GB in
one process for a model of 405B parameters. Two functions of the stack are replaced where the recipe's accelerate file asks
for just that, everything else stays theirs:

* transformers' ``_load_pretrained_model`` leaves the parameters :func:`empty_storage`, having looked up where each comes from;
* accelerate's ``fsdp2_load_full_state_dict``, called with the sharded model, fills each rank's part from the files. What is
  not in them (LoRA's matrices, drawn from the same seed) is broadcast from rank 0 as before.

Of DeepSpeed's ZeRO-3, which parts a model while it is made, each rank's part is filled in the first of the two.

What rows cannot say (:func:`clustertune.config.distribution.why_whole`) is loaded the old way, with a note.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from clustertune.config import accelerate_file as acc
from clustertune.config.distribution import IN_FLIGHT, Distribution
from clustertune.errors import Problem, UserError
from clustertune.manifest import agree
from clustertune.training import loading_quantised as quantised
from clustertune.training import loading_zero as zero
from clustertune.training.collectives import Group
from clustertune.training.loading_files import RowReader, survey
from clustertune.training.loading_sources import SHOWN, ParameterSource, Sources, Unfollowed, find
from clustertune.training.loading_storage import (
    broadcast,
    clean,
    empty_storage,
    is_empty_storage,
    placed,
    plain,
    put,
    region,
    rows,
    span,
)
from clustertune.training.startup import Startup

THREADS = IN_FLIGHT - 1
"""Reads at a time in one rank; transformers' own figure (``GLOBAL_WORKERS``): more make storage slower."""
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""What ``accelerate launch`` makes of ``fsdp_cpu_ram_efficient_loading``; accelerate and transformers read it late."""
_HELD = ("model", "state_dict", "checkpoint_files", "load_config")
"""The parameters of transformers' ``_load_pretrained_model`` that are used here."""


class Loading:
    """The replaced functions, for the length of one attempt: :meth:`install`, make and prepare the model, :meth:`remove`."""

    def __init__(self, distribution: Distribution, startup: Startup, group: Group | None = None) -> None:
        from accelerate.utils import str_to_bool

        # The rank's environment may differ from the file: then accelerate does not fill empty storage.
        wanted = distribution.kind == "FSDP2" and distribution.efficient_loading
        self._wanted = wanted and str_to_bool(os.environ.get(EFFICIENT, "true")) == 1
        self._unfit = ""
        self._is_split = distribution.tp > 1
        self.startup, self._group = startup, group or Group()
        self._reader = RowReader()
        self._model: Any = None
        self._sources: Sources | None = None
        self._undo: list[tuple[Any, str, Any]] = []
        self._send_again: Callable[[], None] = lambda: None
        self.notes: list[str] = []

    def install(self) -> Loading:
        """Replace the functions in this process, until :meth:`remove`."""
        from accelerate import accelerator
        from accelerate.utils import fsdp_utils
        from transformers import PreTrainedModel
        from transformers.utils.loading_report import LoadStateDictInfo

        load, fill = PreTrainedModel._load_pretrained_model, fsdp_utils.fsdp2_load_full_state_dict
        prepare = accelerator.fsdp2_prepare_model
        # transformers 5.5.4, of the reference's stack, tells less of what it loaded: these functions were not tried with it.
        known = "skipped_pp_keys" in LoadStateDictInfo.__dataclass_fields__
        if not known or not set(_HELD) <= set(inspect.signature(load).parameters):
            self._unfit = "this transformers loads models in another way"
        self._replace(PreTrainedModel, "_load_pretrained_model", staticmethod(self._loader(load)))
        self._replace(fsdp_utils, "fsdp2_load_full_state_dict", self._filler(fill))
        self._replace(accelerator, "fsdp2_prepare_model", self._preparer(prepare))
        self._send_again = zero.send_nothing_empty()
        return self

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Put the functions back; nothing is left open."""
        self._send_again()
        while self._undo:
            setattr(*self._undo.pop())
        self._reader.close()
        self._model = self._sources = None

    # -- from_pretrained --------------------------------------------------------------------------------------------

    def _loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(
            model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *rest: Any, **more: Any
        ) -> Any:
            self._send_again()
            parted = zero.is_parted(model)
            wanted, take = (True, self._take_parts) if parted else (self._wanted, self._hold)
            reason = self._reason(state_dict, checkpoint_files, load_config) or (zero.why_not(model) if parted else None)
            with self.startup.part("reading"):
                if wanted and reason is None:
                    try:
                        return take(model, [Path(file) for file in checkpoint_files or ()], load_config), None
                    except Unfollowed as error:
                        reason = str(error)
                size = sum(Path(file).stat().st_size for file in checkpoint_files or ())
                if wanted and dist.is_initialized():  # one process has nothing to part
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
        if load_config.hf_quantizer is not None and (reason := quantised.why_not(load_config.hf_quantizer)):
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
        sources = self._find(model, files, load_config, zero.whole(model))
        likes = zero.likes(model, sources.by_name)
        wanted = {name: sources.by_name[name] for name in likes}
        problems: list[Problem] = []

        def part(name: str, source: ParameterSource, like: Any) -> torch.Tensor:
            return zero.read(name, source, like, self._reader, model)

        try:
            for name, value in self._read(wanted, likes, part):
                zero.fill(likes[name], value)
        except UserError as error:
            problems += error.problems
        agree(problems, self._group)
        self._count()
        return self._record(model, sources)

    def _find(self, model: Any, files: list[Path], load_config: Any, wanted: Mapping[str, torch.Tensor]) -> Sources:
        """What :func:`find` says, agreed on: a node's own copy of the files may differ, and no rank may continue alone."""
        found, problems, other = None, [], ""
        try:
            found = find(model, survey(files, (load_config.sharded_metadata or {}).get("weight_map")), load_config, wanted)
        except UserError as error:
            problems = error.problems
        except Unfollowed as error:
            other = str(error)
        except (ImportError, AttributeError, TypeError) as error:  # another version's functions, other arguments
            other = f"this transformers maps names in another way ({error})"
        agree(problems, self._group)
        reasons = [reason for reason in self._group.gather(other) if reason]
        if found is None or reasons:
            raise Unfollowed(reasons[0])
        return found

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
            # A DTensor was made in float32 when it was split: clustertune/training/tensor.py.
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

    def _fill(self, device: torch.device, model: Any, given: Mapping[str, Any], *, cpu_offload: bool) -> None:
        """Give a sharded model without data this rank's part of every value, in place."""
        empty = model.state_dict()
        shared = {clean(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        sources = self._by_parameter(empty, shared)
        problems: list[Problem] = []
        made: dict[str, Any] = {}
        seen: dict[int, str] = {}
        wanted = {}
        for name in empty:
            first = seen.setdefault(shared.get(clean(name), id(name)), name)
            if first == name and name in sources:
                wanted[name] = sources[name]
            elif first == name and dist.get_rank() == 0 and is_empty_storage(given[name]):
                problems.append(
                    Problem("no weight file holds it", key=name, fix=f"{acc.key_of('cpu_ram_efficient_loading')}: false")
                )
        try:
            for name, local in self._read(wanted, empty, self._part):
                made[name] = placed(local, empty[name], device, cpu_offload=cpu_offload)
        except UserError as error:
            problems += error.problems
        agree(problems, self._group)
        for name, like in empty.items():
            first = seen[shared.get(clean(name), id(name))]
            if first != name:
                made[name] = made[first]
            elif name not in made:
                whole = broadcast(given[name], like, device)
                made[name] = placed(rows(whole, like), like, device, cpu_offload=cpu_offload)
        model.load_state_dict(made, assign=True)
        self._count()

    def _count(self) -> None:
        self.startup.read_bytes += self._reader.bytes
        self._reader.bytes = 0
        self._reader.close()

    def _preparer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """accelerate keeps a base in 4 bits where it is and does not fill it: that is done here, around the whole of it."""

        def prepare(accelerator: Any, model: Any) -> Any:
            if self._sources is None or not any(quantised.is_packed(p) for p in model.parameters()):
                return original(accelerator, model)
            held = quantised.to_meta(model, self._sources.by_name)
            model = original(accelerator, model)
            offload = accelerator.state.fsdp_plugin.cpu_offload
            with self.startup.part("reading"):
                self._fill_held(held, accelerator.device, cpu_offload=type(offload).__name__ == "CPUOffloadPolicy")
            return model

        return prepare

    def _fill_held(self, held: list[tuple[str, torch.nn.Module, str, Any]], device: torch.device, *, cpu_offload: bool) -> None:
        """Fill what :func:`quantised.to_meta` put there and FSDP has sharded since, module by module."""
        assert self._sources is not None
        likes = {name: module._parameters[own] for name, module, own, _ in held}
        packed = {name: parameter for name, _, _, parameter in held if quantised.is_packed(parameter)}
        sources = self._by_parameter(likes, {clean(name): id(like) for name, like in likes.items()})
        firsts: dict[int, str] = {}
        wanted = {n: sources[n] for n, like in likes.items() if firsts.setdefault(id(like), n) == n and n in sources}
        problems = [Problem("no weight file holds it", key=n) for n in likes if n not in sources]
        made: dict[int, Any] = {}

        def part(name: str, source: ParameterSource, like: Any) -> Any:
            try:
                if name in packed:
                    return quantised.read(source, plain(name), like, packed[name], self._reader, self._model)
                return self._part(name, source, like)
            except UserError as error:  # the others wait for this rank's scales: it continues until all can end together
                problems.extend(error.problems)
                return None

        homes = {name: module for name, module, _, _ in held}
        for name, found in self._read(wanted, likes, part):
            like, source, local = likes[name], wanted[name], found
            if name in packed:
                begin, end = quantised.blocks(source, like, packed[name])
                whole = torch.zeros(end - begin, dtype=source.dtype) if found is None else found
                done = quantised.quantise(whole.to(device), source, like, packed[name])
                homes[name].quant_state = quantised.state_of(done.scales, source, like, packed[name])
                local = done.values
            if local is not None:
                made[id(like)] = torch.nn.Parameter(placed(local, like, device, cpu_offload=cpu_offload), like.requires_grad)
        agree(problems, self._group)
        for name, module, own, _ in held:
            put(module, own, made[id(likes[name])])
        self._count()

    def _by_parameter(self, empty: Mapping[str, Any], shared: Mapping[str, int]) -> dict[str, ParameterSource]:
        """The source of every entry of the state dict that the files hold, under whichever of a tied parameter's names."""
        assert self._sources is not None
        found = {name: source for name in empty if (source := self._sources.by_name.get(plain(name))) is not None}
        tied = {shared[clean(name)]: source for name, source in found.items() if clean(name) in shared}
        either = {name: found.get(name) or tied.get(shared.get(clean(name), 0)) for name in empty}
        return {name: source for name, source in either.items() if source is not None}

    def _read(
        self, sources: Mapping[str, ParameterSource], empty: Mapping[str, Any], part: Callable[[str, ParameterSource, Any], Any]
    ) -> Iterator[tuple[str, Any]]:
        """This rank's part of each parameter, in order, read a few at a time so that memory stays at a few parts."""
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[tuple[str, Future[Any]]] = deque()
            try:
                for name, source in sources.items():
                    waiting.append((name, pool.submit(part, name, source, empty[name])))
                    if len(waiting) > THREADS:
                        first, future = waiting.popleft()
                        yield first, future.result()
                while waiting:
                    first, future = waiting.popleft()
                    yield first, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def _part(self, name: str, source: ParameterSource, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor):
            return source.read(plain(name), self._reader, self._model, 0, source.shape[0] if source.shape else 1)
        begin, end = span(like)
        rows = source.read(plain(name), self._reader, self._model, begin, end)
        # Columns, of what tp splits by its inputs: the ranks of a node read the same rows, which its page cache holds.
        return rows[(slice(None), *region(like)[1:])].contiguous() if rows.dim() > 1 else rows


def _without_values(model: Any, name: str, source: ParameterSource) -> tuple[torch.nn.Module, str, Any]:
    """A parameter or buffer of the model, as it is to be but without storage; with its module and its name there."""
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    before = getattr(module, own)
    if quantised.is_packed(before):
        return module, own, quantised.packed(before, source.shape)
    value = empty_storage(source.shape, source.dtype)
    if own in module._parameters:
        value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
    return module, own, value
