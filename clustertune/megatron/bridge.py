"""NVIDIA's side: the few calls into Megatron-Bridge, by the names of release 0.5.1. Imported on the nodes only.

``models/conversion/auto_bridge.py`` (from_hf_pretrained, to_megatron_provider, save_megatron_model, save_hf_adapter,
save_hf_pretrained), ``training/finetune.py``, ``training/callbacks.py``, ``data/builders/finetuning_dataset.py``.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clustertune.errors import Problem, UserError
from clustertune.manifest import open_text
from clustertune.megatron.settings import Counts, sizes
from clustertune.resolve.resolved import Resolved

if TYPE_CHECKING:
    from clustertune.training.event_log import Heartbeat

RELEASE = "0.5"
"""What this module was written against: names move between releases (0.6 has another builder of datasets)."""
IMAGE_FIX = "run it in the image of containers/megatron.def: container.megatron of the cluster file"


class Bridge:
    """Megatron-Bridge on this rank."""

    def __init__(self, source: tuple[str, str | None], name: str) -> None:
        self.source, self._name = source, name
        self._hf: Any = None

    @classmethod
    def load(cls, source: tuple[str, str | None], name: str) -> Bridge:
        """Raises UserError where Megatron-Bridge is not there, or is another release than this was written for."""
        try:
            version = str(_of("megatron.bridge.package_info").__version__)
        except ImportError as error:
            text = f"Megatron-Bridge cannot be imported: {error}"
            raise UserError(Problem(text, key="container.megatron", fix=IMAGE_FIX)) from None
        if not version.startswith(f"{RELEASE}."):
            text = f"the image has Megatron-Bridge {version}, this release of clustertune is for {RELEASE}"
            raise UserError(Problem(text, key="container.megatron", fix=IMAGE_FIX))
        return cls(source, name)

    def start(self, timeout: datetime.timedelta) -> None:
        """The process group, made here: the conversion and the training after it both use it (``_initialize_distributed``
        takes one that is there), and a second one in the same process would meet the keys of the first in the store."""
        torch = _of("torch")
        if not torch.distributed.is_initialized():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group("nccl", timeout=timeout)

    def end(self) -> None:
        """Leave the process group."""
        distributed = _of("torch").distributed
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def hf(self) -> Any:
        """The model in HF's form: its weights are read where they are asked for."""
        if self._hf is None:
            path, revision = self.source
            named = {"revision": revision} if revision else {}
            self._hf = _of("megatron.bridge").AutoBridge.from_hf_pretrained(path, torch_dtype=_of("torch").bfloat16, **named)
        return self._hf

    def fetch(self, name: str, revision: str | None) -> Path:
        """The folder of a model of the Hub, loaded where it is not in the cache. Raises what huggingface_hub raises."""
        patterns = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
        return Path(_of("huggingface_hub").snapshot_download(name, revision=revision, allow_patterns=patterns))

    def convert(self, source: tuple[str, str | None], resolved: Resolved, out: Path, heartbeat: Heartbeat) -> None:
        """All ranks, each with the part that it has in the training: no node holds the whole model."""
        self.source = source
        provider = self.hf().to_megatron_provider(load_weights=True)
        model = resolved.recipe.megatron
        assert model is not None
        _set(provider, sizes(model))
        provider.pipeline_dtype = provider.params_dtype = _of("torch").bfloat16
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
        heartbeat("model")
        self.hf().save_megatron_model(chunks, out)
        del chunks, provider
        # The training makes its groups again, with what it knows of its own.
        _of("megatron.core.parallel_state").destroy_model_parallel()
        _of("gc").collect()
        _of("torch").cuda.empty_cache()

    def pack(self, config: Mapping[str, Mapping[str, Any]], heartbeat: Heartbeat) -> Counts:
        """Rank 0 alone: tokenize and pack as the training will read it, and count. What is packed already is kept."""
        data = config["dataset"]
        tokenizer = _of("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer(self._tokenizer(config))
        specs = data["packed_sequence_specs"]
        builder = _of("megatron.bridge.data.builders.finetuning_dataset").FinetuningDatasetBuilder(
            dataset_root=data["dataset_root"],
            tokenizer=tokenizer,
            seq_length=data["seq_length"],
            seed=data["seed"],
            packed_sequence_specs=self._specs(specs),
            dataset_kwargs=dict(data["dataset_kwargs"]),
            do_test=False,
        )
        heartbeat("model")
        builder.prepare_data()
        heartbeat("model")
        if specs is None:
            return Counts(_lines(builder.train_path), _lines(builder.validation_path))
        counted = [_rows(Path(path)) for path in (builder.train_path_packed, builder.validation_path_packed)]
        if not counted[0]:
            text = "Megatron-Bridge packed no sequence of it: the log of rank 0 says more"
            raise UserError(Problem(text, file=str(builder.train_path)))
        return Counts(*counted)

    def finetune(self, config: Mapping[str, Mapping[str, Any]], listener: Any) -> bool:
        """NVIDIA's training loop, whose events are methods of ``listener``.

        Returns whether it stopped because it was asked to (it ends with SystemExit then).
        """
        manager = _of("megatron.bridge.training.callbacks").CallbackManager()
        for event in ("on_train_step_end", "on_eval_end", "on_checkpoint_save", "on_train_end"):
            manager.register(event, getattr(listener, event))
        forward = _of("megatron.bridge.training.gpt_step").forward_step
        try:
            _of("megatron.bridge.training.finetune").finetune(self.container(config), forward, callbacks=manager)
        except SystemExit as ended:
            if ended.code not in (0, None):
                raise RuntimeError(f"Megatron-Bridge ended with exit code {ended.code}") from None
            return True
        return False

    def container(self, config: Mapping[str, Mapping[str, Any]]) -> Any:
        """The ``ConfigContainer`` of plain sections. A name that this release does not have is an error, not a guess."""
        sections, torch = _of("megatron.bridge.training.config"), _of("torch")
        provider = self.hf().to_megatron_provider(load_weights=False)
        _set(provider, config["model"])
        if provider.pipeline_model_parallel_size > 1:
            provider.pipeline_dtype = torch.bfloat16
        mixed = dict(config["mixed_precision"])
        precision = _of("megatron.bridge.training.mixed_precision").get_mixed_precision_config(mixed.pop("recipe"))
        _set(precision, mixed)
        data = dict(config["dataset"])
        data["packed_sequence_specs"] = self._specs(data["packed_sequence_specs"])
        train = dict(config["train"])
        train["exit_signal"] = signal.Signals[train["exit_signal"]]
        lora = config.get("peft")
        peft = None if lora is None else _of("megatron.bridge.peft.canonical_lora").CanonicalLoRA(**lora)
        kinds = {
            "train": "TrainingConfig",
            "validation": "ValidationConfig",
            "optimizer": "OptimizerConfig",
            "scheduler": "SchedulerConfig",
            "ddp": "DistributedDataParallelConfig",
            "dataset": "FinetuningDatasetConfig",
            "checkpoint": "CheckpointConfig",
            "logger": "LoggerConfig",
            "rng": "RNGConfig",
        }
        values = {**config, "train": train, "dataset": data}
        made = {name: getattr(sections, kind)(**values[name]) for name, kind in kinds.items()}
        tokenizer = self._tokenizer(config)
        return sections.ConfigContainer(model=provider, tokenizer=tokenizer, mixed_precision=precision, peft=peft, **made)

    def export(self, peft: Any, model: Any, out: Path) -> None:
        """The trained part in HF's form, by all ranks together, from the parts that they hold (``save_hf_adapter``)."""
        if peft is not None:
            named = {"peft_config": peft, "base_model_name_or_path": self._name}
            self.hf().save_hf_adapter(model, out, show_progress=False, **named)
        else:
            self.hf().save_hf_pretrained(model, out, show_progress=False)

    @staticmethod
    def _specs(specs: Mapping[str, Any] | None) -> Any:
        module = "megatron.bridge.data.datasets.packed_sequence"
        return None if specs is None else _of(module).PackedSequenceSpecs(**specs)

    @staticmethod
    def _tokenizer(config: Mapping[str, Mapping[str, Any]]) -> Any:
        return _of("megatron.bridge.training.tokenizers.config").TokenizerConfig(**config["tokenizer"])


def _set(target: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if not hasattr(target, key):
            raise UserError(Problem(f"{type(target).__name__} of this Megatron-Bridge has no {key}", key=f"megatron.{key}"))
        setattr(target, key, value)


def from_last(value: Any) -> float | None:
    """A number that the last rank has, on all: the last stage of the pipeline alone computes losses. NaN stands for none."""
    torch = _of("torch")
    tensor = torch.tensor([float("nan") if value is None else float(value)], dtype=torch.float64, device=_device(torch))
    torch.distributed.broadcast(tensor, src=torch.distributed.get_world_size() - 1)
    number = float(tensor.item())
    return None if math.isnan(number) else number


def _device(torch: Any) -> Any:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _rows(path: Path) -> int:
    """Rows of a packed split: its file's own count. 0 where there is none (no evaluation)."""
    return int(_of("pyarrow.parquet").ParquetFile(path).metadata.num_rows) if path.is_file() else 0


def _lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with open_text(path) as stream:
        return sum(bool(json.loads(line)) for line in stream if line.strip())


def _of(module: str) -> ModuleType:
    """A module of the image. By name: the project's own environment has none of them."""
    return importlib.import_module(module)
