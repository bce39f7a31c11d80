"""What an image has installed, against the pins and the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.containers import pins
from clustertune.launch import container_packages
from clustertune.recipe.native_rules import train_defaults
from tests.command import REPO, run

PINNED = pins.read()


def seen(**changes: str | None) -> container_packages.Stack:
    """An image as locked, but for ``changes`` (None: missing)."""
    packages = {**PINNED[pins.PY], **{name.replace("_", "-"): version for name, version in changes.items()}}
    return container_packages.Stack("3.12.3", {name: version for name, version in packages.items() if version is not None})


def judge(found: container_packages.Stack) -> tuple[list[str], list[str]]:
    problems, warnings = container_packages.judge(found, PINNED, "train.sif")
    return [problem.message for problem in problems], warnings


REFERENCE = {name.replace("-", "_"): version for name, version in PINNED[pins.REF].items() if name in PINNED[pins.PY]}


@pytest.mark.parametrize(
    ("changes", "problems", "warnings"),
    [
        ({}, [], []),
        ({"torch": PINNED[pins.PY]["torch"] + "+cpu"}, [], []),  # torch's build for another device
        ({"trl": "0.1", "peft": "9.9"}, [], ["the image has peft 9.9,", "the image has trl 0.1,"]),  # it may be meant
        (
            {"pydantic": None, "typer": None, "wandb": None},
            ["the image has no pydantic", "the image has no typer"],
            ["the image has no wandb"],
        ),
        (REFERENCE, [], []),  # whole in its own way: 7 warnings at every start would be read by nobody
        ({**REFERENCE, "trl": "0.1"}, [], ["the image has trl 0.1,"]),
    ],
)
def test_each_difference_is_a_line(changes: dict[str, str | None], problems: list[str], warnings: list[str]) -> None:
    """What every stage needs is an error, the rest a warning; all at once: an image is built for a quarter of an hour."""
    found = judge(seen(**changes))
    for texts, starts in zip(found, (problems, warnings), strict=True):
        assert len(texts) == len(starts) and all(map(str.startswith, texts, starts)), texts


@pytest.mark.parametrize("command", [["run", "--to", "train"], ["submit", "--tiny", "--dry-run"]])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    """Its callback raised in every rank, after the wait in the queue and the preparation."""
    words = [command[0], "recipes/tiny-oasst2", *command[1:], "--run-dir", tmp_path / "run", "--json"]
    done = run(*words, "train.report_to=[wandb,mlflow,tensorboard]")
    assert done.code == 2 and not (tmp_path / "run" / "data").exists()
    assert [problem["key"] for problem in done.json["problems"]] == ["train.report_to"] * 2
    assert "mlflow" in done.json["problems"][0]["message"]


NEEDS = {
    "train.optim=adamw_torch_4bit": "torchao", "train.optim=schedule_free_sgd": "schedulefree",
    "train.optim=lomo": "lomo-optim", "train.optim=stable_adamw": "torch-optimi", "train.report_to=swanlab": "swanlab",
    "train.report_to=[comet_ml]": "comet-ml",
    "train.model_init_kwargs={attn_implementation: flash_attention_3}": "flash-attn-3",
    "train.model_init_kwargs={attn_implementation: flash_attention_2}": "flash-attn or kernels",
    "train.torch_compile_backend=tvm": "apache-tvm",
}  # fmt: skip
"""Values that name what neither a lock of containers/ nor this Python has, and its package."""


@pytest.mark.parametrize("command", [["show"], ["submit", "--dry-run", "--cluster", "dgx-h100"]])
@pytest.mark.parametrize("value", NEEDS)
def test_what_the_image_cannot_have_is_refused_before_the_queue(command: list[str], value: str, tmp_path: Path) -> None:
    at = ["--run-dir", tmp_path / "r"] if command[0] == "submit" else []  # make demo may have trained it where runs are
    done = run(command[0], "recipes/tiny-oasst2", *command[1:], *at, value, "--json")
    found = {(problem["key"], NEEDS[value] in problem["message"]) for problem in done.json["problems"]}
    key = value.partition("=")[0]
    assert done.code == 2 and found == {(key + ".attn_implementation" * key.endswith("init_kwargs"), True)}


def test_what_an_image_of_ones_own_has_is_said_in_the_cluster_file(tmp_path: Path) -> None:
    text = (REPO / "ops/clusters/dgx-h100.yaml").read_text()
    file = tmp_path / "own.yaml"
    file.write_text(text.replace("container: {", "container: {packages: [flash-attn], "))
    value = "train.model_init_kwargs={attn_implementation: flash_attention_2}"
    words = [
        "submit",
        "recipes/tiny-oasst2",
        "train.packing=false",
        value,
        "--run-dir",
        str(tmp_path / "r"),
        "--dry-run",
        "--cluster",
    ]
    assert run(*words, "dgx-h100").code == 2
    assert run(*words, str(file)).code == 0


def test_what_the_image_can_have_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only an optional layer holds, and what the user's own Python has."""
    args = train_defaults() | {"use_liger_kernel": True, "optim": "adamw_bnb_8bit", "report_to": ["wandb"]}
    assert not container_packages.not_built(args)
    assert container_packages.not_built(args | {"report_to": ["tensorboard"]})
    monkeypatch.setattr(container_packages, "own", lambda: container_packages.Stack("3.12", {"tensorboardx": "2"}))
    assert not container_packages.not_built(args | {"report_to": ["tensorboard"]})
