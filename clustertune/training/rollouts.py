"""TRL's GRPO trainer on a rank: the model answers prompts itself, and learns by the answers' rewards.

What TRL 1.16 lacks, and is here: weights that generation can use under FSDP2, a resumed run that goes on within a generation
and with the prompts of its epoch, and an evaluation whose answers are drawn with the same random numbers every time, so that
two of them can be compared prompt by prompt.

:class:`ServerRing` is a rank's client of vLLM's servers beside the trainer: they are given adapters by files, and answer
prompts of token ids. Each answer is a request of its own with a seed of its own, so that it does not matter which server gives
it, nor how often it was asked for. A server that does not answer leaves the ring; at the next generation it is asked again,
and comes back with the newest adapter. One that does not prove the key, or whose answer is none, does not come back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from clustertune.console import say
from clustertune.data.rewards import text_of
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.server_requests import (
    FEW_BYTES,
    GONE,
    TOKEN_BYTES,
    Malformed,
    NotOurs,
    ask,
    is_log_probability,
    load_adapter,
    request,
    shown,
    unload_adapter,
)
from clustertune.manifest import read_whole
from clustertune.plan.generation_cost import MOST
from clustertune.replaced import replaced
from clustertune.rundir import ROLLOUT_SERVERS
from clustertune.training.recompute import layers_of
from clustertune.training.trainer import ReferenceTrainer

SAMPLES = 3
"""Answers of an evaluation that are kept, those of its first prompts."""
SHOWN_CHARACTERS = 2000
"""Of a prompt and of an answer that is kept."""
CONTROL = ("entropy_coef", "_last_world_entropy")
"""What TRL's control of the entropy goes on with."""
FEW = 8
"""Generations of training below which nothing is said of a rise."""
ANSWER_SECONDS = 1800.0
"""As ``eval.stall_seconds``: 1,280 steps of a 405B model at 0.32 s are 7 minutes."""
PATIENCE_SECONDS = 1800.0
"""Without any server for so long, the rank gives up: one that died is started again, and reads its weights."""
MISSES = 3
"""Times in a row that a server that is there may leave a request without an answer, until the next generation."""
Answer = tuple[list[int], list[float]]
"""Token ids, and the log-probability of each as it was drawn."""


