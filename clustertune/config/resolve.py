"""The way in: a recipe's name and overrides become a :class:`Resolved`, or a UserError with everything that is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import architecture as arch
from clustertune.config import beside, checks, deepspeed, derive, kernels, megatron, quantization, recomputation, strategy
from clustertune.config import distribution as distributions
from clustertune.config.distribution import mixed_precision, recomputed_layers
from clustertune.config.load import COMMAND_LINE, DESCRIPTION, Layer, Layers, base_folder, find_folder, read_layers, same_model
from clustertune.config.resolved import Derived, Resolved, is_there
from clustertune.config.schema import NAME, Megatron, Recipe
from clustertune.config.tiny import scale_deepspeed, scale_mesh, tiny_layer
from clustertune.config.yamlfile import Document, KeyPath, read_text, read_yaml
from clustertune.errors import Problem, UserError

MAX_RANKS = 10**6


def resolve(recipe: str | Path, overrides: Sequence[str] = (), *, tiny: bool = False, ranks: int | None = None) -> Resolved:
    """Load a recipe, lay base, recipe, tiny values and ``section.key=value`` overrides over each other, derive and check.

    ``recipe`` is a folder, its ``recipe.yaml``, or a bare name below ``recipes/``. ``ranks`` replaces
    ``slurm.nodes * slurm.gpus_per_node`` where a machine has another number of processes to give.
    Raises UserError with every problem of every file at once.
    """
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise UserError(Problem(f"{ranks} ranks are not possible", file=COMMAND_LINE, key="ranks"))
    folder, shown = find_folder(recipe)
    layers, problems = read_layers(folder, shown, overrides)
    work = _Work(layers, tiny, ranks, problems)
    work.read_files()
    if layers.recipe_read:
        work.check()
    if work.problems:
        raise UserError(_once(work.problems))
    return work.result()


def asked_size(recipe: str | Path, overrides: Sequence[str] = ()) -> dict[str, int]:
    """``slurm.nodes`` and ``slurm.gpus_per_node`` of a recipe, 1 for what cannot be one; :func:`resolve` says what is wrong."""
    layers, _ = read_layers(*find_folder(recipe), overrides)
    return derive.size(layers.merged()[0])


def _once(problems: list[Problem]) -> list[Problem]:
    """Each problem once, in the order found."""
    return list(dict.fromkeys(problems))


@dataclass
class _Work:
    """One resolution on its way: what was read so far, and what is wrong with it."""

    layers: Layers
    tiny: bool
    ranks: int | None
    problems: list[Problem]
    values: dict[str, Any] = field(default_factory=dict)
    owners: dict[KeyPath, Layer] = field(default_factory=dict)
    accelerate: Document | None = None
    accelerate_file: str = "accelerate.yaml"
    deepspeed: Document | None = None
    deepspeed_overrides: dict[str, Any] = field(default_factory=dict)
    megatron: Megatron | None = None
    architecture: dict[str, Any] | None = None
    chat_template: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    world: int = 1
    dp: int = 1
    derived: list[Derived] = field(default_factory=list)
    complete: bool = True
    """Whether all layers could be read: what is missing from the values is then really missing."""

    def place(self, path: KeyPath) -> str:
        return self.layers.place(path, self.owners)

    def read_files(self) -> None:
        """The files beside the recipe: accelerate.yaml, model.json, the chat template."""
        self.values, self.owners = self.layers.merged()
        self.complete = not self.problems
        folder, shown = self.layers.folder, self.layers.shown
        self.megatron = megatron.read(self.values)
        self._read_distribution(folder, shown)
        try:
            own = (folder / DESCRIPTION).is_file()
            place = None if own else same_model(folder, self.values.get("model"))
            file = (f"{shown}/{DESCRIPTION}", folder) if place is None else (f"{place.name}/{DESCRIPTION}", place)
            self.architecture = arch.read_architecture(file[1] / DESCRIPTION, file[0])
        except UserError as error:
            self.problems += error.problems
        model = self.values.get("model")
        template = model.get("chat_template") if isinstance(model, dict) else None
        if isinstance(template, str) and _is_file_name(template):
            try:
                shared = base_folder(folder) / template
                own = (folder / template).is_file() or not shared.is_file()
                place = folder / template if own else shared
                self.chat_template = read_text(place, f"{shown}/{template}" if own else str(place))
            except UserError as error:
                self.problems += error.problems

    def _read_distribution(self, folder: Path, shown: str) -> None:
        """The accelerate file and DeepSpeed's, with what the command line lays over them."""
        given = self.layers.beside
        named = self.values.get("accelerate", self.accelerate_file)
        if not isinstance(named, str) or not _is_file_name(named):
            return  # the schema says what is wrong
        self.accelerate_file = named
        if self.megatron is not None and "accelerate" not in self.values and not (folder / named).is_file():
            self.accelerate = Document(f"{shown}/{named}", {})  # Megatron-Bridge reads none
            self.problems += [
                Problem(f"a Megatron recipe reads no {part} file", COMMAND_LINE, f"{part}.{key}", "use megatron.KEY=VALUE")
                for part, document in given.items()
                for key in beside.flat(document)
            ]
            return
        try:
            document = read_yaml(folder / named, f"{shown}/{named}", core=False)
        except UserError as error:
            self.problems += error.problems
            return
        self.accelerate = beside.lay_over(document, given.get("accelerate"))
        self.deepspeed_overrides = beside.flat(given.get("deepspeed"))
        self.deepspeed, problems = beside.read_deepspeed(self.accelerate.data, folder, shown, given.get("deepspeed"))
        self.problems += problems

    def check(self) -> None:
        """Everything that can be said without a machine, each part as far as the others allow."""
        distribution = self.accelerate.data if self.accelerate else {}
        accelerate_shown = self.accelerate.file if self.accelerate else self.accelerate_file
        kind = str(self.architecture["model_type"]) if self.architecture else None
        if self.accelerate and (self.accelerate.data or self.megatron is None):
            self.problems += acc.find_problems(self.accelerate, self.layers.folder, kind)
        self.world, reason = derive.world_size(self.values, self.ranks)
        self.derived.append(Derived("world_size", self.world, reason))
        if self.tiny and self.accelerate:
            distribution = self._scale_distribution(self.accelerate)
        self._spread(distribution)
        if self.tiny:
            self._lay_tiny(distribution)
        self.problems += checks.find_schema_problems(self.values, self.place)
        self._check_train(distribution, accelerate_shown)
        self._check_lora()

    def _scale_distribution(self, accelerate: Document) -> dict[str, Any]:
        """The files beside the recipe for a tiny run; what the command line says of them is left alone."""
        if "parallelism_config" not in beside.top(self.layers.beside.get("accelerate")):
            self.accelerate, scaled = scale_mesh(accelerate, self.world)
            self.derived += scaled
        if self.deepspeed is not None:
            small = Document("--tiny", scale_deepspeed(self.deepspeed.data))
            given = self.layers.beside.get("deepspeed")
            self.deepspeed = beside.lay_over(beside.lay_over(self.deepspeed, small), given)
            self.deepspeed_overrides = beside.flat(small) | self.deepspeed_overrides
        return self.accelerate.data if self.accelerate else {}

    def _spread(self, distribution: dict[str, Any]) -> None:
        """The data-parallel ranks, and what FSDP2 shards over where only the other sizes are given."""
        if self.megatron is not None:
            self.dp, derived = derive.megatron_parallel(self.megatron, self.world)
            self.derived.append(derived)
            return
        place = self.accelerate.place(("parallelism_config",)) if self.accelerate else self.accelerate_file
        file = place if place == COMMAND_LINE or not self.accelerate else self.accelerate.file
        self.dp, derived, problems = derive.data_parallel(distribution, self.world, file)
        self.derived.append(derived)
        shards, more = derive.shard_size(distribution, self.world, file)
        if self.accelerate is not None:
            more += derive.alone(distribution, self.world, self.accelerate.place(("distributed_type",)))
        self.problems += problems + more
        if shards is not None and self.accelerate is not None:
            self.derived.append(shards)
            # The mapping may be the file's own: what is derived from the ranks goes into a copy.
            section = {**distribution["parallelism_config"], beside.SHARD_SIZE: shards.value}
            self.accelerate = replace(self.accelerate, data={**distribution, "parallelism_config": section})

    def _check_beneath_tiny(self) -> None:
        """What is wrong in values that ``--tiny`` is about to replace; whether they divide or fit matters to nobody then."""
        self.problems += checks.find_schema_problems(self.values, self.place)
        given = self.values.get("train")
        if isinstance(given, dict):
            self.problems += checks.check_native(checks.train_section(), given, self.place)[1]
            batch = {"global_batch_size": given.get("global_batch_size"), "per_device_train_batch_size": 1}
            if self.complete:
                self.problems += derive.accumulation(batch, 1, 1, self.place)[1]

    def _lay_tiny(self, distribution: dict[str, Any]) -> None:
        self._check_beneath_tiny()
        document = Document("--tiny", tiny_layer(self.values, self.layers.folder, self.dp))
        at = len(self.layers.layers) - (self.layers.layers[-1].origin == "override")
        self.layers.layers.insert(at, Layer("tiny", document))
        self.values, self.owners = self.layers.merged()
        if self.architecture:
            self.architecture = arch.scale_down(self.architecture, acc.parallel_sizes(distribution).get("tp", 1))
            self.derived.append(Derived("architecture", arch.summary(self.architecture), "model.json scaled down for --tiny"))

    def _check_train(self, distribution: dict[str, Any], accelerate_shown: str) -> None:
        given = self.values.get("train")
        if not isinstance(given, dict):
            return
        self.train, problems = checks.check_native(checks.train_section(), given, self.place)
        problems += checks.find_train_problems(self.train, self.place)
        positions = (self.architecture or {}).get("max_position_embeddings")
        length = self.train.get("max_length")
        if positions and length and length > positions:
            path = ("train", "max_length")
            text = f"{length} tokens, the model has {positions} positions (max_position_embeddings)"
            problems.append(Problem(text, file=self.place(path), key=".".join(path)))
        batch = {"global_batch_size": given.get("global_batch_size")}
        found, more = derive.accumulation(batch | self.train, self.world, self.dp, self.place)
        if self.complete and ("per_device_train_batch_size" in self.train or "per_device_train_batch_size" not in given):
            problems += more
        derived, twice = self._recomputation(distribution)
        problems += twice + derive.precision_problems(self.train, distribution, accelerate_shown, self.place)
        problems += checks.find_quantization_problems(self.train, self.values.get("lora"), self.place)
        problems += kernels.find_problems(self.train, self.architecture, distribution, accelerate_shown, self.place)
        if self.megatron is None:
            lora = self.values.get("lora")
            zeros = distribution.get("distributed_type") == "DEEPSPEED"
            zero = acc.zero_stage(distribution, self.deepspeed.data if self.deepspeed else None) if zeros else None
            problems += strategy.find_problems(
                self.train, lora, distribution, self.architecture, accelerate_shown, self.place, zero=zero
            )
        reduced, more = derive.reduce_dtype(
            self.values.get("reduce_dtype"), self.train, distribution, self.place, lora=self.values.get("lora") is not None
        )
        problems += more
        self.derived += [item for item in (found, derived, reduced) if item is not None]
        if self.megatron is None and (attention := kernels.attention(self.train, self.architecture)):
            self.derived.append(attention)
        if self.deepspeed is not None and found is not None:
            lora, total = self.values.get("lora") is not None, batch["global_batch_size"]
            said = deepspeed.read(self.train, total, found.value, self.world, self.dp, self.architecture, lora=lora)
            problems += deepspeed.find_problems(self.deepspeed, said)
            if lora and mixed_precision(self.train) != "no" and self.deepspeed.data.get(deepspeed.REDUCED_IN) is None:
                self.deepspeed = replace(self.deepspeed, data={**self.deepspeed.data, deepspeed.REDUCED_IN: "fp32"})
                self.deepspeed_overrides = {deepspeed.REDUCED_IN: "fp32", **self.deepspeed_overrides}
                self.derived.append(Derived(f"deepspeed.{deepspeed.REDUCED_IN}", "fp32", derive.FEW))
            self.derived += deepspeed.filled(self.deepspeed.data, said)
        self.problems += problems

    def _recomputation(self, distribution: dict[str, Any]) -> tuple[Derived, list[Problem]]:
        """Which of the model, FSDP, the ratio and Megatron recompute activations."""
        key = "train.activation_checkpointing"
        section = recomputation.read(self.values.get("activation_checkpointing"))
        if self.megatron is not None:
            found = self._megatron_problems(section.ratio if section else None)
            return Derived(key, False, "left to megatron.recompute_granularity"), found
        if section is None:
            return derive.checkpointing(self.train, distribution, self.accelerate_file, self.place)
        problems = recomputation.find_problems(section, self.train, distribution, self.accelerate_file, self.place)
        layers = int((self.architecture or {}).get("num_hidden_layers", 1))
        on = bool(recomputed_layers(section.ratio, layers))
        return Derived(key, on, recomputation.reason(section, layers)), problems

    def _megatron_problems(self, ratio: float | None) -> list[Problem]:
        assert self.megatron is not None
        problems: list[Problem] = []

        def add(key: str, message: str, fix: str | None = None) -> None:
            problems.append(Problem(message, file=self.place(("megatron", key)), key=f"megatron.{key}", fix=fix))

        if self.tiny:
            text = "--tiny trains on CPUs, where Megatron-Bridge has no kernels"
            add("tensor_model_parallel_size", text, "submit --dry-run shows command and configuration without a GPU")
        else:
            megatron.find_problems(self.megatron, self.world, self.architecture, self.train, add)
        for key, value in {
            "activation_checkpointing": ratio,
            "train.activation_checkpointing": self.train.get("activation_checkpointing"),
            "train.model_init_kwargs.quantization_config": quantization.of(self.train),
        }.items():
            if value:
                path = tuple(key.split("."))
                fix = "write megatron.recompute_granularity" if "checkpointing" in key else "leave it out"
                problems.append(Problem("Megatron does not read it", file=self.place(path), key=key, fix=fix))
        return problems

    def _check_lora(self) -> None:
        given = self.values.get("lora")
        if not isinstance(given, dict):
            return
        self.lora, problems = checks.check_native(checks.lora_section(), given, self.place)
        if "target_modules" in self.lora or "target_modules" not in given:
            problems += checks.find_lora_problems(self.lora, self.architecture, self.place)
        if "task_type" not in given:
            self.lora["task_type"] = "CAUSAL_LM"
            self.derived.append(Derived("lora.task_type", "CAUSAL_LM", "supervised fine-tuning of a causal language model"))
        self.problems += problems

    def result(self) -> Resolved:
        """The checked recipe. Only after :meth:`check` found nothing."""
        assert self.architecture is not None and self.accelerate is not None
        batch = self.values["train"]["global_batch_size"]
        body = dict(self.values)
        body["train"] = {"global_batch_size": batch, **self.train}
        if self.lora is not None:
            body["lora"] = self.lora
        recipe = Recipe.model_validate(body)
        train_args = {key: value for key, value in self.train.items() if value is not None}
        train_args.pop("gradient_checkpointing", None)  # the deprecated alias of the derived key
        for item in self.derived:
            section, _, key = item.key.partition(".")
            if section == "train":
                holder, _, last = key.rpartition(".")
                if holder:
                    train_args[holder] = {**train_args.get(holder, {}), last: item.value}
                else:
                    train_args[key] = item.value
        resolved = Resolved(
            name=self.layers.folder.name,
            folder=str(self.layers.folder),
            recipe=recipe,
            origins=self._origins(recipe),
            train_args=train_args,
            world_size=self.world,
            data_parallel_size=self.dp,
            architecture=self.architecture,
            accelerate=self.accelerate.data,
            accelerate_file=self.accelerate_file,
            tiny=self.tiny,
            chat_template=self.chat_template,
            accelerate_overrides=beside.flat(self.layers.beside.get("accelerate")),
            deepspeed=self.deepspeed.data if self.deepspeed else None,
            deepspeed_overrides=self.deepspeed_overrides,
            derived=self.derived,
        )
        if problems := distributions.find_problems(resolved.distribution, *self._distribution_files()):
            raise UserError(problems)
        resolved.warnings.extend(_warnings(resolved))
        return resolved

    def _distribution_files(self) -> tuple[str, str]:
        """The accelerate file, and the one that says DeepSpeed's stage, as errors name them."""
        assert self.accelerate is not None
        return self.accelerate.file, (self.deepspeed or self.accelerate).file

    def _origins(self, recipe: Recipe) -> dict[str, str]:
        origins = {".".join(path): layer.origin for path, layer in self.owners.items()}
        for path in _leaves(recipe.model_dump(mode="json"), ()):
            key = ".".join(path)
            if key not in origins and not (path[0] == "expect" and self.tiny):
                parents = (".".join(path[:end]) for end in range(len(path) - 1, 0, -1))
                origins[key] = next((origins[p] for p in parents if p in origins), "default")
        if "lora.task_type" not in {".".join(path) for path in self.owners} and self.lora is not None:
            origins["lora.task_type"] = "derived"
        return origins


def _is_file_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None


def _leaves(body: dict[str, Any], path: KeyPath) -> list[KeyPath]:
    found = []
    for key, value in body.items():
        found += _leaves(value, (*path, key)) if isinstance(value, dict) and value else [(*path, key)]
    return found


def _warnings(resolved: Resolved) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    path = resolved.input_path
    if path is not None and not is_there(path):
        found.append(f"data.input {resolved.recipe.data.input} is not there on this machine")
    if resolved.distribution.kind == "DDP" and resolved.world_size > 1:
        found.append(f"{resolved.accelerate_file}: distributed_type MULTI_GPU keeps the whole model on every rank")
    found += kernels.warnings(resolved.distribution)
    if resolved.recipe.megatron is None:
        micro_batch = int(resolved.train_args.get("per_device_train_batch_size") or derive.DEFAULT_MICRO_BATCH)
        found += kernels.mask_warnings(resolved.train_args, resolved.architecture, micro_batch)
    return found
