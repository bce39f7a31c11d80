"""An evaluation that says the same on every mesh: the mean over the labelled tokens of the eval split, each row once.

transformers 5.23 takes the mean of the batches' means over ranks, and cuts the last, padded batch by counting ranks as rows:
under tp or cp, whose ranks share their rows, full batches then weigh more than the last one. Here the split is filled with
rows without labels until it divides, and each rank sums what its labels cost: whatever is counted twice is so in both sums.
Of preferences the same is done with pairs for tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import torch.distributed as dist

IGNORED_LABEL = -100
"""What a label is where no loss is taken."""
Base: Any = object
"""What stands in for one of TRL's trainers, which :mod:`clustertune.training.trainer` puts behind the classes made of it."""


def filled(rows: Any, multiple: int) -> Any:
    """The rows with as many behind them as divide by ``multiple``: copies of the first one, without a label or an answer.

    accelerate 1.15 would repeat the first rows, labels and all. What is no ``datasets.Dataset`` with labels is left alone.
    """
    lacking = -len(rows) % multiple if isinstance(rows, datasets.Dataset) else 0
    first = rows[0] if lacking else {}
    if "labels" in first:
        blank = {**first, "labels": [IGNORED_LABEL] * len(first["labels"])}
    elif "chosen_ids" in first:
        blank = {**first, "chosen_ids": [], "rejected_ids": []}
    else:
        return rows
    return torch.utils.data.ConcatDataset([rows, [blank] * lacking])


def labels_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """How many tokens of a batch the loss is taken of; labels are moved by one where the model does not do it."""
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    count: torch.Tensor = labels.ne(IGNORED_LABEL).sum()
    return count


class TokenMeans(Base):  # type: ignore[misc]
    """A trainer whose ``eval_loss``, token accuracy and entropy are means over tokens, the same on all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batches: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def my_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank computes of a batch that it is given."""
        return inputs

    def weighed(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], torch.Tensor]:
        """What this rank evaluates of a batch, and how much of it the mean is taken over."""
        inputs = self.my_inputs(inputs)
        return inputs, labels_of(inputs)

    @property
    def _rows_at_a_time(self) -> int:
        """Rows that all ranks together evaluate in one step."""
        sizes = self.accelerator.parallelism_config
        sharing = int(sizes.tp_size * sizes.cp_size) if sizes is not None else 1
        return int(self.args.eval_batch_size) * int(self.accelerator.num_processes) // sharing

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As the Trainer's; where there are several ranks, of rows that divide over them."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.accelerator.num_processes > 1:
            rows = filled(rows, self._rows_at_a_time)
        return super().get_eval_dataloader(rows)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:  # noqa: ARG002
        """Keeps the sum of this rank's part of the batch, and gives the Trainer nothing to gather."""
        inputs, count = self.weighed(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            mean = self.compute_loss(model, inputs).detach().double()
        # Without a label the mean is 0 or, with label smoothing, no number.
        self._batches.append(torch.stack([torch.where(count > 0, mean * count, 0.0), count.double()]))
        return None, None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the Trainer's, with the loss, and what TRL keeps of each batch, over all tokens; no number without any."""
        self._batches = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if not self._batches:
            return output
        metrics = {key: values for key, values in self._metrics["eval"].items() if len(values) == len(self._batches)}
        each = torch.stack(self._batches)
        shares = [(torch.tensor(values).to(each) * each[:, 1]).sum() for values in metrics.values()]
        sums = torch.stack([*each.sum(0), *shares])
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, count, *shares = sums.tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / count if count else float("nan")
        for values, share in zip(metrics.values(), shares, strict=True):
            values[:] = [share / count] if count else values
        return output


class PairMeans(TokenMeans):
    """A trainer whose evaluation takes its means over pairs of answers."""

    def weighed(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], torch.Tensor]:
        """Without the pairs that only fill the split, where there are others."""
        real = inputs["completion_mask"].chunk(2)[0].any(dim=1)
        chosen = torch.cat([real, real]) if real.any() else slice(None)
        return {name: values[chosen] for name, values in inputs.items()}, real.sum()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with _alone(self.accelerator):
            return super().prediction_step(*args, **kwargs)


@contextmanager
def _alone(accelerator: Any) -> Iterator[None]:
    """Have TRL's metrics say what this rank computed: the ranks leave out different numbers of pairs."""
    accelerator.gather = accelerator.gather_for_metrics = lambda values, *_, **__: values
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
