"""The way in: a recipe's name and overrides become a :class:`Resolved`, or a UserError with everything that is wrong."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, collect_problems
from clustertune.manifest import require_own_code
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import architecture as arch
from clustertune.recipe import checks, native_rules, quantization
from clustertune.recipe import deepspeed_file as ds
from clustertune.recipe.findings import Found, usable
from clustertune.recipe.layers import (
    COMMAND_LINE,
    DESCRIPTION,
    Document,
    KeyPath,
    Layer,
    Layers,
    base_folder,
    find_folder,
    leaves,
    read_layers,
    read_text,
    read_yaml,
    same_model,
)
from clustertune.recipe.native_rules import MAX_PROMPT, filled, lora_defaults, mixed_precision, row_tokens, train_defaults
from clustertune.recipe.parameters import adapted_experts, expert_parameters, parameter_count
from clustertune.recipe.sections import NAME, ActivationCheckpointing, Megatron, Recipe, Reward, read_section
from clustertune.resolve import kernels
from clustertune.resolve.resolved import Derived, Resolved, is_there, recomputed_layers
from clustertune.resolve.tiny import is_small, scale_deepspeed, scale_mesh, tiny_layer

MAX_RANKS = 10**6
_SAVING = ("save_strategy", "save_steps")
_SECTION = "activation_checkpointing"
_FEW = "the gradients of adapters are few: to sum them in float32 costs next to nothing"


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
    work = _Resolution(layers, tiny, ranks, problems)
    work.read_files()
    if layers.layers:  # recipe.yaml itself could be read
        work.check()
    if work.problems:
        raise UserError(dict.fromkeys(work.problems))  # each once, in the order found
    return work.result()


def asked_size(recipe: str | Path, overrides: Sequence[str] = ()) -> dict[str, int]:
    """``slurm.nodes`` and ``slurm.gpus_per_node`` of a recipe, 1 for what cannot be one; :func:`resolve` says what is wrong."""
    layers, _ = read_layers(*find_folder(recipe), overrides)
    return _size(layers.merged()[0])


def _size(values: Mapping[str, Any]) -> dict[str, int]:
    slurm = values.get("slurm")
    slurm = slurm if isinstance(slurm, dict) else {}
    return {f"slurm.{key}": min(usable(slurm.get(key), 1), 10_000) for key in ("nodes", "gpus_per_node")}


def accumulation(train: Mapping[str, Any], dp: int) -> Derived | Found:
    """``gradient_accumulation_steps`` = global batch / (micro batch x data-parallel ranks), or why it does not divide."""
    batch, micro = train["global_batch_size"], train["per_device_train_batch_size"]
    if rest := batch % (micro * dp):
        text = f"{batch} is not a multiple of {micro * dp} = per_device_train_batch_size {micro} x {dp} data-parallel ranks"
        return ("train", "global_batch_size"), text, f"write {max(0, batch - rest - micro * dp) + micro * dp}"
    reason = f"global batch {batch} / (micro batch {micro} x {dp} data-parallel ranks)"
    return Derived("train.gradient_accumulation_steps", batch // (micro * dp), reason)


@dataclass
class _Resolution:
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
    reward_code: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    """The section in TRL's types, with TRL's defaults in it."""
    lora: dict[str, Any] | None = None
    """The same of PEFT's."""
    world: int = 1
    dp: int = 1
    derived: list[Derived] = field(default_factory=list)
    complete: bool = True
    """Whether all layers could be read: what is missing from the values is then really missing."""

    @property
    def trainer(self) -> str:
        """TRL's trainer; the schema says what is wrong with another word."""
        stated = self.values.get("trainer")
        return stated if stated in ("dpo", "grpo") else "sft"

    def position(self, path: KeyPath) -> str:
        return self.layers.position(path, self.owners)

    def report(self, findings: Iterable[Found]) -> None:
        """Findings become problems; those below ``accelerate`` or ``deepspeed`` are in the file beside the recipe."""
        for path, message, fix in findings:
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
            origin = None if os.path.lexists(folder / DESCRIPTION) else same_model(folder, self.values.get("model"))
            named = f"{shown if origin is None else origin.name}/{DESCRIPTION}"
            self.architecture = arch.read_architecture((origin or folder) / DESCRIPTION, named)
        model = self.values.get("model")
        template = model.get("chat_template") if isinstance(model, dict) else None
        if isinstance(template, str) and _is_file_name(template):
            with collect_problems(self.problems):
                own, shared = folder / template, base_folder(folder) / template
                is_shared = shared.is_file() and not own.is_file()
                self.chat_template = read_text(shared, str(shared)) if is_shared else read_text(own, f"{shown}/{template}")
        for at, reward in enumerate(checks.read_rewards(self.values.get("reward"))):
            if reward.module is not None:
                self._read_reward(folder, shown, at, reward)

    def _read_reward(self, folder: Path, shown: str, at: int, reward: Reward) -> None:
        """The file of the recipe folder that has a reward, and those that it imports. They are read, not run."""
        assert reward.module is not None
        with collect_problems(self.problems):
            body = self._read_code(folder, shown, reward.module)
            functions = [item.name for item in body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            if reward.name not in functions:
                text, named = f"has no function {reward.name}", f"{shown}/{reward.module}.py"
                fix = f"it has {', '.join(functions)}" if functions else "def it there, as TRL's reward functions are"
                raise UserError(Problem(text, file=named, key=f"reward.{at}", fix=fix))

    def _read_code(self, folder: Path, shown: str, module: str) -> list[ast.stmt]:
        """The statements of a Python file of the recipe folder; its text, and those of files beside it that it imports, are
        what the run keeps. Raises UserError for what is no Python, or could be another user's."""
        named = f"{shown}/{module}.py"
        text = read_text(folder / f"{module}.py", named)
        require_own_code(folder / f"{module}.py", named)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(Problem(f"is not Python: {error}", file=named)) from None
        self.reward_code[module] = text
        imported = set[str]()
        for item in ast.walk(tree):
            if isinstance(item, ast.Import):
                imported |= {name.name.partition(".")[0] for name in item.names}
            elif isinstance(item, ast.ImportFrom) and item.module and not item.level:
                imported.add(item.module.partition(".")[0])
        for name in sorted(imported - self.reward_code.keys()):
            if name not in self.reward_code and os.path.lexists(folder / f"{name}.py"):
                self._read_code(folder, shown, name)
        return tree.body

    def _read_distribution(self, folder: Path, shown: str) -> None:
        """The accelerate file and DeepSpeed's, with what the command line lays over them."""
        overrides = self.layers.file_overrides
        named = self.values.get("accelerate", self.accelerate_file)
        if not isinstance(named, str) or not _is_file_name(named):
            return  # the schema says what is wrong
        self.accelerate_file = named
        if self.megatron is not None and "accelerate" not in self.values and not (folder / named).is_file():
            self.accelerate = Document(f"{shown}/{named}", {})  # Megatron-Bridge reads none
            self.problems += [
                Problem(f"a Megatron recipe reads no {part} file", COMMAND_LINE, f"{part}.{key}", "use megatron.KEY=VALUE")
                for part, document in overrides.items()
                for key in acc.flat(document)
            ]
            return
        with collect_problems(self.problems):
            document = read_yaml(folder / named, f"{shown}/{named}", core=False)
            self.accelerate = document.overridden(overrides.get("accelerate"))
            self.deepspeed_overrides = acc.flat(overrides.get("deepspeed"))
            self.deepspeed, problems = acc.read_deepspeed(self.accelerate.data, folder, shown, overrides.get("deepspeed"))
            self.problems += problems

    def check(self) -> None:
        """Everything that can be checked without a machine, each part as far as the others allow."""
        distribution = self.accelerate.data if self.accelerate else {}
        accelerate_shown = self.accelerate.file if self.accelerate else self.accelerate_file
        if self.accelerate and (self.accelerate.data or self.megatron is None):
            self.report(acc.find_problems(self.accelerate.data, self.layers.folder))
        nodes, gpus = _size(self.values).values()
        self.world = nodes * gpus if self.ranks is None else self.ranks
        counted = f"slurm.nodes {nodes} x slurm.gpus_per_node {gpus}"
        self.derived.append(Derived("world_size", self.world, counted if self.ranks is None else "given for this machine"))
        if self.tiny and self.accelerate:
            distribution = self._scale_distribution(self.accelerate)
        self._spread(distribution)
        if self.tiny:
            self._lay_tiny(distribution)
        self.report(checks.check_schema(self.values, self.position))
        self._check_lora()
        self._check_train(distribution, accelerate_shown)

    def _scale_distribution(self, accelerate: Document) -> dict[str, Any]:
        """The files beside the recipe for a tiny run; what the command line says about them is left alone."""
        overrides = self.layers.file_overrides
        if "accelerate" not in overrides or acc.MESH not in overrides["accelerate"].data:
            self.accelerate, scaled = scale_mesh(accelerate, self.world)
            self.derived += scaled
        if self.deepspeed is not None:
            small = Document("--tiny", scale_deepspeed(self.deepspeed.data))
            self.deepspeed = self.deepspeed.overridden(small).overridden(overrides.get("deepspeed"))
            self.deepspeed_overrides = acc.flat(small) | self.deepspeed_overrides
        return self.accelerate.data if self.accelerate else {}

    def _spread(self, distribution: dict[str, Any]) -> None:
        """The ranks that read different sequences: all, but for those that share a sequence or a layer."""
        if (m := self.megatron) is not None:
            named, shared = "tp x pp x cp", m.model_parallel_size
        else:
            sizes = acc.parallel_sizes(distribution)
            named, shared = "tp x cp x sp", math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "sp"))
        self.dp = max(1, self.world // shared)
        reason = f"{self.world} ranks" + (f" / {shared} ({named})" if shared > 1 else "")
        self.derived.append(Derived("data_parallel_size", self.dp, reason))
        if self.megatron is None:
            self.report(self._check_mesh(distribution, sizes, shared))
            if acc.distributed_type(distribution) == "NO" and self.world > 1:
                fix = "write MULTI_GPU (the whole model on every rank) or FSDP, or use slurm.nodes=1 slurm.gpus_per_node=1"
                text = f"NO starts one process; there are {self.world} ranks"  # each would train a model of its own
                self.report([(("accelerate", acc.TYPE), text, fix)])

    def _check_mesh(self, distribution: dict[str, Any], sizes: Mapping[str, int], shared: int) -> Iterator[Found]:
        """The sizes of the mesh against the ranks; and ``dp_shard`` of FSDP2 where the file gives other sizes and not this one:
        the ranks that are left to shard over. accelerate would take 1 (parallelism_config.py:372).
        """
        section, fsdp = acc.section(distribution, acc.MESH), acc.distributed_type(distribution) == "FSDP"
        stated = fsdp and section.get(acc.SHARD_SIZE) is not None
        fixed = shared * sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
        if self.world % fixed or (stated and fixed != self.world):
            fix = f"use a multiple of {fixed} ranks, or leave {acc.SHARD_SIZE} out: it is derived"
            yield ("accelerate", acc.MESH), f"its sizes make {fixed} ranks; there are {self.world}", fix
        elif fsdp and section and self.world == shared * sizes.get("dp_replicate", 1) > 1 and list(sizes) != ["cp"]:
            # parallelism_config.py:325 and 381: a KeyError or a ValueError once the base is loaded.
            yield ("accelerate", acc.MESH), "its sizes leave FSDP no ranks to shard over", "use smaller sizes or more ranks"
        elif fsdp and not stated and section and self.world > fixed and self.accelerate is not None:
            left, shown = self.world // fixed, " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            reason = f"{self.world} ranks" + (f" / ({shown})" if shown else "")
            self.derived.append(Derived(f"accelerate.{acc.MESH}.{acc.SHARD_SIZE}", left, reason))
            # The mapping may be the file's own: what is derived from the ranks goes into a copy.
            body = {**distribution, acc.MESH: {**section, acc.SHARD_SIZE: left}}
            self.accelerate = replace(self.accelerate, data=body)

    def _check_beneath_tiny(self) -> None:
        """What is wrong in values that ``--tiny`` is about to replace; whether they divide or fit does not matter then."""
        self.report(checks.check_schema(self.values, self.position))
        train = self.values.get("train")
        if isinstance(train, dict):
            self.report(native_rules.check(native_rules.train_section(self.trainer), train)[1])

    def _lay_tiny(self, distribution: dict[str, Any]) -> None:
        self._check_beneath_tiny()
        document = Document("--tiny", tiny_layer(self.values, self.layers.folder, self.dp))
        at = len(self.layers.layers) - (self.layers.layers[-1].origin == "override")
        self.layers.layers.insert(at, Layer("tiny", document))
        self.values, self.owners = self.layers.merged()
        if self.architecture:
            self.architecture = arch.scale_down(self.architecture, acc.parallel_sizes(distribution).get("tp", 1))
            self.derived.append(Derived("architecture", arch.summary(self.architecture), "model.json scaled down for --tiny"))

    def _check_lengths(self) -> None:
        positions = (self.architecture or {}).get("max_position_embeddings")
        length, evaluation = row_tokens(self.train), self.values.get("eval")
        if positions and length > positions:
            key = "max_completion_length" if self.trainer == "grpo" else "max_length"
            text = f"{length} tokens, the model has {positions} positions (max_position_embeddings)"
            text = f"with {MAX_PROMPT} {text}" if self.trainer == "grpo" else text
            self.report([(("train", key), text, f"write at most {positions}" if self.trainer != "grpo" else None)])
        answer = evaluation.get("max_gen_toks") if isinstance(evaluation, dict) else None
        if positions and isinstance(answer, int | float) and answer >= positions:
            text = f"{answer:.0f} tokens of answer leave no room for a prompt in this model's {positions} positions"
            self.report([(("eval", "max_gen_toks"), text, "lower it")])

    def _check_train(self, distribution: dict[str, Any], accelerate_shown: str) -> None:
        train = self.values.get("train")
        if not isinstance(train, dict):
            return
        if self.values.get("save") is not None:
            self.report(self._find_saved_twice(train))
            train = {key: value for key, value in train.items() if key not in _SAVING}
        section = native_rules.train_section(self.trainer)
        stated, findings = native_rules.check(section, train)
        self.train = filled(train_defaults(self.trainer), stated)
        if self.complete and not {"global_batch_size"} & train.keys():
            fix = "write how many sequences one optimizer step takes over all ranks, such as 32"
            findings.append((("train", "global_batch_size"), "missing", fix))
        self.report([*findings, *checks.check_train(self.train)])
        if not isinstance(self.train["model_init_kwargs"], dict | None):
            self.train["model_init_kwargs"] = None  # reported; what is checked below reads keys of it
        if self.trainer == "dpo":
            self.report(checks.check_dpo(self.train, distribution, megatron=self.megatron is not None))
        if self.trainer == "grpo":
            self.report(checks.check_grpo(self.train, distribution, megatron=self.megatron is not None))
        self._check_lengths()
        accumulated = accumulation(self.train, self.dp) if "global_batch_size" in self.train else None
        if isinstance(accumulated, Derived):
            self.derived.append(accumulated)
        elif accumulated and not findings and self.complete:
            self.report([accumulated])
        self._recomputation()
        lora, deep = self.values.get("lora"), self.deepspeed
        named, precision = acc.mixed_precision(distribution), mixed_precision(self.train)
        if named not in (None, precision):
            text = f"{named}, while the recipe's train section means {precision} (TRL's default is bf16)"
            self.report([(("accelerate", acc.PRECISION), text, "leave it out, or change train.bf16")])
        self.report(kernels.find_problems(self.train, self.architecture, distribution, accelerate_shown))
        self.report(checks.check_quantization(self.train, lora))
        if self.megatron is None:
            zeros = acc.distributed_type(distribution) == "DEEPSPEED"
            zero = acc.zero_stage(distribution, deep.data if deep else None) if zeros else None
            self.report(checks.check_strategy(self.train, self.lora, distribution, self.architecture, zero=zero))
        self._reduce_dtype(acc.distributed_type(distribution) == "FSDP" and precision != "no", lora=lora is not None)
        if self.megatron is None and (attention := kernels.attention(self.train, self.architecture)):
            self.derived.append(attention)
        if deep is not None and isinstance(accumulated, Derived):
            self._fill_deepspeed(deep, accumulated.value, stated, lora=lora is not None)

    def _reduce_dtype(self, is_a_choice: bool, *, lora: bool) -> None:
        """The type in which FSDP sums gradients: accelerate 1.15 takes bfloat16 for all (utils/dataclasses.py:2137)."""
        stated = self.values.get("reduce_dtype")
        if is_a_choice and stated is None:
            reason = "accelerate's; float32 is exact, and doubles their traffic and what micro batches accumulate"
            value, reason = ("float32", _FEW) if lora else ("bfloat16", reason)
            self.derived.append(Derived("reduce_dtype", value, reason))
        elif stated is not None and not is_a_choice:
            text = f"{stated}, which only FSDP under mixed precision reads: elsewhere gradients are summed in their own type"
            fix = "leave it out; under DeepSpeed write communication_data_type in its own file"
            self.report([(("reduce_dtype",), text, fix)])

    def _find_saved_twice(self, train: dict[str, Any]) -> Iterator[Found]:
        """What ``train`` says about saving in the file that has ``save``, or over it; what lies below is replaced."""
        places = {id(layer): at for at, layer in enumerate(self.layers.layers)}
        section = max((places.get(id(owner), -1) for path, owner in self.owners.items() if path[0] == "save"), default=-1)
        for key in _SAVING:
            owner = self.owners.get(("train", key))
            if key in train and owner is not None and owner.origin != "tiny" and places.get(id(owner), -1) >= section:
                yield ("train", key), "the section save is given, too", "leave one of the two out"

    def _fill_deepspeed(self, document: Document, accumulation: int, stated: Collection[str], *, lora: bool) -> None:
        """DeepSpeed's file against the train section, and what stands in the place of its ``auto``."""
        meant = ds.meant(self.train, accumulation, self.dp)
        self.report(ds.find_problems(document, meant, self.train, stated))
        if lora and mixed_precision(self.train) != "no" and document.data.get(ds.REDUCED_IN) is None:
            self.deepspeed = document = replace(document, data={**document.data, ds.REDUCED_IN: "fp32"})
            self.deepspeed_overrides = {ds.REDUCED_IN: "fp32", **self.deepspeed_overrides}
            self.derived.append(Derived(f"deepspeed.{ds.REDUCED_IN}", "fp32", _FEW))
        # transformers fills in the others by the model's size.
        filled_in = (item for item in meant if ds.get(document.data, item[0]) == ds.AUTO)
        self.derived += [Derived(f"deepspeed.{key}", value, reason) for key, value, reason in filled_in]

    def _recomputation(self) -> None:
        """Which layers recompute their activations: those of the section, under Megatron-Bridge by its own key."""
        section = read_section(ActivationCheckpointing, self.values.get(_SECTION))
        if self.megatron is not None:
            self.report(self._check_megatron(self.megatron, section.ratio if section else None))
            value, reason = False, "left to megatron.recompute_granularity"
        elif section is None:
            value, reason = True, f"TRL's default; {_SECTION}.ratio=0 turns it off"
        else:
            layers = int((self.architecture or {}).get("num_hidden_layers", 1))
            count = len(recomputed_layers(section.ratio, layers))
            saved = f"; of them {', '.join(section.save)} kept" if section.save else ""
            value, reason = bool(count), f"{_SECTION}.ratio {section.ratio:g}: {count} of {layers} layers{saved}"
            written = acc.section(self.accelerate.data if self.accelerate else {}, "fsdp_config").get(acc.RECOMPUTING)
            if str(written).lower() == "true" and (count < layers or section.save):
                text = f"it recomputes all layers, and the recipe's section {_SECTION} other ones"
                self.report([(("accelerate", "fsdp_config", acc.RECOMPUTING), text, "leave one of the two out")])
        self.derived.append(Derived(f"train.{_SECTION}", value, reason))

    def _check_megatron(self, section: Megatron, ratio: float | None) -> Iterator[Found]:
        if self.tiny:
            text = "--tiny trains on CPUs, where Megatron-Bridge has no kernels"
            fix = "submit --dry-run shows command and configuration without a GPU"
            yield ("megatron", "tensor_model_parallel_size"), text, fix
        elif self.world % (size := section.model_parallel_size):
            # What does not divide the model Megatron-Core says at its start (parallel_state.py, transformer_config.py).
            sizes = (section.tensor_model_parallel_size, section.pipeline_model_parallel_size, section.context_parallel_size)
            text = (
                "tensor {} x pipeline {} x context {}".format(*sizes) + f" is {size}, which does not divide {self.world} ranks"
            )
            yield ("megatron", "tensor_model_parallel_size"), text, f"use a multiple of {size} ranks"
        for key, value in {
            "activation_checkpointing": ratio,
            "train.model_init_kwargs.quantization_config": quantization.of(self.train),
            "save": self.values.get("save"),
        }.items():
            if value:
                fix = "write megatron.recompute_granularity" if "checkpointing" in key else "leave it out"
                fix = "write train.save_steps" if key == "save" else fix
                yield tuple(key.split(".")), "Megatron does not read it", fix

    def _check_lora(self) -> None:
        lora = self.values.get("lora")
        if lora is None and self.values.get("push") is not None:
            self.report([(("push",), "all parameters are trained: only adapters are pushed", "leave it out")])
        if not isinstance(lora, dict):
            return
        stated, findings = native_rules.check(native_rules.lora_section(), lora)
        self.lora = filled(lora_defaults(), stated)
        self.report(findings)
        if "target_modules" in stated or "target_modules" not in lora:
            self.report(checks.check_lora(self.lora, self.architecture))
        if "task_type" not in lora:
            self.lora["task_type"] = "CAUSAL_LM"
            self.derived.append(Derived("lora.task_type", "CAUSAL_LM", "a causal language model is trained"))

    def result(self) -> Resolved:
        """The checked recipe. Only after :meth:`check` found nothing."""
        assert self.architecture is not None and self.accelerate is not None
        recipe = Recipe.model_validate({key: value for key, value in self.values.items() if key not in ("train", "lora")})
        train_args = dict(self.train)
        batch = train_args.pop("global_batch_size")
        for item in self.derived:
            section, _, key = item.key.partition(".")
            if section == "train":
                holder, _, last = key.rpartition(".")
                if holder:
                    train_args[holder] = {**(train_args[holder] or {}), last: item.value}
                else:
                    train_args[key] = item.value
        resolved = Resolved(
            name=self.layers.folder.name,
            folder=str(self.layers.folder),
            recipe=recipe,
            global_batch_size=batch,
            origins=self._origins(recipe),
            train_args=train_args,
            lora=self.lora,
            world_size=self.world,
            data_parallel_size=self.dp,
            architecture=self.architecture,
            accelerate=self.accelerate.data,
            accelerate_file=self.accelerate_file,
            tiny=self.tiny,
            chat_template=self.chat_template,
            reward_code=self.reward_code,
            accelerate_overrides=acc.flat(self.layers.file_overrides.get("accelerate")),
            deepspeed=self.deepspeed.data if self.deepspeed else None,
            deepspeed_overrides=self.deepspeed_overrides,
            derived=self.derived,
        )
        resolved.warnings.extend(_warnings(resolved))
        return resolved

    def _origins(self, recipe: Recipe) -> dict[str, str]:
        origins = {".".join(path): layer.origin for path, layer in self.owners.items()}
        for path, _ in leaves(recipe.model_dump(mode="json")):
            key = ".".join(path)
            if key not in origins and not (path[0] == "expect" and self.tiny):
                parents = (".".join(path[:end]) for end in range(len(path) - 1, 0, -1))
                origins[key] = next((origins[p] for p in parents if p in origins), "default")
        return origins


def _is_file_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None


def _warnings(resolved: Resolved) -> list[str]:
    """What is allowed and probably not meant."""
    warnings = []
    for key, path in resolved.inputs.items():
        if not is_there(path):
            warnings.append(f"{key} {path} is not there on this machine")
    if resolved.distribution.kind == "DDP" and resolved.world_size > 1 and not is_small(resolved.architecture):
        warnings.append(f"{resolved.accelerate_file}: {acc.TYPE} MULTI_GPU keeps the whole model on every rank")
    dropout = resolved.lora["lora_dropout"] if resolved.lora else 0
    if dropout > 0.5:
        warnings.append(f"lora.lora_dropout {dropout:g} hides most of what an adapter reads; 0 to 0.1 is usual")
    elif dropout and resolved.is_dpo and resolved.train_args["disable_dropout"]:
        warnings.append(f"lora.lora_dropout {dropout:g} has no effect: train.disable_dropout is true, DPOConfig's own")
    experts = expert_parameters(resolved.architecture)
    if experts and resolved.lora is not None and not adapted_experts(resolved.architecture, resolved.lora):
        share = sum(linear.parameters for _, linear in experts) / (parameter_count(resolved.architecture) or 1)
        names = sorted({linear.name for _, linear in experts})
        warnings.append(
            f"the experts stay frozen, {share:.0%} of the parameters: lora.target_parameters={json.dumps(names)} trains them"
        )
    warnings += kernels.warnings(resolved.distribution)
    if resolved.recipe.megatron is None:
        warnings += kernels.mask_warnings(resolved.train_args, resolved.architecture)
    return warnings