class EpochSampler(RepeatSampler):  # type: ignore[misc]
    """TRL's sampler, whose order of prompts goes by the epoch: TRL's goes by how often this process has drawn one."""

    def __init__(self, *args: Any, trainer: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer = trainer

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(int(self._trainer.state.epoch or 0)):
                torch.randperm(self.num_samples, generator=self.generator)
        return iter(super().__iter__())


@dataclass(frozen=True)
class Sample:
    """One answer of an evaluation."""

    prompt: str
    answer: str
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class HeldOut:
    """An evaluation: the model's answers to the held-out prompts."""

    reward: float
    """Mean over the prompts, each reward times its weight."""
    by_name: dict[str, float]
    by_kind: dict[str, float]
    """By the kind of the prompts' first instruction, where they have one."""
    difference: float | None
    """Mean over the prompts of the reward less that of the first evaluation; None at the first."""
    error: float | None
    """Standard error of the difference."""
    samples: tuple[Sample, ...]
    alarm: str | None
    """The reward of training has risen, and this has not."""


class RolloutTrainer(ReferenceTrainer, GRPOTrainer):  # type: ignore[misc]
    """One rank's trainer of the model's own answers to prompts."""

    held_out: HeldOut | None = None
    """The newest evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._answers: dict[int, list[tuple[str, list[float], Sample]]] = defaultdict(list)
        """Of the evaluation that runs, by the number of the prompt."""
        self._first: dict[int, float] = {}
        """Rewards of the first evaluation, by the number of the prompt."""
        self._rewards: list[float] = []
        """Mean reward of each generation of training so far."""
        self._generated: list[tuple[float, float]] = []
        """Of each generation since the optimizer step before, over all ranks: the share of prompts whose answers have one
        reward, and of answers that were cut."""
        self._same = self._cut = 0.0
        """The largest of them at the last step that had any."""
        with replaced(grpo_trainer, prepare_fsdp=lambda model, _: model):  # as in PreferenceTrainer
            super().__init__(*args, **kwargs)
        self._ring: ServerRing | None = None
        """The servers that generate; None: the ranks do."""
        self._served: int | None = None
        """The step whose adapter they have."""
        if file := os.environ.get(ROLLOUT_SERVERS):
            rows = self.accelerator.unwrap_model(self.model).get_input_embeddings().weight.shape[0]
            self._ring = ServerRing(Path(file), self.beat, rows)
            self.use_vllm = True  # from here on TRL corrects for how the servers' probabilities differ from the model's

    # -- the order of prompts --------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        made = super()._get_train_sampler(dataset)
        return EpochSampler(
            made.data_source,
            mini_repeat_count=made.mini_repeat_count,
            batch_size=made.batch_size,
            repeat_count=made.repeat_count,
            shuffle=made.shuffle,
            seed=made.seed,
            trainer=self,
        )

    # -- generation and rewards -------------------------------------------------------------------------------------

    @property
    def _phase(self) -> str:
        return "train" if self.model.training else "eval"

    def beat(self) -> None:
        """A sign of life while answers are made and judged."""
        self.heartbeat(self._phase, self.state.global_step)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.beat()
        parted = self.clock.part("generation") if self.model.training else contextlib.nullcontext()
        with parted, replaced(grpo_trainer, unwrap_model_for_generation=self._for_generation):
            made = super()._generate(*args, **kwargs)
        self._total_train_tokens = int(self.state.num_input_tokens_seen)
        return made

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ring is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._serve(self._ring)
        # Of torch's generator, as generation in the rank: a checkpoint has its state, and an evaluation its own seed.
        seeds = torch.randint(0, 2**31 - 1, (len(prompt_ids),)).tolist()
        sampling = {
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": list(self.eos_token_ids),
            "skip_special_tokens": False,
        }
        answers = self._ring.answer(prompt_ids, seeds, sampling)
        return [ids for ids, _ in answers], [values for _, values in answers]

    def _serve(self, ring: ServerRing) -> None:
        """Give the servers the adapter of this step, where they have another. All ranks call it together."""
        step = int(self.state.global_step)
        if self._served == step:
            return
        model = self.accelerator.unwrap_model(self.model)
        name, trained = f"adapter-{self.store.attempt}-{step}", {}
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                trained[key] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if self.group.rank == 0:
            ring.publish(model, trained, name)
        self.group.barrier()
        ring.use(name)
        self._served = step

    @contextmanager
    def _for_generation(self, model: Any, accelerator: Any, **_: Any) -> Iterator[Any]:
        """The model as ``generate`` can use it; replaces TRL's, which switches recomputation of all layers on behind it.

        Without dropout: answers are the policy's own. Under FSDP2 all weights are gathered first, and given back behind it: the
        ranks' answers have different lengths, and a rank that is done would leave the others waiting in the gather of a layer.
        """
        inner, phase = accelerator.unwrap_model(model), self._phase
        sharded = [module for module in inner.modules() if isinstance(module, FSDPModule)]
        training = inner.training
        # Each token of an answer is a sign of life.
        beat = layers_of(inner)[0].register_forward_pre_hook(lambda *_: self.heartbeat(phase, self.state.global_step))
        try:
            inner.eval()
            if sharded:
                sharded[0]._get_fsdp_state()._lazy_init()  # generate calls a module below the root, which would become one
                for module in sharded:
                    module.set_reshard_after_forward(False, recurse=False)
                    module.unshard()
            yield inner
        finally:
            beat.remove()
            for module in sharded:
                module.reshard()
                module.set_reshard_after_forward(self.accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)
            inner.train(training)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """As TRL's, which switches recomputation off and on again around the forward passes without gradients."""
        with replaced(grpo_trainer, disable_gradient_checkpointing=lambda *_: contextlib.nullcontext()):
            made = super()._generate_and_score_completions(inputs)
        if self.model.training:
            figures = (self._metrics["train"][name][-1] for name in ("frac_reward_zero_std", "completions/clipped_ratio"))
            self._generated.append(tuple(figures))
        return made

    def has_taught(self, norm: float) -> bool | None:
        """Whether answers of this step's generations had different rewards, and were not all left out; None between two."""
        if not self._generated:
            return None
        generated, self._generated = self._generated, []
        self._same, self._cut = (max(values) for values in zip(*generated, strict=True))
        return norm != 0 and any(same < 1 for same, _ in generated)

    def why_idle(self) -> tuple[str, str]:
        """The cause among rewards and lengths."""
        if self._same >= 1:
            fix = "make it differ: a reward that is given in parts, easier prompts, a larger num_generations or temperature"
            cut = f"; {self._cut:.0%} of the answers were cut at max_completion_length" if self._cut else ""
            return f"all answers to each prompt have one reward{cut}", fix
        if self._cut >= 1 and self.args.mask_truncated_completions:
            what = "every answer was cut at max_completion_length, and mask_truncated_completions leaves those out"
            return what, "raise train.max_completion_length, or write train.mask_truncated_completions=false"
        return super().why_idle()

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Any:
        self.beat()
        training = self.model.training
        with self.clock.part("reward") if training else contextlib.nullcontext():
            rewards = super()._calculate_rewards(inputs, prompts, completions, *args)
        values = [self._weighted(row) for row in rewards.tolist()]
        if training:
            known = [value for value in values if value is not None]
            self._rewards += [statistics.fmean(known)] if known else []
            return rewards
        pairs = zip(inputs, completions, strict=True)
        mine = [(one["row"], one["kind"], text_of(one["prompt"]), text_of(answer)) for one, answer in pairs]
        for (number, kind, prompt, answer), row in zip(gather_object(mine), rewards.tolist(), strict=True):
            named = {name: None if math.isnan(v) else v for name, v in zip(self.reward_func_names, row, strict=True)}
            sample = Sample(prompt[:SHOWN_CHARACTERS], answer[:SHOWN_CHARACTERS], named)
            if len(self._answers[number]) < self.num_generations_eval:  # the last batch is filled with prompts that were there
                self._answers[number].append((kind, row, sample))
        return rewards

    def _weighted(self, rewards: Sequence[float]) -> float | None:
        """The sum that TRL takes; None where no reward has judged the answer."""
        pairs = zip(rewards, self.reward_weights.tolist(), strict=True)
        known = [reward * weight for reward, weight in pairs if not math.isnan(reward)]
        return math.fsum(known) if known else None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            ids, mask = (torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], dim=1) for part in ("ids", "mask"))
            self.clock.count({"input_ids": ids, "attention_mask": mask})
        return super().compute_loss(model, inputs, *args, **kwargs)

    # -- the held-out prompts ----------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, with the same random numbers every time, each prompt counted once, and the comparison."""
        self._answers.clear()
        set_seed(self.args.seed, device_specific=True)
        output = super().evaluation_loop(*args, **kwargs)
        if self._answers:
            self.held_out = compared = self._compared()
            kept = self._metrics["eval"]  # TRL's log puts these behind eval_
            kept["reward"] = [compared.reward]
            for name, value in compared.by_name.items():
                kept[f"rewards/{name}/mean"] = [value]
            if compared.difference is not None and compared.error is not None:
                kept["reward_difference"], kept["reward_difference_error"] = [compared.difference], [compared.error]
        return output

    def _compared(self) -> HeldOut:
        scores: dict[int, float] = {}
        kinds: dict[str, list[float]] = defaultdict(list)
        columns: dict[str, list[float]] = defaultdict(list)
        for number, answers in sorted(self._answers.items()):
            known = [value for _, row, _ in answers if (value := self._weighted(row)) is not None]
            if not known:
                continue
            scores[number] = statistics.fmean(known)
            if answers[0][0]:
                kinds[answers[0][0]].append(scores[number])
            for _, row, _ in answers:
                for name, value in zip(self.reward_func_names, row, strict=True):
                    columns[name] += [] if math.isnan(value) else [value]
        difference, error = paired(self._first, scores) if self._first else (None, None)
        self._first = self._first or scores
        return HeldOut(
            statistics.fmean(scores.values()) if scores else 0.0,
            {name: statistics.fmean(values) for name, values in columns.items() if values},
            {kind: statistics.fmean(values) for kind, values in sorted(kinds.items())},
            difference,
            error,
            tuple(answers[0][2] for _, answers in sorted(self._answers.items())[:SAMPLES]),
            find_alarm(self._rewards, difference, error),
        )

    # -- resume --------------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Where in a generation the run is, with what is left of it, and what the evaluations are compared with."""
        is_complete = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        left = [{key: _on_host(value) for key, value in part.items()} for part in self._buffered_inputs or ()]
        return {
            "rollouts": {
                "step": self._step,
                "left": [] if is_complete else left,
                "first": list(self._first.items()),
                "rewards": self._rewards,
                "control": {name: getattr(self, name) for name in CONTROL},
            }
        }

    def take_own_state(self, states: Mapping[str, Any]) -> None:
        stored = states.get("rollouts")
        if stored is None:  # of an export
            return
        device = self.accelerator.device
        left = [
            {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in part.items()}
            for part in stored["left"]
        ]
        self._step, self._buffered_inputs = stored["step"], left or None
        self._first, self._rewards = dict(stored["first"]), list(stored["rewards"])
        for name, value in stored["control"].items():
            setattr(self, name, value)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def paired(first: Mapping[int, float], now: Mapping[int, float]) -> tuple[float, float]:
    """Mean of the differences of the prompts that both have, and its standard error (0 for a single one)."""
    differences = [now[number] - first[number] for number in first.keys() & now.keys()]
    if not differences:
        return 0.0, 0.0
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences)) if len(
        differences
    ) > 1 else 0.0


