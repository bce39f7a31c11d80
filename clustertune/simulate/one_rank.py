"""One rank in a process of its own: made as a training session makes it, trained for two steps, saved, evaluated, and counted;
in a second process resumed from what it saved."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
import torch.distributed as dist
import trl  # noqa: F401 - before CUDA is said to be there
import yaml
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from clustertune.checkpoint.store import CheckpointStore, find_checkpoint
from clustertune.errors import UserError
from clustertune.manifest import read_manifest
from clustertune.plan.memory import BACKWARD, FORWARD, LOSS, REFERENCE, UPDATE
from clustertune.resolve.resolved import Resolved
from clustertune.simulate import fake_cuda, stand_ins
from clustertune.simulate.fake_cuda import JOURNAL
from clustertune.simulate.follow import EVALUATION, LOADING, REST, RESUME, SAVE, Counted, Curve, Follow, Memory
from clustertune.simulate.guard import Guard
from clustertune.training import build, figures, packing, recompute, sharding
from clustertune.training.collectives import Group
from clustertune.training.figures import Startup
from clustertune.training.loading import Loading
from clustertune.training.trainer import PreferenceTrainer, RankTrainer, Trainer

STEPS = 2
"""The first makes the optimizer's states; the second is looked at."""
MICRO_BATCHES = 2
"""At most: one that accumulates, and the last one, which reduces. Those between are like the first; what is counted of it is
multiplied."""
EVALUATED = 2
"""Batches: what the first leaves behind is there in the second."""
_KEPT = frozenset({"weights", "adapters", stand_ins.GATHERED})


def run(
    spec: Mapping[str, Any],
    one: Mapping[str, Any],
    guard: Guard | None,
    out: TextIO,
    began: float,
    folder: Path,
    *,
    resumes: bool,
) -> int:
    """Simulate one rank, or resume it from what it saved in ``folder``; writes a line: what was counted, or where it failed."""

    def tell(**line: Any) -> None:
        out.write(json.dumps({"rank": one["rank"], **line}) + "\n")

    simulated = _Simulated(spec, _laid_out_again(one) if resumes else one, guard, folder, tell)
    try:
        result = simulated.resume() if resumes else simulated.run()
    except UserError as error:
        tell(error="; ".join(map(str, error.problems)), where="", during=simulated.memory.moment)
        return 1
    except Exception as error:
        traceback.print_exc()
        tell(error=f"{type(error).__name__}: {error}", where=_where(error), during=simulated.memory.moment)
        return 1
    tell(**{"resumed" if resumes else "found": {**result, "seconds": round(time.perf_counter() - began, 1)}})
    return 0


def _laid_out_again(one: Mapping[str, Any]) -> dict[str, Any]:
    """The same rank on nodes of half as many GPUs, where that divides."""
    on_node = one["on_node"] // 2 if one["on_node"] % 2 == 0 else one["on_node"]
    return {**one, "on_node": on_node, "local": one["rank"] % on_node}


def _where(error: BaseException) -> str:
    """The project's line that is nearest to an error, else the last one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "simulate" not in Path(f.filename).parts]
    own = [f for f in frames if "clustertune" in Path(f.filename).parts and "site-packages" not in f.filename] or frames
    if not own:
        return ""
    parts = Path(own[-1].filename).parts
    at = len(parts) - 1 - parts[::-1].index("clustertune") if "clustertune" in parts else max(0, len(parts) - 3)
    return f"{'/'.join(parts[at:])}:{own[-1].lineno}"


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Proves what was set up, as a session does, and says where the step is."""

    def __init__(self, simulated: _Simulated) -> None:
        self._simulated = simulated

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._simulated.prove()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._simulated.begin_step(state.global_step)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._simulated.trainer.wait_for_copy()
        self._simulated.memory.enter(UPDATE)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._simulated.end_step(state.global_step)
        control.should_save = True
        control.should_evaluate = control.should_training_stop = state.global_step == STEPS


class _Resumed(Exception):
    """The next step would begin."""


