"""``ops/prices.yaml``: what an hour of a GPU costs. Operators edit it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from clustertune.config.findings import Found, read_model
from clustertune.config.hardware import load_hardware
from clustertune.config.load import did_you_mean
from clustertune.config.schema import Number, Plain, Section
from clustertune.config.yamlfile import read_yaml
from clustertune.tree import ROOT

PRICES = ROOT / "ops" / "prices.yaml"


def _date(text: str) -> str:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise ValueError("is no date: write it as 2026-04-29") from None
    return text


Money = Annotated[Number, Field(ge=0, le=100_000)]
IsoDate = Annotated[str, AfterValidator(_date)]


class Entry(Section):
    """The prices of one GPU."""

    on_demand: Money | None = None
    """Per GPU-hour; None: nobody offers it."""
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
    gpus: dict[Plain, Entry]


@dataclass(frozen=True)
class Price:
    """What a GPU-hour costs."""

    on_demand: float | None
    spot: float | None
    currency: str
    date: str
    source: str
    warning: str | None = None
    """What looks wrong without being impossible."""


def price(gpu: str, path: Path = PRICES) -> Price | None:
    """The price of a GPU of ops/hardware.yaml per GPU-hour; None without one, or without a file.

    Raises UserError with every problem of the file.
    """
    return load_prices(path).get(gpu) if path.exists() else None


@cache
def load_prices(path: Path = PRICES) -> Mapping[str, Price]:
    """The prices by GPU. Raises UserError with every problem of the file."""
    document = read_yaml(path, "ops/prices.yaml" if path == PRICES else str(path))
    prices = read_model(PriceFile, document, _find_problems)
    return {
        name: Price(entry.on_demand, entry.spot, prices.currency, entry.date or prices.date, entry.source, _warning(entry))
        for name, entry in prices.gpus.items()
    }


def _warning(entry: Entry) -> str | None:
    if entry.on_demand is not None and entry.spot is not None and entry.spot > entry.on_demand:
        return f"spot {entry.spot:g} is above on-demand {entry.on_demand:g}: are they swapped?"
    return None


def _find_problems(prices: PriceFile) -> Iterator[Found]:
    known = load_hardware()
    for name, entry in prices.gpus.items():
        path = ("gpus", name)
        if name not in known:
            near = did_you_mean(name, known)
            yield path, f"ops/hardware.yaml has no {name}", f"{near or 'name one'}, or add it there"
        if entry.on_demand is None and entry.spot is None:
            yield path, "neither on_demand nor spot", "give one, or take the GPU away"
