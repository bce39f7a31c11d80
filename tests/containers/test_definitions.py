"""The definitions of the tree: shellchecked, held to base.env and to each other, without versions or indexes of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from clustertune.containers import lock_file, pins
from tests import tree
from tests.folders import program

TEXTS = {name: text for name, text in tree.texts().items() if name.startswith("containers/")}
DEFINITIONS = sorted(name for name in TEXTS if name.endswith(".def"))
BASES = pins.read_bases()


def sections(text: str) -> dict[str, str]:
    """The lines below each ``%name`` of a definition; its header is the section without a name."""
    name, *rest = re.split(r"^%(\w+)$", f"\n{text}", flags=re.MULTILINE)
    return {"": name, **dict(zip(rest[::2], rest[1::2], strict=True))}


def arguments(text: str) -> dict[str, str]:
    """The build arguments of a definition with their defaults."""
    return dict(re.findall(r"^ +(\w+)=(\S+)$", sections(text)["arguments"], re.MULTILINE))


@pytest.mark.parametrize("name", ["containers/install.sh", "containers/Dockerfile", *DEFINITIONS])
def test_pip_installs_by_hash_and_nothing_else_is_fetched(name: str) -> None:
    """A base by digest and a step that takes what is on an index today are two builds of one name."""
    text = re.sub(r"^ *#.*$", "", TEXTS[name], flags=re.MULTILINE).replace("\\\n", " ")
    for line in re.findall(r"^.*\bpip\b.* install\b.*$", text, re.MULTILINE):
        assert "--no-index" in line and "--require-hashes" in line
    assert not re.search(r"\b(curl|wget|git|conda|npm|add-apt-repository) ", text)


def default(text: str) -> str:
    """The base that a definition or the Dockerfile starts from when nobody says otherwise."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
    return found[1] if found else arguments(text)["base"]


@pytest.mark.parametrize("name", [*DEFINITIONS, "containers/Dockerfile"])
def test_the_base_is_the_one_of_base_env(name: str) -> None:
    """A digest that is moved in one place only: two images of one name."""
    key = "BASE_MEGATRON" if "megatron" in name else "BASE_TRAIN"
    assert default(TEXTS[name]) == BASES[key]
    assert default(TEXTS[name].replace("sha256:", "sha256:0", 1)) != BASES[key]


def test_the_reference_is_built_like_the_training_image() -> None:
    """Another lock, nothing else: else the comparison with the source document compares builds."""
    both = [TEXTS[f"containers/{name}.def"] for name in ("train", "reference")]
    one, other = map(sections, both)
    differ = {name for name in one if name and one[name] != other[name]}
    assert set(one) == set(other) and differ == {"arguments", "help"}
    assert arguments(both[0]) == {**arguments(both[1]), "lock": "train"}


def test_the_dockerfile_does_what_the_definition_does() -> None:
    """The same files in, the same installer, the same environment and labels: the same result."""
    docker, parts = TEXTS["containers/Dockerfile"], sections(TEXTS["containers/train.def"])
    copied = re.search(r"^COPY (.+) /usr/local/share/clustertune/$", docker, re.MULTILINE)
    assert copied and copied[1].split() == re.findall(r"^    (\S+) /usr", parts["files"], re.MULTILINE)
    labels = re.findall(r'^(?:LABEL|     ) ([\w.]+)="', docker, re.MULTILINE)
    assert labels == re.findall(r"^    ([\w.]+) ", parts["labels"], re.MULTILINE)
    for name in re.findall(r"export (\w+)=", parts["environment"]):
        assert re.search(rf"^(ENV|   ) {name}=", docker, re.MULTILINE), name
    assert (
        "install.sh" in parts["post"] and "install.sh" in docker and "selftest.py" in parts["test"] and "selftest.py" in docker
    )


def test_the_dockerfile_is_told_what_the_definition_is_told() -> None:
    """The same build arguments with the same defaults, and the Python of the lock that they name."""
    docker, definition = TEXTS["containers/Dockerfile"], TEXTS["containers/train.def"]
    given = {name.lower(): value for name, value in re.findall(r"^ARG (\w+)=(\S+)$", docker, re.MULTILINE)}
    wanted = {name: value for name, value in arguments(definition).items() if name != "bootstrap"}
    given["base"] = given.pop("base_image")
    assert given == wanted
    for name in ("train", "reference"):
        defaults = arguments(TEXTS[f"containers/{name}.def"])
        assert lock_file.read(pins.FOLDER / f"{defaults['lock']}.lock").python == defaults["python"]


# --- what recipes compile at run time finds its compilers in the image: held to what DeepSpeed's builders ask for -----------

INSTALL = (pins.FOLDER / "install.sh").read_text()


def test_nvcc_is_found_where_torch_looks_for_it(tmp_path: Path) -> None:
    """The part of install.sh, run: torch takes the folder above that of the nvcc on PATH, and links from its lib64."""
    part = INSTALL[INSTALL.index("nvcc=$(echo") : INSTALL.index("# Each rank would compile")]
    home, venv = tmp_path / "venv/lib/python3.12/site-packages/nvidia/cu13", tmp_path / "venv"
    for folder in (home / "lib", venv / "bin"):
        folder.mkdir(parents=True)
    (venv / "lib64").symlink_to("lib")
    program(home / "bin/nvcc", "echo release 13.0, V13.0.88")
    (home / "lib/libcudart.so.13").write_bytes(b"")
    subprocess.run(["bash", "-euo", "pipefail", "-c", f"venv={venv}\n{part}"], check=True, timeout=60)
    done = subprocess.run([venv / "bin/nvcc", "-V"], capture_output=True, text=True, check=True, timeout=60)
    assert "release 13.0" in done.stdout
    assert (venv / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
    linked = subprocess.run(
        ["gcc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "x.so", f"-L{venv}/lib64", "-Wl,--no-as-needed", "-lcuda"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert linked.returncode == 0, linked.stderr