def find_alarm(rewards: Sequence[float], difference: float | None, error: float | None) -> str | None:
    """What to say where the reward of training rose and that of the held-out prompts did not; None otherwise.

    Rose: the last quarter of the generations so far is above the first quarter by more than two standard errors of the
    difference of their means. Did not: the paired difference is not above its own standard error.
    """
    quarter = len(rewards) // 4
    if difference is None or error is None or len(rewards) < FEW:
        return None
    before, after = rewards[:quarter], rewards[-quarter:]
    rise = statistics.fmean(after) - statistics.fmean(before)
    doubt = math.sqrt(statistics.variance(before) / quarter + statistics.variance(after) / quarter)
    if rise <= 2 * doubt or difference > error:
        return None
    return (
        f"the reward of training rose by {rise:.3f} +- {doubt:.3f}, and that of the held-out prompts by {difference:+.3f} +- "
        f"{error:.3f}: the model may have found what the reward overlooks; read the sample answers"
    )


# -- servers that answer beside the trainer ------------------------------------------------------------------------------


class ServerRing:
    """The servers, as one rank sees them. ``beat`` is called now and then while it waits.

    ``vocabulary``: rows of the model's embedding; an answer's token ids are below it.
    """

    def __init__(self, file: Path, beat: Callable[[], object], vocabulary: int) -> None:
        ring = json.loads(read_whole(file))
        self.urls: list[str] = ring["urls"]
        self._key, self._beat, self._folder, self._vocabulary = ring["key"], beat, file.parent, vocabulary
        self._adapter = ""
        self._loaded: dict[str, str] = {}
        """Which adapter each server of the ring has; those that are down have none."""
        self._misses: dict[str, int] = {}
        """How often in a row each server left the ring without an answer."""
        self._out: dict[str, str] = {}
        """Servers that do not come back, and why."""
        self._next, self._lock = itertools.count(), threading.Lock()

    # -- weights ---------------------------------------------------------------------------------------------------

    def publish(self, model: Any, tensors: Mapping[str, Any], name: str) -> None:
        """Write an adapter for the servers, and remove those before the last one. One rank does it for all.

        ``tensors``: the trained parameters by the names that the model's ``state_dict`` has.
        """
        state = get_peft_model_state_dict(model, state_dict=dict(tensors))
        folder, made = self._folder / name, self._folder / f".{name}.tmp"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        save_file({key: value.detach().contiguous().cpu() for key, value in state.items()}, made / "adapter_model.safetensors")
        model.peft_config["default"].save_pretrained(str(made))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        for other in self._folder.glob("adapter-*"):
            if other.name not in (name, self._adapter):
                shutil.rmtree(other, ignore_errors=True)

    def use(self, name: str) -> None:
        """From here on answers are those of this adapter, and servers that were silent too often are asked again."""
        self._adapter = name
        with self._lock:
            self._out = {url: why for url, why in self._out.items() if self._misses.get(url, 0) < MISSES}
            self._misses.clear()

    def _join(self, url: str) -> bool:
        """Whether a server is in the ring with the adapter of now; one that is healthy is given it.

        Raises NotOurs, Malformed, and one of GONE.
        """
        with self._lock:  # of several requests that find it without, one loads
            if url in self._out:
                return False
            if self._loaded.get(url) == self._adapter:
                return True
            if ask(url, "/health", self._key) is None:
                return False
            if (why := load_adapter(url, self._key, self._adapter, self._folder / self._adapter)) is not None:
                self._miss(url, why)
                return False
            before, self._loaded[url] = self._loaded.get(url), self._adapter
            if before is not None:
                unload_adapter(url, self._key, before)
            return True

    def _leave(self, url: str, why: str, *, for_good: bool) -> None:
        with self._lock:
            was_in = self._loaded.pop(url, None) is not None
            if for_good:
                self._put_out(url, why)
            elif was_in:  # of several requests that fail together, one counts
                self._miss(url, why)

    def _miss(self, url: str, why: str) -> None:
        """Count a server that is there and has not answered."""
        self._misses[url] = self._misses.get(url, 0) + 1
        if self._misses[url] >= MISSES:
            self._put_out(url, f"{self._misses[url]} times no answer, at last: {why}")

    def _put_out(self, url: str, why: str) -> None:
        if url not in self._out:
            self._out[url] = why
            say(f"{url} leaves the ring of servers: {why}")

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Mapping[str, Any]) -> list[Answer]:
        """One answer to each prompt, in order. Raises UserError where no server is left for :data:`PATIENCE_SECONDS`, or all
        have left the ring.
        """
        with ThreadPoolExecutor(min(len(prompts), MOST * len(self.urls))) as pool:
            asked = [pool.submit(self._ask, list(ids), seed, sampling) for ids, seed in zip(prompts, seeds, strict=True)]
            left = set(asked)
            try:
                while left:
                    _, left = wait_for(left, timeout=1.0)
                    self._beat()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
            return [one.result() for one in asked]

    def _ask(self, ids: list[int], seed: int, sampling: Mapping[str, Any]) -> Answer:
        deadline = time.monotonic() + PATIENCE_SECONDS
        body = {**sampling, "prompt": [ids], "seed": seed, "logprobs": 0, "return_token_ids": True, "model": self._adapter}
        first = next(self._next)
        for turn in itertools.count(first):
            if (found := self._answer_of(self.urls[turn % len(self.urls)], body)) is not None:
                return found
            if len(self._out) == len(self.urls):
                break
            if time.monotonic() > deadline:
                break
            if (turn - first) % len(self.urls) == len(self.urls) - 1:
                time.sleep(0.5)
        problems = [Problem(f"has left the ring of servers: {why}", file=url) for url, why in self._out.items()]
        if len(problems) < len(self.urls):
            text = f"no answer for {PATIENCE_SECONDS:.0f} s from any of {', '.join(self.urls)}"
            problems.append(Problem(text, file=str(self._folder), fix="the servers' logs there say why"))
        raise UserError(problems, ExitCode.AGAIN)

    def _answer_of(self, url: str, body: Mapping[str, Any]) -> Answer | None:
        """One server's answer; None where it has none, and has left the ring."""
        most, prompt = int(body["max_tokens"]), len(body["prompt"][0])
        try:
            if not self._join(url):
                return None
            limit = FEW_BYTES + TOKEN_BYTES * (most + prompt)
            status, content = request(url, "/v1/completions", self._key, body, seconds=ANSWER_SECONDS, limit=limit)
            if status == 200:
                answer = read_answer(content, most, self._vocabulary)
                self._misses.pop(url, None)
                return answer
            # 404: it was started again, and has no adapter; 5xx: its engine ends
            self._leave(url, f"{status} {shown(content)}", for_good=status != 404 and status < 500)
        except (NotOurs, Malformed) as error:
            self._leave(url, str(error), for_good=True)
        except (*GONE, BrokenOff) as error:
            self._leave(url, f"{type(error).__name__}: {error}", for_good=False)
        return None


