"""Fixtures that several rooms share: a tiny Llama of random weights with a locally trained tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from clustertune import lock
from tests import parallel
from tests.command import SHORT, Done, run
from tests.slurm import slurm, slurm_session
from tests.slurm_job import quiet

__all__ = ["quiet", "slurm", "slurm_session"]

# Machines are shared: how long an example takes says nothing about the code. CI takes --hypothesis-profile=full.
for profile, examples in (("local", 40), ("full", 200)):
    settings.register_profile(profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("local")

REPO = Path(__file__).resolve().parent.parent

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

TEXTS = [
    "A batch job asks Slurm for nodes, waits in the queue, and starts when the nodes are free.",
    "The adapter is small: only the low-rank matrices are trained, and the base model stays as it is.",
    "Each rank keeps a shard of the parameters and gathers a layer when it needs it.",
]


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random Llama in bf16, its tokenizer and chat template. Read only."""
    from clustertune.data.local_model import make_local_model

    return make_local_model(TINY_LLAMA, TEXTS, tmp_path_factory.mktemp("model") / "tiny-llama", seed=0)


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of all workers."""
    return parallel.common_folder or factory.getbasetemp()


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` has filled, read only: of all workers the first that wants it makes it."""
    folder = common_folder(factory) / "once" / name
    with lock.in_turn(folder.with_name(f"{name}.lock"), lambda: None):
        if not (made := folder.with_name(f"{name}.made")).exists():
            shutil.rmtree(folder, ignore_errors=True)  # one that was begun
            folder.mkdir(parents=True)
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run of the short chain from nothing, in a network namespace with loopback only. Read only."""

    def make(folder: Path) -> None:
        done = run("run", "recipes/tiny-oasst2", "--run-dir", folder / "run", "--json", *SHORT, network=False, stack=True)
        (folder / "said.json").write_text(json.dumps(asdict(done)))

    folder = once(tmp_path_factory, "reference", make)
    done = Done(**json.loads((folder / "said.json").read_text()))
    assert done.code == 0, done.err
    return folder / "run", done


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Commands that are run in this process set handlers; what is ignored here, every later subprocess would ignore too."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test is a failure: the machine has all it needs")
    parser.addoption("--workers", type=int, default=0, help="processes that run test files; 0: this one runs all")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers:
        config.pluginmanager.register(parallel.Workers(config.option.workers), "workers")


def pytest_collection_finish() -> None:
    """torch computes with one thread: several wait for each other by turning, which takes half of the cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--no-skip") and "real_input" not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skip forbids it: {report.longrepr}"


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """A command that a test calls in this process makes what follows private to its user; the next test starts afresh."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A command that a test calls in this process, or a library that it imports, sets variables for its children; with those
    a later command could not be forked of :mod:`tests.warm`."""
    os.environ.pop("PYTHONSAFEPATH", None)  # what a fixture of the session called has set it (``close_working_folder``)
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
