"""What ends a training between two steps: a signal, another attempt, an evaluation that is not a number."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import SFTTrainer

from clustertune import manifest
from clustertune.checkpoint.saving import digest
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.plan import check_fence
from clustertune.process import StopFlag, stop_signals
from clustertune.training import deepspeed
from clustertune.training.evaluation import TokenMeans
from clustertune.training.events import EventLog
from clustertune.training.heartbeat import Heartbeat
from clustertune.training.trainer import NothingLeft, Trainer, state_parts


class Ranks:
    """This rank of two; ``others`` is what the other one brings to a maximum."""

    world_size = 2

    def __init__(self, rank: int = 0, others: tuple[float, ...] = ()) -> None:
        self.rank, self.others = rank, others

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def maximum(self, values: list[float]) -> list[float]:
        others = (*self.others, *[0.0] * len(values))
        return [max(pair) for pair in zip(values, others, strict=False)]


def make(monkeypatch: pytest.MonkeyPatch, fence: Any = lambda: None, step: int = 0, start: int = 0, **metrics: float) -> Any:
    made: Any = object.__new__(Trainer)
    made.group, made.stop, made.heartbeat, made.fence = Ranks(), StopFlag(), Heartbeat(), fence
    made.stopping, made.eval_skipped, made.peak_memory_bytes, made.start_step = False, False, 0, start
    made.state = SimpleNamespace(global_step=step, max_steps=8)
    made.control, made._metrics, made.model = SimpleNamespace(), {"eval": {}}, torch.nn.Linear(1, 1)

    def evaluate(self: Any, **kwargs: Any) -> Any:
        self.prediction_step()
        return metrics

    monkeypatch.setattr(SFTTrainer, "evaluate", evaluate)
    monkeypatch.setattr(TokenMeans, "prediction_step", lambda self: None)
    return made


def taken_over() -> None:
    raise UserError(Problem("attempt 2 has taken over from attempt 1"), ExitCode.AGAIN)


def test_all_ranks_end_where_rank_0_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a step's end and within an evaluation; ranks other than 0 hear of it in the collective that is there anyway."""
    first = make(monkeypatch, taken_over)
    other = make(monkeypatch, taken_over)
    other.group = Ranks(rank=1)
    assert not other.agree()
    other.group = Ranks(rank=1, others=(0.0, 0.0, 1.0))
    for trainer, act in ((first, "agree"), (first, "evaluate"), (other, "agree")):
        with pytest.raises(UserError, match=r"has taken over|newer attempt of this run") as caught:
            getattr(trainer, act)()
        assert caught.value.code is ExitCode.AGAIN


