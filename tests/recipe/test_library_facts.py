"""The committed facts are those of the installed libraries, whose versions are the pinned ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from clustertune.containers import pins
from clustertune.recipe.library_facts import FOLDER, facts
from tests.tree import REPO
from tools import library_facts

FIX = "a pin has moved: run make library-facts, and look at the difference"


def test_there_is_a_file_for_each_library_of_the_pinned_version() -> None:
    found = {path.stem: json.loads(path.read_text())[path.stem] for path in FOLDER.glob("*.json")}
    pinned = pins.read()
    every = {**pinned[pins.DEV], **pinned[pins.PY]}
    names = ("trl", "peft", "accelerate", "deepspeed", "lm_eval", "transformers")
    assert found == {name: every[name.replace("_", "-")] for name in names}, FIX


WRITTEN = ("trl", "peft", "accelerate", "deepspeed")
"""In the order of ``make library-facts``."""


INSTALLED = f"""
import json
from tools import library_facts as of
found = {{name: getattr(of, name + "_facts")() for name in {WRITTEN}}}
from peft import LoraConfig
LoraConfig.__dataclass_fields__["r"].default = 9
print(json.dumps(found | {{"another peft": of.peft_facts()}}))
"""


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """What it would write, from a process of its own: typing gives two unions that are equal the order of the one that was
    written first. Of PEFT also with another default, as of another release."""
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, check=True, cwd=REPO)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.jobs
@pytest.mark.parametrize("name", WRITTEN)
def test_the_facts_are_the_installed_classes(name: str, installed: dict[str, Any]) -> None:
    assert installed[name] == facts(name), FIX
    assert installed["another peft"] != facts("peft")


def test_the_model_types_are_those_of_the_installed_transformers() -> None:
    assert library_facts.model_kinds() == list(facts("transformers")["models"]), FIX
    assert library_facts.base_keys() == facts("transformers")["keys"], FIX
