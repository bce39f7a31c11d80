"""Real images: the CPU variant as SIF and as OCI image from a stand-in base, built, run without a network, and searched."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import image_build as images
from clustertune.containers import lock_file, pins
from clustertune.containers.lock_file import text_digest
from tests import tree
from tests.containers.conftest import TAG
from tests.containers.in_sif import in_sif

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

PLANTED = "planted-7f3a9c51d2"
"""In the environment of every build here, as tokens are on a person's machine."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "APPTAINERENV_TOKEN", "SINGULARITYENV_TOKEN", "GIT_PASSWORD")
PIP_LIST = ["python", "-m", "pip", "list", "--format", "json"]
SEARCH = """
import os, sys
wanted = [word.encode() for word in sys.stdin.read().split("\\0")]
with open("/proc/self/mountinfo") as file:
    mounted = {line.split()[4] for line in file} - {"/"}
for folder, folders, files in os.walk("/", topdown=True):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in mounted]
    for name in files:
        path = os.path.join(folder, name)
        if path in mounted or os.path.islink(path) or not os.path.isfile(path) or not os.access(path, os.R_OK):
            continue
        with open(path, "rb") as file:
            data = file.read()
        for word in wanted:
            if word in data:
                print(path, word.decode())
"""
"""Runs inside an image: every file of its own that holds one of the words."""


@dataclass(frozen=True)
class Image:
    """An image that was built, and how to run something in it."""

    answer: dict[str, Any]
    """What the build said."""
    inside: Sequence[str]
    """The words in front of a command that runs in it without network."""

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.inside, *command], input=text, capture_output=True, text=True, timeout=900, check=False)


