"""``ops/hardware.yaml``: what a GPU, a link and a network can do, each figure with its source."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from clustertune.cluster.schema import INTERCONNECTS, NETWORKS
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.layers import did_you_mean, read_yaml
from clustertune.recipe.sections import Number, Plain, Score, Section
from clustertune.tree import IS_INSTALLED, ROOT

HARDWARE = ROOT / "ops" / "hardware.yaml"
OLDEST_FP8 = 8.9
"""Compute capability from which tensor cores have fp8 (Ada; https://developer.nvidia.com/cuda-gpus)."""

Figure = Annotated[Number, Field(gt=0, le=1_000_000)]


class Sourced(Section):
    """Figures, and where each stands."""

    sources: dict[str, str]
    """For each figure a link, or what was read where; ``assumed`` and why, where nothing is published."""


class GpuModel(Sourced):
    """One model of GPU."""

    vendor: Literal["nvidia"]
    """NCCL and ``nvidia-smi`` are what the rest of the project speaks to."""
    generation: Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
    compute_capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
    memory_gb: Annotated[Number, Field(gt=0, le=10_000)]
    """As sold; vendors mean GiB here, or less."""
    usable_gib: Annotated[Number, Field(gt=0, le=10_000)]
    """What CUDA says the device has in all, GiB; the least that was seen."""
    bf16_tflops: Figure | None
    """Dense peak of the tensor cores, 10^12 FLOP/s, fp32 accumulation, without sparsity; None: they have no bfloat16."""
    fp16_tflops: Figure | None = None
    """The same in fp16, where there is no bfloat16."""
    fp8_tflops: Figure | None
    """The same in fp8; None: they have none."""
    hbm_gb_s: Figure
    """Bandwidth of the device memory, GB/s."""
    power_w: Figure | None = None
    """What the board may draw at most, watts; None: not published of the GPU alone."""
    host_link: Literal["pcie3", "pcie4", "pcie5", "pcie6", "c2c", "c2c-shared"]
    """How the GPU reaches the memory of its node."""
    nvlink: Annotated[int, Field(ge=2, le=5)] | None = None
    """Generation of the NVLink that joins all GPUs of a node; None: there is none, or bridges that join two."""
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """What ``nvidia-smi`` calls it."""
    types: tuple[str, ...] = ()
    """GRES types that mean this model and no other."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory that one process could have at most."""
        return int(self.usable_gib * 2**30)


class LinkFacts(Sourced):
    """A link between GPUs, or (without latency) between a GPU and its node's memory."""

    gb_s: Figure
    """Nominal, of one GPU, one direction, GB/s."""
    share: Annotated[Score, Field(gt=0)]
    """What of it is reached: by the bus bandwidth of an NCCL all-gather, or by copies from pinned memory."""
    latency_us: Annotated[Number, Field(gt=0, le=10_000)] | None = None
    """Of one step of a ring, microseconds."""
    hint: str = ""
    """What is known to make it faster."""


class NetworkFacts(Sourced):
    """A kind of network between nodes."""

    share: Annotated[Score, Field(gt=0)]
    """What of a node's nominal speed the bus bandwidth of an NCCL all-gather reaches."""
    most_gb_s: Figure | None = None
    """No more than that of a node whatever its ports, GB/s."""
    latency_us: Annotated[Number, Field(gt=0, le=10_000)]
    """Of one step of a ring, microseconds."""
    hint: str = ""
    """What is known to make it faster."""


class StorageFacts(Sourced):
    """What all nodes together read and write where a cluster file does not say, GB/s."""

    read_gb_s: Figure
    write_gb_s: Figure


class NodeHardware(Sourced):
    """The node around a GPU where none is described, per GPU."""

    network: Literal[NETWORKS]  # type: ignore[valid-type]
    gbit: Figure
    """Nominal speed of the port that each GPU has, Gbit/s."""
    memory_gb: Figure
    """RAM, GiB."""
    cores: Annotated[int, Field(ge=1, le=1_000)]


class HardwareFile(Section):
    """The whole file."""

    gpus: dict[Plain, GpuModel]
    links: dict[Plain, LinkFacts]
    host_links: dict[Plain, LinkFacts]
    networks: dict[Plain, NetworkFacts]
    storage: StorageFacts
    nodes: dict[Literal["nvlink5", "nvlink4", "nvlink3", "nvlink2", "pcie"], NodeHardware]


NO_FIGURE = (
    "vendor", "network", "generation", "compute_capability", "host_link", "nvlink", "names", "types", "sources", "hint",
)  # fmt: skip
"""Keys that hold no figure: all others have a source where they are given."""


@cache
def read_hardware(path: Path = HARDWARE) -> HardwareFile:
    """The file. Raises UserError with every problem in it."""
    document = read_yaml(path, "ops/hardware.yaml" if path == HARDWARE else str(path))
    return read_model(HardwareFile, document, _find_problems)


def _find_problems(hardware: HardwareFile) -> Iterator[Found]:  # noqa: PLR0912 - a branch for each thing that can be wrong
    """Figures without a source or against each other, names that two models claim, and links that are missing."""
    entries: list[tuple[tuple[str, ...], Sourced]] = [(("storage",), hardware.storage)]
    for kind in ("gpus", "links", "host_links", "networks", "nodes"):
        entries += [((kind, name), entry) for name, entry in getattr(hardware, kind).items()]
    for path, entry in entries:
        figures = [key for key in type(entry).model_fields if key not in NO_FIGURE]
        stated = [key for key in figures if getattr(entry, key) is not None]
        for key in stated:
            if not entry.sources.get(key, "").strip():
                yield (*path, "sources", key), "missing: every figure has its source", "give the link that it was read from"
        for key in sorted(set(entry.sources) - set(stated)):
            message = "the figure is not given" if key in figures else "there is no such figure"
            yield (*path, "sources", key), message, "take it away"

    # A cluster file may name every one of these: a plan must not find nothing.
    for section, names in (
        ("nodes", sorted({f"nvlink{gpu.nvlink}" if gpu.nvlink else "pcie" for gpu in hardware.gpus.values()})),
        ("links", [name for name in INTERCONNECTS if name != "none"]),
        ("host_links", sorted({gpu.host_link for gpu in hardware.gpus.values()})),
        ("networks", [name for name in NETWORKS if name not in ("none", "unknown")]),
    ):
        table = getattr(hardware, section)
        for name in names:
            if name not in table:
                yield (section, name), "missing: cluster files name it", None
            elif section == "links" and table[name].latency_us is None:
                yield (section, name, "latency_us"), "missing", None
    owners: dict[str, str] = {}
    for name, gpu in hardware.gpus.items():
        for key in ("names", "types"):
            for word in getattr(gpu, key):
                owner = owners.setdefault(plain(word), name)
                if owner != name:
                    yield ("gpus", name, key), f"{word!r} is also {owner}: what is found would fit both", "keep one"
        yield from ((("gpus", name, key), message, fix) for key, message, fix in _gpu(gpu))


def _gpu(gpu: GpuModel) -> Iterator[tuple[str, str, str | None]]:
    # 48 GB with ECC leave 44.4 GiB; less than that share is a typing error, more than was sold as well.
    if not 0.9 * gpu.memory_gb <= gpu.usable_gib <= gpu.memory_gb:
        yield "usable_gib", f"{gpu.usable_gib} GiB cannot be what a GPU of {gpu.memory_gb:g} GB leaves", None
    old = gpu.generation in ("volta", "turing")
    if old and (gpu.bf16_tflops is not None or gpu.fp16_tflops is None):
        yield "bf16_tflops", f"tensor cores of {gpu.generation} have no bfloat16", "write null, and fp16_tflops"
    if not old and (gpu.bf16_tflops is None or gpu.fp16_tflops is not None):
        yield "bf16_tflops", f"tensor cores of {gpu.generation} compute in bfloat16", "give that figure, and no fp16_tflops"
    if (gpu.fp8_tflops is not None) != (float(gpu.compute_capability) >= OLDEST_FP8):
        has = "no fp8" if gpu.fp8_tflops is not None else "fp8"
        yield "fp8_tflops", f"tensor cores of compute capability {gpu.compute_capability} have {has}", None
    elif gpu.fp8_tflops is not None and gpu.bf16_tflops is not None and not 1.9 <= gpu.fp8_tflops / gpu.bf16_tflops <= 2.1:
        message = f"{gpu.fp8_tflops:g} is not twice the {gpu.bf16_tflops:g} of bf16"
        yield "fp8_tflops", message, "give both without sparsity, with fp32 accumulation"


def plain(word: str) -> str:
    """A name without case and separators: Slurm's AutoDetect writes ``nvidia_h100_80gb_hbm3`` for ``NVIDIA H100 80GB HBM3``."""
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")


def recognise(word: str) -> str | None:
    """The GPU that ``nvidia-smi`` or a GRES type calls ``word``; None where it is unknown or could be several."""
    plain_word = plain(word)
    for name, gpu in read_hardware().gpus.items():
        if plain_word in {plain(name), *map(plain, gpu.names), *map(plain, gpu.types)}:
            return name
    return None


def near_gpus(word: str) -> str | None:
    """What somebody may mean who names no GPU of ops/hardware.yaml: every size that it is sold in, else the nearest name."""
    known = read_hardware().gpus
    if alike := [name for name in known if len(word) > 1 and plain(name).startswith(plain(word))]:
        sizes = ", ".join(f"{name} ({known[name].memory_gb:g} GB)" for name in alike)
        return f"write {sizes}" if len(alike) == 1 else f"write the one that you have: {sizes}"
    return did_you_mean(word, known)


def peak_flops(device: str | None) -> float | None:
    """FLOP/s of the dense peak in 16 bits of what ``nvidia-smi`` calls a GPU; None where ops/hardware.yaml does not say."""
    name = recognise(device) if device else None
    gpu = read_hardware().gpus[name] if name else None
    peak = (gpu.bf16_tflops or gpu.fp16_tflops) if gpu else None
    return peak * 1e12 if peak else None


# --- prices ---------------------------------------------------------------------------------------------------------------

# ``ops/prices.yaml``: what an hour of a GPU costs. Operators edit it.

PRICES = ROOT / "ops" / "prices.yaml"
"""The prices that come with the project."""
OWN_PRICES = Path("ops", "prices.yaml")
"""In the working folder, instead of them."""


def price_file() -> Path:
    """The file of prices that holds: the one in the working folder, else the project's."""
    return OWN_PRICES if OWN_PRICES.is_file() else PRICES


def shown_prices() -> str:
    """What to call the file of prices in a message, and where one's own goes."""
    if OWN_PRICES.is_file() or not IS_INSTALLED:
        return "ops/prices.yaml"
    return f"{PRICES} ({OWN_PRICES} in the working folder goes before it)"


def _date(text: str) -> str:
    with contextlib.suppress(ValueError):
        if datetime.date.fromisoformat(text).isoformat() == text:
            return text
    raise ValueError("is not a date: write it as 2026-04-29")


Money = Annotated[Number, Field(ge=0, le=100_000)]
IsoDate = Annotated[str, AfterValidator(_date)]


class GpuPrices(Section):
    """The prices of one GPU."""

    on_demand: Money | None = None
    """Per GPU-hour; None: no offer is known."""
    spot: Money | None = None
    """The same for capacity that may be taken back at any time."""
    date: IsoDate | None = None
    """When it was read; None: the file's date."""
    source: Annotated[str, Field(min_length=1)]


class PriceFile(Section):
    """The whole file."""

    date: IsoDate
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    """ISO 4217."""
    gpus: dict[Plain, GpuPrices]


class Price(GpuPrices):
    """What a GPU-hour costs."""

    currency: str
    date: str


def price(gpu: str, path: Path | None = None) -> Price | None:
    """The price of a GPU of ops/hardware.yaml per GPU-hour; None without one, or without a file.

    ``path``: the file, None: :func:`price_file`. Raises UserError with every problem of the file.
    """
    path = (path or price_file()).absolute()
    return load_prices(path).get(gpu) if path.exists() else None


@cache
def load_prices(path: Path) -> Mapping[str, Price]:
    """The prices by GPU. Raises UserError with every problem of the file."""
    document = read_yaml(path, "ops/prices.yaml" if path == PRICES else str(path))
    prices = read_model(PriceFile, document, _doubts_of_prices)
    common = {"currency": prices.currency, "date": prices.date}
    return {name: Price(**common | entry.model_dump(exclude_none=True)) for name, entry in prices.gpus.items()}


def _doubts_of_prices(prices: PriceFile) -> Iterator[Found]:
    known = read_hardware().gpus
    for name, entry in prices.gpus.items():
        path = ("gpus", name)
        if name not in known:
            near = did_you_mean(name, known)
            yield path, f"ops/hardware.yaml has no {name}", f"{near or 'name one'}, or add it there"
        if entry.on_demand is None and entry.spot is None:
            yield path, "neither on_demand nor spot", "give one, or take the GPU away"
