"""Stand-ins of the modules of NVIDIA's image: the recorded names and nothing else, so that a wrong one fails here.

They do the bookkeeping of Megatron-Bridge's loop (``training/train.py``): steps, when it saves, what it fires and when, and
that it ends with ``sys.exit`` where a signal came.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

NAMES = json.loads((Path(__file__).with_name("names.json")).read_text())


def of_class(name: str, *others: str) -> Any:
    """A class that takes the recorded fields as keywords, and no other."""
    known = {field for one in (name, *others) for field in NAMES["classes"][one]}

    def init(self: Any, **values: Any) -> None:
        if wrong := set(values) - known:
            raise TypeError(f"{name} has no {sorted(wrong)}")
        for key in known:
            setattr(self, key, values.get(key))

    return type(name, (), {"__init__": init})


def check_call(name: str, values: dict[str, Any]) -> None:
    """A call with a keyword that the real function does not have."""
    known = NAMES["functions"][name]
    wrong = [key for key in values if key not in known]
    if wrong and not any(key.startswith("**") for key in known):
        raise TypeError(f"{name} has no {wrong}")


class Handler:
    """``DistributedSignalHandler``."""

    def __init__(self) -> None:
        self._signal_received = False


@dataclass
class Loop:
    """What the stand-in of the training loop does, and what was called."""

    rows: dict[str, int] = field(default_factory=lambda: {"train": 40, "eval": 8})
    stop_at: int | None = None
    """A signal arrives in this step."""
    fail_at: int | None = None
    fail_export: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    config: Any = None
    losses: dict[int, float] = field(default_factory=dict)

    def called(self, name: str) -> list[Any]:
        return [value for key, value in self.calls if key == name]

    def train(self, config: Any, _forward: Any, callbacks: Any) -> None:
        """``pretrain`` and ``train``, as far as anybody sees them from outside."""
        self.config = config
        started = 0
        if config.checkpoint.load is not None:
            started = int((Path(config.checkpoint.load) / "latest_checkpointed_iteration.txt").read_text())
        state = types.SimpleNamespace(cfg=config, train_state=types.SimpleNamespace(step=started), signal_handler=Handler())
        optimizer = types.SimpleNamespace(param_groups=[{"lr": 0.5}])
        context = types.SimpleNamespace(
            state=state, model=["chunk"], optimizer=optimizer, loss_dict=None, grad_norm=2.0, total_loss_dict=None
        )
        saved_at = None
        while state.train_state.step < config.train.train_iters:
            step = state.train_state.step + 1
            if step == self.fail_at:
                raise RuntimeError("the node is gone")
            self.losses[step] = 4.0 / step
            context.loss_dict = {"lm loss": torch.tensor(self.losses[step])}
            callbacks.fire("on_train_step_end", context)
            state.train_state.step = step
            if config.validation.eval_interval and step % config.validation.eval_interval == 0:
                context.total_loss_dict = {"lm loss": torch.tensor(3.0)}
                callbacks.fire("on_eval_end", context)
            if step == self.stop_at or state.signal_handler._signal_received:
                self.save(config, step, callbacks, context)
                sys.exit(0)
            if config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0:
                self.save(config, step, callbacks, context)
                saved_at = step
        if saved_at != state.train_state.step and state.train_state.step % (config.checkpoint.save_interval or 10**9):
            self.save(config, state.train_state.step, callbacks, context)
        callbacks.fire("on_train_end", context)

    def save(self, config: Any, step: int, callbacks: Any, context: Any) -> None:
        folder = Path(config.checkpoint.save)
        inner = folder / f"iter_{step:07d}"
        inner.mkdir(parents=True)
        (inner / "__0_0.distcp").write_bytes(b"weights %d" % step)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        callbacks.fire("on_checkpoint_save", context)


class Manager:
    """``CallbackManager``."""

    EVENTS = ("on_train_step_end", "on_eval_end", "on_checkpoint_save", "on_train_end", "on_train_start")

    def __init__(self) -> None:
        self.by_event: dict[str, Callable[[Any], None]] = {}

    def register(self, event_name: str, fn: Callable[[Any], None]) -> None:
        assert event_name in self.EVENTS
        self.by_event[event_name] = fn

    def fire(self, event: str, context: Any) -> None:
        self.by_event[event](context)


def modules(loop: Loop) -> dict[str, types.ModuleType]:
    """Every module that the project asks for by name."""
    provider_fields = {*NAMES["classes"]["TransformerConfig"], *NAMES["classes"]["GPTModelProvider"]}

    class Provider:
        def __init__(self) -> None:
            for name in provider_fields:
                setattr(self, name, 1 if name.endswith("_parallel_size") else None)

        def finalize(self) -> None:
            loop.calls.append(("finalize", dict(vars(self))))

        def initialize_model_parallel(self, **values: Any) -> None:
            check_call("ModelProviderMixin.initialize_model_parallel", values)

        def provide_distributed_model(self, **values: Any) -> list[str]:
            check_call("ModelProviderMixin.provide_distributed_model", values)
            return ["chunk"]

    class AutoBridge:
        @classmethod
        def from_hf_pretrained(cls, path: str, **values: Any) -> AutoBridge:
            loop.calls.append(("from_hf_pretrained", (path, values)))
            return cls()

        def to_megatron_provider(self, **values: Any) -> Provider:
            check_call("AutoBridge.to_megatron_provider", values)
            return Provider()

        def save_megatron_model(self, model: Any, path: Path, **values: Any) -> None:
            check_call("AutoBridge.save_megatron_model", values)
            loop.calls.append(("save_megatron_model", path))
            (Path(path) / "iter_0000000").mkdir(parents=True)
            (Path(path) / "iter_0000000" / "__0_0.distcp").write_bytes(b"base")

        def save_hf_adapter(self, model: Any, path: Path, **values: Any) -> None:
            check_call("AutoBridge.save_hf_adapter", values)
            loop.calls.append(("save_hf_adapter", values))
            if loop.fail_export:
                raise RuntimeError("no room")
            from safetensors.torch import save_file

            save_file(loop.adapter, Path(path) / "adapter_model.safetensors")
            (Path(path) / "adapter_config.json").write_text("{}")

        def save_hf_pretrained(self, model: Any, path: Path, **values: Any) -> None:
            check_call("AutoBridge.save_hf_pretrained", values)
            loop.calls.append(("save_hf_pretrained", values))

    class Builder:
        def __init__(self, **values: Any) -> None:
            check_call("FinetuningDatasetBuilder.__init__", values)
            self.root = Path(values["dataset_root"])
            loop.calls.append(("builder", values))

        def prepare_data(self) -> None:
            (self.root / "packed").mkdir(exist_ok=True)
            for split in ("training", "validation"):
                rows = loop.rows["train" if split == "training" else "eval"]
                if rows:
                    (self.root / "packed" / split).write_text(str(rows))

        train_path = property(lambda self: self.root / "training.jsonl")
        validation_path = property(lambda self: self.root / "validation.jsonl")
        train_path_packed = property(lambda self: self.root / "packed" / "training")
        validation_path_packed = property(lambda self: self.root / "packed" / "validation")

    def parquet(path: Path) -> Any:
        return types.SimpleNamespace(metadata=types.SimpleNamespace(num_rows=int(Path(path).read_text())))

    config_classes = {
        name: of_class(name)
        for name in (
            "TrainingConfig", "ValidationConfig", "OptimizerConfig", "SchedulerConfig", "DistributedDataParallelConfig",
            "FinetuningDatasetConfig", "CheckpointConfig", "LoggerConfig", "RNGConfig", "ConfigContainer",
        )
    }  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "megatron.core.parallel_state": {"destroy_model_parallel": lambda: loop.calls.append(("destroy", None))},
        "megatron.bridge": {"AutoBridge": AutoBridge},
        "megatron.bridge.package_info": {"__version__": "0.5.1"},
        "megatron.bridge.training.config": config_classes,
        "megatron.bridge.training.callbacks": {"CallbackManager": Manager},
        "megatron.bridge.training.gpt_step": {"forward_step": object()},
        "megatron.bridge.training.finetune": {"finetune": loop.train},
        "megatron.bridge.training.mixed_precision": {
            "get_mixed_precision_config": lambda name: of_class("MixedPrecisionConfig")(bf16=name == "bf16_mixed")
        },
        "megatron.bridge.training.tokenizers.config": {"TokenizerConfig": of_class("TokenizerConfig")},
        "megatron.bridge.training.tokenizers.tokenizer": {"build_tokenizer": lambda config: config.tokenizer_model},
        "megatron.bridge.data.builders.finetuning_dataset": {"FinetuningDatasetBuilder": Builder},
        "megatron.bridge.data.datasets.packed_sequence": {"PackedSequenceSpecs": of_class("PackedSequenceSpecs")},
        "megatron.bridge.peft.canonical_lora": {"CanonicalLoRA": of_class("CanonicalLoRA")},
        "pyarrow.parquet": {"ParquetFile": parquet},
    }
    names = [name.split(".") for name in contents]
    found = {".".join(parts[:n]): types.ModuleType(".".join(parts[:n])) for parts in names for n in range(1, len(parts) + 1)}
    for name, values in contents.items():
        vars(found[name]).update(values)
    del found["pyarrow"]  # the real one has more
    return found


@contextmanager
def installed(loop: Loop) -> Iterator[Loop]:
    """Have the stand-ins where they are imported from."""
    made = modules(loop)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield loop
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
