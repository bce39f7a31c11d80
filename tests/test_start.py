"""What a command costs before it does anything: it imports what it needs, and no other command is made ready."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "matplotlib", "lm_eval"}
SLOW = HEAVY | {"yaml", "rich"}
"""What a command that only looks at its arguments has no use for. typer checks them with pydantic, and lists them without."""
SCRIPT = "#!/bin/bash\n#SBATCH --time=1:00:00\ntrue\n"


def imported(tmp_path: Path, *arguments: str) -> set[str]:
    """The top-level packages that a command has imported when it ends."""
    code = (
        "import sys, clustertune.cli.app as cli; sys.argv[1:] = sys.argv[2:]\n"
        "try:\n    cli.main()\n"
        "finally:\n    open(found, 'w').write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    found = tmp_path / "modules"
    words = [sys.executable, "-c", f"found = {str(found)!r}\n{code}", "-", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(words, capture_output=True, check=False, env=environment, cwd=Path(__file__).parents[1])
    return set(found.read_text().split())


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["doctor", "sbatch", "FILE"], ["nonsense"]])
def test_a_command_that_needs_nothing_imports_nothing(tmp_path: Path, arguments: list[str]) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    arguments = [str(script) if word == "FILE" else word for word in arguments]
    modules = imported(tmp_path, *arguments)
    prints = arguments[0] in {"doctor", "nonsense"}  # a message for a person: rich prints it
    assert "typer" in modules and ("pydantic" not in modules or arguments != ["--help"])
    assert modules & (SLOW - {"rich"} if prints else SLOW) == set()


@pytest.mark.parametrize("arguments", [["show"], ["plan", "--cluster", "rno-rtxpro6000"]])
def test_planning_imports_no_framework_and_a_document_no_tables(tmp_path: Path, arguments: list[str]) -> None:
    modules = imported(tmp_path, arguments[0], "llama405b-oasst2", *arguments[1:], "--json")
    assert "clustertune" in modules and "yaml" in modules
    assert modules & (HEAVY | {"rich"}) == set()
