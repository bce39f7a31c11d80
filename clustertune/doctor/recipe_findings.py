"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import clustertune.doctor
from clustertune import secrets
from clustertune.check import report
from clustertune.check.rule import Finding, Rule
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
    looks = [look for module in _modules() for look in tuple(getattr(module, "LOOKS", ())) or (module.check,)]
    return list(report.run(looks, context, resolved.name))


def _modules() -> list[Any]:
    """The modules of rules that need the recipe: ``RULES``, and ``LOOKS`` or ``check``, which yield findings."""
    found = sorted(info.name for info in pkgutil.iter_modules(clustertune.doctor.__path__))
    wanted = [name for name in found if name.startswith(("recipe_", "stack_", "run_", "data_"))]
    loaded = [importlib.import_module(f"clustertune.doctor.{name}") for name in wanted]
    return [module for module in loaded if hasattr(module, "RULES")]


def recipe_rules() -> tuple[Rule, ...]:
    """The rules of recipe, stack, data and run folder."""
    return tuple(rule for module in _modules() for rule in module.RULES)


def all_rules() -> tuple[Rule, ...]:
    """Every rule of the doctor; imports what the recipe's rules need."""
    return (*report.machine_rules(), *recipe_rules())
