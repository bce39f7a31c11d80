"""The table of releases with known faults: what lies in a range, and that its neighbours do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.containers import pins as containers
from clustertune.doctor.stack_faults import FAULTS, holds
from clustertune.host import packages
from tests.doctor.recipe_case import make


@pytest.mark.parametrize(
    ("version", "ranges", "inside"),
    [
        ("1.14.0", "<1.15", True),
        ("1.15", "<1.15", False),
        ("1.15.0", "<1.15", False),
        ("1.15.0.dev0", "<1.15", True),
        ("1.15.0rc1", "<1.15", True),
        ("1.9.0", "<1.15", True),
        ("2.28.9.post1", ">=2.28.3,<2.28.9", False),
        ("2.28.3", ">=2.28.3,<2.28.9", True),
        ("2.28.2", ">=2.28.3,<2.28.9", False),
        ("0.21.2", ">=0.21.0,<=0.21.2", True),
        ("0.21", ">=0.21.0,<=0.21.2", True),
        ("0.21.3", ">=0.21.0,<=0.21.2", False),
        ("2.5.1+cu124", "<2.6", True),
        ("2.6.0+cpu", "<2.6", False),
        ("v4.57.3", ">=4.57.2,<4.57.4", True),
        ("4.57.2.post1", "==4.57.2", False),
        ("nonsense", "<9", False),
        ("", "<9", False),
    ],
)
def test_versions_are_compared_as_pip_does(version: str, ranges: str, inside: bool) -> None:
    """1.9 is before 1.15, a release candidate before its release, a local part counts for nothing."""
    assert holds(version, ranges) is inside


def test_the_pins_themselves_have_no_known_fault(tmp_path: Path) -> None:
    """What the project installs must pass its own table, and the pins must be read at all."""
    pins = containers.read()[containers.PY]
    assert pins["torch"]
    assert pins["lm-eval"]
    assert "pytest" not in pins
    assert [item.rule for item in make(tmp_path).findings()] == []


@pytest.mark.parametrize(
    ("rule", "package", "before", "first", "last", "after"),
    [
        ("frozen-base-in-float32", "accelerate", None, "1.6.0", "1.12.0", "1.13.0"),
        ("empty-adapter", "peft", "0.20.0", "0.21.0", "0.21.2", "0.21.3"),
        ("packed-see-each-other", "transformers", None, "4.40.0", "4.53.0", "4.53.1"),
        ("nccl-2-28", "nvidia-nccl-cu13", "2.28.2", "2.28.3", "2.28.8", "2.28.9"),
        ("nccl-hang-2-29-2", "nvidia-nccl-cu13", "2.29.1", "2.29.2", "2.29.2", "2.29.3"),
        ("checkpoint-runs-code", "torch", None, "2.0.0", "2.5.1", "2.6.0"),
        ("punkt-format", "nltk", None, "3.8.0", "3.8.1", "3.8.2"),
    ],
)
def test_a_range_ends_where_it_ends(
    rule: str, package: str, before: str | None, first: str, last: str, after: str, tmp_path: Path
) -> None:
    """A fix that is not seen keeps people from upgrading; a fault that is not seen costs them the run."""
    assert rule in {key for key, _ in FAULTS}
    case = make(tmp_path)
    for version, expected in ((before, False), (first, True), (last, True), (after, False)):
        if version is not None:
            case.versions[package] = version
            found = {item.rule for item in case.findings()}
            assert (rule in found) is expected, version


def test_every_range_can_be_read() -> None:
    """A typing mistake in a range would silence its rule for ever."""
    for fault, ranges in FAULTS:
        for part in ranges.split(","):
            assert part.strip().lstrip("<>=") and holds(part.strip().lstrip("<>="), part) is ("=" in part), fault


def test_what_is_in_the_image_is_not_judged_from_outside(tmp_path: Path) -> None:
    """A faulty package of the login node's Python is not the image's, and the other way round."""
    case = make(tmp_path)
    about = {"stack-unseen", "empty-adapter", "versions-differ"}
    case.versions["peft"] = "0.21.2"
    case.place = "login"
    assert {item.rule for item in case.findings()} & about == {"stack-unseen"}
    case.cluster["container.runtime"] = "none"
    assert {item.rule for item in case.findings()} & about == {"empty-adapter", "versions-differ"}


def test_the_sentence_splitter_matters_to_ifeval_alone(tmp_path: Path) -> None:
    case = make(tmp_path)
    case.versions["nltk"] = "3.8.1"
    case.overrides += ["eval.tasks=[gsm8k]"]
    assert "punkt-format" not in {item.rule for item in case.findings()}


def test_what_a_recipe_may_need_is_looked_for_on_nodes() -> None:
    """A package that no node is asked for would be called missing wherever facts come from a node."""
    needed = {"bitsandbytes", "torchao", "gptqmodel", "fbgemm-gpu", "deepspeed", "flash-attn", "kernels", "liger-kernel"}
    assert needed <= set(packages.STACK)
