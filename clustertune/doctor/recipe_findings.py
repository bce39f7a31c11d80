"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import clustertune.doctor
from clustertune import secrets
from clustertune.check import report
from clustertune.check.rule import RECIPE, REFUSED, Check, Finding, Rule, checks
from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolved import Resolved
from clustertune.doctor.recipe_context import build
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
    ``run_dir``: the run folder, which need not exist; None: nothing is said of one. ``environment``: what a job will
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
    return (*report.machine_rules(), *recipe_rules())
