"""What ends a training between two steps: a signal, another attempt, a number that is none, a save that fails or a load."""

from __future__ import annotations

import errno
import json
import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl import SFTTrainer

from clustertune.checkpoint.saving import NotSaved, digest
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.attempt import check_fence
from clustertune.process import StopFlag
from clustertune.training import deepspeed_engine
from clustertune.training import trainer as room
from clustertune.training.event_log import EventLog, Heartbeat
from clustertune.training.figures import Clock, TokenMeans
from clustertune.training.trainer import ALARM_STEPS, IDLE_STEPS, NothingLeft, Trainer, state_parts
from tests.damage import failing, refused

FULL = OSError(errno.ENOSPC, "No space left on device", "shard")


class Ranks:
    """This rank of two; ``others`` is what the other one brings to a maximum. Counts how often they meet."""

    world_size = 2

    def __init__(self, rank: int = 0, others: tuple[float, ...] = ()) -> None:
        self.rank, self.others, self.met = rank, others, 0

    def gather(self, value: Any) -> list[Any]:
        self.met += 1
        return [value, value]

    def maximum(self, values: list[float]) -> list[float]:
        self.met += 1
        others = (*self.others, *[0.0] * len(values))
        return [max(pair) for pair in zip(values, others, strict=False)]


taken_over = failing(UserError(Problem("attempt 2 has taken over from attempt 1"), ExitCode.AGAIN))


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a trainer without TRL's constructor, of one layer; its evaluation finds the ``metrics``."""

    def made(ranks: Ranks | None = None, fence: Any = lambda: None, step: int = 0, start: int = 0, **metrics: float) -> Any:
        trainer: Any = object.__new__(Trainer)
        trainer.group, trainer.stop, trainer.heartbeat, trainer.fence = ranks or Ranks(), StopFlag(), Heartbeat(), fence
        trainer.stopping, trainer.eval_skipped, trainer.peak_memory_bytes, trainer.start_step = False, False, 0, start
        trainer.state, trainer.control = SimpleNamespace(global_step=step, max_steps=8, epoch=0.5), SimpleNamespace()
        trainer._metrics, trainer.model = {"eval": {}}, torch.nn.Linear(4, 4)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
        trainer._losses, trainer._total_train_tokens, trainer.on_inputs, trainer.clock = [], 0, None, Clock()
        trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = False
        trainer.store, trainer.store_flos = SimpleNamespace(path=lambda _: tmp_path), lambda: None

        def evaluate(self: Any, **kwargs: Any) -> Any:
            self.prediction_step()
            return metrics

        monkeypatch.setattr(SFTTrainer, "evaluate", evaluate)
        return trainer

    monkeypatch.setattr(TokenMeans, "prediction_step", lambda self: None)
    return made


def test_all_ranks_end_where_rank_0_is_fenced(make: Any) -> None:
    """At a step's end and within an evaluation; ranks other than 0 hear of it in the collective that is there anyway."""
    first, other = make(fence=taken_over), make(Ranks(rank=1), taken_over)
    assert not other.agree()
    other.group = Ranks(rank=1, others=(0.0, 1.0))
    for act in (first.agree, first.evaluate, other.agree):
        with refused("has taken over|newer attempt of this run", ExitCode.AGAIN):
            act()


