"""Writes the golden texts of ``submit --dry-run``: ``python -m tests.launch.golden_submit``, then read the diff."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from clustertune.commands.submit import Submission
from clustertune.launch.step import EXPORTED
from clustertune.launch.submit import SCRIPT, split_script
from tests.launch.machines import OURS, RECIPES, REPO, cluster_of

GOLDEN = REPO / "tests" / "golden"
CASES = [(recipe, cluster_of(recipe), tiny) for recipe in RECIPES for tiny in ((False, True) if recipe in OURS else (False,))]


def file_name(recipe: str, cluster: str, tiny: bool) -> str:
    return f"submit-{recipe}-{cluster}{'-tiny' if tiny else ''}.txt"


def document(recipe: str, cluster: str, tiny: bool) -> str:
    """What a person sees, without what differs between machines."""
    before = dict(os.environ)
    for name in EXPORTED:
        os.environ.pop(name, None)
    os.environ |= {"PATH": "/usr/bin", "HOME": "/h/me", "USER": "me"}
    try:
        found = Submission.make(recipe, [], tiny, cluster, REPO / "runs" / "X", None, "report", one_job=False)
        lines = [*(str(problem) for problem in found.find_problems(dry_run=True)), *found.warnings(), *found.lines()]
    finally:
        os.environ.clear()
        os.environ.update(before)
    _, body = split_script(SCRIPT.read_text())
    text = "\n".join(lines).replace(body.rstrip("\n"), "<the body of launch/run.sbatch>")
    return text.replace(sys.executable, "PYTHON").replace(str(REPO), "CHECKOUT") + "\n"


def main() -> None:
    for case in CASES:
        Path(GOLDEN, file_name(*case)).write_text(document(*case))


if __name__ == "__main__":
    main()
