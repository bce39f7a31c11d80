"""What a command costs before it does anything: it imports what it needs, and no other command is made ready."""

from __future__ import annotations

import os
import re
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


LAZY = """
import sys, inspect, threading, clustertune.cli.app
from clustertune.cli.deferred import DeferredModule
lazy = [module for module in sys.modules.values() if type(module) is DeferredModule]
inspect.getmodule(compile("1", "<text>", "exec"))  # asks every module for its file, as torch does in a rank
assert all(type(module) is DeferredModule for module in lazy)
from clustertune.report import content
assert type(content) is DeferredModule
together, seen = threading.Barrier(8), []
def first() -> None:
    together.wait()
    seen.append(content.number(1))
threads = [threading.Thread(target=first) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert seen == ["1"] * 8 and type(content) is not DeferredModule
print(*(module.__file__ for module in lazy))
"""


def test_a_deferred_module_only_names_things() -> None:
    """It is imported once, when a name of it is used, however many threads ask; until then the rules in it would be missing."""
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 50
    rule = re.compile(r"^def [a-z]\w*\(.*\) -> Iterator\[Seen\]:|@rule$", re.MULTILINE)
    assert [path for path in done.stdout.split() if rule.search(Path(path).read_text())] == []
