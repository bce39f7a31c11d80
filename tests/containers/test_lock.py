"""From pins to locks, and whether the locks of the tree still are what the pins give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import lock_file, package_lock, pins
from clustertune.containers.lock_file import LockedPackage, PackageLock
from clustertune.containers.package_lock import SPECS, X86, NotAudited
from clustertune.errors import UserError
from tests.folders import program
from tests.refusal import problems

PINS = pins.read()


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_the_locks_hold_to_the_pins(spec: package_lock.LockSpec) -> None:
    """A version that is moved in one place only: the image would run another stack than the tests."""
    assert package_lock.held_to_pins(spec, lock_file.read(spec.path), PINS) == []
    assert spec.path.read_text() == lock_file.read(spec.path).text()


def unlike(moved: pins.Pins) -> list[str]:
    """What is said of the tree's locks beside other pins."""
    return [str(problem) for spec in SPECS for problem in package_lock.held_to_pins(spec, lock_file.read(spec.path), moved)]


@pytest.mark.parametrize(
    ("group", "name"), [("PY", "torch"), ("BUILD", "pip"), ("EXTRA", "liger-kernel"), ("REF", "trl"), ("DEV", "ray")]
)
def test_a_version_moved_in_one_place_only_is_found(group: str, name: str) -> None:
    """Whichever group it stands in."""
    moved = pins.read()
    moved[group][name] = "99.0"
    told = unlike(moved)
    assert told and all(f"{name}: is " in line and "99.0 in containers/versions.env" in line for line in told)


def test_no_lock_names_an_index() -> None:
    """An address in a lock is tried by every machine that installs from it."""
    texts = [spec.path.read_text() for spec in SPECS]
    assert [text for text in texts if re.search(r"https?:|file:|--(extra-)?index|--find-links|--trusted", text)] == []


def package(name: str, version: str, *wheels: str, sdist: str = "") -> dict[str, Any]:
    """As uv spells it in pylock.toml."""
    files = [{"url": f"https://index.example/{wheel}", "hashes": {"sha256": wheel}} for wheel in wheels]
    source = {"sdist": {"url": "https://index.example/x.tar.gz", "hashes": {"sha256": sdist}}} if sdist else {}
    return {"name": name, "version": version, "wheels": files, **source}


def test_a_layer_holds_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is resolved with every version of the lock below."""
    given: dict[str, list[str]] = {}

    def answer(requirements: list[str], constraints: list[str], *_: str) -> dict[str, Any]:
        given.update(requirements=requirements, constraints=constraints)
        return {"packages": [package(name, "1", "x-1-py3-none-any.whl") for name in ("kiln", "pan")]}

    monkeypatch.setattr(package_lock, "uv_resolve", answer)
    below = PackageLock("train", "3.12", X86, "", {"kiln": LockedPackage("kiln", "1", ("h",))})
    spec = next(spec for spec in SPECS if spec.name == "extra-ray")
    assert set(package_lock.make(spec, PINS, {"train": below}).entries) == {"pan"}
    assert given == {"requirements": [f"ray=={PINS['DEV']['ray']}"], "constraints": ["kiln==1"]}
    entries = {"pan": LockedPackage("pan", "1", ("h",)), "torch": LockedPackage("torch", "2+cpu", ("h",))}
    present = PackageLock("extra-ray", "3.12", X86, "", entries)
    package_lock.make(spec, PINS, {"train": below, "extra-ray": present}, keep=True)
    assert given["constraints"] == ["pan==1", "kiln==1"]


def test_lock_check_tells_a_lock_that_is_not_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that the pins do not give, or another one: somebody edited, or the index changed under the date."""
    now = {spec.name: lock_file.read(spec.path) for spec in SPECS}
    monkeypatch.setattr(package_lock, "make_all", lambda *_, keep: now if keep else {})
    assert set(package_lock.check_all(lambda _: None)) == set(now)
    wheel = now["train"].entries["wandb"]
    moved = {**now["train"].entries, "wandb": replace(wheel, hashes=("0" * 64,))}
    monkeypatch.setattr(package_lock, "make_all", lambda *_, keep: {**now, "train": replace(now["train"], entries=moved)})
    with pytest.raises(UserError, match=r"containers/train.lock: is not what the pins resolve to .*: wandb"):
        package_lock.check_all(lambda _: None)
    package_lock.check_all(lambda _: None, fresh=False)


