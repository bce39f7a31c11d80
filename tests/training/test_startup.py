"""What a rank says of itself: its start-up's clock, signs of life, another group than planned; kernels, what was compiled."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.training import build

LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}


@pytest.mark.parametrize(
    ("wanted", "missing", "named"),
    [
        (LIGER, {"liger_kernel"}, "liger-kernel"),
        (FLASH, {"flash_attn", "kernels"}, "flash-attn or kernels"),
        (FLASH, {"flash_attn"}, None),
        ({}, {"liger_kernel", "flash_attn", "kernels"}, None),
    ],
)
def test_a_kernel_that_is_not_installed_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], missing: set[str], named: str | None
) -> None:
    """An error with the key, not an ImportError after the weights were loaded; a machine without GPUs needs none of them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    section = train_defaults() | wanted
    build.check_packages(section, cuda=False)
    with pytest.raises(UserError, match=named) if named else nullcontext():
        build.check_packages(section, cuda=True)
