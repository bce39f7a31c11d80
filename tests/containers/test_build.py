"""What a build passes on, what it refuses before it starts, and what is left where it fails. The engines here are scripts."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune.containers import image_build, pins
from clustertune.containers.image_build import BuildRequest
from clustertune.containers.lock_file import PackageLock
from clustertune.errors import UserError
from tests import tree
from tests.folders import program
from tests.refusal import problems
from tests.slurm import wait_for

DIGEST = "example.org/base@sha256:" + "a" * 64


def options(kind: str, *words: str) -> BuildRequest:
    parser = argparse.ArgumentParser()
    image_build.arguments(parser, kind)
    return image_build.request(parser.parse_args(words))


def test_what_cannot_be_built_is_refused() -> None:
    """Before three gigabytes are fetched, and all at once. A base by its tag is another one tomorrow."""
    bases = ["--base ubuntu:24.04", "--base docker.io/x@sha256:abc", "--base no/such/file.tar"]
    extras = ["--extras flash", "--extras ray --variant cpu", "--extras ray --definition reference"]
    variants = [f"--definition {name} --variant {variant}" for name in ("reference",) for variant in ("cpu", "vllm")]
    for keys, lines in {"EXTRAS": extras, "BASE": bases, "VARIANT": variants}.items():
        for words in lines:
            assert [problem.key for problem in problems(options, "build-sif", *words.split())] == keys.split()
    for words, keys in {
        "--tag=A/B": "TAG",
        "--tag=--help": "TAG",
        "--extras flash --base x:y --tag X": "EXTRAS TAG BASE",
    }.items():
        assert [problem.key for problem in problems(options, "build-image", *words.split())] == keys.split()
    with pytest.raises(SystemExit):
        options("build-sif", "--tag", "a/b")  # a SIF is a file and has none


@pytest.mark.parametrize("words", ["--variant cpu", "--variant vllm", "--definition reference", "--extras ray"])
def test_a_lock_of_another_architecture_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip would say so inside the image, after the base is fetched."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (problem,) = problems(options, "build-sif", *words.split())
    assert (
        problem.key == {"--variant": "VARIANT", "--definition": "DEFINITION", "--extras": "EXTRAS"}[words.split(maxsplit=1)[0]]
    )
    assert "aarch64" in problem.message


def test_a_version_moved_in_one_place_only_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is what is installed; a pin that it does not know yet would be ignored without a message."""
    assert image_build.locked(BuildRequest("build-sif")) is not None
    moved = tmp_path / "versions.env"
    moved.write_text(pins.FILE.read_text().replace("PY_WANDB=", "PY_WANDB=9"))
    monkeypatch.setattr(image_build.pins, "read", lambda: pins.parse(moved.read_text()))
    with pytest.raises(UserError, match=r"containers/train.lock: wandb: is .* run make lock"):
        image_build.locked(BuildRequest("build-sif"))


def test_engines_are_not_told_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine does not know cannot get into an image or its log."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PIP_INDEX_URL", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    environment = image_build.environ()
    assert "planted" not in environment.values() and {"PATH", "http_proxy"} <= set(environment)


# --- an engine that is a script ------------------------------------------------------------------------------------------

