"""One training of a tiny recipe on two gloo ranks, with every storage of its second step followed.

``python -m tests.plan.tracked FOLDER... [FILE]`` imports the libraries once and forks the ranks of each recipe, which leave
``FOLDER/peaks.json``: bytes at rest and the largest sum of each phase of a step; and beside them :mod:`tests.plan.full_size`
for the cases of a file.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # tests that import this keep their environment
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.damage import fork, free_port, wait

RANKS = 2
GLOO_COPY = "aten.split.Tensor"
"""gloo reduces and scatters in a copy of what it is given (ProcessGroupGloo); NCCL has none."""


class Tracker(TorchDispatchMode):
    """Sums the storages that live while it is active, and those that it was shown before."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now, self.phase = 0, "rest"
        self.peaks: dict[str, int] = {}

    def add(self, tensor: torch.Tensor, operator: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        key = storage._cdata
        known = self.live.get(key)
        if known is not None and known[0]() is not None:
            self._count(key, known[0], storage.nbytes())
        elif operator != GLOO_COPY:
            reference = weakref.ref(storage, lambda reference: self._drop(key, reference))
            self._count(key, reference, storage.nbytes())

    def _count(self, key: int, reference: weakref.ref[Any], size: int) -> None:
        self.now += size - (self.live[key][1] if key in self.live else 0)
        self.live[key] = (reference, size)
        self.peaks[self.phase] = max(self.now, self.peaks.get(self.phase, 0))

    def _drop(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self.live.get(key)
        if known is not None and known[0] is reference:
            self.now -= known[1]
            del self.live[key]

    def enter_phase(self, name: str) -> None:
        self.phase = name
        self.peaks[name] = max(self.now, self.peaks.get(name, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor, str(func))
        return result

    def start(self) -> None:
        """Count what is there, and follow what FSDP does behind the dispatcher: it empties and fills storages."""
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                self.add(thing, "before")
        self.enter_phase("rest")
        resize = torch.UntypedStorage.resize_

        def followed(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            known = self.live.get(storage._cdata)
            if known is not None and known[0]() is not None:
                self._count(storage._cdata, known[0], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = followed  # type: ignore[assignment,method-assign]
        self.__enter__()


def make_rows(config: Mapping[str, Any], vocabulary: int) -> Any:
    """Conversations as token ids, of the lengths that the recipe's folder names."""
    from datasets import Dataset

    generator, lengths = torch.Generator().manual_seed(0), config["lengths"]
    rows = [torch.randint(0, vocabulary, (lengths[n % len(lengths)],), generator=generator).tolist() for n in range(64)]
    return Dataset.from_list([{"input_ids": row} for row in rows])


def make_tokenizer() -> Any:
    """Any: the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate(special.values())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, special["unk_token"])), **special)


def leave_tiles_alone() -> None:
    """TRL's tiles: on a GPU a kernel works in them in place, here there would be copies. What it computes does not matter."""
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        setattr(chunked_logprob, name, lambda *args, **kwargs: None)


def train(folder: Path) -> Tracker:
    """Two steps as the training program takes them; the second one is followed."""
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from clustertune.resolve.resolve import resolve
    from clustertune.training import build, packing, recompute, sharding

    resolved = resolve(folder)
    build.use_cpu()
    for key, value in build.accelerate_environment(folder / "accelerate.yaml", RANKS).items():
        os.environ.setdefault(key, value)
    build.install_cpu_fsdp()
    leave_tiles_alone()
    packing.register()
    config = json.loads((folder / "tracked.json").read_text())
    tracker = Tracker()

    class Follow(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recompute.apply(trainer.model, resolved)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                tracker.start()
                tracker.enter_phase("forward and backward")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                tracker.enter_phase("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                tracker.__exit__(None, None, None)

    values = build.fit_to_device(resolved.train_args, cuda=False)[0]
    values |= {"output_dir": str(folder / "out"), "report_to": "none", "save_strategy": "no", "max_steps": 2}
    trainer = SFTTrainer(
        model=str(folder / "base"),
        args=SFTConfig(**{key: value for key, value in values.items() if key in SFTConfig.__dataclass_fields__}),
        train_dataset=make_rows(config, resolved.architecture["vocab_size"]),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(**resolved.lora) if resolved.lora else None,
        callbacks=[Follow()],
    )
    sharding.set_precision(trainer.accelerator, resolved.distribution.reduce_dtype)
    if resolved.recipe.plan.whole_logits:

        def whole(model: Any, inputs: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs, use_cache=False).loss
            return loss

        trainer.compute_loss = whole
    trainer.train()
    return tracker


def run_rank(folder: Path, rank: int, port: int) -> None:
    """What a forked rank does."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    peaks = train(folder).peaks
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(peaks))
    torch.distributed.barrier()


def run_full_size(file: Path) -> None:
    """The cases of a file."""
    from tests.plan import full_size

    full_size.run(file)


def main() -> int:
    """All recipes, one after the other, and beside them the cases of a file. Returns how many failed."""
    import peft  # noqa: F401
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM

    assert trl.SFTTrainer  # loaded once, before the ranks are forked
    failed, given = 0, [Path(text) for text in sys.argv[1:]]
    beside = [fork(partial(run_full_size, file)) for file in filter(Path.is_file, given)]
    for folder in filter(Path.is_dir, given):
        architecture = json.loads((folder / "model.json").read_text())
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)).save_pretrained(folder / "base")
        port = free_port()
        failed += any(wait([fork(partial(run_rank, folder, rank, port)) for rank in range(RANKS)]))
    return failed + sum(code != 0 for code in wait(beside))


if __name__ == "__main__":
    sys.exit(main())
