"""``ops/hardware.yaml``: what a GPU can hold, each figure with its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from clustertune.config.cluster_words import schema_problems
from clustertune.config.schema import NAME, Number, Section
from clustertune.config.yamlfile import Document, read_yaml
from clustertune.errors import Problem, UserError

HARDWARE = Path(__file__).resolve().parents[2] / "ops" / "hardware.yaml"
FIGURES = ("memory_gb", "usable_gib")
"""Keys that hold a figure: each must have a source."""


class Gpu(Section):
    """One model of GPU."""

    vendor: Literal["nvidia"]
    """NCCL and ``nvidia-smi`` are what the rest of the project speaks to."""
    generation: Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
    compute_capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
    memory_gb: Annotated[Number, Field(gt=0, le=10_000)]
    """As sold; vendors mean GiB here, or less."""
    usable_gib: Annotated[Number, Field(gt=0, le=10_000)]
    """What CUDA says the device has in all, GiB; the least that was seen."""
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """What ``nvidia-smi`` calls it."""
    types: tuple[str, ...] = ()
    """GRES types that mean this model and no other."""
    sources: dict[str, str]
    """For each figure, where it stands: a link, or what was read where."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory that one process could have at most."""
        return int(self.usable_gib * 2**30)


class HardwareFile(Section):
    gpus: dict[Annotated[str, Field(pattern=rf"^{NAME}$")], Gpu]


@cache
def load_hardware(path: Path = HARDWARE) -> dict[str, Gpu]:
    """The GPUs by name. Raises UserError with every problem of the file."""
    document = read_yaml(path, "ops/hardware.yaml" if path == HARDWARE else str(path))
    try:
        gpus = HardwareFile.model_validate(document.data).gpus
    except ValidationError as error:
        raise UserError(schema_problems(HardwareFile, error, document)) from None
    if problems := find_problems(gpus, document):
        raise UserError(problems)
    return gpus


def find_problems(gpus: dict[str, Gpu], document: Document) -> list[Problem]:
    """Figures without a source or against each other, and names that two models claim."""
    problems: list[Problem] = []
    owners: dict[str, str] = {}

    def add(path: tuple[str, ...], message: str, fix: str | None = None) -> None:
        problems.append(Problem(message, file=document.place(("gpus", *path)), key=".".join(("gpus", *path)), fix=fix))

    for name, gpu in gpus.items():
        for key in FIGURES:
            if not gpu.sources.get(key, "").strip():
                add((name, "sources", key), "missing: every figure has its source", "give the link that it was read from")
        for key in sorted(set(gpu.sources) - set(FIGURES)):
            add((name, "sources", key), "there is no such figure")
        # 48 GB with ECC leave 44.4 GiB; less than that share is a typing error, more than was sold as well.
        if not 0.9 * gpu.memory_gb <= gpu.usable_gib <= gpu.memory_gb:
            add((name, "usable_gib"), f"{gpu.usable_gib} GiB cannot be what a GPU of {gpu.memory_gb:g} GB leaves")
        for key in ("names", "types"):
            for word in getattr(gpu, key):
                owner = owners.setdefault(plain(word), name)
                if owner != name:
                    add((name, key), f"{word!r} is also {owner}: what is found could not be told apart", "keep one")
    return problems


def plain(word: str) -> str:
    """A name without case and separators: Slurm's AutoDetect writes ``nvidia_h100_80gb_hbm3`` for ``NVIDIA H100 80GB HBM3``."""
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")


def recognise(word: str) -> str | None:
    """The GPU that ``nvidia-smi`` or a GRES type calls ``word``; None where it is unknown or could be several."""
    wanted = plain(word)
    for name, gpu in load_hardware().items():
        if wanted in {plain(name), *map(plain, gpu.names), *map(plain, gpu.types)}:
            return name
    return None
