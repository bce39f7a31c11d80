"""Parameters and optimizer state in files, by DeepSpeed's own reader: a run that stops continues with the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.training.benches import CPU, FULL, SAME, Bench, lossless, make_bench, startup
from tests.training.deepspeed_breaks import BREAKS
from tests.training.forked import Forge
from tests.training.test_loading import BF16, zero
from tests.training.test_strategies import exported
from tests.warm import Warm

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.jobs,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
NVME = {"device": "nvme", "nvme_path": "auto"}
PARAMETERS = {**NVME, "buffer_size": 2_000_000, "buffer_count": 8}
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
"""DeepSpeed leaves in memory what is less than 1 MiB: of the tiny model all of it."""


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``async_io`` lies, compiled as on a node's first run; that takes minutes."""
    if shutil.which("g++") is None or not Path("/usr/include/libaio.h").exists():
        pytest.skip("g++ and libaio's header are not installed (packages g++, libaio-dev)")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or tmp_path_factory.mktemp("extensions"))
    program = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def bench(extensions: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("nvme")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"DS_BUILD_AIO": "1", "TORCH_EXTENSIONS_DIR": extensions, "TMPDIR": folder}.items():
            patch.setenv(key, str(value))
        forge = Forge(folder / "log", Warm(stack=True))  # DeepSpeed reads them when it is imported
    return make_bench(forge, folder, SAME, changes=SIZES)


def train(bench: Bench, settings: dict[str, Any], more: list[str], *, stop: bool = False, breaks: str = "") -> Path:
    """To the end; ``stop``: asked to stop in the second step, then begun again."""
    path = zero(bench, 2, more, **settings)
    if stop:
        bench.stop(path)
    bench.end(path, breaks=breaks and BREAKS + breaks)
    return path


@pytest.mark.parametrize(
    ("settings", "more", "files"),
    [
        ({"offload_param": PARAMETERS, "offload_optimizer": NVME}, [*FULL, *BF16, "activation_checkpointing.ratio=1"], 3),
        ({"offload_optimizer": NVME, "sub_group_size": 6_000_000}, FULL, 6),
        ({"offload_param": PARAMETERS, "offload_optimizer": CPU}, FULL, 0),
        ({"offload_optimizer": NVME}, ["lora.r=256"], 3),
        ({"offload_optimizer": NVME}, ["lora.r=4"], 0),
    ],
    ids=["both", "groups", "parameters", "adapter", "small"],
)
def test_a_run_that_stops_goes_on_with_the_same_bytes(
    bench: Bench, settings: dict[str, Any], more: list[str], files: int
) -> None:
    """Masters, moments and counts of steps in files and in memory; each rank reads what it keeps into either."""
    whole, stopped = (train(bench, settings, more, stop=stop) for stop in (False, True))
    assert lossless(stopped) == lossless(whole)
    assert startup(whole)["loading"] == "slices"
    assert len(list(whole.glob("checkpoints/step-000003*/*/*/rank00/*.swp"))) == files
    found, expected = exported(stopped), exported(whole)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


def test_parameters_in_files_are_those_that_rank_0_sends(bench: Bench) -> None:
    """Bit for bit, with a broadcast and without."""
    settings = {"offload_param": PARAMETERS, "offload_optimizer": NVME}
    found, sent = (train(bench, settings, FULL, breaks=breaks) for breaks in ("", "whole_models"))
    assert lossless(found) == lossless(sent)
    assert (startup(found)["loading"], startup(sent)["loading"]) == ("slices", "whole")
