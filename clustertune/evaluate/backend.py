"""What answers lm-eval's requests: its own ``HFLM`` here, refusing what transformers lets pass with a warning; or servers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clustertune.config.schema import Eval
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.evaluate import servers
from clustertune.evaluate.model import ROOM, Backend, ModelFacts, weight_bytes

_NAMED = 5
"""How many tensors an error names."""


def describe(name: str, model: ModelFacts, adapter: Path | None = None) -> Backend:
    """The backend called ``name`` (``hf`` or ``vllm``) for a model, before it is loaded. Raises UserError."""
    if name == "hf":
        return Backend("hf", version("transformers"), model.dtype)
    return servers.describe(model, adapter)


def choose(requested: str, model: ModelFacts, device: str | None) -> tuple[str, str]:
    """The backend that is asked for; of ``auto`` the one that suits the model and this machine. With one sentence why."""
    import torch

    if requested != "auto":
        return requested, "asked for"
    if os.environ.get(servers.GIVEN):
        return "vllm", "vllm: the job has started its servers"
    if device == "cpu" or not torch.cuda.is_available():
        return "hf", "hf: no GPU is used"
    weights = weight_bytes(model.folder)
    memory = torch.cuda.get_device_properties(0).total_memory
    sizes = f"{weights / 2**30:.1f} GiB of weights, {memory / 2**30:.0f} GiB of memory a GPU"
    if ROOM * weights < memory:
        return "hf", f"hf: one GPU holds the model ({sizes})"
    if not servers.find_program():
        return "hf", f"hf: vLLM is not here, the model is spread over all GPUs ({sizes})"
    return "vllm", f"vllm: one GPU does not hold the model ({sizes})"


@contextlib.contextmanager
def model_for(
    backend: Backend, model: ModelFacts, settings: Eval, *, adapter: Path | None = None, device: str
) -> Iterator[Any]:
    """lm-eval's ``LM`` for a model, ready for requests while the context lasts.

    ``adapter``: a LoRA adapter's folder that is applied to the model without merging. Raises UserError where a tensor is
    missing, the model does not fit, or a server does not start.
    """
    if backend.name == "hf":
        yield load_lm(model.folder, device, settings.batch_size, adapter, model.tokenizer_folder)
        return
    with servers.model_for(model, settings, adapter=adapter) as lm:
        yield lm


def load_lm(folder: Path, device: str, batch_size: int, adapter: Path | None = None, tokenizer: Path | None = None) -> Any:
    """lm-eval's model on ``device`` (``auto``: spread over all GPUs), in the type that the model's configuration names.

    Raises UserError where tensors are missing or of another shape: transformers draws missing ones at random and says so
    in a warning only, so that a half copied model would be scored.
    """
    from lm_eval.models.huggingface import HFLM

    placing = {"parallelize": True} if device == "auto" else {"device": device}
    with out_of_memory(folder), _watched() as reports:
        try:
            parts = {
                "peft": adapter and str(adapter),
                "tokenizer": str(tokenizer) if tokenizer and tokenizer != folder else None,
            }
            lm = HFLM(pretrained=str(folder), dtype="auto", batch_size=batch_size, **parts, **placing)
        except RuntimeError:
            _judge(folder, reports)
            raise
    _judge(folder, reports)
    return lm


def _judge(folder: Path, reports: list[Any]) -> None:
    problems = []
    for report in reports:
        kinds = {
            "missing": sorted(report.missing_keys),
            "of another shape than the configuration says": sorted(str(entry[0]) for entry in report.mismatched_keys),
        }
        for what, names in kinds.items():
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                problems.append(
                    Problem(
                        f"{len(names)} tensors are {what}: {', '.join(names[:_NAMED])}{more}",
                        file=str(folder),
                        fix="copy or merge the model again",
                    )
                )
    raise_if(problems)


@contextlib.contextmanager
def _watched() -> Iterator[list[Any]]:
    """Gather transformers' loading reports while the context lasts: 5.23 gives them only to callers that ask for a tuple."""
    from transformers import modeling_utils

    reports: list[Any] = []
    original = modeling_utils.log_state_dict_report

    def keep(*args: Any, **kwargs: Any) -> None:
        reports.append(kwargs["loading_info"])
        original(*args, **kwargs)

    modeling_utils.log_state_dict_report = keep
    try:
        yield reports
    finally:
        modeling_utils.log_state_dict_report = original


@contextlib.contextmanager
def out_of_memory(folder: Path) -> Iterator[None]:
    """Raises a UserError that names the key to lower, where the model or a batch does not fit into memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            Problem(
                f"does not fit: {error}",
                file=str(folder),
                key="eval.batch_size",
                fix="lower the batch size, or spread the model over all GPUs with --device auto",
            ),
            ExitCode.FAILED,
        ) from error
