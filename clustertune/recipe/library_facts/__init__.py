"""What the pinned TRL, PEFT, accelerate, DeepSpeed and transformers take, as data beside this module.

``make library-facts`` (tools/library_facts.py) writes it from their classes when a pin moves, and
tests/recipe/test_library_facts.py compares it with them. Reading it needs none of them: ``import trl`` takes 7 s, and a
login node need not have torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def facts(library: str) -> dict[str, Any]:
    """The facts of one library. Callers share them and must not change them."""
    found: dict[str, Any] = json.loads((FOLDER / f"{library}.json").read_text(encoding="utf-8"))
    return found