class BrokenOff(Exception):
    """An answer that the server did not end, as a dying engine leaves it."""


def read_answer(content: bytes, most: int, vocabulary: int) -> Answer:
    """An answer of at most ``most`` tokens with ids below ``vocabulary``. Raises BrokenOff, and Malformed for all else."""
    try:
        choices = json.loads(content)["choices"]
        choice = choices[0]
        if (reason := choice["finish_reason"]) == "abort":
            raise BrokenOff("an answer that was broken off")
        ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Malformed(f"an answer without token ids or log-probabilities ({type(error).__name__}: {error})") from None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(ids, list) and isinstance(values, list)):
        raise Malformed("an answer that is no list of token ids with their log-probabilities, or several")
    if reason not in ("stop", "length"):
        raise Malformed(f"an answer that ended with {reason!r:.80}")
    if not 0 < len(ids) <= most or len(ids) != len(values):
        raise Malformed(
            f"an answer of {len(ids)} tokens with {len(values)} log-probabilities, where {most} were asked for at most"
        )
    if any(type(one) is not int or not 0 <= one < vocabulary for one in ids):
        raise Malformed(f"an answer with a token id beyond the {vocabulary} tokens of the model")
    if not all(map(is_log_probability, values)):
        raise Malformed("an answer with a log-probability that is no finite number up to 0")
    return ids, [float(one) for one in values]
