"""The linter of definition files: what Apptainer would refuse, and what it would not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.containers import deflint
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


def test_a_good_one(tmp_path: Path) -> None:
    """A linter that cries is switched off."""
    assert faults(GOOD, tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("%test", "%tset", "22: unknown section %tset"),
        ("%labels", "%post", "19: %post stands twice"),
        ("%files", "%appinstall x", "10: unknown section %appinstall"),
        ("From: {{ base }}", "Form: {{ base }}", "3: unknown header form"),
        ("From: {{ base }}", "", "1: no header from"),
        ("From: {{ base }}", "From: {{ base }}\nFrom: x", "4: header from stands twice"),
        ("From: {{ base }}", "From: {{ base }}\nnonsense", "4: neither `Key: value` nor a section"),
        ("bootstrap=docker", "bootstrap=dockr", "1: Bootstrap: dockr is unknown"),
        ("@sha256:" + "a" * 64, ":latest", "1: From: example/base:latest has no digest"),
        ("python{{ python }}", "python{{ pyhton }}", "14: {{ pyhton }} has no default"),
        ("python{{ python }}", "python3", "8: argument python is not used"),
        ("    true\n", "    rm -rf $x/y\n", "23: %test: "),
        ("    true\n", "    if true; then\n", "23: %test: "),
        ("    python{{ python }} -m", "    # why\n    cd /x\n    python{{ python }} -m", "15: %post: "),
    ],
)
def test_each_fault_with_its_line(old: str, new: str, fault: str, tmp_path: Path) -> None:
    """The line is that of the file, not of the section."""
    assert old in GOOD
    told = faults(GOOD.replace(old, new, 1), tmp_path)
    assert any(line.startswith(fault) for line in told), told


def test_several_at_once(tmp_path: Path) -> None:
    """One by one would take as many builds."""
    assert len(faults(GOOD.replace("%test", "%tset").replace("docker\n", "dockr\n"), tmp_path)) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Told, without a traceback."""
    with pytest.raises(UserError, match="cannot be read"):
        deflint.lint(tmp_path / "none.def")


def test_the_base_with_the_defaults_put_in() -> None:
    """What a production build starts from."""
    assert deflint.read(GOOD).value("from") == "example/base@sha256:" + "a" * 64
