"""What a rank says of itself: its start-up's clock, signs of life, another group than planned; kernels, what was compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clustertune.launch import container_packages
from clustertune.recipe.native_rules import train_defaults

LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}


@pytest.mark.parametrize(
    ("wanted", "missing", "named"),
    [
        (LIGER, {"liger-kernel"}, ["liger-kernel"]),
        (FLASH, {"flash-attn", "kernels"}, ["flash-attn or kernels"]),
        (FLASH, {"flash-attn"}, []),
        ({}, {"liger-kernel", "flash-attn", "kernels"}, []),
    ],
)
def test_a_kernel_that_is_not_installed_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], missing: set[str], named: list[str]
) -> None:
    """An error with the key, not an ImportError after the weights were loaded; a machine without GPUs needs none of them."""
    packages = dict.fromkeys({"flash-attn", "kernels", "liger-kernel"} - missing, "1.0")
    monkeypatch.setattr(container_packages, "own", lambda: container_packages.Stack("3.12", packages))
    section = train_defaults() | wanted
    assert not container_packages.lacking_here(section, gpus=False)
    found = container_packages.lacking_here(section, gpus=True)
    assert [re.findall(r"needs (.+), and", problem.message)[0] for problem in found] == named
