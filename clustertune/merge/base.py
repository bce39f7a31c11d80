"""The base model's folder, read without loading a weight: headers, index, config, and what must be refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.manifest import DigestComparison, read_json
from clustertune.recipe.checks import CONV1D_MODELS
from clustertune.tensorfile import Tensor, TensorHeader
from clustertune.training.base_weights import read_weights

EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.weight$")


@dataclass(frozen=True)
class Base:
    """A base model: its tensors in the order of their bytes, shard after shard."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    headers: dict[Path, TensorHeader]
    index_metadata: dict[str, Any] = field(default_factory=dict)
    unrecorded: list[str] = field(default_factory=list)
    """Names of the weight files that no digest is known of."""

    @property
    def tied(self) -> bool:
        """Whether the output head shares the input embedding's tensor."""
        stated = self.config.get("tie_word_embeddings")
        if stated is None and isinstance(self.config.get("text_config"), dict):
            stated = self.config["text_config"].get("tie_word_embeddings")
        if stated is None:
            return not any(re.search(r"(^|\.)(lm_head|embed_out)\.weight$", name) for name in self.tensors)
        return bool(stated)

    def identity(self) -> dict[str, list[Any]]:
        """:func:`identity` of the shards: with the headers, what tells one base from another without reading it."""
        return identity(self.headers)


def identity(files: Iterable[Path]) -> dict[str, list[Any]]:
    """By name: bytes and modification time. Raises OSError."""
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)}


def _config_problems(config: dict[str, Any], path: Path) -> list[Problem]:
    problems = []
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "?") if isinstance(method, dict) else method
        problems.append(
            Problem(
                f"the base is quantised ({method}); its weights cannot take a LoRA update exactly",
                file=str(path),
                key="quantization_config",
                fix="merge into the unquantised base",
            )
        )
    if config.get("model_type") in CONV1D_MODELS:
        problems.append(
            Problem(
                f"{config['model_type']} keeps weights transposed (Conv1D): not supported", file=str(path), key="model_type"
            )
        )
    return problems


def read_base(folder: Path) -> Base:
    """Read a base model's headers and config. Raises UserError with every problem found."""
    if not folder.is_dir():
        raise UserError("no such folder", file=str(folder))
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    recorded = frozenset[Path]()
    with collect_problems(problems):
        config = read_json(folder / "config.json")
        problems += _config_problems(config, folder / "config.json")
    try:
        comparison = DigestComparison(folder)
        recorded, problems = comparison.recorded, problems + comparison.problems
        tensors, headers, metadata = read_weights(folder)
    except UserError as error:
        problems += [p for p in error.problems if p not in problems]
    raise_if(problems)
    unrecorded = [path.name for path in headers if path.absolute() not in recorded]
    return Base(folder, config, tensors, headers, metadata, unrecorded)