def build(kind: str, *options: str | Path) -> dict[str, Any]:
    """As ``make`` starts it, with secrets in the environment."""
    command = [sys.executable, "-m", "clustertune.containers", kind, *map(str, options)]
    environ = {**os.environ, **dict.fromkeys(SECRETS, PLANTED)}
    done = subprocess.run(command, cwd=tree.REPO, env=environ, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def sif(cpu_sif: dict[str, Any]) -> Image:
    """``make build-sif VARIANT=cpu BASE=standin``."""
    return Image(cpu_sif, in_sif(images.find_apptainer(), Path(cpu_sif["file"])))


@pytest.fixture(scope="module")
def oci(cpu_oci: dict[str, Any]) -> Image:
    """``make build-image VARIANT=cpu BASE=standin``."""
    engine = images.find_engine()
    return Image(cpu_oci, [engine, "run", "--rm", "--interactive", "--network", "none", *images.limits(engine), TAG])


@pytest.fixture(params=["sif", "oci"])
def image(request: pytest.FixtureRequest) -> Image:
    """Both."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_it_holds_what_is_locked(image: Image) -> None:
    """Package by package, as a person lists them: nothing more, nothing less."""
    done = image.run(*PIP_LIST)
    assert done.returncode == 0, done.stderr
    have = {pins.normal(item["name"]): item["version"] for item in json.loads(done.stdout)}
    locked = lock_file.read(pins.FOLDER / "train-cpu.lock")
    assert have == {name: entry.version for name, entry in locked.entries.items()}


def test_it_works_without_a_network(image: Image) -> None:
    """The image's own test: imports, two ranks that add, a few training steps."""
    done = image.run("python", images.SELFTEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2-rank gloo all_reduce: 1 \+ 2 = 3$", done.stdout, re.MULTILINE)
    assert "training steps: loss" in done.stdout
    outside = image.run("python", "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 2)")
    assert outside.returncode and "unreachable" in outside.stderr


CHECK = """
import sys
sys.path.insert(0, "/usr/local/share/clustertune")
import selftest
real = selftest.locked()
selftest.locked = lambda: {name: version for name, version in {**real, **%s}.items() if version}
selftest.check_installed()
"""


@pytest.mark.parametrize(
    ("change", "message"), [("{}", ""), ("{'trl': '0'}", "trl: "), ("{'peft': ''}", "peft: "), ("{'pan': '1'}", "pan: ")]
)
def test_its_own_test_finds_what_is_not_locked(image: Image, change: str, message: str) -> None:
    """Another version, one package too many, one too few: else it would pass an image that is not what was locked."""
    done = image.run("python", "-c", CHECK % change)
    assert (done.returncode, message in done.stderr) == (int(bool(message)), True), done.stderr


def words_of_this_machine() -> list[str]:
    """The planted token, the checkout, where its user, pip and pytest keep things, and its name."""
    settings = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
    words = [PLANTED, str(tree.REPO), socket.gethostname(), "/tmp/pytest", *(os.environ.get(name, "") for name in settings)]
    # Root's home is every image's, and a short host name (`vm`) is part of many words.
    home = [str(Path.home())] if os.geteuid() else []
    return [word for text in (*words, *home) for word in text.split() if len(word) > 6]


def test_nothing_of_this_machine_is_in_it(image: Image) -> None:
    """Tokens of the environment, and paths and the name of the machine that built it."""
    there = "2-rank gloo all_reduce"  # the search itself is tried too, in the same pass: an image has 50,000 files
    done = image.run("python", "-c", SEARCH, text="\0".join([*words_of_this_machine(), there]))
    found = done.stdout.splitlines()
    assert done.returncode == 0 and f"{images.SELFTEST} {there}" in found, done.stderr[-500:]
    assert [line for line in found if not line.endswith(there)] == []


def test_what_travels_beside_the_files_says_nothing_either(sif: Image, oci: Image) -> None:
    """Labels, environment, the definition, the history of the layers."""
    program, engine = images.find_apptainer(), images.find_engine()
    answers = [
        images.answer([program, "inspect", "--all", sif.answer["file"]]),
        images.answer([engine, "inspect", oci.answer["image"]]),
        images.answer([engine, "history", "--no-trunc", oci.answer["image"]]),
    ]
    for text in answers:
        assert text and len(text) > 200
        assert not [word for word in words_of_this_machine() if word in text]
    digest = text_digest(lock_file.read(pins.FOLDER / "train-cpu.lock").text())
    assert digest in str(answers[0]) and digest in str(answers[1])


def test_the_sif_is_what_its_sum_says(sif: Image) -> None:
    """And zstd inside: gzip takes ten times as long to write and longer to read."""
    out = Path(sif.answer["file"])
    subprocess.run(["sha256sum", "--check", "--quiet", f"{out.name}.sha256"], cwd=out.parent, check=True, timeout=120)
    data = out.read_bytes()
    start = data.index(b"hsqs")  # a squashfs superblock; its compressor is the 16-bit word at 20: 6 is zstd
    assert int.from_bytes(data[start + 20 : start + 22], "little") == 6


def test_the_bill_names_every_package(image: Image) -> None:
    """With the hash of its wheel; cyclonedx-py comes from an index, which not every machine reaches."""
    if "sbom" not in image.answer:
        pytest.skip("cyclonedx-py could not be had")
    bill = json.loads(Path(image.answer["sbom"]).read_text())
    locked = lock_file.read(pins.FOLDER / "train-cpu.lock")
    python = {item["name"]: item for item in bill["components"]}
    assert set(python) == set(locked.entries)
    for name in locked.entries.keys() - set(locked.from_source):
        assert python[name]["externalReferences"][0]["hashes"][0]["content"] in locked.entries[name].hashes, name


def test_the_oci_image_is_no_roots(oci: Image) -> None:
    """Kubernetes refuses root where it is configured to, and a job's files are the user's."""
    assert oci.run("id", "-u").stdout.strip() == "10001"
    assert oci.run("sh", "-c", "touch $HOME/x && ! touch /usr/local/venv/x 2>/dev/null").returncode == 0


def test_an_altered_hash_ends_the_build(sif: Image, tmp_path: Path) -> None:
    """With everything fetched already: the sum of one package changed in the lock is enough. No image is left."""
    checkout = tmp_path / "checkout"
    for part in ("clustertune", "containers"):
        shutil.copytree(tree.REPO / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    lock = checkout / "containers" / "train-cpu.lock"
    digest = lock_file.read(lock).entries["sqlitedict"].hashes[0]
    lock.write_text(lock.read_text().replace(digest, digest[::-1]))
    there, copied = (root / "build" / "containers" for root in (tree.REPO, checkout))
    (fetched,) = there.glob(
        f"wheels/train-cpu-{lock_file.text_digest(lock_file.read(lock_file.path_of('train-cpu')).text())[:12]}"
    )
    altered = copied / "wheels" / f"train-cpu-{lock_file.text_digest(lock_file.read(lock).text())[:12]}"
    shutil.copytree(fetched, altered, copy_function=os.link, ignore=shutil.ignore_patterns("requirements.txt"))
    for archive in there.glob("standin-*.tar"):
        os.link(archive, copied / archive.name)
    out = tmp_path / "altered.sif"
    options = ["--variant", "cpu", "--base", "standin", "--out", str(out)]
    command = [sys.executable, "-m", "clustertune.containers", "build-sif", *options]
    environ = {**os.environ, "PATH": f"{Path(sif.inside[0]).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "containers/train-cpu.lock: a file has another hash" in done.stderr, done.stderr
    assert "sqlitedict" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("*.sif*"))


@pytest.mark.long
def test_the_cuda_image(tmp_path: Path) -> None:
    """The whole stack with DeepSpeed, 3 GB to fetch: NCCL and CUDA are torch's own; it imports and compiles without a GPU."""
    program = images.find_apptainer()
    out = tmp_path / "train.sif"
    answer = build("build-sif", "--extras", "deepspeed", "--base", "standin", "--out", out)
    command = in_sif(program, out, "python", images.SELFTEST, "--compile")
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DeepSpeed's async_io: compiled" in done.stdout
    locked = lock_file.read(pins.FOLDER / "train.lock")
    assert f"NCCL {locked.entries['nvidia-nccl-cu13'].version}" in done.stdout and "torch's CUDA: 13.0" in done.stdout
    assert answer["bytes"] < 4 << 30
