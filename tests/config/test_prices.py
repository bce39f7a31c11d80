"""What a GPU-hour costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.config.hardware import PRICES, load_prices, price
from clustertune.config.yamlfile import read_yaml
from clustertune.errors import UserError
from tests.config.conftest import check_form


def write(tmp_path: Path, change: dict[str, Any], **top: Any) -> Path:
    """A price file of one GPU."""
    entry = {"on_demand": 2.9, "spot": 0.8, "source": "x"} | change
    body = {
        "date": "2026-04-29",
        "currency": "USD",
        "gpus": {"h100-sxm": {k: v for k, v in entry.items() if v is not None}},
    } | top
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    return path


def test_the_shipped_prices_are_those_of_their_day() -> None:
    """As Spheron listed them on 29 April 2026."""
    found = price("h100-sxm")
    assert found and (found.on_demand, found.spot, found.currency, found.date) == (2.90, 0.80, "USD", "2026-04-29")
    assert price("a40") is None
    assert not any(p.warning for p in load_prices().values())


def test_the_file_says_that_it_ages() -> None:
    """Whoever edits a price must meet the date first."""
    assert next(iter(read_yaml(PRICES, "prices").data)) == "date"


@pytest.mark.parametrize(
    ("change", "top", "words"),
    [
        ({"spot": -0.1}, {}, "greater than or equal to 0"),
        ({"on_demand": -1}, {}, "greater than or equal to 0"),
        ({"on_demand": "2.90 USD"}, {}, "number"),
        ({"on_demand": float("nan")}, {}, "finite"),
        ({"on_demand": None, "spot": None}, {}, "neither on_demand nor spot"),
        ({"source": None}, {}, "missing"),
        ({"ondemand": 2}, {}, "did you mean on_demand?"),
        ({"date": "yesterday"}, {}, "is not a date"),
        ({}, {"date": "2026-13-01"}, "is not a date"),
        ({}, {"currency": "dollars"}, "currency"),
        ({}, {"gpus": {"h100-smx": {"spot": 1, "source": "x"}}}, "did you mean h100-sxm?"),
    ],
)
def test_a_wrong_price_is_refused(tmp_path: Path, change: dict[str, Any], top: dict[str, Any], words: str) -> None:
    """A misspelt GPU would be a run without a price, a negative one a run that earns money."""
    path = write(tmp_path, change, **top)
    with pytest.raises(UserError) as caught:
        load_prices(path)
    check_form(caught.value)
    assert any(words in str(problem) for problem in caught.value.problems), caught.value


def test_spot_above_on_demand_is_a_warning(tmp_path: Path) -> None:
    """It happens for an hour on some markets; most often the two are swapped."""
    path = write(tmp_path, {"spot": 3.5})
    found = price("h100-sxm", path)
    assert found and found.warning and "swapped" in found.warning


def test_a_price_of_another_day_keeps_its_date(tmp_path: Path) -> None:
    """Edited one by one, each says when it was read; own machines may cost nothing."""
    found = price("h100-sxm", write(tmp_path, {"on_demand": 0, "spot": None, "date": "2026-07-01"}))
    assert found and (found.on_demand, found.spot, found.date) == (0, None, "2026-07-01")


def test_without_a_file_there_is_no_price(tmp_path: Path) -> None:
    """A plan is worth its time and memory alone; the cost is then left out."""
    assert price("h100-sxm", tmp_path / "prices.yaml") is None
