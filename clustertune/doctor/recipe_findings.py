"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import clustertune.doctor
from clustertune import secrets
from clustertune.check import report
from clustertune.check.rule import (
    FAIL,
    LOOKS,
    MACHINE,
    NODES,
    RECIPE,
    REFUSED,
    SCRIPT,
    WARN,
    Check,
    Finding,
    Rule,
    Seen,
    checks,
    rule,
)
from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolved import Resolved
from clustertune.doctor.recipe_context import RecipeContext, build
from clustertune.errors import UserError
from clustertune.host.facts import HostFacts


def recipe_findings(
    resolved: Resolved,
    cluster: Cluster,
    facts: HostFacts | None,
    *,
    run_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
    env_file: Path = secrets.DEFAULT,
) -> list[Finding]:
    """What the rules of recipe, stack, data and run folder find. Reads headers and small files only; imports no torch.

    ``facts``: of this machine, its versions those of the ranks' Python; None: what is installed here is looked at.
    ``run_dir``: the run folder, which need not exist; None: no findings on one. ``environment``: what a job will
    inherit; None: this process's.
    """
    context = build(resolved, cluster, facts, run_dir=run_dir, environment=environment, env_file=env_file)
    return list(report.run(recipe_checks(RECIPE), context, resolved.name))


def recipe_checks(*subjects: str) -> list[Check]:
    """The rules that need the recipe, and what refuses it, of the modules of this package that hold them."""
    return checks(*subjects, package=clustertune.doctor, modules=("recipe_", "stack_", "run_", "data_"))


def recipe_rules() -> tuple[Rule, ...]:
    """The rules of recipe, stack, data and run folder."""
    return tuple(one.rule for one in recipe_checks(RECIPE, REFUSED))


def all_rules() -> tuple[Rule, ...]:
    """Every rule of the doctor; imports what the recipe's rules need."""
    return (*report.machine_rules(), *recipe_rules(), *script_rules())


def script_rules() -> tuple[Rule, ...]:
    """The rules of ``doctor sbatch``."""
    return tuple(one.rule for one in checks(SCRIPT))


# --- recipe refused -------------------------------------------------------------------------------------------------------

# A recipe that ``resolve`` refuses, as findings: keys of another release, batches that do not divide.


@rule("recipe-refused", REFUSED)
def refused(error: UserError) -> Iterator[Seen]:
    """Looks at: recipe and distribution against the installed dataclasses

    Why: submit and train refuse it: a key of another release, values that exclude each other, a batch that does not divide
    Fix: fix it: clustertune show RECIPE
    See: https://github.com/huggingface/trl/pull/4983
    """
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        yield Seen(FAIL, problem.message, problem.fix or "", where)


@rule("recipe-doubtful", RECIPE)
def doubtful(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: warnings from resolving the recipe

    Why: it is allowed, but probably unintended
    Fix: change it, or ignore the rule if it is intended; clustertune show RECIPE lists every value
    See: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    for warning in context.resolved.warnings:
        if not warning.startswith("data."):  # a missing input has a rule of its own
            yield Seen(WARN, warning)


# --- page -----------------------------------------------------------------------------------------------------------------

# The page of the documents that lists the rules, written from them.

HEAD = """# Doctor: what goes wrong on clusters, before it does

```sh
clustertune doctor                                  # this machine; in a Slurm job, every node of it
clustertune doctor recipes/llama405b-oasst2 --cluster rno-rtxpro6000     # and what this recipe would hit on that cluster
clustertune doctor --cluster rno-rtxpro6000 --submit --dry-run           # as a job on all nodes
clustertune doctor --list                           # the rules of this page
python3 -m clustertune.doctor                       # on a bare machine: Python 3.8, no package
python3 -m clustertune.doctor --facts               # the collected facts as JSON, unchecked
```

Each finding has a rule, what was found, why it matters, what to do, and a link to a report of the problem. `--json` prints
one document, `--all` also shows checks that passed. Exit code 0: nothing found, 1: warnings, 2: what would stop or spoil a
job. Checks that cannot run are reported as `unknown` and do not affect the exit code.

The same rules run in three places, and each finding names the machine: on the login node, in the container, and in the srun
step, which has the ranks' limits, cores and GPUs. A login node without GPUs is not a fault. In a Slurm job (`salloc`, a batch
script, or `--submit`) one step checks every node, in the cluster's container if it has one, and compares the nodes; `--here`
checks this machine alone. On a machine that the cluster file does not name, such as a laptop, machine rules run only with
`--here`.

Every training job on Slurm begins with these checks: its log lists warnings and failures, and a failure ends the job with
exit code 2 and without a requeue. If a node does not answer, the job is requeued. In the cluster file `doctor: {ignore:
[gpu-persistence, mtu]}` skips rules, in jobs too, and `doctor: {preflight: false}` skips the check before jobs. `--ignore
RULE` skips a rule once. The checks change nothing, except that they create one-page files in cache folders and remove them
again.

`clustertune doctor sbatch FILE` checks a script by the [rules of batch scripts](sbatch-lint.md). Measurements between GPUs have
[separate rules](nccl-verdicts.md), in addition to the machine rules that concern NCCL.

To add a rule write one function in `clustertune/check/`: `machine_*.py` for a machine, `nodes.py` for the nodes of a job,
`links_*.py` for measurements and NCCL's log, `script_*.py` for batch scripts; in `clustertune/doctor/`, in the modules
`recipe_*`, `stack_*`, `data_*` and `run_*`, if it needs the resolved recipe. Its decorator gives the id, its docstring the
texts that people read, and it yields what it found; `clustertune/check/rule.py` shows one. Add a case in
`tests/doctor/machine_cases.py`, `tests/doctor/test_compare.py`, `tests/nccl_check/test_judge.py`, `tests/doctor/cases.txt` or
`tests/doctor/test_recipe_rules.py`: a rule without one fails a test. Then write the pages again with
`clustertune doctor --list --out docs/doctor.md` and `python3 -m clustertune.nccl_check.judge > docs/nccl-verdicts.md`.
"""


def render() -> str:
    """The text of docs/doctor.md. Imports what the recipe's rules need."""
    parts = [HEAD]
    sections: list[tuple[str, Iterable[Rule]]] = [
        ("Each machine", (one.rule for one in checks(MACHINE))),
        ("Between the nodes of a job", (one.rule for one in checks(NODES, LOOKS))),
        ("Recipe, stack, data and runs", recipe_rules()),
        ("Batch scripts", script_rules()),
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
