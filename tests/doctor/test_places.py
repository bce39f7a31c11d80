"""The doctor on a bare machine, and the same rules told apart by place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.check.report import machine_rules
from clustertune.doctor import __main__ as bare_doctor
from clustertune.doctor import wire
from clustertune.host.facts import HostFacts, from_dict
from tests import tree
from tests.doctor import bare
from tests.doctor.machine_cases import GOOD, patched

REPO = Path(__file__).resolve().parents[2]
PROGRAM = ["clustertune/doctor/__main__.py", *tree.sources("clustertune/check/")]


def run(*words: str, python: str = sys.executable, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m clustertune.doctor`` without site-packages."""
    command = [python, "-S", "-E", "-m", "clustertune.doctor", *words]
    env = {**os.environ, **(environ or {})}
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=120, env=env)


def test_it_needs_only_the_standard_library_of_python_3_8() -> None:
    """Login nodes have the system's Python and nothing else: by grammar, imports and names, whatever is installed here."""
    sources = bare.closure(*PROGRAM)
    assert {"clustertune/host/collect.py", "clustertune/check/machine_gpu.py", "clustertune/doctor/wire.py"} <= set(sources)
    assert bare.faults(sources) == []


LATER = [
    "import yaml",
    "from torch import x",
    "match x:\n    case 1:\n        pass",
    "'a'.removeprefix('b')",
    "zip(a, strict=True)",
]


@pytest.mark.parametrize("text", LATER)
def test_what_3_8_cannot_run_is_seen(text: str) -> None:
    """The check itself."""
    assert bare.faults({"x.py": text}) != []


def test_a_real_old_python_runs_it() -> None:
    """Where there is one: it looks at this machine, and its facts are what newer ones read."""
    found = bare.interpreters()
    if not found:
        pytest.skip("no Python 3.8 or 3.9 on PATH or under pyenv")
    for python in found:
        printed = run("--facts", python=python)
        assert printed.returncode == 0 and printed.stderr == "", printed.stderr
        assert from_dict(json.loads(printed.stdout)).kernel
        done = run("--json", python=python)
        assert done.returncode in (0, 1, 2) and done.stderr == "", done.stderr
        assert len(json.loads(done.stdout)["findings"]) > 15


def facts_file(tmp_path: Path, **patch: Any) -> str:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(patched(GOOD, {key.replace("__", "."): value for key, value in patch.items()})))
    return str(path)


def test_exit_codes(tmp_path: Path) -> None:
    """0: nothing, 1: warnings, 2: failures; ignored ones do not count."""
    assert run("--from", facts_file(tmp_path)).returncode == 0
    warned = run("--from", facts_file(tmp_path, nofile=1024))
    assert warned.returncode == 1 and warned.stdout.startswith("WARN    open-files: gpu01: 1024\n        why: ")
    failed = run("--from", facts_file(tmp_path, nofile=128, gpus__0__mig=True))
    assert failed.returncode == 2 and failed.stdout.index("gpu-mig") < failed.stdout.index("gpu01 (step): 2 failed")
    ignored = run("--from", facts_file(tmp_path, nofile=128, gpus__0__mig=True), "--ignore", "gpu-mig", "--ignore=open-files")
    assert ignored.returncode == 0 and "ignored: gpu-mig, open-files" in ignored.stdout


def test_the_document(tmp_path: Path) -> None:
    """One JSON document with every finding, worst first."""
    done = run("--from", facts_file(tmp_path, nofile=128), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2 and done.stderr == ""
    assert (document["place"], document["host"], document["verdict"]) == ("step", "gpu01", "fail")
    assert [item["rule"] for item in document["findings"] if item["status"] == "fail"] == ["open-files"]
    assert set(document["findings"][0]) == {"rule", "status", "where", "found", "fix", "why", "link"}


def test_the_same_facts_at_another_place(tmp_path: Path) -> None:
    """Limits and cores of a step are judged in a step, those of a login node are not a fault."""
    path = facts_file(tmp_path, nofile=128, memlock_bytes=65536, affinity=1, affinity_list="0", nvidia_devices=0, gpus=[])
    assert run("--from", path).returncode == 2
    assert run("--from", path, "--place", "login").returncode == 0
    assert run("--from", path, "--place", "container+step").returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--from", "/nonexistent"], ["--from", "/"], ["--from", "pyproject.toml"], ["--ignore", "nonsense"],
        ["--place", "moon"], ["--seconds", "0"], ["--seconds", "x"], ["--what"], ["recipe"],
    ],
)  # fmt: skip
def test_wrong_usage(words: list[str]) -> None:
    """Words, exit code 2, no traceback."""
    done = run(*words)
    assert done.returncode == 2 and done.stderr.strip() and "Traceback" not in done.stderr and done.stdout == ""


def test_facts_that_are_none(tmp_path: Path) -> None:
    """JSON of something else, facts of a later version, facts with odd values."""
    path = tmp_path / "x.json"
    for text in ("[]", "{}", '{"hostname": 1}', '{"hostname": "a", "gpus": 7}', "\x00", '{"hostname": "a", "gpus": [1]}'):
        path.write_text(text)
        done = run("--from", str(path))
        assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    path.write_text(
        '{"hostname": "a", "later": {"x": 1}, "gpus": [{"index": 0, "colour": "red"}], "mounts": [{"point": 1, "kind": 2}]}'
    )
    assert run("--from", str(path)).returncode in (0, 1, 2)


def test_the_lines_of_srun() -> None:
    """What a step prints for its node is read again as it was; the node's name is Slurm's."""
    done = run("--facts", "--lines", "--name=localhost", environ={"SLURMD_NODENAME": "node7"})
    facts, faults, others = wire.decode(done.stdout.splitlines())
    assert set(facts) == {"node7"} and faults == {} and others == [] and facts["node7"].names["localhost"]


def test_the_list_of_rules() -> None:
    """Every rule that it may name."""
    listed = [line.partition(":")[0] for line in run("--list").stdout.splitlines()]
    assert listed == [rule.id for rule in machine_rules()]


def test_place_of_facts_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--place reaches the collector."""
    seen: list[str | None] = []

    def collect(place: str | None, *_: object, **__: object) -> HostFacts:
        seen.append(place)
        return HostFacts("x", place or "here")

    monkeypatch.setattr(bare_doctor, "collect", collect)
    assert bare_doctor.main(["--place", "login"]) == 0 and seen == ["login"]
    assert "x (login)" in capsys.readouterr().out
