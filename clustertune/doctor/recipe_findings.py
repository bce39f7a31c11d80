"""The way in: all findings of a recipe on a cluster, its stack and its folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clustertune import secrets
from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolved import Resolved
from clustertune.doctor import frame
from clustertune.doctor.recipe_context import build
from clustertune.health import Finding
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
    looks = [look for module in frame.modules(frame.OTHERS) for look in frame.looks_of(module)]
    return list(frame.run(looks, context, resolved.name))