class _Simulated:
    """What is made of one rank."""

    trainer: RankTrainer

    def __init__(self, spec: Mapping[str, Any], one: Mapping[str, Any], guard: Guard | None, folder: Path, tell: Any) -> None:
        self.resolved, self.tell = Resolved.from_dict(spec["resolved"]), tell
        self._spec, self._guard, self._folder = spec, guard, folder
        self._rank, self._local, self._on_node = int(one["rank"]), int(one["local"]), int(one["on_node"])
        self._device = "cuda" if guard is not None else "cpu"
        self._length = int(self.resolved.train_args["max_length"])
        self.memory = Memory(self._device)
        gpu = spec["gpu"]
        self._follow = Follow(
            self.memory, self._device, flops_per_s=gpu["flops_per_s"], bytes_per_s=gpu["bytes_per_s"], length=self._length
        )
        self._layer = self._step = 0
        self._told: list[str] = []
        self._inside = False
        """In a save or an evaluation, whose layers are none of a step."""

    def run(self) -> dict[str, Any]:
        """Load, train, save behind each step, evaluate, and return what was counted."""
        parameters = stand_ins.write_base(self._folder / "base", self.resolved.architecture)
        self.tell(progress=f"{parameters:,} parameters, {self._spec['world']} ranks")
        with self._ready() as notes:
            self.trainer.train()
            self.trainer.finish_save()
        return self._document(parameters, notes)

    def resume(self) -> dict[str, Any]:
        """Load, resume from the first save up to the begin of the next step, and return what was counted."""
        checkpoint = find_checkpoint(self._folder / "checkpoints" / "step-000001")
        with self._ready():
            self.trainer.resume_with(read_manifest(checkpoint).meta)
            with suppress(_Resumed):
                self.trainer.train(resume_from_checkpoint=str(checkpoint))
        return {
            "gpus_per_node": self._on_node,
            "device": self._local,
            "read_bytes": self._reading.bytes,
            "checkpoint_bytes": self._bytes.read,
            "moments": {name: asdict(peak) for name, peak in self.memory.moments.items() if name in (LOADING, RESUME)},
            "rest_bytes": self.memory.now,
            "random": [{"device": device, "of": owner} for device, owner in JOURNAL.random],
            "reseeded": JOURNAL.reseeded,
        }

    @contextmanager
    def _ready(self) -> Iterator[list[str]]:
        """Inside, the trainer is made and tensors are fake; gives what loading has to say."""
        self._join()
        args = self._arguments()
        self._reading = stand_ins.install(
            self.memory, self._follow, two_models=self.resolved.is_dpo and self.resolved.lora is None
        )
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._bytes = stand_ins.install_files(mode, self._follow)
        loading = Loading(self.resolved.distribution, Startup(), Group()).install()
        torch.set_grad_enabled(True)
        with mode, self._follow:
            self.trainer = self._make(args, loading)
            sharding.set_precision(self.trainer.accelerator, self.resolved.distribution.reduce_dtype)
            self.trainer.remove_callback(PrinterCallback)
            self.trainer.on_inputs = self._begin_micro_batch
            self._name_phases()
            yield list(dict.fromkeys(loading.notes))

    # -- as a launcher and a session do --------------------------------------------------------------------------------

    def _join(self) -> None:
        spec, resolved = self._spec, self.resolved
        world, on_node = spec["world"], self._on_node
        ranks = {"RANK": self._rank, "LOCAL_RANK": self._local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": on_node}
        for key, value in ranks.items():
            os.environ.pop(key, None)
            if world > 1:  # accelerate takes a rank of one for one of several
                os.environ[key] = str(value)
        file = self._folder / "accelerate.yaml"
        file.write_text(yaml.safe_dump(resolved.accelerate))
        for key, value in build.accelerate_environment(file, world).items():
            os.environ[key] = value
        if self._guard is not None:
            gpu = spec["gpu"]
            fake_cuda.install(
                self._guard,
                rank=self._rank,
                devices=on_node,
                name=gpu["name"],
                memory=gpu["memory"],
                capability=tuple(gpu["capability"]),
            )
        else:
            build.use_cpu()
            build.install_cpu_fsdp()
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=world)

    def _arguments(self) -> Any:
        resolved = self.resolved
        build.leave_shapes_to_torch(resolved.distribution)
        packing.register()
        values, _ = build.fit_to_device(resolved.train_args, cuda=self._guard is not None)
        self._micro_batches = int(resolved.train_args["gradient_accumulation_steps"])
        values |= {
            "report_to": "none", "save_strategy": "no", "max_steps": STEPS + 1, "eval_strategy": "no", "eval_on_start": False,
            "dataloader_num_workers": 0, "dataloader_pin_memory": False, "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": None, "logging_steps": 1, "disable_tqdm": True,
            "gradient_accumulation_steps": min(MICRO_BATCHES, self._micro_batches),
        }  # fmt: skip
        return build.trl_arguments(resolved, self._folder / "out", values)

    def _make(self, args: Any, loading: Loading) -> RankTrainer:
        resolved = self.resolved
        (self._folder / "checkpoints").mkdir(exist_ok=True)
        store = CheckpointStore(self._folder / "checkpoints", 1, None, stand_ins.Alone(), self._told.append)
        stop = SimpleNamespace(is_set=False)
        attempt: Any = SimpleNamespace(resolved=resolved, stop=stop, heartbeat=lambda *_, **__: None, fence=lambda: None)
        kind = PreferenceTrainer if resolved.is_dpo else Trainer
        made: RankTrainer = kind(
            model=str(self._folder / "base"),
            args=args,
            train_dataset=self._rows((STEPS + 2) * args.per_device_train_batch_size * args.gradient_accumulation_steps),
            eval_dataset=self._rows(EVALUATED * args.per_device_eval_batch_size),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(**resolved.lora) if resolved.lora is not None else None,
            callbacks=[_Watch(self)],
            loading=loading,
            store=store,
            attempt=attempt,
            on_checkpoint=lambda *_: None,
        )
        return made

    def _rows(self, count: int) -> Dataset:
        """``count`` full rows for each rank: of four conversations where they are packed, of a prompt of a quarter in pairs."""
        length, part = self._length, self._length // 4
        row: dict[str, Any] = {"input_ids": [5] * length, "labels": [5] * length}
        if self.resolved.is_dpo:
            answer = [6] * (length - part)
            row = {"prompt_ids": [5] * part, "chosen_ids": answer, "rejected_ids": answer}
        elif self.resolved.train_args["packing"]:
            row["seq_lengths"] = [part, part, part, length - 3 * part]
        with torch.utils._python_dispatch._disable_current_modes():
            return Dataset.from_list([row]).select([0] * (count * self._spec["world"]))

    # -- moments -------------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """What a session proves before the first step; then the hooks that say where a step is."""
        trainer, resolved = self.trainer, self.resolved
        state = sharding.inspect(trainer.model_wrapped, trainer.accelerator)
        sharding.check(state, resolved.distribution)
        self._recomputed = recompute.apply(trainer.model, resolved)
        self._sharding = state.as_dict()
        figures.attach(trainer, resolved, recompute.layers_of, self._spec["gpu"]["name"])
        gc.collect()
        self.memory.rename("weights")
        if resolved.lora is not None:
            self.memory.rename_storages([p for p in trainer.model.parameters() if p.requires_grad], "adapters")
        self.tell(progress=f"loaded: {self._reading.bytes / 1e9:,.2f} GB read by this rank")
        self._hook(trainer.model)
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            self._hook(reference)

    def _name_phases(self) -> None:
        trainer = self.trainer
        stand_ins.put(
            trainer,
            _save_checkpoint=self._phase(SAVE, partial(self._save, trainer._save_checkpoint)),
            evaluate=self._phase(EVALUATION, trainer.evaluate),
            _load_from_checkpoint=self._phase(RESUME, trainer._load_from_checkpoint),
            _load_optimizer_and_scheduler=self._phase(RESUME, trainer._load_optimizer_and_scheduler),
        )
        take, JOURNAL.random = trainer._load_rng_state, []

        def take_random_state(checkpoint: Any) -> None:
            JOURNAL.random, JOURNAL.reseeded = [], False
            take(checkpoint)

        stand_ins.put(trainer, _load_rng_state=take_random_state)

    def _save(self, save: Callable[..., Any], *args: Any) -> None:
        """The same, with what rank 0 writes for all where another one is simulated."""
        save(*args)
        if self._rank and self.trainer.state.global_step == 1:
            folder = self._folder / "checkpoints" / "step-000001"
            self.trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            self.trainer._save_scheduler(folder)

    def _phase(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, told apart from the steps."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, moment = self._follow.begin(name), self.memory.moment
            self._inside, self._follow.on_copy = True, JOURNAL.copied if name == SAVE else None
            self.memory.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._inside, self._follow.on_copy = False, None
                self._follow.begin(*before)
                if moment != LOADING:
                    self.memory.enter(moment)

        return run

    def _hook(self, model: Any) -> None:
        layers = recompute.layers_of(model)
        outer = {id(m._checkpoint_wrapped_module): m for m in model.modules() if isinstance(m, CheckpointWrapper)}
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._begin_layer(number, len(layers)))
        last = layers[-1]
        # Ahead of FSDP's own hooks on the same tensor, which gather the layer again.
        last.register_forward_hook(self._before_backward, prepend=True)
        outer.get(id(last), last).register_forward_hook(self._end_layers)

    def _begin_micro_batch(self, inputs: Any) -> None:  # noqa: ARG002
        self._micro_batch += 1
        is_last = self._micro_batch == self.trainer.args.gradient_accumulation_steps
        self._follow.begin(f"step {self._step + 1}", times=1 if is_last else self._micro_batches - MICRO_BATCHES + 1)
        self.memory.enter(FORWARD)

    def _begin_layer(self, number: int, layers: int) -> None:
        memory = self.memory
        if self._inside:
            return
        if self.resolved.is_dpo and not torch.is_grad_enabled():
            memory.enter(REFERENCE)
        elif memory.moment == LOSS:
            memory.enter(BACKWARD)  # it is computed again
        elif memory.moment == REFERENCE:
            memory.enter(FORWARD)
        self._layer += 1
        if layers > 8 and self._layer % max(1, layers // 4) == 0:
            self.tell(layer=number + 1, layers=layers, moment=memory.moment, step=self._step + 1)

    def _end_layers(self, module: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        if self.memory.moment != BACKWARD and not self._inside:
            self.memory.enter(LOSS)

    def _before_backward(self, module: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        hidden = output[0] if isinstance(output, tuple) else output
        if self.memory.moment == FORWARD and hidden.requires_grad:
            hidden.register_hook(lambda _: self.memory.enter(BACKWARD))

    def begin_step(self, step: int) -> None:
        if self.trainer.start_step:
            raise _Resumed
        self._step, self._micro_batch = step, 0
        if step == STEPS - 1:
            self.memory.forget()
            self._rest = self.memory.now
            self.memory.curve = Curve()
            self.memory.enter(REST)
            self._follow.counted = Counted()

    def end_step(self, step: int) -> None:
        trainer = self.trainer
        trainer.end_step()
        if step == 1:
            gc.collect()
            self.memory.rename("optimizer states", _KEPT)
        if step == STEPS:
            self._curve = self.memory.curve.as_json()
            self._counted, self._follow.counted = self._follow.counted, None
        self.tell(progress=f"step {step}: {self.memory.now / 2**30:,.2f} GiB at rest")

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _document(self, parameters: int, notes: list[str]) -> dict[str, Any]:
        counted = self._counted
        assert counted is not None
        calls = self._follow.calls
        return {
            "device": self._device,
            "parameters": parameters,
            "read_bytes": self._reading.bytes,
            "rest_bytes": self._rest,
            "moments": {name: asdict(peak) for name, peak in self.memory.moments.items()},
            "curve": self._curve,
            "traffic": {stage: _sums(of_stage) for stage, of_stage in calls.items()},
            "simulated_micro_batches": int(self.trainer.args.gradient_accumulation_steps),
            "sequence": {stage: [[c.kind, c.ranks, c.stride, c.bytes] for c in of_stage] for stage, of_stage in calls.items()},
            "waits": [
                {"moment": moment, "operator": operator, "where": where, "count": count}
                for (moment, operator, where), count in sorted(counted.waits.items())
            ],
            "operators": counted.operators,
            "launches": counted.launches,
            "flops": counted.flops,
            "product_flops": counted.product_flops,
            "device_seconds": counted.device_seconds,
            "micro_batches": self._micro_batches,
            "sharding": self._sharding,
            "recomputed": self._recomputed,
            "notes": [*notes, *dict.fromkeys(text for text in self._told if text.startswith(("note", "warning")))],
            "save": {
                "bytes": self._bytes.written // STEPS,
                "pinned_bytes": self._bytes.pinned,
                "pageable_bytes": self._bytes.pageable,
                "devices": {name: sorted(devices) for name, devices in JOURNAL.devices.items()},
                "waits": [
                    {"thread": thread, "stream": stream, "for": other, "count": count}
                    for (thread, stream, other), count in sorted(JOURNAL.waits.items())
                    if thread.startswith("save")
                ],
                "faults": dict(JOURNAL.faults),
            },
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _sums(calls: list[Any]) -> list[dict[str, Any]]:
    """Calls and bytes by kind and group."""
    sums: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for call in calls:
        row = sums[call.kind, call.ranks, call.stride]
        row[0] += call.times
        row[1] += call.bytes * call.times
    return [
        {"kind": kind, "ranks": ranks, "stride": stride, "calls": count, "bytes": size}
        for (kind, ranks, stride), (count, size) in sorted(sums.items())
    ]


def _tokenizer() -> Any:
    """Any: the rows are tokens already."""
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate(special.values())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, special["unk_token"])), **special)
