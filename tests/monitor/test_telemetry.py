"""What a node's sampler measures and keeps: by a library that answers as NVML does, and in a month."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.monitor import sampler
from clustertune.monitor.sampler import TelemetryWriter
from clustertune.report import metrics
from clustertune.report.metrics import TelemetryRow

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``libnvidia-ml.so.1`` that was built from fake_nvml.c."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    folder = tmp_path_factory.mktemp("nvml")
    words = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libnvidia-ml.so.1", FOLDER / "fake_nvml.c"]
    subprocess.run(words, check=True)
    return folder


class Sampler:
    """The real program beside a fake driver."""

    def __init__(self, run: Path, library: Path, **state: int) -> None:
        self.run, self.file = run, run / "driver"
        self.state = {
            "count": 2, "util": 90, "memory": 1024, "power": 500_000, "temperature": 60, "mhz": 1980, "throttle": 0,
            "energy": 1_000_000, "lost": -1, "xid": 0, "init": 0,
        }  # fmt: skip
        self.set(**state)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(self.file)}
        environment |= {"CLUSTERTUNE_SAMPLE_SECONDS": "0.1", "PYTHONPATH": str(FOLDER.parents[1])}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        words = [sys.executable, "-m", "clustertune.monitor.sampler", str(os.getpid()), str(run), "3", "0"]
        self.child = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)

    def set(self, **state: int) -> None:
        self.state |= state
        part = self.file.with_suffix(".new")
        part.write_text(" ".join(map(str, self.state.values())))
        part.replace(self.file)

    def rows(self) -> list[TelemetryRow]:
        found = list[TelemetryRow]()
        for path in (self.run / "telemetry").glob("*.jsonl"):
            with path.open("rb") as lines:
                found += metrics.parse(lines, {})
        return found

    def wait(self, more: int) -> TelemetryRow:
        """The newest row, once so many have been added."""
        wanted, deadline = len(self.rows()) + more, time.monotonic() + 60
        while len(self.rows()) < wanted:
            assert time.monotonic() < deadline and self.child.poll() is None, self.child.communicate()
            time.sleep(0.05)
        return self.rows()[-1]

    def end(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        _, output = self.child.communicate(timeout=30)
        assert (self.child.returncode, output) == (0, "")


@pytest.mark.parametrize("program", [["sampler", "RUN", "3", "0"], ["live", "RUN"]], ids=lambda words: words[0])
def test_a_program_ends_where_its_parent_has_ended_before_it_could_look(tmp_path: Path, program: list[str]) -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    name, *more = (str(tmp_path) if word == "RUN" else word for word in program)
    subprocess.run([sys.executable, "-m", f"clustertune.monitor.{name}", str(parent.pid), *more], check=True, timeout=60)


def test_a_driver_is_read_whole(tmp_path: Path, library: Path) -> None:
    """Values, an Xid, and energy by the counter: 3,000 J on each of two GPUs."""
    sampler = Sampler(tmp_path, library)
    row = sampler.wait(3)
    assert row.attempt == 3 and len(row.gpus) == 2 and not row.problems
    wanted = {"memory_gib": 1.0, "power_w": 500, "temperature_c": 60, "sm_mhz": 1980, "throttle": 0, "energy_j": 0, "ecc": None}
    assert {key: row.gpus[0][key] for key in wanted} == wanted
    assert [gpu["utilisation"] for gpu in row.gpus] == [90, 91] and row.gpus[1]["xid"] is None
    sampler.set(energy=4_000_000, throttle=8, xid=79)
    row = sampler.wait(2)
    assert [gpu["energy_j"] for gpu in row.gpus] == [3000, 3000] and row.gpus[0]["throttle"] == 8
    assert [gpu["xid"] for gpu in row.gpus] == [None, 79]
    sampler.set(lost=1)  # a GPU that leaves the bus is named, and the other is measured
    row = sampler.wait(2)
    assert row.problems == {"1": "GPU is lost"}
    assert row.gpus[0]["utilisation"] == 90 and row.gpus[1]["utilisation"] is None
    sampler.set(lost=-1)
    # What Slurm sends to every process is for the ranks: they are measured while they save.
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        sampler.child.send_signal(number)
    assert sampler.wait(2).problems == {}
    sampler.end()
    (node,) = metrics.TelemetryReader(tmp_path / "telemetry").read().values()
    assert node.about["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2 and node.about["energy"] == "counter"
    assert node.joules == {3: 6000.0}


def wide_row(at: float) -> TelemetryRow:
    """As long as rows of a busy node get."""
    figures = [100, 79.11, 1000, 88, 1980, 72, 0, 0, 1_234_567_890]
    gpu = dict(zip(sampler.GPU_COLUMNS, figures, strict=True))
    node = dict(zip(sampler.COLUMNS, [0.123, 123.4, 1234.56, 123456.7, 12345.67], strict=True))
    return TelemetryRow(1.7e9 + at, 12, node, (gpu,) * 8)


def test_a_month_of_64_nodes_stays_below_300_mb() -> None:
    """By the length of a row and the pauses between them."""
    age, size, row = 0.0, 0, len(sampler.line(wide_row(30 * 86400)))
    while age < 30 * 86400:
        age, size = age + sampler.seconds_between(age), size + row
    assert 64 * size < 300e6


def test_a_start_behind_a_torn_line_begins_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"node_columns": ["cpu"], "gpu_columns": []}\n[1.0, 1, [0.5], []]\n[2.0, 1, [0.')
    TelemetryWriter(tmp_path, "n", {"node": 0}).add(wide_row(0))
    (node,) = metrics.TelemetryReader(tmp_path).read().values()
    assert node.about["node"] == 0 and node.last is not None and node.last.node["cpu"] == 0.123


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Else who may write to the folder has the user's sampler write to any file of the user."""
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "n.jsonl").symlink_to(other)
    with pytest.raises(UserError, match="not a plain file"):
        TelemetryWriter(tmp_path / "t", "n", {}).add(wide_row(0))
    assert other.read_text() == "kept"
