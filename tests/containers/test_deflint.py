"""The linter of definition files: what Apptainer would refuse, and what it would not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.containers import deflint, pins
from clustertune.errors import UserError

GOOD = """# why
Bootstrap: {{ bootstrap }}
From: {{ base }}

%arguments
    bootstrap=docker
    base=example/base@sha256:""" + "a" * 64 + """
    python=3.12

%files
    a /b

%post
    python{{ python }} -m venv /usr/local/venv

%environment
    export PATH="/usr/local/venv/bin:$PATH"

%labels
    x y

%test
    true
"""  # fmt: skip


def faults(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "x.def"
    path.write_text(text)
    return [str(problem).removeprefix(f"{path}:") for problem in deflint.lint(path)]


BASE = "@sha256:" + "a" * 64
WRONG = [
    ("%test", "%tset", "22: unknown section %tset"), ("%labels", "%post", "19: %post appears twice"),
    ("%files", "%appinstall x", "10: unknown section %appinstall"),
    ("From: {{ base }}", "Form: {{ base }}", "3: unknown header form"), ("From: {{ base }}", "", "1: no header from"),
    ("From: {{ base }}", "From: {{ base }}\nFrom: x", "4: header from appears twice"),
    ("From: {{ base }}", "From: {{ base }}\nnonsense", "4: neither `Key: value` nor a section"),
    ("bootstrap=docker", "bootstrap=dockr", "1: Bootstrap: dockr is unknown"),
    (BASE, ":latest", "1: From: example/base:latest has no digest"),
    ("bootstrap=docker", "bootstrap=debootstrap", "1: Bootstrap: debootstrap takes what its mirror has today"),
    (f"bootstrap=docker\n    base=example/base{BASE}", "bootstrap=library\n    base=a/b:1", "1: From: a/b:1 has no"),
    ("    python{{ ", "    wget http://x/y\n    python{{ ", "14: %post: what wget loads is held to no"),
    ("python{{ python }}", "python{{ pyhton }}", "14: {{ pyhton }} has no default"),
    ("python{{ python }}", "python3", "8: argument python is not used"),
    ("    true\n", "    rm -rf $x/y\n", "23: %test: "), ("    true\n", "    if true; then\n", "23: %test: "),
    ("    python{{ ", "    # why\n    cd /x\n    python{{ ", "15: %post: "),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "fault"), WRONG)
def test_each_fault_with_its_line(old: str, new: str, fault: str, tmp_path: Path) -> None:
    """The line is that of the file, not of the section."""
    assert old in GOOD
    found = faults(GOOD.replace(old, new, 1), tmp_path)
    assert any(line.startswith(fault) for line in found), found


def test_several_at_once(tmp_path: Path) -> None:
    """One by one would take as many builds. A good one has none."""
    assert faults(GOOD, tmp_path) == []
    assert len(faults(GOOD.replace("%test", "%tset").replace("docker\n", "dockr\n"), tmp_path)) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Told, without a traceback."""
    with pytest.raises(UserError, match="cannot be read"):
        deflint.lint(tmp_path / "none.def")


def test_the_base_with_the_defaults_put_in() -> None:
    """What a production build starts from."""
    assert deflint.read(GOOD).value("from") == "example/base@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("curl -fsSLO https://x/y.tar", "held to no hash"), ("curl -fsSL https://x/y.sh | sh -s -- -y", "is run unseen"),
        ('bash -c "$(wget -qO- https://x/y.sh)"', "is run unseen"),
        ("pip install einops==2.0", "pip takes what the index has today"),
        ("/v/bin/python -m pip --quiet install -r x.txt", "pip takes what the index has today"),
        ("uv pip install --system torch", "pip takes what the index has today"),
        ("git clone --depth 1 https://x/y", "git clone takes what the branch is today"),
        ("conda install -y x", "`conda install` takes what its index has today"),
        ("true && npm install x", "`npm install` takes what its index has today"),
        ("add-apt-repository ppa:x/y", "add-apt-repository adds another archive"),
        ("curl -O https://x/y \\\n    && tar xf y", "held to no hash"),
    ],
)  # fmt: skip
def test_what_is_held_to_nothing(line: str, expected: str) -> None:
    """A base by digest and a %post that takes what is there today: two builds of one name, or somebody else's code."""
    ((number, message, fix),) = deflint.unheld(["set -eu", *line.split("\n")], 10)
    assert number == 11 and expected in message and fix


HELD = [
    "# curl https://x/y", "pip install --require-hashes -r x.lock", "pip check", "echo done # pip install x",
    "python3 -m pip install \\\n    --no-index --find-links /mnt x", "apt-get install --yes curl wget git",
    "command -v curl > /dev/null", "curl -O https://x/y\necho '0a  y' | sha256sum --check -",
    "git clone https://x/y\ngit -C y checkout " + "0123456789" * 4,
]  # fmt: skip


@pytest.mark.parametrize("line", HELD)
def test_what_is_held(line: str) -> None:
    """A linter that cries is switched off."""
    assert list(deflint.unheld(line.split("\n"), 1)) == []


def test_the_installer_is_looked_at_too(tmp_path: Path) -> None:
    """The definitions hand their %post to it."""
    text = (pins.FOLDER / "install.sh").read_text()
    assert deflint.lint(pins.FOLDER / "install.sh") == []
    loose = tmp_path / "install.sh"
    loose.write_text(text.replace("--no-index", "").replace("--require-hashes", ""))
    (problem,) = deflint.lint(loose)
    assert "pip takes what the index has today" in str(problem)
