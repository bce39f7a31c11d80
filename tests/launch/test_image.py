"""Which image a run is in: its SHA-256, computed once, and what it has installed against the pins."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Container
from clustertune.containers import pins
from clustertune.errors import UserError
from clustertune.launch import container
from clustertune.recipe.native_rules import train_defaults
from clustertune.submission import SubmissionPlan, check, plan_submission, send
from tests.command import REPO, run

CONTENT = b"an image" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PINNED = pins.read()


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    found = tmp_path / "train.sif"
    found.write_bytes(CONTENT)
    found.with_name("train.sif.sha256").write_text(f"{DIGEST}  train.sif\n")
    return found


def settings(sif: Path, program: Path | None = None) -> Container:
    return Container(runtime="apptainer", image=str(sif), program=str(program or "/not/there"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0" * 64 + "  train.sif\n", f"its SHA-256 is {DIGEST[:16]}..., and train.sif.sha256 says 0000000000000000..."),
        ("", "contains no sum of one file"),
        (f"{DIGEST}  a\n{DIGEST}  b\n", "contains no sum of one file"),
        ("\xff" * 64, "contains no sum of one file"),
    ],
)
def test_another_image_than_its_sum_says_is_refused(sif: Path, text: str, message: str) -> None:
    """Altered, copied in part, or a sum of something else: with what to do."""
    sif.with_name("train.sif.sha256").write_text(text)
    with pytest.raises(UserError) as caught:
        container.look(settings(sif))
    (problem,) = caught.value.problems
    assert message in problem.message and problem.fix and "sha256sum train.sif" in problem.fix


def test_a_changed_image_is_noticed(sif: Path) -> None:
    """Each look reads the file: a copy that keeps size and time (cp -p, rsync -t) is no other's sum."""
    container.look(settings(sif))
    before = sif.stat()
    sif.write_bytes(CONTENT[::-1])
    os.utime(sif, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="its SHA-256 is"):
        container.look(settings(sif))


def test_no_image(sif: Path, tmp_path: Path) -> None:
    """A missing one, a folder, none asked for, and one of a registry."""
    sif.unlink()
    with pytest.raises(UserError, match="no such image"):
        container.look(settings(sif))
    sif.mkdir()
    with pytest.raises(UserError, match="is not a file"):
        container.look(settings(sif))
    assert container.look(Container()) == (None, [])
    digest = "ab" * 32
    found, notes = container.look(Container(runtime="pyxis", image=f"docker://a/b@sha256:{digest}"))
    assert found is not None and (found.sha256, found.checked, notes) == (digest, True, [])


def test_a_run_that_goes_on_in_another_image_says_so(sif: Path) -> None:
    """After an update of the image in its place a restarted job would mix two stacks unnoticed."""
    found, _ = container.look(settings(sif))
    assert found is not None
    assert (
        container.changed(None, found)
        == container.changed(found.as_json(), found)
        == container.changed({"sha256": None}, found)
        == ""
    )
    assert "another image" in container.changed({"sha256": "0" * 64}, found)


def test_submit_tells_of_an_image_before_anything_is_queued(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one goes into the run's record; a damaged one, and a run folder that cannot be bound, are reported together."""
    file = tmp_path / "mine.yaml"
    text = (REPO / "ops/clusters/rno-rtxpro6000.yaml").read_text().replace("rno-rtxpro6000\n", "mine\n", 1)
    file.write_text(text.replace("image: /pool/images/train.sif", f"image: {sif}"))

    def submission(path: Path) -> SubmissionPlan:
        return plan_submission("tiny-oasst2", [], True, load_cluster(str(file)), path, None, "report")

    good = submission(tmp_path / "run")
    problems, found, _ = check(good, dry_run=False)
    assert not [p for p in problems if p.key == "container.image"]
    assert found is not None and found.sha256 == DIGEST
    monkeypatch.setattr("clustertune.launch.stage_jobs.submit_all", lambda *words: [])
    send(replace(good, jobs=[]), found, as_json=False)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["container"]
    assert recorded.items() >= {
        "runtime": "apptainer", "image": str(sif), "sha256": DIGEST, "checked": True, "bytes": len(CONTENT),
    }.items()  # fmt: skip
    os.truncate(sif, 100)
    messages = [problem.message for problem in check(submission(tmp_path / "a,b"), dry_run=False)[0]]
    assert any("its SHA-256 is" in text for text in messages) and any("cannot be shown a path" in text for text in messages)


# --- what it has installed ------------------------------------------------------------------------------------------------


def seen(**changes: str | None) -> container.Stack:
    """An image as locked, but for ``changes`` (None: missing)."""
    packages = {**PINNED[pins.PY], **{name.replace("_", "-"): version for name, version in changes.items()}}
    return container.Stack("3.12.3", {name: version for name, version in packages.items() if version is not None})


def judge(found: container.Stack) -> tuple[list[str], list[str]]:
    problems, warnings = container.judge(found, PINNED, "train.sif")
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
    assert not container.not_built(args)
    assert container.not_built(args | {"report_to": ["tensorboard"]})
    monkeypatch.setattr(container, "own", lambda: container.Stack("3.12", {"tensorboardx": "2"}))
    assert not container.not_built(args | {"report_to": ["tensorboard"]})
