"""Ranks of real runs by fork: the stack is imported once (about 10 s), each training then takes seconds.

As a program (``python -m tests.training.forked REQUEST``, forked of :mod:`tests.warm`) it reads its request,
``{"folder", "attempt", "ranks"}``, forks that many ranks of ``clustertune.rank`` over loopback, and prints their exit codes.
``breaks`` names one of :data:`BREAKS`, which each rank calls first: a guard is proved by taking away what it guards.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.command import REPO, warm
from tests.damage import fork, free_port, wait
from tests.warm import Warm


class Forge:
    """Runs ranks, each a fork of the process that has the stack (:mod:`tests.warm`)."""

    def __init__(self, log: Path, server: Warm | None = None) -> None:
        self._log, self._server = log, server or warm(stack=True)
        self._environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(self, folder: Path, ranks: int, *, attempt: int = 1, seconds: float = 300, **more: Any) -> list[int]:
        """One attempt at a prepared run; the ranks' exit codes. ``seconds``: a hang ends with SIGALRM (code -14)."""
        request = {"folder": str(folder), "attempt": attempt, "ranks": ranks, "seconds": seconds, **more}
        words = ["tests.training.forked", json.dumps(request)]
        with self._log.open("a+b") as log, tempfile.TemporaryFile() as codes:
            with self._server.start(words, REPO, codes.fileno(), log.fileno(), self._environment) as answer:
                status = answer.recv(64)
            assert status == b"0", f"the forking process ended: {self._log.read_text()[-2000:]}"
            codes.seek(0)
            found: list[int] = json.loads(codes.read())
        return found


def around(owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> None:
    """Have ``before`` called ahead of a method or function, and ``after`` behind it, both with its arguments."""
    call = getattr(owner, name)

    def then(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        found = call(*args, **kwargs)
        if after is not None:
            after(*args)
        return found

    setattr(owner, name, then)


def on_rank(number: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``act`` on one rank only."""
    return lambda *args: act(*args) if os.environ["RANK"] == str(number) else None


def kill(number: int = signal.SIGKILL) -> Callable[..., None]:
    """Sends a signal to this process."""
    return lambda *_: os.kill(os.getpid(), number)


def replacing(module: str, name: str, value: Any) -> Callable[[], None]:
    """Puts ``value`` in the place of a function of a module of the training."""
    return lambda: setattr(importlib.import_module(f"clustertune.training.{module}"), name, value)


def _other_weights() -> None:
    """Rank 1 starts from parameters of its own, after DDP has made them equal."""
    import torch

    from clustertune.training import sharding

    def change(model: Any, *_: Any) -> None:
        with torch.no_grad():
            first = next(model.parameters())
            # This rank's part alone: an operation on the whole would wait for the other ranks.
            getattr(first, "_local_tensor", first).view(-1)[0] += 1

    around(sharding, "inspect", on_rank(1, change))


def bad_loss(change: Callable[[Any], Any]) -> None:
    """Changes the loss of the last rank in the second step."""
    from clustertune.training.trainer import Trainer

    compute = Trainer.compute_loss

    def bad(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return change(loss) if last and self.model.training and self.state.global_step == 1 else loss

    Trainer.compute_loss = bad


def signal_rank_1(number: int, step: int) -> None:
    """Rank 1 gets a signal while it computes the step after ``step``."""
    from clustertune.training.trainer import RankTrainer

    send = on_rank(1, kill(number))
    around(RankTrainer, "training_step", lambda self, *_: send() if self.state.global_step == step else None)


BREAKS: dict[str, Callable[[], None]] = {
    "split": replacing("parallelism", "split", lambda model, mesh, upcast: {}),
    "context": replacing("parallelism", "install_context", lambda model, mesh: None),
    "fsdp": replacing("build", "install_cpu_fsdp", lambda: None),
    "replicas": _other_weights,
    "offload": lambda: os.environ.update(FSDP_OFFLOAD_PARAMS="false"),
    "nan": lambda: bad_loss(lambda loss: loss * float("nan")),
    "stop": lambda: signal_rank_1(signal.SIGUSR1, 1),
    "killed": lambda: signal_rank_1(signal.SIGKILL, 2),
}


def _rank(request: dict[str, Any], rank: int, port: int) -> int:
    signal.alarm(int(request["seconds"]))
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
        del os.environ[key]
    world = str(request["ranks"])
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    config = Path(request["folder"], "accelerate.yaml")
    if request["ranks"] == 1 and config.is_file() and yaml.safe_load(config.read_bytes()).get("distributed_type") == "NO":
        variables = {}  # as `accelerate launch` starts one process: without these its state is NO, with them MULTI_CPU
    os.environ.update(variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WANDB_MODE="disabled")
    os.environ.update(request.get("environment", {}))
    import torch

    from clustertune import rank as program

    torch.set_num_threads(1)
    if request.get("breaks"):
        from clustertune.training import build

        build.set_environment(config, request["ranks"])
        (BREAKS.get(request["breaks"]) or pkgutil.resolve_name(request["breaks"]))()
    return program.main(Path(request["folder"]), request["attempt"], quiet=True)


def main() -> None:
    """Fork the ranks of the request, and print their exit codes."""
    request, port = json.loads(sys.argv[1]), free_port()

    def act(rank: int) -> int:
        os.dup2(2, 1)  # stdout is for the codes
        return _rank(request, rank, port)

    codes = wait([fork(partial(act, rank)) for rank in range(request["ranks"])])
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main()
