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


@pytest.mark.parametrize(
    ("arguments", "needed", "useless"),
    [
        (["--help"], {"typer"}, SLOW | {"pydantic"}),
        (["plan", "--help"], {"typer"}, SLOW),
        (["doctor", "sbatch", "FILE"], {"typer"}, SLOW - {"rich"}),  # a message for a person: rich prints it
        (["nonsense"], {"typer"}, SLOW - {"rich"}),
        (["show", "llama405b-oasst2", "--json"], {"clustertune", "yaml"}, HEAVY | {"rich"}),
        (["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--json"], {"clustertune", "yaml"}, HEAVY | {"rich"}),
    ],
)
def test_a_command_imports_what_it_needs(tmp_path: Path, arguments: list[str], needed: set[str], useless: set[str]) -> None:
    """Planning no framework, and a document no tables."""
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    modules = imported(tmp_path, *(str(script) if word == "FILE" else word for word in arguments))
    assert needed <= modules and modules & useless == set()


def test_a_deferred_module_only_names_things() -> None:
    """One that registers rules would leave them out of every list that is made before it is used."""
    code = (
        "import sys, importlib.util, clustertune.cli.app\n"
        "lazy = [module for module in sys.modules.values() if type(module) is importlib.util._LazyModule]\n"
        "print(*(object.__getattribute__(module, '__spec__').origin for module in lazy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [path for path in done.stdout.split() if "\n@rule(" in Path(path).read_text()] == []
    assert len(done.stdout.split()) > 50
