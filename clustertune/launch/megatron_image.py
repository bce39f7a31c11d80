"""The image of Megatron recipes: their ranks run in NVIDIA's, by the same step and launcher on every node."""

from __future__ import annotations

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem
from clustertune.launch.container_packages import Stack, too_old
from clustertune.resolve.resolved import Resolved

MEGATRON_KEY = "container.megatron"
MEGATRON_NEEDED = (
    "megatron-bridge", "megatron-core", "transformer-engine", "torch", "transformers", "pyarrow",
    "pydantic", "pyyaml", "rich", "typer",
)  # fmt: skip
"""Packages that the ranks import: NVIDIA's own, and what the launcher's side of a rank needs."""
BRIDGE_RELEASE = "0.5."


def is_megatron(resolved: Resolved) -> bool:
    """Whether the ranks of a recipe are Megatron's."""
    return resolved.recipe.megatron is not None


def of_training(resolved: Resolved, cluster: Cluster) -> Cluster:
    """The cluster as the ranks see it: for a Megatron recipe with NVIDIA's image in the place of the project's own."""
    if not is_megatron(resolved) or cluster.container.megatron is None:
        return cluster
    container = cluster.container.model_copy(update={"image": cluster.container.megatron})
    return cluster.model_copy(update={"container": container})


def megatron_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """A cluster that has no image for the ranks of a Megatron recipe."""
    if not is_megatron(resolved):
        return []
    if cluster.container.runtime == "none":
        text = "a Megatron recipe runs in NVIDIA's image, and this cluster has no container runtime"
        fix = "container: {runtime: apptainer, image: ..., megatron: ...}"
        return [Problem(text, file=cluster.source, key="container.runtime", fix=fix)]
    if cluster.container.megatron is None:
        fix = "apptainer build megatron.sif containers/megatron.def makes it; name the file there"
        return [Problem("missing: the image that a Megatron recipe trains in", file=cluster.source, key=MEGATRON_KEY, fix=fix)]
    return []


def judge_megatron(seen: Stack, image: str) -> list[Problem]:
    """What keeps the ranks from running in an image, by what it has installed."""
    fix = "build it from containers/megatron.def"
    problems = [
        Problem(f"the image has no {name}", file=image, key=MEGATRON_KEY, fix=fix)
        for name in MEGATRON_NEEDED
        if name not in seen.packages
    ]
    version = seen.packages.get("megatron-bridge")
    if version is not None and not version.startswith(BRIDGE_RELEASE):
        text = f"the image has Megatron-Bridge {version}, and this release of clustertune is for {BRIDGE_RELEASE}x"
        problems.append(Problem(text, file=image, key=MEGATRON_KEY, fix=fix))
    if text := too_old(seen.python):
        problems.append(Problem(text, file=image, key=MEGATRON_KEY, fix=fix))
    return problems