@pytest.mark.parametrize(
    ("norm", "losses", "others", "stops"),
    [
        (1.0, [2.0, 3.0], (), False), (math.inf, [2.0], (), True), (math.nan, [], (), True), (1.0, [math.nan, 2.0], (), True),
        (1.0, [2.0, math.inf], (), True), (1.0, [2.0], (0.0, 1.0), True),
    ],
)  # fmt: skip
def test_a_step_that_is_not_finite_anywhere_is_not_taken(
    norm: float, losses: list[float], others: tuple[float, ...], stops: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient or a loss, of this rank or of another one: the weights stay as they are, and nothing starts the run again.
    The host reads no value of a micro batch: on a GPU it would wait for the backward pass before it queues the next one."""
    trainer = make(Ranks(others=others))
    each = iter(losses)
    monkeypatch.setattr(SFTTrainer, "training_step", lambda *_, **__: torch.tensor(next(each)))
    with Reads() as reads:
        for _ in losses:
            trainer.training_step(trainer.model, {})
    assert reads.count == 0
    monkeypatch.setattr(SFTTrainer, "_get_grad_norm", lambda *_, **__: torch.tensor(norm))
    if not stops:
        assert float(trainer._get_grad_norm(trainer.model)) == norm
        return
    with refused("stopped before the optimizer step", ExitCode.STOP):
        trainer._get_grad_norm(trainer.model)


@pytest.mark.parametrize("lasting", [True, False])
def test_a_gradient_that_stays_0_is_told_and_then_ends_the_run(
    lasting: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm first, once; then exit 93. One step with a gradient begins the count anew."""
    trainer, alarms = make(), []
    trainer._idle, trainer.on_alarm, trainer.state.max_steps = 0, lambda step, _: alarms.append(step), 1000
    monkeypatch.setattr(SFTTrainer, "_get_grad_norm", lambda *_, **__: torch.tensor(norm))
    monkeypatch.setattr(trainer, "finish_save", lambda: None)
    for step in range(IDLE_STEPS - 1):
        trainer.state.global_step, norm = step, 0.0 if lasting or step != IDLE_STEPS // 2 else 1e-30
        trainer._get_grad_norm(trainer.model)
    assert alarms[0] == ALARM_STEPS and len(alarms) == (1 if lasting else 2)
    trainer.state.global_step, norm = IDLE_STEPS - 1, 0.0
    if lasting:
        with refused("no progress", ExitCode.STOP):
            trainer._get_grad_norm(trainer.model)
    else:
        trainer._get_grad_norm(trainer.model)


def test_a_short_run_in_which_no_step_had_a_gradient_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, alarms = make(), []
    trainer._idle, trainer.on_alarm, trainer.state.max_steps = 0, lambda step, _: alarms.append(step), 2
    monkeypatch.setattr(SFTTrainer, "_get_grad_norm", lambda *_, **__: torch.tensor(0.0))
    for step in range(2):
        trainer.state.global_step = step
        trainer._get_grad_norm(trainer.model)
    assert alarms == [2]


def test_random_numbers_of_a_gpu_are_restored_on_whatever_gpu_the_rank_has(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 5 is device 5 of a node of 8, and device 1 of one of 4: the same world, so nothing else notices."""
    generators = {device: torch.Generator().manual_seed(42) for device in range(8)}
    for name, value in {
        "is_available": lambda: True,
        "get_rng_state": lambda *_: generators[mine].get_state(),
        "set_rng_state": lambda state, *_: generators[mine].set_state(state),
        "get_rng_state_all": lambda: [one.get_state() for one in generators.values()],
        "set_rng_state_all": lambda states: [generators[at].set_state(state) for at, state in enumerate(states)],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.random, name, value, raising=False)
    trainer, mine = make(Ranks(rank=5)), 5
    trainer.group.world_size, trainer._resumed, trainer.args = 16, {}, SimpleNamespace(parallel_mode=None)
    torch.rand(1000, generator=generators[5])
    trainer._save_rng_state(str(tmp_path))
    expected = torch.rand(3, generator=generators[5])
    mine, generators = 1, {device: torch.Generator().manual_seed(42) for device in range(4)}
    trainer._load_rng_state(str(tmp_path))
    assert torch.equal(torch.rand(3, generator=generators[1]), expected)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_evaluation_that_is_no_number_stops_for_good(make: Any, loss: float) -> None:
    with refused(rf"not finite at step 5 \(rank 0: eval loss {loss}.*eval split", ExitCode.STOP):
        make(step=4, eval_loss=loss).evaluate()
    assert make(step=4, eval_loss=1.0).evaluate() == {"eval_loss": 1.0}


def test_asked_to_stop_ahead_of_the_first_step_no_step_is_taken(make: Any) -> None:
    """The stock loop looks for a stop only after a step: it would take one more, even behind the last one."""
    asked, under_way, made_up = (make(step=step, start=start, eval_loss=1.0) for step, start in ((8, 8), (4, 2), (8, 8)))
    asked.stop.signal_name = under_way.stop.signal_name = "SIGUSR1"
    for trainer in (asked, made_up):  # behind the last step only the evaluation is made up
        with pytest.raises(NothingLeft):
            trainer.evaluate()
    assert asked.eval_skipped and not made_up.eval_skipped
    assert under_way.evaluate() == {} and under_way.control.should_training_stop
    assert make(step=8, start=6, eval_loss=1.0).evaluate() == {"eval_loss": 1.0}


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
    module, calls = torch.nn.Linear(2, 1), list[Any]()
    module.weight.grad = torch.tensor([[gradient, 1.0]])  # the bias is not trained
    engine: Any = SimpleNamespace(module=module, zero_optimization_stage=lambda: stage)
    engine.backward, engine.step = (lambda value: calls.append(float(value))), (lambda: calls.append("step"))
    deepspeed_engine.guard(engine, lambda *found: calls.append(found))
    engine.backward(torch.tensor(loss))
    engine.step()
    assert calls == [loss, question, "step"]
    deepspeed_engine.guard(engine, lambda *_: taken_over())
    with pytest.raises(UserError):
        engine.step()
    assert calls.count("step") == 1


def test_no_event_is_written_for_an_attempt_that_was_followed(tmp_path: Path) -> None:
    """Behind the torn line of a killed writer, which stays apart."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event":"st')
    log = EventLog(path, 1, lambda: check_fence(tmp_path, 1))
    log.write("step", step=1)
    (tmp_path / "attempts" / "0002").mkdir(parents=True)
    for act in (lambda: log.write("step", step=2), lambda: EventLog(path, 1, lambda: check_fence(tmp_path, 1))):
        with pytest.raises(UserError, match="taken over"):
            act()
    [_, line] = path.read_text().splitlines()
    assert json.loads(line)["step"] == json.loads(line)["attempt"] == 1


def test_a_state_that_is_not_the_saved_one_ends_the_start(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that matches no key leaves the start values, and would train from them."""
    trainer = make()
    trainer.optimizer = trainer.lr_scheduler = SimpleNamespace(state={}, load_state_dict=lambda _: None)
    trainer.accelerator = SimpleNamespace(state=None)
    monkeypatch.setattr(trainer, "_stored", lambda *_, **__: {})
    parts = state_parts(trainer.model, trainer.optimizer)
    for saved in (None, digest(parts)):
        trainer._resumed = {"state_digests": [saved] * trainer.group.world_size} if saved else {}
        trainer._load_optimizer_and_scheduler("step-000002")
    torch.nn.init.ones_(trainer.model.weight)
    with refused("not those that were saved", ExitCode.FAILED):
        trainer._load_optimizer_and_scheduler("step-000002")


# -- a save that fails ---------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_write_leaves_without_meeting_the_others(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may still be inside the save, in a collective of its own: a further one here would never end.

    A lost peer is not the storage's fault, where the storage has room.
    """
    trainer, met = make(step=4), list[int]()
    error: BaseException = RuntimeError("Connection closed by peer")

    def write(_folder: Path | None) -> None:
        met.append(trainer.group.met)
        raise error

    monkeypatch.setattr(trainer, "_collect", write, raising=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer._save_checkpoint(trainer.model, None)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="was not saved"):
        patch.setattr(room, "is_full", lambda path: True)
        trainer._save_checkpoint(trainer.model, None)
    error = FULL
    with refused("step 4 was not saved: rank 0: .*No space.*MB free, it needs about", ExitCode.STORAGE):
        trainer._save_checkpoint(trainer.model, None)
    assert trainer.group.met == met[-1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FULL, ExitCode.STORAGE),
        (NotSaved("rank 0: No space left on device", stored=True), ExitCode.STORAGE),
        (NotSaved("rank 0: a fault of a library", stored=False), ExitCode.FAILED),
    ],
)
def test_what_failed_behind_training_ends_all_ranks_alike(error: BaseException, code: ExitCode, make: Any) -> None:
    trainer, future = make(step=4), Future[Any]()
    future.set_exception(error)
    trainer._saving = room.Saving(4, False, future, True, 0.0, 0.0, 0.0)
    with refused(f"step 4 was not saved: .*{getattr(error, 'strerror', None) or ''}", code):
        trainer.finish_save()
    trainer.finish_save()  # it is over


@pytest.mark.parametrize("saved", [["weight", "bias"], ["weight"], []])
def test_a_save_that_lacks_trained_parameters_is_refused(saved: list[str], make: Any, tmp_path: Path) -> None:
    """PEFT 0.21.2 saves no adapter at all under FSDP2 with activation checkpointing, and raises nothing."""
    trainer = make()
    state = trainer.model.state_dict()
    states = {"pytorch_model_fsdp_0": {"model": {key: state[key] for key in saved}}}
    if len(saved) == 2:
        trainer._check_states(states, tmp_path)
        return
    with pytest.raises(UserError, match=f"{len(saved)} of 2 trained parameters were to be saved"):
        trainer._check_states(states, tmp_path)