APPTAINER = """
echo "$PWD" "$*" "token=$HF_TOKEN" >> {log}
case $1 in
build)
    for word; do last=$before; before=$word; done
    [ -e {fail} ] && echo half > "$last" && exit 255
    ls > {log}.files
    echo image > "$last";;
image) echo 7;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """apptainer and uv on PATH, and an empty lock; their arguments are in ``log``."""
    folder = tmp_path / "bin"
    lines = APPTAINER.format(log=tmp_path / "log", fail=tmp_path / "fail")
    for name in ("apptainer", "docker", "podman"):
        program(folder / name, lines)
    program(folder / "uv", f'echo uv "$*" >> {tmp_path / "log"}\nfor word; do last=$word; done\necho bill > "$last"')
    monkeypatch.setattr(pins, "find_tool", lambda name: str(folder / name))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "planted")
    monkeypatch.setattr(image_build, "WORK", tmp_path / "work")
    monkeypatch.setattr(image_build, "locked", lambda _: PackageLock("train", "3.12", "any", "2030-01-31", {}))

    def fill(_lock: PackageLock, house: Path, *_: object) -> None:
        house.mkdir(parents=True, exist_ok=True)
        (house / "requirements.txt").write_text("")

    monkeypatch.setattr(image_build, "fill", fill)
    # As an ordinary user: no mount namespace is needed to start a script.
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return tmp_path


def test_a_build_and_what_lies_beside_it(fake: Path) -> None:
    """The sum, the bill, and no path of this machine in the arguments of the definition."""
    out = fake / "x.sif"
    made = image_build.build(BuildRequest("build-sif", base=DIGEST, out=out), lambda _: None)
    digest = hashlib.sha256(b"image\n").hexdigest()
    assert (made["sha256"], made["bytes"], made["lock"]) == (digest, 6, "train")
    assert (fake / "x.sif.sha256").read_text() == f"{digest}  x.sif\n"
    subprocess.run(["sha256sum", "--check", "--quiet", "x.sif.sha256"], cwd=fake, check=True, timeout=30)
    assert (fake / "x.sif.cdx.json").read_text() == "bill\n"
    log = (fake / "log").read_text()
    assert f"--build-arg base={DIGEST}" in log and f"base_name={DIGEST}" in log and "token=\n" in log and "planted" not in log
    assert f"uv tool run --quiet --from cyclonedx-bom=={pins.read()['TOOL']['cyclonedx-bom']} cyclonedx-py requirements" in log
    files = set((fake / "log.files").read_text().split())
    assert files == {"image.lock", "install.sh", "requirements.txt", "selftest.py", "train.def"}
    assert sorted(path.name for path in fake.glob("*sif*")) == ["x.sif", "x.sif.cdx.json", "x.sif.sha256"]
    assert {path.name for path in (fake / "work").iterdir()} == {"lock", "wheels"}  # builds gather one at a time


def test_an_apptainer_beside_the_system_builds_too(fake: Path) -> None:
    """What containers/get-apptainer.sh puts into build/apptainer, where PATH has none."""
    own = fake / "apptainer" / "bin"
    own.mkdir(parents=True)
    (fake / "bin" / "apptainer").rename(own / "apptainer")
    made = image_build.build(BuildRequest("build-sif", base=DIGEST, out=fake / "x.sif"), lambda _: None)
    assert made["bytes"] == 6 and image_build.find_apptainer() == str(own / "apptainer")


def test_an_oci_image_has_its_bill(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built, tested without a network, described."""
    monkeypatch.setattr(image_build, "ROOT", fake)
    made = image_build.build(BuildRequest("build-image", base=DIGEST, tag=f"{fake}/made"), lambda _: None)
    log = (fake / "log").read_text()
    assert f"--build-arg BASE_IMAGE={DIGEST}" in log and "--network none" in log and "planted" not in log
    assert made["image"] == f"{fake}/made" and Path(made["sbom"]).read_text() == "bill\n" and made["bytes"] == 7
    assert {path.name for path in (fake / "work").iterdir()} == {"lock", "wheels"}


def test_a_build_that_fails_leaves_the_old_image(fake: Path) -> None:
    """With its own sum, and nothing half made."""
    out = fake / "x.sif"
    image_build.build(BuildRequest("build-sif", base=DIGEST, out=out), lambda _: None)
    before = {path.name: path.read_text() for path in fake.glob("*sif*")}
    (fake / "fail").write_text("")
    with pytest.raises(UserError, match="BASE=standin"):
        image_build.build(BuildRequest("build-sif", base=DIGEST, out=out), lambda _: None)
    assert {path.name: path.read_text() for path in fake.glob("*sif*")} == before
    assert {path.name for path in (fake / "work").iterdir()} == {"lock", "wheels"}  # builds gather one at a time


WITHOUT_WHEELS = """
import runpy, sys
from pathlib import Path
from clustertune.containers import image_build
def fill(lock, folder, *_):
    folder.mkdir(parents=True)
    (folder / "requirements.txt").touch()
image_build.fill, image_build.WORK = fill, Path(sys.argv.pop(1))
runpy.run_module("clustertune.containers", run_name="__main__")
"""


def test_a_build_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """By SIGTERM too, as CI and schedulers end things: a build folder holds gigabytes."""
    folder, started = tmp_path / "bin", tmp_path / "started"
    program(folder / "apptainer", f"pwd > {started}.part && mv {started}.part {started}\nexec sleep 600")
    words = ["build-sif", "--base", DIGEST, "--out", str(tmp_path / "x.sif")]
    command = [sys.executable, "-c", WITHOUT_WHEELS, str(tmp_path / "work"), *words]
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(command, cwd=tree.REPO, env=environ, stderr=subprocess.PIPE, text=True) as running:
        wait_for(started.exists, "the start of the engine", 120)
        running.terminate()
        _, output = running.communicate(timeout=60)
    assert running.returncode == 75 and "interrupted" in output and "Traceback" not in output
    assert not Path(started.read_text().strip()).exists() and not list(tmp_path.glob("*.sif*"))


def test_it_is_built_with_nothing_installed() -> None:
    """An image is what a bare machine builds first: only the standard library is imported."""
    code = (
        "import sys; import clustertune.containers.__main__; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'clustertune', '__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tree.REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- the stand-in base ---------------------------------------------------------------------------------------------------
