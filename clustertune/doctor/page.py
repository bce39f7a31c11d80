"""The page of the documents that lists the rules, written from them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clustertune.check.report import BROKEN
from clustertune.check.rule import MACHINE, NODES, Rule, checks
from clustertune.doctor.recipe_findings import recipe_rules

HEAD = """# Doctor: what goes wrong on clusters, before it does

```sh
clustertune doctor                                  # this machine; in a Slurm job, every node of it
clustertune doctor recipes/llama405b-oasst2 --cluster rno-rtxpro6000     # and what of this recipe does not fit there
clustertune doctor --cluster rno-rtxpro6000 --submit --dry-run           # as a job on all nodes
clustertune doctor --list                           # the rules of this page
python3 -m clustertune.doctor                       # on a bare machine: Python 3.8, no package
python3 -m clustertune.doctor --facts               # what is seen, as JSON; nothing is judged
```

Each finding has a rule, what was found, why it hurts, what to do, and where people met it. `--json` is one document, `--all`
shows also what is as it should be. Exit code 0: nothing found, 1: warnings, 2: what would stop or spoil a job. What cannot be
seen is reported as unknown, and spoils no verdict.

The same rules run in three places, and each finding says on which machine: on the login node, in the container, and in the srun
step, whose limits, cores and GPUs are those of the ranks. A login node without GPUs is no fault. In a Slurm job (`salloc`, a
batch script, or `--submit`) one step looks at every node, in the cluster's container if it has one, and compares the nodes;
`--here` looks at this machine alone.

Every training job on Slurm begins with it: its log has what is not as it should be, and a failure ends the job (exit code 2, it
is not requeued; it is where a node only does not answer). In the cluster file `doctor: {ignore: [gpu-persistence, mtu]}` leaves
rules out, in jobs too, and `doctor: {preflight: false}` the look before jobs. `--ignore RULE` does so once. Looking changes
nothing, but for files of one page that are made in folders of caches and removed again.

Batch scripts have [rules of their own](sbatch-lint.md), and so has what is measured between GPUs ([here](nccl-verdicts.md)). It
asks the rules of a machine that concern NCCL as well, with the same verdict.

To add a rule write one function in `clustertune/check/`: `machine_*.py` for a machine, `nodes.py` for the nodes of a job,
`links_*.py` for measurements and NCCL's log, `script_*.py` for batch scripts; in `clustertune/doctor/`, in the modules
`recipe_*`, `stack_*`, `data_*` and `run_*`, where it needs the resolved recipe. Its decorator gives the id, its docstring the
texts that people read, and it yields what it saw; `clustertune/check/rule.py` shows one. Add a case in
`tests/doctor/machine_cases.py`, `tests/doctor/test_compare.py`, `tests/nccl_check/test_judge.py`, `tests/doctor/cases.txt` or
`tests/doctor/test_recipe_rules.py`: a rule without one fails a test. Then write the pages anew with
`clustertune doctor --list --out docs/doctor.md` and `python3 -m clustertune.nccl_check.judge > docs/nccl-verdicts.md`.
"""


def render() -> str:
    """The text of docs/doctor.md. Imports what the recipe's rules need."""
    parts = [HEAD]
    sections: list[tuple[str, Iterable[Rule]]] = [
        ("Each machine", (one.rule for one in checks(MACHINE))),
        ("Between the nodes of a job", (*(one.rule for one in checks(NODES)), BROKEN)),
        ("Recipe, stack, data and runs", recipe_rules()),
    ]
    for title, rules in sections:
        rows = [f"| `{rule.id}` | {_cell(rule.title)} | {_cell(rule.why)} | [link]({rule.link}) |" for rule in rules]
        parts.append("\n".join(["", f"## {title}", "", "| rule | looks at | why | |", "|---|---|---|---|", *rows, ""]))
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(path: Path) -> None:
    """Write the page. Raises OSError."""
    path.write_text(render(), encoding="utf-8")
