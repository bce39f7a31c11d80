"""The way in: a recipe's name and overrides become a :class:`Resolved`, or a UserError with everything that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import architecture as arch
from clustertune.config import checks, deepspeed, derive, kernels, megatron, quantization, strategy
from clustertune.config import distribution as distributions
from clustertune.config.distribution import mixed_precision, recomputed_layers
from clustertune.config.findings import Found
from clustertune.config.load import COMMAND_LINE, DESCRIPTION, Layer, Layers, base_folder, find_folder, read_layers, same_model
from clustertune.config.parameters import adapted_experts, expert_parameters, parameter_count
from clustertune.config.resolved import Derived, Resolved, is_there
from clustertune.config.schema import NAME, ActivationCheckpointing, Megatron, Recipe, read_section
from clustertune.config.tiny import scale_deepspeed, scale_mesh, tiny_layer
from clustertune.config.yamlfile import Document, KeyPath, leaves, read_text, read_yaml
from clustertune.errors import Problem, UserError, collect_problems

MAX_RANKS = 10**6
_SAVING = ("save_strategy", "save_steps")


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

    @property
    def trainer(self) -> str:
        """TRL's trainer; the schema says what is wrong with another word."""
        return "dpo" if self.values.get("trainer") == "dpo" else "sft"

    def position(self, path: KeyPath) -> str:
        return self.layers.position(path, self.owners)

    def report(self, found: Iterable[Found]) -> None:
        """Findings become problems; those below ``accelerate`` or ``deepspeed`` are in the file beside the recipe."""
        for path, message, fix in found:
            document = {"accelerate": self.accelerate, "deepspeed": self.deepspeed}.get(path[0]) if len(path) > 1 else None
            where = self.position(path) if document is None else document.position(path[1:])
            key = path if document is None or where == COMMAND_LINE else path[1:]
            self.problems.append(Problem(message, file=where, key=".".join(key), fix=fix))

    def read_files(self) -> None:
        """The files beside the recipe: accelerate.yaml, model.json, the chat template."""
        self.values, self.owners = self.layers.merged()
        self.complete = not self.problems
        folder, shown = self.layers.folder, self.layers.shown
        self.megatron = read_section(Megatron, self.values.get("megatron"))
        self._read_distribution(folder, shown)
        with collect_problems(self.problems):
            own = (folder / DESCRIPTION).is_file()
            origin = None if own else same_model(folder, self.values.get("model"))
            file = (f"{shown}/{DESCRIPTION}", folder) if origin is None else (f"{origin.name}/{DESCRIPTION}", origin)
            self.architecture = arch.read_architecture(file[1] / DESCRIPTION, file[0])
        model = self.values.get("model")
        template = model.get("chat_template") if isinstance(model, dict) else None
        if isinstance(template, str) and _is_file_name(template):
            with collect_problems(self.problems):
                shared = base_folder(folder) / template
                own = (folder / template).is_file() or not shared.is_file()
                origin = folder / template if own else shared
                self.chat_template = read_text(origin, f"{shown}/{template}" if own else str(origin))

    def _read_distribution(self, folder: Path, shown: str) -> None:
        """The accelerate file and DeepSpeed's, with what the command line lays over them."""
        given = self.layers.file_overrides
        named = self.values.get("accelerate", self.accelerate_file)
        if not isinstance(named, str) or not _is_file_name(named):
            return  # the schema says what is wrong
        self.accelerate_file = named
        if self.megatron is not None and "accelerate" not in self.values and not (folder / named).is_file():
            self.accelerate = Document(f"{shown}/{named}", {})  # Megatron-Bridge reads none
            self.problems += [
                Problem(f"a Megatron recipe reads no {part} file", COMMAND_LINE, f"{part}.{key}", "use megatron.KEY=VALUE")
                for part, document in given.items()
                for key in acc.flat(document)
            ]
            return
        with collect_problems(self.problems):
            document = read_yaml(folder / named, f"{shown}/{named}", core=False)
            self.accelerate = acc.lay_over(document, given.get("accelerate"))
            self.deepspeed_overrides = acc.flat(given.get("deepspeed"))
            self.deepspeed, problems = acc.read_deepspeed(self.accelerate.data, folder, shown, given.get("deepspeed"))
            self.problems += problems

    def check(self) -> None:
        """Everything that can be checked without a machine, each part as far as the others allow."""
        distribution = self.accelerate.data if self.accelerate else {}
        accelerate_shown = self.accelerate.file if self.accelerate else self.accelerate_file
        kind = str(self.architecture["model_type"]) if self.architecture else None
        if self.accelerate and (self.accelerate.data or self.megatron is None):
            self.report(acc.find_problems(self.accelerate.data, self.layers.folder, kind))
        self.world, reason = derive.world_size(self.values, self.ranks)
        self.derived.append(Derived("world_size", self.world, reason))
        if self.tiny and self.accelerate:
            distribution = self._scale_distribution(self.accelerate)
        self._spread(distribution)
        if self.tiny:
            self._lay_tiny(distribution)
        self.report(checks.check_schema(self.values, self.position))
        self._check_train(distribution, accelerate_shown)
        self._check_lora()

    def _scale_distribution(self, accelerate: Document) -> dict[str, Any]:
        """The files beside the recipe for a tiny run; what the command line says about them is left alone."""
        if "parallelism_config" not in acc.top(self.layers.file_overrides.get("accelerate")):
            self.accelerate, scaled = scale_mesh(accelerate, self.world)
            self.derived += scaled
        if self.deepspeed is not None:
            small = Document("--tiny", scale_deepspeed(self.deepspeed.data))
            given = self.layers.file_overrides.get("deepspeed")
            self.deepspeed = acc.lay_over(acc.lay_over(self.deepspeed, small), given)
            self.deepspeed_overrides = acc.flat(small) | self.deepspeed_overrides
        return self.accelerate.data if self.accelerate else {}

    def _spread(self, distribution: dict[str, Any]) -> None:
        """The data-parallel ranks, and what FSDP2 shards over where only the other sizes are given."""
        if self.megatron is not None:
            self.dp, derived = derive.megatron_parallel(self.megatron, self.world)
            self.derived.append(derived)
            return
        self.dp, derived, found = derive.data_parallel(distribution, self.world)
        self.derived.append(derived)
        shards, more = derive.shard_size(distribution, self.world)
        self.report([*found, *more, *derive.alone(distribution, self.world)])
        if shards is not None and self.accelerate is not None:
            self.derived.append(shards)
            # The mapping may be the file's own: what is derived from the ranks goes into a copy.
            section = {**distribution["parallelism_config"], acc.SHARD_SIZE: shards.value}
            self.accelerate = replace(self.accelerate, data={**distribution, "parallelism_config": section})

    def _check_beneath_tiny(self) -> None:
        """What is wrong in values that ``--tiny`` is about to replace; whether they divide or fit does not matter then."""
        self.report(checks.check_schema(self.values, self.position))
        given = self.values.get("train")
        if isinstance(given, dict):
            self.report(checks.check_native(checks.train_section(self.trainer), given)[1])
            batch = {"global_batch_size": given.get("global_batch_size"), "per_device_train_batch_size": 1}
            if self.complete:
                self.report(derive.accumulation(batch, 1, 1)[1])

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
        if self.values.get("save") is not None:
            self.report(self._find_saved_twice(given))
            self.report(checks.check_local_saves(self.values["save"], distribution, megatron=self.megatron is not None))
            given = {key: value for key, value in given.items() if key not in _SAVING}
        self.train, found = checks.check_native(checks.train_section(self.trainer), given)
        self.report([*found, *checks.check_train(self.train)])
        if not isinstance(self.train.get("model_init_kwargs"), dict | None):
            del self.train["model_init_kwargs"]  # reported; what is checked below reads keys of it
        if self.trainer == "dpo":
            self.report(checks.check_dpo(self.train, distribution, megatron=self.megatron is not None))
        positions = (self.architecture or {}).get("max_position_embeddings")
        length = self.train.get("max_length")
        if positions and length and length > positions:
            text = f"{length} tokens, the model has {positions} positions (max_position_embeddings)"
            self.report([(("train", "max_length"), text, None)])
        batch = {"global_batch_size": given.get("global_batch_size")}
        accumulated, more = derive.accumulation(batch | self.train, self.world, self.dp)
        if self.complete and ("per_device_train_batch_size" in self.train or "per_device_train_batch_size" not in given):
            self.report(more)
        checkpointing = self._recomputation(distribution)
        lora, deep = self.values.get("lora"), self.deepspeed
        self.report(derive.check_precision(self.train, distribution))
        self.report(checks.check_quantization(self.train, lora))
        self.report(kernels.find_problems(self.train, self.architecture, distribution, accelerate_shown))
        if self.megatron is None:
            zeros = distribution.get("distributed_type") == "DEEPSPEED"
            zero = acc.zero_stage(distribution, deep.data if deep else None) if zeros else None
            self.report(strategy.find_problems(self.train, lora, distribution, self.architecture, zero=zero))
        stated = self.values.get("reduce_dtype")
        reduced, more = derive.reduce_dtype(stated, self.train, distribution, lora=lora is not None)
        self.report(more)
        self.derived += [item for item in (accumulated, checkpointing, reduced) if item is not None]
        if self.megatron is None and (attention := kernels.attention(self.train, self.architecture)):
            self.derived.append(attention)
        if deep is not None and accumulated is not None:
            self._fill_deepspeed(deep, batch["global_batch_size"], accumulated.value, lora=lora is not None)

    def _find_saved_twice(self, given: dict[str, Any]) -> Iterator[Found]:
        """What ``train`` says about saving in the file that has ``save``, or over it; what lies below is replaced."""
        places = {id(layer): at for at, layer in enumerate(self.layers.layers)}
        section = max((places.get(id(owner), -1) for path, owner in self.owners.items() if path[0] == "save"), default=-1)
        for key in _SAVING:
            owner = self.owners.get(("train", key))
            if key in given and owner is not None and owner.origin != "tiny" and places.get(id(owner), -1) >= section:
                yield ("train", key), "the section save is given, too", "leave one of the two out"

    def _fill_deepspeed(self, document: Document, batch: Any, accumulation: int, *, lora: bool) -> None:
        """DeepSpeed's file against the train section, and what stands in the place of its ``auto``."""
        described = deepspeed.read(self.train, batch, accumulation, self.world, self.dp, self.architecture, lora=lora)
        self.report(deepspeed.find_problems(document, described))
        if lora and mixed_precision(self.train) != "no" and document.data.get(deepspeed.REDUCED_IN) is None:
            self.deepspeed = document = replace(document, data={**document.data, deepspeed.REDUCED_IN: "fp32"})
            self.deepspeed_overrides = {deepspeed.REDUCED_IN: "fp32", **self.deepspeed_overrides}
            self.derived.append(Derived(f"deepspeed.{deepspeed.REDUCED_IN}", "fp32", derive.FEW))
        self.derived += deepspeed.filled(document.data, described)

    def _recomputation(self, distribution: dict[str, Any]) -> Derived:
        """Which of the model, FSDP, the ratio and Megatron recompute activations."""
        key = "train.activation_checkpointing"
        section = read_section(ActivationCheckpointing, self.values.get("activation_checkpointing"))
        if self.megatron is not None:
            self.report(self._check_megatron(self.megatron, section.ratio if section else None))
            return Derived(key, False, "left to megatron.recompute_granularity")
        if section is None:
            derived, found = derive.checkpointing(self.train, distribution, self.accelerate_file)
            self.report(found)
            return derived
        self.report(derive.find_problems(section, self.train, distribution, self.accelerate_file))
        layers = int((self.architecture or {}).get("num_hidden_layers", 1))
        return Derived(key, bool(recomputed_layers(section.ratio, layers)), derive.reason(section, layers))

    def _check_megatron(self, section: Megatron, ratio: float | None) -> Iterator[Found]:
        if self.tiny:
            text = "--tiny trains on CPUs, where Megatron-Bridge has no kernels"
            fix = "submit --dry-run shows command and configuration without a GPU"
            yield ("megatron", "tensor_model_parallel_size"), text, fix
        else:
            found = megatron.find_problems(section, self.world, self.architecture, self.train)
            yield from ((("megatron", key), text, fix) for key, text, fix in found)
        for key, value in {
            "activation_checkpointing": ratio,
            "train.activation_checkpointing": self.train.get("activation_checkpointing"),
            "train.model_init_kwargs.quantization_config": quantization.of(self.train),
            "save": self.values.get("save"),
        }.items():
            if value:
                fix = "write megatron.recompute_granularity" if "checkpointing" in key else "leave it out"
                fix = "write train.save_steps" if key == "save" else fix
                yield tuple(key.split(".")), "Megatron does not read it", fix

    def _check_lora(self) -> None:
        given = self.values.get("lora")
        if given is None and self.values.get("push") is not None:
            self.report([(("push",), "all parameters are trained: only adapters are pushed", "leave it out")])
        if not isinstance(given, dict):
            return
        self.lora, found = checks.check_native(checks.lora_section(), given)
        self.report(found)
        if "target_modules" in self.lora or "target_modules" not in given:
            self.report(checks.check_lora(self.lora, self.architecture))
        if "task_type" not in given:
            self.lora["task_type"] = "CAUSAL_LM"
            self.derived.append(Derived("lora.task_type", "CAUSAL_LM", "a causal language model is trained"))

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
            accelerate_overrides=acc.flat(self.layers.file_overrides.get("accelerate")),
            deepspeed=self.deepspeed.data if self.deepspeed else None,
            deepspeed_overrides=self.deepspeed_overrides,
            derived=self.derived,
        )
        if text := distributions.breaks_nodes(resolved.distribution):
            key = acc.key_of("sharding_strategy")
            raise UserError(Problem(text, file=self.accelerate.file, key=key, fix="use whole nodes"))
        resolved.warnings.extend(_warnings(resolved))
        return resolved

    def _origins(self, recipe: Recipe) -> dict[str, str]:
        origins = {".".join(path): layer.origin for path, layer in self.owners.items()}
        for path, _ in leaves(recipe.model_dump(mode="json")):
            key = ".".join(path)
            if key not in origins and not (path[0] == "expect" and self.tiny):
                parents = (".".join(path[:end]) for end in range(len(path) - 1, 0, -1))
                origins[key] = next((origins[p] for p in parents if p in origins), "default")
        if "lora.task_type" not in {".".join(path) for path in self.owners} and self.lora is not None:
            origins["lora.task_type"] = "derived"
        return origins


