"""Writes the golden texts of ``plan``: ``python -m tests.plan.golden_plan``, then read the diff."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from clustertune.cli import app
from tests.launch.machines import RECIPES, REPO, cluster_of

GOLDEN = REPO / "tests" / "golden"
GB200 = ("idris-dalia-gb200", "slurm.nodes=8", "train.per_device_train_batch_size=4")
ELSEWHERE = {
    "qwen2.5-14b-tulu3": (*GB200, "activation_checkpointing.ratio=0"),
    "qwen2.5-32b-tulu3": (*GB200, "activation_checkpointing.ratio=0.5"),
    "qwen2.5-72b-tulu3": (*GB200, "activation_checkpointing.ratio=1"),
    "mistral7b-alpaca": ("nebius-h100", "slurm.nodes=2", "train.global_batch_size=16"),
}
"""The other form of a recipe, of which its README speaks: 32 GB200, two nodes."""
CASES: list[tuple[str, ...]] = [(recipe, cluster_of(recipe)) for recipe in RECIPES] + [
    (recipe, *words) for recipe, words in ELSEWHERE.items()
]


def file_name(recipe: str, cluster: str, *overrides: str) -> str:
    return f"plan-{recipe}-{cluster}{'-2' if overrides else ''}.txt"


def document(recipe: str, cluster: str, *overrides: str) -> str:
    """What a person sees."""
    done = CliRunner().invoke(app, ["plan", recipe, *overrides, "--cluster", cluster])
    assert done.exit_code == 0, done.output
    return done.stderr


def main() -> None:
    for case in CASES:
        Path(GOLDEN, file_name(*case)).write_text(document(*case))


if __name__ == "__main__":
    main()