@pytest.mark.parametrize(
    ("norm", "loss", "others", "stops"),
    [
        (1.0, None, (), False), (math.inf, None, (), True), (math.nan, None, (), True), (1.0, math.nan, (), True),
        (1.0, None, (0.0, 1.0), True),
    ],
)  # fmt: skip
def test_a_step_that_is_not_finite_anywhere_is_not_taken(
    norm: float, loss: float | None, others: tuple[float, ...], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient or a loss, of this rank or of another one: the weights stay as they are, and nothing starts the run again."""
    trainer = make(monkeypatch)
    trainer.group, trainer._bad_loss = Ranks(others=others), loss
    monkeypatch.setattr(SFTTrainer, "_get_grad_norm", lambda *_, **__: torch.tensor(norm))
    if not stops:
        assert float(trainer._get_grad_norm(trainer.model)) == norm
        return
    with pytest.raises(UserError, match="stopped before the optimizer step") as caught:
        trainer._get_grad_norm(trainer.model)
    assert caught.value.code is ExitCode.STOP


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_evaluation_that_is_no_number_stops_for_good(monkeypatch: pytest.MonkeyPatch, loss: float) -> None:
    trainer = make(monkeypatch, step=4, eval_loss=loss)
    with pytest.raises(UserError, match=rf"not finite at step 5 \(rank 0: eval loss {loss}") as caught:
        trainer.evaluate()
    assert caught.value.code is ExitCode.STOP and "eval split" in str(caught.value)
    assert make(monkeypatch, step=4, eval_loss=1.0).evaluate() == {"eval_loss": 1.0}


def test_asked_to_stop_ahead_of_the_first_step_no_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock loop looks for a stop only after a step: it would take one more, even behind the last one."""
    trainer = make(monkeypatch, step=8, start=8, eval_loss=1.0)
    trainer.stop.signal_name = "SIGUSR1"
    with pytest.raises(NothingLeft):
        trainer.evaluate()
    assert trainer.eval_skipped
    under_way = make(monkeypatch, step=4, start=2, eval_loss=1.0)
    under_way.stop.signal_name = "SIGUSR1"
    assert under_way.evaluate() == {} and under_way.control.should_training_stop
    made_up = make(monkeypatch, step=8, start=8, eval_loss=1.0)  # behind the last step only the evaluation is made up
    with pytest.raises(NothingLeft):
        made_up.evaluate()
    assert not made_up.eval_skipped
    assert make(monkeypatch, step=8, start=6, eval_loss=1.0).evaluate() == {"eval_loss": 1.0}


@pytest.mark.parametrize(
    ("stage", "gradient", "loss", "question"),
    [
        (0, 1.0, 1.0, (None, True)), (0, math.nan, 1.0, (None, False)), (0, math.inf, 1.0, (None, False)),
        (0, 1.0, math.inf, (math.inf, True)), (2, 1.0, math.inf, (math.inf, True)), (2, math.nan, 1.0, (None, True)),
    ],
)  # fmt: skip
def test_deepspeed_asks_before_each_step_what_it_does_not_look_at_itself(
    stage: int, gradient: float, loss: float, question: tuple[float | None, bool]
) -> None:
    """ZeRO 1 to 3 leave a step out whose gradients are not finite; stage 0 takes it, whatever they are."""
    module = torch.nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[gradient, 1.0]])  # the bias is not trained
    calls: list[Any] = []
    engine: Any = SimpleNamespace(
        backward=lambda value: calls.append(float(value)),
        step=lambda: calls.append("step"),
        zero_optimization_stage=lambda: stage,
        module=module,
    )
    deepspeed.guard(engine, lambda *found: calls.append(found))
    engine.backward(torch.tensor(loss))
    engine.step()
    assert calls == [loss, question, "step"]

    def refuse(*found: Any) -> None:
        raise UserError("not finite")

    deepspeed.guard(engine, refuse)
    with pytest.raises(UserError):
        engine.step()
    assert calls.count("step") == 1


def test_no_event_is_written_for_an_attempt_that_was_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = EventLog(path, 1, lambda: check_fence(tmp_path, 1))
    log.write("step", step=1)
    (tmp_path / "attempts" / "0002").mkdir(parents=True)
    for act in (lambda: log.write("step", step=2), lambda: EventLog(path, 1, lambda: check_fence(tmp_path, 1))):
        with pytest.raises(UserError, match="taken over"):
            act()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of the test run itself, put back."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_closed_terminal_asks_to_stop_unless_nohup_was_asked_for(handlers: None) -> None:
    """The system's own answer to SIGHUP is to kill: the steps since the last checkpoint would be lost."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = StopFlag()
    stop.install()
    signal.raise_signal(signal.SIGHUP)
    assert stop.is_set and stop.signal_name == "SIGHUP"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    StopFlag().install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_state_that_is_not_the_saved_one_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that matches no key leaves the start values, and would train from them."""
    trainer = make(monkeypatch)
    loads_nothing = SimpleNamespace(state={}, load_state_dict=lambda _: None)
    trainer.optimizer = trainer.lr_scheduler = loads_nothing
    trainer.accelerator = SimpleNamespace(state=None)
    trainer.is_fsdp_enabled = trainer.is_deepspeed_enabled = False
    monkeypatch.setattr(trainer, "_stored", lambda *_: {})
    parts = state_parts(trainer.model, trainer.optimizer)
    # None: saved before digests were kept; SHA-256: by a former release.
    for saved in (None, digest(parts, manifest.SHA256), digest(parts)):
        trainer._resumed = {"state_digests": [saved] * trainer.group.world_size} if saved else {}
        trainer._load_optimizer_and_scheduler("step-000002")
    torch.nn.init.ones_(trainer.model.weight)
    with pytest.raises(UserError, match="not those that were saved") as caught:
        trainer._load_optimizer_and_scheduler("step-000002")
    assert caught.value.code is ExitCode.FAILED
