"""Whose squashfuse mounts the image: one that a preemption ends is reported before the job is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.cluster.schema import Container
from clustertune.launch import image


def settings(runtime: str = "apptainer", *options: str, program: str | None = None) -> Container:
    return Container(runtime=runtime, image="/x.sif", options=options, program=program)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "options", "warned"),
    [
        (["starter"], (), False),  # Debian's: squashfuse is the system's, and launch/fuse stands in front of it
        (["squashfuse_ll", "starter"], (), True),  # the project's own packages
        (["squashfuse", "starter"], (), True),
        (["squashfuse_ll", "starter", "starter-suid"], (), False),  # the kernel mounts
        (["squashfuse_ll", "starter", "starter-suid"], ("--userns",), True),
    ],
)
def test_a_squashfuse_of_its_own_cannot_be_shielded(own: list[str], options: tuple[str, ...], warned: bool) -> None:
    """It is found before the PATH."""
    found = image.judge(settings("apptainer", *options), own, "/usr/libexec/apptainer/bin")
    assert bool(found) is warned
    assert all(
        "/usr/libexec/apptainer/bin/squashfuse" in text and "-> container.options: [--unsquash]" in text for text in found
    )


def test_singularity_is_not_told_of_an_option_that_it_does_not_have() -> None:
    """The cluster file would refuse it."""
    (text,) = image.judge(settings("singularity"), ["squashfuse_ll"], "/f")
    assert "--unsquash" not in text and "send_user_signal" in text


def runtime(tmp_path: Path, name: str, *own: str) -> str:
    """A program that says about its build what ``apptainer buildcfg`` does."""
    folder = tmp_path / "libexec" / name.partition("-")[0] / "bin"
    folder.mkdir(parents=True)
    for helper in own:
        (folder / helper).touch()
    program = tmp_path / "runtime"
    lines = f"PACKAGE_NAME={name}\\nPREFIX=/usr\\nLIBEXECDIR={tmp_path}/libexec\\n"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = buildcfg ] && printf '{lines}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("name", ["apptainer", "singularity-ce"])
def test_the_runtime_says_where_its_helpers_are(name: str, tmp_path: Path) -> None:
    """A package, an unprivileged installation and one that was moved have them in different places."""
    program = runtime(tmp_path, name, "squashfuse_ll", "starter")
    kind = name.partition("-")[0]
    (text,) = image.unshielded(settings(kind, program=program))
    assert f"{tmp_path}/libexec/{kind}/bin/squashfuse_ll" in text
    if kind == "apptainer":
        assert image.unshielded(settings(kind, "--unsquash", program=program)) == []


def test_where_nothing_is_known_nothing_is_told(tmp_path: Path) -> None:
    """A login node without the runtime, one that says something else, and pyxis, which mounts in the kernel."""
    assert image.unshielded(settings(program="/not/there")) == []
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    assert image.unshielded(settings(program=str(silent))) == []
    assert image.unshielded(Container(runtime="pyxis", image="/x.sqsh")) == []
    assert image.unshielded(Container()) == []


def test_submit_and_the_job_tell_it(tmp_path: Path) -> None:
    """With what else there is to say about an image."""
    sif = tmp_path / "x.sif"
    sif.write_text("image")
    program = runtime(tmp_path, "apptainer", "squashfuse_ll")
    _, notes = image.look(Container(runtime="apptainer", image=str(sif), program=program))
    assert [text for text in notes if "ends with any SIGTERM" in text]