# --- the lock format: whatever pip would not hold to a hash is refused --------------------------------------------------

A, B = "a" * 64, "b" * 64
MADE = PackageLock(
    "train", "3.12", "x86_64-manylinux_2_28", "2030-01-31",
    {"kiln": LockedPackage("kiln", "1.0", (A, B)), "oven-x": LockedPackage("oven-x", "2+cpu", (B,))}, ("kiln",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f" \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}", ""), (A, A[:-1]), (A, A.upper()), ("kiln==1.0", "kiln>=1.0"),
        ("kiln==1.0", "kiln @ https://example.org/kiln.whl"), ("kiln==1.0", "--index-url https://example.org kiln==1.0"),
        ("oven-x==2+cpu", "Kiln==2"), ("# python: 3.12\n", ""), (MADE.text(), ""),
        (f"oven-x==2+cpu \\\n    --hash=sha256:{B}\n", f"kiln==2.0 \\\n    --hash=sha256:{B}\n"),
    ],
)  # fmt: skip
def test_what_make_lock_did_not_write(old: str, new: str) -> None:
    """One line without a hash turns hash checking off for what it names."""
    assert lock_file.parse(MADE.text(), "x.lock") == MADE and old in MADE.text()
    (problem,) = problems(lock_file.parse, MADE.text().replace(old, new), "x.lock")
    assert problem.file == "x.lock" and "was edited by hand" in problem.message


def test_a_layer_adds_and_never_changes() -> None:
    """Else an extra would move the version that the image was tested with."""

    def layer(name: str, version: str, *sources: str) -> PackageLock:
        entries = {name: LockedPackage(name, version, (A,))}
        return PackageLock(f"extra-{name}", "3.12", MADE.platform, MADE.before, entries, sources, "train")

    whole = MADE.with_layer(layer("pan", "1", "pan"))
    assert set(whole.entries) == {"kiln", "oven-x", "pan"} and whole.from_source == ("kiln", "pan")
    with pytest.raises(UserError, match=r"kiln is 2\.0 here and 1\.0"):
        MADE.with_layer(layer("kiln", "2.0"))


# --- containers/versions.env and base.env as the builds read them ---------------------------------------------------------


# --- the vulnerability scan: pip-audit is a script here ------------------------------------------------------------------

ENTRIES = {name: LockedPackage(name, version, ("h",)) for name, version in (("kiln", "1.0"), ("oven", "2.0+cpu"))}
LOCK = PackageLock("x", "3.12", "any", "", ENTRIES)


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """Have uv print a text and end with a code; gives the file with its arguments and the requirements that it was given."""

    def make(text: str, code: int) -> Path:
        (tmp_path / "answer").write_text(text)
        log = tmp_path / "log"
        program(
            tmp_path / "uv", f'echo "$@" > {log}; cat "${{@: -1}}" >> {log}; cat {tmp_path}/answer; exit {code}', "/bin/bash"
        )
        monkeypatch.setattr(pins, "find_tool", lambda _: str(tmp_path / "uv"))
        return log

    return make


SKIPPED = {"dependencies": [{"name": "kiln", "skip_reason": "not found"}]}


@pytest.mark.parametrize("answer", ["", "<html>", "[]", "{}", json.dumps(SKIPPED)])
def test_an_answer_that_is_none_is_no_clean_bill(uv: Callable[[str, int], Path], answer: str) -> None:
    """A portal's login page is not `nothing known`."""
    uv(answer, 0)
    with pytest.raises(NotAudited):
        package_lock.audit([LOCK], {})
