"""Loading the model with lm-eval's ``HFLM``, and refusing what transformers lets pass with a warning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError

_NAMED = 5
"""How many tensors an error names."""


def load_lm(folder: Path, device: str, batch_size: int) -> Any:
    """lm-eval's model on ``device`` (``auto``: spread over all GPUs), in the type that the model's configuration names.

    Raises UserError where tensors are missing or of another shape: transformers draws missing ones at random and says so
    in a warning only, so that a half copied model would be scored.
    """
    from lm_eval.models.huggingface import HFLM

    placing = {"parallelize": True} if device == "auto" else {"device": device}
    with out_of_memory(folder), _watched() as reports:
        try:
            lm = HFLM(pretrained=str(folder), dtype="auto", batch_size=batch_size, **placing)
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
    if problems:
        raise UserError(problems)


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
    """A model that does not fit is told in words."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            Problem(
                f"does not fit: {error}",
                file=str(folder),
                key="eval.ifeval.batch_size",
                fix="lower the batch size, or spread the model over all GPUs with --device auto",
            ),
            ExitCode.FAILED,
        ) from error
