"""What ZeRO-3 keeps of a model in this rank, read from the files by the rank itself.

transformers 5.23 has rank 0 map the files and broadcast every parameter, of which each rank keeps its part
(``integrations/deepspeed.py``, ``_load_state_dict_into_zero3_model``); before that DeepSpeed 0.19 broadcasts every parameter
as it makes it, when it has no values yet (``zero.Init._zero_init_param``). Here nothing of the base is sent. A part is a run
of elements of the flattened parameter, the last one padded; it is on the GPU, in host memory or in a file on NVMe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from clustertune.training.loading_files import RowReader
from clustertune.training.loading_sources import ParameterSource

_MODULE = "deepspeed.runtime.zero.partition_parameters"


def is_parted(model: torch.nn.Module) -> bool:
    """Whether the model was made under DeepSpeed's ``zero.Init``."""
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def why_not(model: torch.nn.Module) -> str | None:
    """Why the parts of such a model are left to transformers; None where they can be filled here."""
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_tensor"):
            return "ZeRO-3 has not split all of it"
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            return "zero_hpz_partition_size keeps a second part of it in each node"
    return None


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict in the shapes that it has over all ranks, without values."""
    named = model.state_dict(keep_vars=True)
    return {name: torch.empty(getattr(v, "ds_shape", v.shape), dtype=v.dtype, device="meta") for name, v in named.items()}


def own_elements(parameter: Any) -> tuple[int, int]:
    """The elements of a parameter that this rank keeps, first and one after the last; padding is none of them."""
    size = parameter.ds_tensor.ds_numel
    begin = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return begin, min(begin + size, parameter.ds_numel)


def read(name: str, source: ParameterSource, like: Any, reader: RowReader, model: Any) -> torch.Tensor:
    """This rank's part of a parameter, flat and on the CPU, or all of a buffer, which ZeRO-3 does not split."""
    if not hasattr(like, "ds_tensor"):
        return source.read(name, reader, model, 0, source.shape[0] if source.shape else 1)
    return source.elements(name, reader, model, *own_elements(like))


def fill(like: Any, value: torch.Tensor) -> None:
    """Put what :func:`read` gave into its place, as the dtype that it has there."""
    with torch.no_grad():
        if not hasattr(like, "ds_tensor"):
            like.copy_(value.reshape(like.shape))
        elif _is_on_nvme(like):
            like.ds_tensor.data = like.nvme_swapper.get_buffer(like, like.ds_tensor.ds_numel).data
            _fill_flat(like.ds_tensor, value)
            like.nvme_swapper.swap_out_and_release([like])
        else:
            _fill_flat(like.ds_tensor, value)
    like._is_hf_initialized = True  # else transformers draws random values for it


def _fill_flat(part: torch.Tensor, value: torch.Tensor) -> None:
    part[: value.numel()].copy_(value)
    part[value.numel() :].zero_()  # padding, which DeepSpeed leaves as the memory was: two runs' states would differ in it


def _is_on_nvme(parameter: Any) -> bool:
    return str(getattr(parameter.ds_tensor.final_location, "value", parameter.ds_tensor.final_location)) == "nvme"


def send_nothing_empty() -> Callable[[], None]:
    """Parameters that ``zero.Init`` makes from here on are split without a broadcast. Returns what undoes it.

    To be undone before PEFT's matrices are split: they have values, and by then the same object splits them.
    """
    init = getattr(sys.modules.get(_MODULE), "Init", None)
    original = getattr(init, "_zero_init_param", None)
    if init is None or original is None or not hasattr(init, "_convert_to_deepspeed_param"):
        return lambda: None

    def split(self: Any, parameter: Any) -> None:
        if self.module is not None:
            original(self, parameter)
            return
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()

    init._zero_init_param = split

    def undo() -> None:
        init._zero_init_param = original

    return undo


def likes(model: torch.nn.Module, sources: Mapping[str, ParameterSource]) -> dict[str, Any]:
    """The parameters and buffers that the files hold, each once, by the first of its names."""
    named = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: named[name] for name in sources if first.setdefault(id(named[name]), name) == name}
