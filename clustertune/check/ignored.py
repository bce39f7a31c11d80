"""Rules that a cluster file (``doctor.ignore``) or ``--ignore`` leaves out: one list for doctor, preflight and nccl-check."""

from __future__ import annotations

from collections.abc import Sequence

from clustertune.check.rule import checks
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.recipe.layers import did_you_mean


def ignored(cluster: Cluster) -> tuple[str, ...]:
    """The ids of the rules that the cluster file leaves out. Raises UserError for names that are not rules."""
    return check_rules(cluster.doctor.ignore, cluster.source, "doctor.ignore")


def check_rules(names: Sequence[str], file: str, key: str) -> tuple[str, ...]:
    """``names`` if each is the id of a rule of any kind. Raises UserError with every other name, and the nearest id."""
    known = [one.rule.id for one in checks()] if names else []
    fixes = {name: did_you_mean(name, known) or "clustertune doctor --list" for name in names if name not in known}
    if fixes:
        raise UserError([Problem(f"there is no rule {name!r}", file=file, key=key, fix=fix) for name, fix in fixes.items()])
    return tuple(names)