def _is_file_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None


def _warnings(resolved: Resolved) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    for key, path in resolved.inputs.items():
        if not is_there(path):
            found.append(f"{key} {path} is not there on this machine")
    if resolved.distribution.kind == "DDP" and resolved.world_size > 1:
        found.append(f"{resolved.accelerate_file}: distributed_type MULTI_GPU keeps the whole model on every rank")
    dropout = (resolved.recipe.lora or {}).get("lora_dropout") or 0
    if dropout > 0.5:
        found.append(f"lora.lora_dropout {dropout:g} hides most of what an adapter reads; 0 to 0.1 is usual")
    elif dropout and resolved.is_dpo and resolved.train_args.get("disable_dropout", True):
        found.append(f"lora.lora_dropout {dropout:g} has no effect: train.disable_dropout is true, DPOConfig's own")
    experts = expert_parameters(resolved.architecture)
    if experts and resolved.recipe.lora is not None and not adapted_experts(resolved.architecture, resolved.recipe.lora):
        share = sum(linear.parameters for _, linear in experts) / (parameter_count(resolved.architecture) or 1)
        names = sorted({linear.name for _, linear in experts})
        found.append(
            f"the experts stay frozen, {share:.0%} of the parameters: lora.target_parameters={json.dumps(names)} trains them"
        )
    found += kernels.warnings(resolved.distribution)
    if resolved.recipe.megatron is None:
        micro_batch = int(resolved.train_args.get("per_device_train_batch_size") or derive.DEFAULT_MICRO_BATCH)
        found += kernels.mask_warnings(resolved.train_args, resolved.architecture, micro_batch)
    return found
