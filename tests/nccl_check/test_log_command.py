"""``python3 -m clustertune.nccl_check.log``: recorded logs, exit codes, bare Pythons, odd files; and the page of the rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune.check.rule import LINKS, checks
from clustertune.nccl_check import log
from clustertune.nccl_check.judge import page
from tests.doctor import bare
from tests.nccl_check.log_maker import Job, text

REPO = Path(__file__).resolve().parents[2]
LOGS = Path(__file__).with_name("logs")

RECORDED = {
    # file: exit code, version, a transport or network, an interface or adapter, the main fault's rule
    "silent-sockets-2.27-slurm.txt": (2, "2.27.5", "NET/Socket", "ens18f0", "socket-fallback"),
    "nvlink-infiniband-2.29-files.txt": (0, "2.29.7", "NET/IB/GDRDMA", "mlx5_1:1", ""),
    "shared-memory-2.28-ray.txt": (2, "2.28.9", "SHM/direct", "", "small-shm"),
    "no-interface-torch-2.20.txt": (2, "2.20.5", "", "", "interface-down"),
    "bridges-2.10-mpirun.txt": (2, "2.10.3", "NET/Socket", "br-9f21c0aa41d7", "extra-interfaces"),
    "roce-timeout-2.23-kubernetes.txt": (2, "2.23.4", "NET/IBext_v8/GDRDMA", "mlx5_2:1", "rdma-timeout"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person looks for in such a log: version, transport, interface, and the one thing that is wrong."""
    code, version, transport, device, fault = RECORDED[name]
    assert log.main(["--json", str(LOGS / name)]) == code
    found = json.loads(capsys.readouterr().out)
    assert list(found["log"]["versions"]) == [version]
    assert not transport or transport in found["log"]["transports"]
    listed = [*found["log"]["sockets"].values(), *found["log"]["adapters"].values()]
    assert not device or any(device in entry for devices in listed for entry in devices)
    assert [item["rule"] for item in found["findings"] if item["status"] == "fail"][:1] == ([fault] if fault else [])
    assert found["headline"].startswith(("PASS", "WARN", "FAIL")[code])
    assert log.main([str(LOGS / name)]) == code
    shown = capsys.readouterr().out
    assert shown.startswith(found["headline"]) and version in shown and (not fault or f"FAIL  {fault}: " in shown)


def test_every_recorded_log_is_read() -> None:
    """A file that no test names may say anything."""
    assert {file.name for file in LOGS.iterdir()} == set(RECORDED)
    assert all(file.read_text(encoding="utf-8").startswith("# ") for file in LOGS.iterdir()), "say which version's format it is"


def run(python: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The command of a login node, without any package."""
    command = [python, "-S", "-E", "-m", "clustertune.nccl_check.log", *arguments]
    return subprocess.run(command, cwd=REPO, input=stdin, capture_output=True, timeout=120, check=False)


def test_it_runs_without_any_package() -> None:
    """Login nodes have the system's Python, an old one, and nothing else."""
    for python in (sys.executable, *bare.interpreters()):
        ended = run(python, "--json", str(LOGS / "silent-sockets-2.27-slurm.txt"))
        assert ended.returncode == 2, ended.stderr
        assert json.loads(ended.stdout)["status"] == "fail" and not ended.stderr
        good = run(python, "-", stdin=text(Job()).encode())
        assert good.returncode == 0 and good.stdout.startswith(b"PASS: 2 nodes of 8 ranks over NET/IB/GDRDMA"), good.stderr


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake of a caller ends with a sentence that names the file."""
    empty, alien, binary = tmp_path / "empty", tmp_path / "alien.log", tmp_path / "binary"
    empty.touch()
    alien.write_text("epoch 1 loss 0.3\n" * 5)
    binary.write_bytes(bytes(range(256)) * 100)
    for wrong in (tmp_path / "absent", tmp_path, empty, alien, binary):
        assert log.main([str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert not out and str(wrong) in err and " -> " in err
    with pytest.raises(SystemExit, match="2"):
        log.main([])


def test_a_log_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own words stand in the findings."""
    bad = tmp_path / "bad.log"
    bad.write_text("n1:1:2 [0] a.cc:1 NCCL WARN \x1b]0;title\x07 \x9b31m odd \u202e words\n")
    assert log.main([str(bad)]) == 1
    assert not set("\x1b\x07\u202e") & set(capsys.readouterr().out)


def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    """``| head -1`` is how people look: no traceback."""
    file = tmp_path / "all.log"
    file.write_text(text(Job()) + "".join(f"n1:1:2 [0] a.cc:1 NCCL WARN odd {'x' * 200} {n}\n" for n in range(3)))
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as gone:
        command = [sys.executable, "-m", "clustertune.nccl_check.log", "--json", str(file)]
        ended = subprocess.run(command, cwd=REPO, stdout=gone, stderr=subprocess.PIPE, timeout=60, check=False)
    assert b"Traceback" not in ended.stderr and b"BrokenPipe" not in ended.stderr


def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block ends must not matter, and one endless line takes no more memory than two blocks."""
    file = tmp_path / "all.log"
    file.write_text(text(Job()) + "tail without an end " * 500)
    whole = log.read_files([str(file)])
    for size in (4096, 5003):
        monkeypatch.setattr(log, "BLOCK", size)
        assert log.read_files([str(file)]) == whole
        with file.open("rb") as opened:
            assert max(map(len, log.blocks(opened))) <= 3 * size


def test_the_page_of_the_rules_is_current() -> None:
    """``python3 -m clustertune.nccl_check.judge > docs/nccl-verdicts.md`` writes it."""
    command = [sys.executable, "-S", "-E", "-m", "clustertune.nccl_check.judge"]
    written = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=True).stdout
    assert written == page() == (REPO / "docs" / "nccl-verdicts.md").read_text(encoding="utf-8")


def test_rules_are_told_in_full_sentences() -> None:
    """The page is what people find who search for a rule."""
    for one in checks(LINKS):
        assert one.rule.why.endswith(".") and one.rule.why[0].isupper(), one.rule.id
        assert one.rule.title[0].isupper() and not one.rule.title.endswith("."), one.rule.id
        assert len(one.rule.fix) > 10 and not one.rule.fix.endswith("."), one.rule.id
        assert one.rule.link.startswith("https://"), one.rule.id
