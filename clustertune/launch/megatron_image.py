"""How a Megatron recipe is started: the same step and launcher on every node, in NVIDIA's image."""

from __future__ import annotations

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem
from clustertune.launch.image import Stack, too_old
from clustertune.resolve.resolved import Resolved

KEY = "container.megatron"
NEEDED = (
    "megatron-bridge", "megatron-core", "transformer-engine", "torch", "transformers", "pyarrow",
    "pydantic", "pyyaml", "rich", "typer",
)  # fmt: skip
"""Packages that the ranks import: NVIDIA's own, and what the launcher's side of a rank needs."""
BRIDGE_RELEASE = "0.5."


def is_asked(resolved: Resolved) -> bool:
    """Whether the ranks of a recipe are Megatron's."""
    return resolved.recipe.megatron is not None


def of_training(resolved: Resolved, cluster: Cluster) -> Cluster:
    """The cluster as the ranks see it: for a Megatron recipe with NVIDIA's image in the place of the project's own."""
    if not is_asked(resolved) or cluster.container.megatron is None:
        return cluster
    container = cluster.container.model_copy(update={"image": cluster.container.megatron})
    return cluster.model_copy(update={"container": container})


def find_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """A cluster that has no image for the ranks of a Megatron recipe."""
    if not is_asked(resolved):
        return []
    if cluster.container.runtime == "none":
        text = "a Megatron recipe runs in NVIDIA's image, and this cluster has no container runtime"
        fix = "container: {runtime: apptainer, image: ..., megatron: ...}"
        return [Problem(text, file=cluster.source, key="container.runtime", fix=fix)]
    if cluster.container.megatron is None:
        fix = "make build-sif DEFINITION=megatron builds it; name the file there"
        return [Problem("missing: the image that a Megatron recipe trains in", file=cluster.source, key=KEY, fix=fix)]
    return []


def judge(seen: Stack, image: str) -> list[Problem]:
    """What keeps the ranks from running in an image, by what it has installed."""
    fix = "build it from containers/megatron.def"
    found = [Problem(f"the image has no {name}", file=image, key=KEY, fix=fix) for name in NEEDED if name not in seen.packages]
    version = seen.packages.get("megatron-bridge")
    if version is not None and not version.startswith(BRIDGE_RELEASE):
        text = f"the image has Megatron-Bridge {version}, and this release of clustertune is for {BRIDGE_RELEASE}x"
        found.append(Problem(text, file=image, key=KEY, fix=fix))
    if text := too_old(seen.python):
        found.append(Problem(text, file=image, key=KEY, fix=fix))
    return found
