"""The way in: a recipe's name and overrides become a :class:`Resolved`, or a UserError with everything that is wrong."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, collect_problems
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import architecture as arch
from clustertune.recipe import checks, quantization
from clustertune.recipe.findings import Found
from clustertune.recipe.load import COMMAND_LINE, DESCRIPTION, Layer, Layers, base_folder, find_folder, read_layers, same_model
from clustertune.recipe.native_rules import MAX_PROMPT, row_tokens, show_value, train_defaults, usable
from clustertune.recipe.parameters import adapted_experts, expert_parameters, parameter_count
from clustertune.recipe.schema import NAME, ActivationCheckpointing, Megatron, Recipe, Reward, read_section
from clustertune.recipe.yamlfile import Document, KeyPath, leaves, read_text, read_yaml
from clustertune.resolve import deepspeed, kernels, megatron
from clustertune.resolve.distribution import mixed_precision, recomputed_layers
from clustertune.resolve.resolved import Derived, Resolved, is_there
from clustertune.resolve.tiny import is_small, scale_deepspeed, scale_mesh, tiny_layer

MAX_RANKS = 10**6
_SAVING = ("save_strategy", "save_steps")
_MESH = ("accelerate", acc.MESH)
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


def accumulation(train: Mapping[str, Any], world: int, dp: int) -> tuple[Derived | None, list[Found]]:
    """``gradient_accumulation_steps`` = global batch / (micro batch x data-parallel ranks), or what would divide."""
    path = ("train", "global_batch_size")
    batch = train.get("global_batch_size")
    if batch is None:
        fix = "write how many sequences one optimizer step takes over all ranks, such as 32"
        return None, [(path, "missing", fix)]
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 10**7:
        text = f"{show_value(batch)} is not a whole number from 1"
        return None, [(path, text, "write how many sequences one step takes")]
    micro = int(train["per_device_train_batch_size"])
    per_pass = micro * dp
    if batch % per_pass == 0:
        reason = f"global batch {batch} / (micro batch {micro} x {dp} data-parallel ranks)"
        return Derived("train.gradient_accumulation_steps", batch // per_pass, reason), []
    below, above = batch // per_pass * per_pass, (batch // per_pass + 1) * per_pass
    batches = " or ".join(str(size) for size in (below, above) if size)
    shared = max(1, world // dp)
    fitting = [ranks * shared for ranks in range(1, min(batch // micro, 10**5) + 1) if batch % (micro * ranks) == 0]
    near = [ranks for ranks in fitting if ranks < world][-1:] + [ranks for ranks in fitting if ranks > world][:1]
    fix = f"write {batches}"
    if near:
        fix += f", or use {' or '.join(map(str, near))} ranks"
    elif batch % micro:
        fix += f", or a per_device_train_batch_size that divides {batch}"
    text = f"{batch} is not a multiple of {per_pass} = per_device_train_batch_size {micro} x {dp} data-parallel ranks"
    return None, [(path, text, fix)]


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
    """The section as it is stated, in TRL's types."""
    lora: dict[str, Any] | None = None
    world: int = 1
    dp: int = 1
    derived: list[Derived] = field(default_factory=list)
    complete: bool = True
    """Whether all layers could be read: what is missing from the values is then really missing."""

    @property
    def args(self) -> dict[str, Any]:
        """The section ``train`` with TRL's defaults in it."""
        stated = {key: value for key, value in self.train.items() if value is not None}
        return stated | {key: value for key, value in train_defaults(self.trainer).items() if key not in stated}

    @property
    def trainer(self) -> str:
        """TRL's trainer; the schema says what is wrong with another word."""
        stated = self.values.get("trainer")
        return stated if stated in ("dpo", "grpo") else "sft"

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
        """The file of the recipe folder that has a reward, whose text the run keeps. It is read, not run."""
        assert reward.module is not None
        named = f"{shown}/{reward.module}.py"
        with collect_problems(self.problems):
            text = read_text(folder / f"{reward.module}.py", named)
            try:
                body = ast.parse(text).body
            except (SyntaxError, ValueError) as error:
                raise UserError(Problem(f"is not Python: {error}", file=named)) from None
            functions = [item.name for item in body if isinstance(item, ast.FunctionDef)]
            if reward.name not in functions:
                text = f"has no function {reward.name}"
                fix = f"it has {', '.join(functions)}" if functions else "def it there, as TRL's reward functions are"
                raise UserError(Problem(text, file=named, key=f"reward.{at}", fix=fix))
            self.reward_code[reward.module] = text

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
        self._check_train(distribution, accelerate_shown)
        self._check_lora()

    def _scale_distribution(self, accelerate: Document) -> dict[str, Any]:
        """The files beside the recipe for a tiny run; what the command line says about them is left alone."""
        if acc.MESH not in acc.top(self.layers.file_overrides.get("accelerate")):
            self.accelerate, scaled = scale_mesh(accelerate, self.world)
            self.derived += scaled
        if self.deepspeed is not None:
            small = Document("--tiny", scale_deepspeed(self.deepspeed.data))
            given = self.layers.file_overrides.get("deepspeed")
            self.deepspeed = acc.lay_over(acc.lay_over(self.deepspeed, small), given)
            self.deepspeed_overrides = acc.flat(small) | self.deepspeed_overrides
        return self.accelerate.data if self.accelerate else {}

    def _spread(self, distribution: dict[str, Any]) -> None:
        """The ranks that read different sequences: all, but for those that share a sequence or a layer."""
        if (m := self.megatron) is not None:
            named, self.dp = "tp x pp x cp", megatron.data_parallel(m, self.world)
            shared = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
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
        the ranks that are left to shard over.

        accelerate would take 1 and refuse: the product of its sizes must be the number of ranks (parallelism_config.py:372),
        and something must be left to shard over (parallelism_config.py:325 and 381: a KeyError or a ValueError of every rank).
        """
        world, section, fsdp = self.world, acc.section(distribution, acc.MESH), acc.distributed_type(distribution) == "FSDP"
        stated = fsdp and section.get(acc.SHARD_SIZE) is not None
        copies, shards = sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1)
        replicas = 1 if fsdp and not stated else copies * shards
        needs_shards = world > 1 and ("cp" not in sizes or "dp_replicate" in sizes)
        if world % shared:
            yield _MESH, f"tp x cp x sp is {shared}, which does not divide {world} ranks", f"use a multiple of {shared} ranks"
        elif (replicas > 1 or stated) and replicas * shared != world:
            fix = f"let dp_replicate x dp_shard x tp x cp x sp be {world}, or leave {acc.SHARD_SIZE} out: it is derived"
            yield _MESH, f"its sizes make {replicas * shared} ranks; there are {world}", fix
        elif stated and shards == 1 and needs_shards:
            fix = f"use smaller sizes, and leave {acc.SHARD_SIZE} out"
            yield _MESH, f"{acc.SHARD_SIZE} is 1: FSDP has no ranks to shard over", fix
        elif not fsdp or stated or not section or world == 1 or self.accelerate is None:
            return
        elif world % (copies * shared):
            text = f"dp_replicate {copies} x tp x cp x sp is {copies * shared}, which does not divide {world} ranks"
            yield _MESH, text, f"use a multiple of {copies * shared} ranks"
        elif world == copies * shared and needs_shards:
            text = f"its sizes take all {world} ranks: FSDP has none left to shard over"
            yield _MESH, text, "use smaller sizes or more ranks"
        else:
            left, shown = world // (copies * shared), " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            reason = f"{world} ranks" + (f" / ({shown})" if shown else "")
            self.derived.append(Derived(f"accelerate.{acc.MESH}.{acc.SHARD_SIZE}", left, reason))
            # The mapping may be the file's own: what is derived from the ranks goes into a copy.
            body = {**distribution, acc.MESH: {**section, acc.SHARD_SIZE: left}}
            self.accelerate = replace(self.accelerate, data=body)

    def _check_beneath_tiny(self) -> None:
        """What is wrong in values that ``--tiny`` is about to replace; whether they divide or fit does not matter then."""
        self.report(checks.check_schema(self.values, self.position))
        given = self.values.get("train")
        if isinstance(given, dict):
            self.report(checks.check_native(checks.train_section(self.trainer), given)[1])
            batch = {"global_batch_size": given.get("global_batch_size"), "per_device_train_batch_size": 1}
            if self.complete:
                self.report(accumulation(batch, 1, 1)[1])

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
        length, evaluation = row_tokens(self.args), self.values.get("eval")
        if positions and length and length > positions:
            key = "max_completion_length" if self.trainer == "grpo" else "max_length"
            text = f"{length} tokens, the model has {positions} positions (max_position_embeddings)"
            text = f"with {MAX_PROMPT} {text}" if self.trainer == "grpo" else text
            self.report([(("train", key), text, f"write at most {positions}" if self.trainer != "grpo" else None)])
        answer = evaluation.get("max_gen_toks") if isinstance(evaluation, dict) else None
        if positions and isinstance(answer, int | float) and answer >= positions:
            text = f"{answer:.0f} tokens of answer leave no room for a prompt in this model's {positions} positions"
            self.report([(("eval", "max_gen_toks"), text, "lower it")])

    def _check_train(self, distribution: dict[str, Any], accelerate_shown: str) -> None:
        given = self.values.get("train")
        if not isinstance(given, dict):
            return
        if self.values.get("save") is not None:
            self.report(self._find_saved_twice(given))
            given = {key: value for key, value in given.items() if key not in _SAVING}
        self.train, found = checks.check_native(checks.train_section(self.trainer), given)
        self.report([*found, *checks.check_train(train_defaults(self.trainer) | self.train)])
        if not isinstance(self.train.get("model_init_kwargs"), dict | None):
            del self.train["model_init_kwargs"]  # reported; what is checked below reads keys of it
        if self.trainer == "dpo":
            self.report(checks.check_dpo(self.args, distribution, megatron=self.megatron is not None))
        if self.trainer == "grpo":
            batch = given.get("global_batch_size")
            self.report(checks.check_grpo(self.args, distribution, batch, self.world, megatron=self.megatron is not None))
        self._check_lengths()
        batch = {"global_batch_size": given.get("global_batch_size")}
        accumulated, more = accumulation(batch | self.args, self.world, self.dp)
        if self.complete and ("per_device_train_batch_size" in self.train or "per_device_train_batch_size" not in given):
            self.report(more)
        self.derived += [accumulated] if accumulated is not None else []
        self._recomputation()
        lora, deep = self.values.get("lora"), self.deepspeed
        named, wanted = acc.mixed_precision(distribution), mixed_precision(self.args)
        if named not in (None, wanted):
            text = f"{named}, while the recipe's train section means {wanted} (TRL's default is bf16)"
            self.report([(("accelerate", acc.PRECISION), text, "leave it out, or change train.bf16")])
        self.report(kernels.find_problems(self.args, self.architecture, distribution, accelerate_shown))
        self.report(checks.check_quantization(self.args, lora))
        if self.megatron is None:
            zeros = acc.distributed_type(distribution) == "DEEPSPEED"
            zero = acc.zero_stage(distribution, deep.data if deep else None) if zeros else None
            self.report(checks.check_strategy(self.args, lora, distribution, self.architecture, zero=zero))
        stated = self.values.get("reduce_dtype")
        if acc.distributed_type(distribution) == "FSDP" and wanted != "no":
            # accelerate 1.15 takes bfloat16 for all (utils/dataclasses.py:2137).
            reason = "accelerate's; float32 is exact, and doubles their traffic and what micro batches accumulate"
            value, reason = ("float32", _FEW) if lora is not None else ("bfloat16", reason)
            self.derived += [Derived("reduce_dtype", value, reason)] if stated is None else []
        elif stated is not None:
            text = f"{stated}, which only FSDP under mixed precision reads: elsewhere gradients are summed in the type that "
            fix = "leave it out; under DeepSpeed write communication_data_type in its own file"
            self.report([(("reduce_dtype",), f"{text}they have", fix)])
        if self.megatron is None and (attention := kernels.attention(self.args, self.architecture)):
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
        known, world, dp = self.architecture or {}, self.world, self.dp
        described = deepspeed.RecipeValues(self.args, int(batch), accumulation, world, dp, known, lora, frozenset(self.train))
        self.report(deepspeed.find_problems(document, described))
        if lora and mixed_precision(self.args) != "no" and document.data.get(deepspeed.REDUCED_IN) is None:
            self.deepspeed = document = replace(document, data={**document.data, deepspeed.REDUCED_IN: "fp32"})
            self.deepspeed_overrides = {deepspeed.REDUCED_IN: "fp32", **self.deepspeed_overrides}
            self.derived.append(Derived(f"deepspeed.{deepspeed.REDUCED_IN}", "fp32", _FEW))
        self.derived += deepspeed.filled(document.data, described)

    def _recomputation(self) -> None:
        """Which layers recompute their activations: those of the section, under Megatron-Bridge by its own key."""
        section = read_section(ActivationCheckpointing, self.values.get(_SECTION))
        if self.megatron is not None:
            self.report(self._check_megatron(self.megatron, section.ratio if section else None))
            value, reason = False, "left to megatron.recompute_granularity"
        elif section is None:
            value, reason = True, f"TRL's default; {_SECTION}.ratio=0 turns it off"
        else:
            self.report(self._check_section(section))
            layers = int((self.architecture or {}).get("num_hidden_layers", 1))
            count = len(recomputed_layers(section.ratio, layers))
            saved = f"; of them {', '.join(section.save)} kept" if section.save else ""
            value, reason = bool(count), f"{_SECTION}.ratio {section.ratio:g}: {count} of {layers} layers{saved}"
        self.derived.append(Derived(f"train.{_SECTION}", value, reason))

    def _check_section(self, section: ActivationCheckpointing) -> Iterator[Found]:
        """What is wrong with the section."""
        if not section.model_fields_set & {"ratio", "save"}:
            yield (
                (_SECTION,),
                "says neither ratio nor save",
                f"write {_SECTION}.ratio=1 for all layers, or {_SECTION}.save=[attention]",
            )
        saved, save = section.save or [], (_SECTION, "save")
        if len(set(saved)) < len(saved):
            yield save, f"[{', '.join(saved)}] names one twice", "name each once"
        if {"matmul", "every_second_matmul"} <= set(saved):
            yield save, "matmul keeps every product, every_second_matmul each second one", "keep one of the two"
        if saved and section.ratio == 0:
            yield save, "given, and ratio 0 recomputes nothing that could be kept", "leave one of the two out"
        if "attention" in saved and (self.train.get("model_init_kwargs") or {}).get("attn_implementation") == "eager":
            text = "attention, and eager attention is not a single operation whose result could be kept"
            yield save, text, "use attn_implementation: sdpa or flash_attention_2, or leave attention out"

    def _check_megatron(self, section: Megatron, ratio: float | None) -> Iterator[Found]:
        if self.tiny:
            text = "--tiny trains on CPUs, where Megatron-Bridge has no kernels"
            fix = "submit --dry-run shows command and configuration without a GPU"
            yield ("megatron", "tensor_model_parallel_size"), text, fix
        else:
            found = megatron.find_problems(section, self.world, self.architecture, self.args)
            yield from ((("megatron", key), text, fix) for key, text, fix in found)
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
        train_args = self.args
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
    if resolved.distribution.kind == "DDP" and resolved.world_size > 1 and not is_small(resolved.architecture):
        found.append(f"{resolved.accelerate_file}: {acc.TYPE} MULTI_GPU keeps the whole model on every rank")
    dropout = resolved.lora["lora_dropout"] if resolved.lora else 0
    if dropout > 0.5:
        found.append(f"lora.lora_dropout {dropout:g} hides most of what an adapter reads; 0 to 0.1 is usual")
    elif dropout and resolved.is_dpo and resolved.train_args["disable_dropout"]:
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
        found += kernels.mask_warnings(resolved.train_args, resolved.architecture)
    return found
