"""A recipe from a model, data and GPUs: what ``clustertune new`` writes, and ``plan --model`` plans."""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from clustertune.cluster.load import load_cluster, of_gpus
from clustertune.data import system_messages
from clustertune.data.prepare import MeasuredData, measure
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if, storage_error
from clustertune.host.system import GIB
from clustertune.manifest import read_object
from clustertune.plan.advise import CostedCandidate, advise
from clustertune.plan.calibration import CalibratedCluster, find_calibrated
from clustertune.plan.predict import fewest_nodes
from clustertune.plan.schedule import FEW_STEPS, PACKED_SHARE, Lengths, of_counts
from clustertune.plan.strategy import unconverted
from clustertune.recipe import quantization
from clustertune.recipe.accelerate_file import ALONE, REPLICATED, SHARDED
from clustertune.recipe.layers import RECIPES, did_you_mean, laid_over, read_overrides
from clustertune.recipe.native_rules import TEMPLATE_ARGUMENTS, filled, template_arguments, train_defaults
from clustertune.recipe.parameters import count, parameter_count
from clustertune.recipe.sections import NAME
from clustertune.resolve.models import FoundModel, find_model, known_models, size_of
from clustertune.resolve.overrides import RecipeSource, loading
from clustertune.resolve.resolve import resolve
from clustertune.resolve.tiny import RANKS
from clustertune.tree import how_to_install

if TYPE_CHECKING:
    from clustertune.data.tokens import Tried

METHODS = ("lora", "qlora", "full")
BATCH, SMALL_BATCH = 32, 8
"""Sequences of an optimizer step, as the recipes here have, and of little data; more where there are more ranks."""
STEPS, EPOCHS = 30, 3
"""Optimizer steps that a training should have, and the most epochs that are taken for it: below, warm-up and decay are most of
it; above three epochs small data are learnt by heart. Assumed."""
MAX_LENGTH = 2048
"""Of the base recipes."""
PLAIN_TEMPLATE = "mistral.jinja"
"""A chat template of ``recipes/_base`` that needs no tokens of its own."""
ANY_GPUS = "1x8xh100-sxm"
"""What is planned on where neither GPUs nor a cluster are named."""
SAME_RANKS = f"1x{RANKS}xh100-sxm"
"""As many GPUs as a recipe for CPUs has processes: its batch is made for these."""
LORA_RATE, LORA_RATE_OF_PAIRS = 2.0e-4, 1.0e-5
"""Learning rates of LoRA: QLoRA's for 7B and 13B (arXiv:2305.14314, table 9), which takes half of it above; and ten times
DPOConfig's, which is of full fine-tuning."""
LARGE = 20e9
"""Parameters from which LoRA takes half of that."""
CPU_LENGTHS = (256, 512, 1024)
"""Sequence lengths on CPUs: the smallest that holds the conversations, as the logits of long ones take gigabytes."""
GENERATIONS, ANSWERS = 8, 64
"""Answers to a prompt, as GRPOConfig has them, and of an optimizer step at least: fewer prompts say little of a direction."""
CPU_GENERATIONS, CPU_ANSWERS, CPU_TOKENS = 4, 8, 64
"""The same on CPUs, and tokens of an answer."""
COMPLETION = 512
"""Tokens of an answer and of a prompt in the base recipe grpo."""
REWARD_EPOCHS = 10
"""The most epochs that are taken of prompts: the answers to them are others each time. Assumed."""
LORA_RATE_OF_REWARDS = 2.0e-5
"""Twenty times the rate of GRPOConfig, which is of full fine-tuning: as the recipe qwen3-8b-ifeval-grpo has it."""
OF_IFEVAL = {"instruction_id_list", "kwargs"}
"""Columns of rows that IFEval's checkers judge."""
CPU_EVAL = {"limit": 8, "max_gen_toks": 128}
"""Documents and tokens of the evaluation on CPUs: a look, no score."""
_KINDS = ("NO", "DDP", "FSDP2")
"""What is chosen from: torch's own strategies, which need no compiler on the node and no folder on an NVMe; without context
parallelism, which a sequence of :data:`MAX_LENGTH` tokens does not need, and which takes more ranks than one to run."""
ROOM = 0.93
"""Of a GPU's memory that a new recipe takes at most: other conversations and the allocator's gaps need the rest. Assumed."""
_NO_DATA = {"name": "not-given", "input": "not-given", "format": "messages"}


@dataclass(frozen=True)
class Draft:
    """The files of a recipe, and what was assumed."""

    recipe: dict[str, Any]
    accelerate: dict[str, Any]
    architecture: Mapping[str, Any]
    assumed: list[str]
    lengths: Lengths | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Others of the recipe's folder, by name."""


def targets(architecture: Mapping[str, Any]) -> tuple[list[str] | str, str]:
    """LoRA's ``target_modules``, and a sentence on them: every linear module of the layers; of a mixture, attention's."""
    counted = count(architecture)
    if counted is None:
        return "all-linear", "LoRA on all linear modules"
    linears = [linear for kind in counted.layers for linear in kind.linears]
    mixture = any(linear.copies > 1 for linear in linears)
    chosen = [one.name for one in linears if not one.bare and (not mixture or "attn" in one.name)]
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
    of_attention = "the linear modules of attention: experts and routers stay frozen"
    return names, f"LoRA on {', '.join(names)}: {of_attention if mixture else 'every linear module of the layers'}"


@dataclass(frozen=True)
class PlanTarget:
    """On what is planned, as the command line says it."""

    calibrated: CalibratedCluster
    sizes: tuple[int, ...]
    """Numbers of nodes to try, the fewest first."""
    gpus: int
    """Of a node."""
    options: tuple[str, ...]
    """The options that name it again."""
    assumed: bool = False
    """Whether it was chosen, not named."""


def where(gpus: str | None, cluster: str | None, nccl_check: Path | None = None) -> PlanTarget:
    """``--gpus``, ``--cluster``, this place where it has GPUs, else :data:`ANY_GPUS`. Raises UserError."""
    place, options = (of_gpus(gpus), ("--gpus", gpus)) if gpus else (load_cluster(cluster), ("--cluster", cluster or "local"))
    if assumed := not (gpus or cluster or place.compute.gpus):
        place, options = of_gpus(ANY_GPUS), ("--gpus", ANY_GPUS)
    calibrated = find_calibrated(place, nccl_check)
    calibrated.machine(1)  # a place without GPUs, nodes or figures is refused with what it lacks
    most = len(place.compute_nodes)
    sizes = (most,) if gpus else tuple(sorted({2**power for power in range(most.bit_length())}))
    return PlanTarget(calibrated, sizes, place.compute.gpus, options, assumed)


@contextmanager
def drafted(
    name: str,
    model: FoundModel,
    method: str,
    data: MeasuredData | None,
    at: PlanTarget,
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[Draft, Path]]:
    """The recipe of the fewest nodes whose GPUs hold it, with its best distribution, in a folder that is gone afterwards.

    ``stated``: keys of the recipe that hold whatever is chosen. Where no GPUs hold it, the fewest nodes on which it fits with
    host memory. Raises NothingFits, and UserError where it is refused.
    """
    kept: Draft | None = None
    for nodes in at.sizes:
        made = draft(model, method, data, nodes, at.gpus)
        made = replace(made, recipe=laid_over(made.recipe, stated, null_removes=True))
        with folder_of(made, name) as folder:
            try:
                chosen, burdens = choose(made, folder, at.calibrated, method)
            except NothingFits:
                if nodes == at.sizes[-1] and kept is None:
                    raise
                continue
        kept = chosen if not burdens else kept or chosen
        if not burdens:
            break
    assert kept is not None
    if at.assumed:
        kept.assumed.append(f"no GPUs were named: --gpus {at.options[1]}")
    with folder_of(kept, name) as folder:
        yield kept, folder


def stated(overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of a recipe that ``section.key=value`` arguments state. Raises UserError with every problem."""
    document, beside, problems = read_overrides(overrides)
    problems += [Problem("is set by this command", file="command line", key=name) for name, part in beside.items() if part.data]
    raise_if(problems)
    return document.data


class NothingFits(UserError):
    """No distribution holds the model on these GPUs."""


def on_cpus(
    model: FoundModel,
    method: str,
    data: MeasuredData,
    stated: Mapping[str, Any] = MappingProxyType({}),
    ends: Sequence[int] = (),
) -> Draft:
    """The recipe of a small model for this machine's CPUs.

    ``stated``: keys of the recipe that hold whatever is chosen; ``ends``: where conversations end that were tokenised.
    """
    estimated = 2 * max(data.tokens, default=CPU_LENGTHS[-1])  # digits and other languages take up to twice
    need = max(estimated, *ends, 0)
    longest = next((length for length in CPU_LENGTHS if length >= need), CPU_LENGTHS[-1])
    if data.section["format"] == "text":  # which is split anyway: the longest rows of which there are enough
        total = EPOCHS * sum(length * count for length, count in data.tokens.items())
        enough = (length for length in reversed(CPU_LENGTHS) if length <= longest and total >= STEPS * SMALL_BATCH * length)
        longest = next(enough, CPU_LENGTHS[0])
    made = draft(model, method, data, 1, RANKS, longest, cpus=True)
    made.recipe["train"].pop("model_init_kwargs", None)  # bfloat16, which many CPUs emulate
    own = {"train": {"bf16": False, "report_to": "none"}, "activation_checkpointing": {"ratio": 0}, "eval": CPU_EVAL}
    recipe = laid_over(laid_over(made.recipe, own), stated, null_removes=True)
    assumed = [
        f"there is no GPU here and none was named, so it is for {RANKS} processes on CPUs, in float32. For GPUs: again with "
        f"--gpus {ANY_GPUS}, or --cluster NAME",
        *made.assumed,
        f"the evaluation stops after {CPU_EVAL['limit']} prompts of {CPU_EVAL['max_gen_toks']} tokens: no score (section eval)",
    ]
    # Under FSDP each micro batch gathers the model over gloo, which takes longer than a small one computes.
    accelerate = SHARDED if method == "full" else REPLICATED
    return replace(made, recipe=recipe, accelerate=accelerate, assumed=assumed)


def draft(
    model: FoundModel,
    method: str,
    data: MeasuredData | None,
    nodes: int,
    gpus: int,
    longest: int = MAX_LENGTH,
    *,
    cpus: bool = False,
) -> Draft:
    """A recipe before its distribution is chosen: FSDP2 over all GPUs, every layer recomputed. ``cpus``: their answers to
    prompts are few and short."""
    world = nodes * gpus
    assumed = [*model.notes, *(data.notes if data else ())]
    train: dict[str, Any] = {"global_batch_size": _batch(BATCH, world)}
    pairs = data is not None and data.section["format"] == "preference"
    base = ["sft-full" if method == "full" else "sft-lora", *(["dpo"] if pairs else [])]
    recipe: dict[str, Any] = {"base": base if pairs else base[0], "model": dict(model.section)}
    recipe |= {"data": dict(data.section) if data else _NO_DATA, "train": train}
    position = model.architecture.get("max_position_embeddings")
    longest = min(longest, position) if isinstance(position, int) else longest
    if longest != MAX_LENGTH:
        train["max_length"] = longest
    if model.pad_token:
        train["pad_token"] = model.pad_token
    if data and data.section["format"] == "text":
        train["packing_strategy"] = "bfd_split"  # a document goes on in another piece, where TRL's default drops the rest
    if method != "full":
        train["model_init_kwargs"] = loading(method)
        assumed += [note] if (note := _left_by_quantisation(model.architecture, train["model_init_kwargs"])) else []
        names, what = targets(model.architecture)
        recipe["lora"] = {"target_modules": names} | ({"lora_dropout": 0.0} if pairs else {})  # which DPOConfig turns off
        rate = LORA_RATE / (2 if (parameter_count(model.architecture) or 0) > LARGE else 1)
        train["learning_rate"] = LORA_RATE_OF_PAIRS if pairs else rate
        assumed.append(what)
    recipe["slurm"] = {"nodes": nodes, "gpus_per_node": gpus, "time": "24:00:00"}
    recipe["activation_checkpointing"] = {"ratio": 1}
    if data and data.section["format"] == "prompt":
        made = Draft(recipe, SHARDED if world > 1 else ALONE, model.architecture, assumed)
        return _with_rewards(made, data, world, position, cpus=cpus)
    enough = _enough_steps(data, world, longest, pairs=pairs) if data and data.tokens else None
    train |= enough[0] if enough else {}
    packed = not pairs and train.get("packing", True)
    kind = f"{'pairs of answers' if pairs else 'sequences'} of {'' if packed else 'up to '}{longest} tokens"
    part = "learning rate" if method == "full" else f"learning rate {train['learning_rate']:g}, LoRA rank"
    rates = f"{part} from the base recipe {' and '.join(base)}"
    assumed.append(f"{train['global_batch_size']} {kind} per step{', packed' if packed else ''}; {rates}")
    assumed += [enough[1]] if enough else []
    lengths = of_counts(list(data.tokens.items()), data.source) if data and data.tokens else None
    return Draft(recipe, SHARDED if world > 1 else ALONE, model.architecture, assumed, lengths)


def _with_rewards(made: Draft, data: MeasuredData, world: int, position: Any, *, cpus: bool) -> Draft:
    """The same for GRPO over prompts: IFEval's reward where the rows have its instructions, else one to be written."""
    recipe, train = made.recipe, made.recipe["train"]
    generations, answers = (CPU_GENERATIONS, CPU_ANSWERS) if cpus else (GENERATIONS, ANSWERS)
    together = math.lcm(generations, world)
    room = position if isinstance(position, int) else 4 * COMPLETION
    completion = CPU_TOKENS if cpus else min(COMPLETION, room // 2)
    prompt = next((size for size in (COMPLETION << power for power in range(12)) if size >= 2 * max(data.tokens)), COMPLETION)
    batch = together * -(-answers // together)
    prompts = sum(data.tokens.values())
    steps = math.ceil(prompts * generations / batch)
    epochs = min(REWARD_EPOCHS, -(-STEPS // steps))
    train.pop("max_length", None)
    train |= {"global_batch_size": batch, "num_generations": generations, "num_train_epochs": epochs}
    train |= {"max_prompt_length": min(prompt, room - completion), "max_completion_length": completion}
    train |= {"per_device_train_batch_size": min(generations, batch // world)}
    base = [recipe["base"], "grpo"]
    recipe["base"] = base
    if "lora" in recipe:
        recipe["lora"] = {**recipe["lora"], "lora_dropout": 0}
        train["learning_rate"] = LORA_RATE_OF_REWARDS
    rate = f"learning rate {train['learning_rate']:g}" if "learning_rate" in train else "learning rate of the base recipe grpo"
    judged = all(example.get("columns", {}).keys() >= OF_IFEVAL for example in data.examples)
    recipe["reward"] = ["ifeval"] if judged else [{"function": f"{REWARDS}:{TO_WRITE}"}]
    reward = "the reward is IFEval's share of instructions followed" if judged else "the reward is still to be written"
    assumed = [
        *made.assumed,
        f"{reward}; each prompt gets {generations} answers of up to {completion} tokens (docs/grpo.md)",
        f"{batch} answers a step, to {batch // generations} prompts; {rate}",
        f"{epochs * steps:,} optimizer steps: {prompts:,} prompts x {generations} answers / {batch} x {epochs} epochs",
    ]
    files = {} if judged else {f"{REWARDS}.py": REWARD_TEXT}
    recipe = {key: recipe[key] for key in ("base", "model", "data", "reward", *(key for key in recipe if key != "reward"))}
    lengths = of_counts(list(data.tokens.items()), data.source)
    return replace(made, recipe=recipe, assumed=assumed, files=files, lengths=lengths)


REWARDS, TO_WRITE = "rewards", "reward"
REWARD_TEXT = f'''"""What an answer is worth. Until the function below is filled in, a training ends with its message."""

from __future__ import annotations

from typing import Any


def {TO_WRITE}(completions: list[list[dict[str, str]]], prompts: list[Any], **columns: Any) -> list[float | None]:
    """A number for each answer, or None where the answer is not to count.

    completions: the answers, each a list with one message: completion[-1]["content"] is its text
    prompts: the prompt of each answer
    columns: every other column of your rows, as a list with a value for each answer

    Such as, for rows with a column "number":

        texts = [completion[-1]["content"] for completion in completions]
        return [1.0 if number in text else 0.0 for text, number in zip(texts, columns["number"], strict=True)]

    Ready-made ones, by name in recipe.yaml: ifeval, exact_match, regex, json_schema, length (docs/grpo.md).
    """
    raise RuntimeError("write what an answer is worth, in the place of this line")
'''
"""``rewards.py`` of a new recipe."""


def to_write(made: Draft) -> list[str]:
    """What a person must write before the recipe of a draft runs."""
    if f"{REWARDS}.py" not in made.files:
        return []
    return [
        f"{REWARDS}.py: say in {TO_WRITE}() what an answer is worth, or name a ready-made reward in recipe.yaml (docs/grpo.md)"
    ]


def _left_by_quantisation(architecture: Mapping[str, Any], init: Mapping[str, Any]) -> str:
    """What a quantised base keeps in 16 bits beyond embeddings, head and norms, as a sentence; empty: nothing."""
    config = quantization.of({"model_init_kwargs": init})
    return unconverted(quantization.read(config, int(architecture["hidden_size"])), count(architecture)) if config else ""


def _batch(least: int, world: int) -> int:
    """The smallest global batch of at least so many sequences that the ranks share out."""
    return world * -(-least // world)


def _sequences(data: MeasuredData, longest: int, *, packed: bool) -> int:
    """Of an epoch: the conversations, or what they fill."""
    if not packed:
        return sum(data.tokens.values())
    most = math.inf if data.section["format"] == "text" else longest
    return math.ceil(sum(min(length, most) * number for length, number in data.tokens.items()) / (longest * PACKED_SHARE))


def _enough_steps(data: MeasuredData, world: int, longest: int, *, pairs: bool) -> tuple[dict[str, Any], str]:
    """Batch, packing and epochs with which the data give :data:`STEPS` optimizer steps, or as many as they can; and a sentence.

    What changes the training least is taken first: a smaller batch, then more epochs, then rows that are not packed, again
    from one epoch on. Where a training would still be warned of, the batch is smaller than :data:`SMALL_BATCH`. Text that may
    be longer than a row stays packed, which is what splits it.
    """
    sequences = {packed: _sequences(data, longest, packed=packed) for packed in (True, False)}
    small = (_batch(BATCH // 2, world), _batch(SMALL_BATCH, world))
    tries = [(_batch(BATCH, world), not pairs, 1), *((batch, not pairs, 1) for batch in small)]
    tries += [(small[1], not pairs, epochs) for epochs in range(2, EPOCHS + 1)]
    split = data.section["format"] == "text" and 2 * max(data.tokens) > longest  # of an estimate, as in on_cpus
    tries += [(small[1], False, epochs) for epochs in range(1, EPOCHS + 1) if not pairs and not split]
    least = [(_batch(batch, world), tries[-1][1], EPOCHS) for batch in (SMALL_BATCH, SMALL_BATCH // 2, 1)]

    def steps(one: tuple[int, bool, int]) -> int:
        batch, packed, epochs = one
        return epochs * math.ceil(sequences[packed] / batch)

    chosen = next((one for one in tries if steps(one) >= STEPS), None)
    chosen = chosen or next((one for one in least if steps(one) >= FEW_STEPS), least[-1])
    batch, packed, epochs = chosen
    keys: dict[str, Any] = {"global_batch_size": batch}
    keys |= {"num_train_epochs": epochs} if epochs > 1 else {}
    keys |= {"packing": False} if not packed and not pairs else {}
    text = f"{steps(chosen):,} optimizer steps: {sequences[packed]:,} sequences / {batch} x {epochs} epoch{'s' * (epochs > 1)}"
    if chosen != tries[0]:
        text += f", where {tries[0][0]} a step would make {steps(tries[0])}"
    return keys, text + ("; more data, or fewer GPUs, would make more" if steps(chosen) < STEPS else "")


def look_at_weights(model: FoundModel, stated: Mapping[str, Any]) -> list[str]:
    """Sentences on weights of a local model that were not looked at. ``stated``: keys of the recipe that hold in any case.

    Raises UserError where files of weights are there and are not those of the architecture in ``config.json``: missing tensors
    would be random numbers.
    """
    section = {**model.section, **(stated.get("model") or {})}
    if section.get("weights") == "random" or not section.get("path"):
        return []
    folder = Path(str(section["path"])).expanduser()
    if find_spec("transformers") is None:
        return [f"the weights were not looked at: transformers is not installed ({how_to_install('train')})"]
    from clustertune.training import base_weights

    around = read_object(folder / "config.json").get("model_type")
    if around and around != model.architecture.get("model_type") and base_weights.is_named(folder):
        classes = model.architecture.get("architectures") or ["text model"]
        text = f"holds a {around}, a model with pictures or sound, of which the {classes[0]} inside can be trained"
        fix = f"clustertune text-model {shlex.quote(str(folder))} OUT, and again with --model OUT"
        raise UserError(text, file=str(folder), key="--model", fix=fix)
    if base_weights.is_named(folder) or any(folder.glob("*.gguf")) or any(folder.glob("*.safetensors")):
        raise_if(base_weights.check_tensors(folder))
    elif pickled := base_weights.pickles(folder):
        return [f"the weights are pickled ({pickled[0]}): they train, and merge refuses them; save_pretrained converts"]
    return []


def lacking_weights(model: FoundModel, stated: Mapping[str, Any]) -> list[str]:
    """A sentence on a local model that has no weights yet, empty where it has some or is no local one."""
    section = {**model.section, **(stated.get("model") or {})}
    if section.get("weights") == "random" or not section.get("path") or find_spec("transformers") is None:
        return []
    from clustertune.training import base_weights

    folder = Path(str(section["path"])).expanduser()
    if base_weights.is_named(folder) or any(folder.glob("*.safetensors")) or base_weights.pickles(folder):
        return []
    return [f"no weights are in {folder} -> put model.safetensors there, or name the model's id on the Hub as --model"]


@dataclass(frozen=True)
class Looked:
    """What came of the first conversations with the tokenizer of a local model."""

    keys: dict[str, Any] = field(default_factory=dict)
    """What a recipe must say so that ``prepare`` accepts them."""
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why ``prepare`` refuses the recipe all the same, and what to do first."""
    helps: tuple[int, ...] = ()
    """The smallest ``train.max_length`` with which each stays; 0: no length helps."""
    ends: tuple[int, ...] = ()
    """The same with which the end of an answer is learnt of each."""

    @property
    def sentences(self) -> list[str]:
        """All of it for a person."""
        return [*self.notes, *(f"clustertune prepare and run will refuse it: {one}" for one in self.refused)]


def look_at_tokenizer(model: FoundModel, data: MeasuredData, stated: Mapping[str, Any]) -> Looked:
    """Try the tokenizer of a local model with the first conversations. ``stated``: keys of the recipe that hold whatever is
    found.

    Whether there is a chat template and it takes them, also their system messages; whether the assistant's words can be told
    apart, and whether an answer ends with the token that stops the model.
    """
    folder, chats = model.section.get("path"), data.section["format"] != "text"
    named = (stated.get("model") or {}).get("chat_template")
    template = RECIPES / "_base" / str(named)
    if not folder or not data.examples or (named and not template.is_file()):
        note = "the tokenizer has a chat template, as instruct models do; for a base model set model.chat_template"
        return Looked(notes=[note] * (chats and not named))
    if find_spec("transformers") is None:
        return Looked(notes=[f"the tokenizer was not looked at: transformers is not installed ({how_to_install('train')})"])
    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.data.tokens import try_examples

    train = filled(train_defaults(), {"assistant_only_loss": True, **(stated.get("train") or {})})
    keys: dict[str, Any] = {}
    notes, refused = list[str](), list[str]()
    try:
        text = template.read_text(encoding="utf-8") if named else None
        tokenizer = load_tokenizer(str(folder), None, text, train, chats=False)
    except UserError as error:
        problem = error.problems[0]
        return Looked(refused=[f"{problem.message} -> {problem.fix}"])
    if chats and not tokenizer.chat_template:
        tokenizer.chat_template = (RECIPES / "_base" / PLAIN_TEMPLATE).read_text(encoding="utf-8")
        keys["model"] = {"chat_template": PLAIN_TEMPLATE}
        notes.append(
            f"the tokenizer has no chat template: recipes/_base/{PLAIN_TEMPLATE} is taken, which needs no tokens of its own"
        )
    if not tokenizer.chat_template:
        keys["eval"] = {"apply_chat_template": False}
        notes.append("the tokenizer has no chat template: the evaluation asks without one (eval.apply_chat_template=false)")
    own = (stated.get("data") or {}).get("system_messages")
    if own == system_messages.BEFORE_USER:
        tokenizer.chat_template = system_messages.rendered_before_user(tokenizer.chat_template)
    tried, with_system = try_examples(tokenizer, data.examples, train), data.fields.get("system messages", 0)
    if with_system and tried.system is not None and own is None:
        keys["data"] = {"system_messages": system_messages.BEFORE_USER}
        notes.append(
            f"the chat template refuses system messages, which {with_system:,} conversations have ({tried.system}): "
            f"{system_messages.FIX}"
        )
        tokenizer.chat_template = system_messages.rendered_before_user(tokenizer.chat_template)
        tried = try_examples(tokenizer, data.examples, train)
    elif with_system and tried.leaves_out_system:
        notes.append(
            f"the chat template leaves out the system messages of {with_system:,} conversations: {system_messages.FIX}"
        )
    looked = Looked(keys, notes, refused, tuple(tried.helps), tuple(tried.ends))
    _tell(looked, tried, tokenizer, model, data)
    if tokenizer.chat_template and chats:
        _set_switch(looked, tokenizer, data, template_arguments(train))
    return looked


def _set_switch(looked: Looked, tokenizer: Any, data: MeasuredData, given: Mapping[str, Any]) -> None:
    """Switch thinking off where no row holds a thought and nothing says it; where some do, say that nothing says it."""
    from clustertune.data.rendering import unset_switch
    from clustertune.data.tokenizer import within_limits

    own = data.section["format"] == "prompt"
    known = {**given, **{name: None for example in data.examples for name in example.get("chat_template_kwargs", ())}}
    thoughts, every = 0 if own else data.with_thought, not data.without_thought
    found = within_limits(lambda: unset_switch(tokenizer, known, thoughts, every=every, own=own))
    if found is None:
        return
    name, text = found
    if own or thoughts:
        looked.notes.append(text)
        return
    looked.keys.setdefault("train", {})[TEMPLATE_ARGUMENTS] = {**given, name: False}
    said = f"no row holds a thought: train.{TEMPLATE_ARGUMENTS}={{{name}: false}}"
    looked.notes.append(f"{said}, so that evaluation, chat and serve ask as the rows teach")


def _tell(looked: Looked, tried: Tried, tokenizer: Any, model: FoundModel, data: MeasuredData) -> None:
    """Add what the trial showed of thoughts, answers and token ids."""
    from clustertune.data.sequences import NO_ROOM
    from clustertune.data.tokenizer import ENDLESS, ENDLESS_FIX
    from clustertune.data.tokens import OTHER_TEMPLATE, open_thoughts

    keys, notes, refused = looked.keys, looked.notes, looked.refused
    if tried.opens_thought and data.without_thought and data.section["format"] != "prompt":
        notes.append(open_thoughts(data.without_thought, tried.opens_thought))
    if tried.indistinct:
        keys.setdefault("train", {})["assistant_only_loss"] = False
        notes.append(f"all tokens are learnt, not the assistant's alone (train.assistant_only_loss=false): {tried.indistinct}")
    if tried.stop is not None and data.section["format"] != "prompt":  # prompts end with no answer
        keys.setdefault("train", {})["eos_token"] = tried.stop
        notes.append(f"answers end with {tried.stop} in the chat template and not with {tokenizer.eos_token}: train.eos_token")
    if tried.endless and data.section["format"] != "prompt":
        refused.append(f"no answer ends with {tokenizer.eos_token}, the tokenizer's EOS: {ENDLESS} -> {ENDLESS_FIX}")
    rows = model.architecture.get("vocab_size")
    if isinstance(rows, int) and (beyond := max(tried.largest, tokenizer.pad_token_id)) >= rows:
        name = tokenizer.convert_ids_to_tokens(beyond)
        refused.append(f"{name!r} is token {beyond}, and the model has {rows} (vocab_size) -> {NO_ROOM}")
    if tried.refused:
        many = f"{len(tried.refused)} of the first {len(data.examples)} conversations"
        refused.append(f"the chat template refuses {many}: {tried.refused[0]} -> {OTHER_TEMPLATE}")


def left_out(made: Draft, looked: Looked) -> list[str]:
    """A sentence on the conversations of which ``train.max_length`` leaves nothing to train on, empty where there are none.

    Where it leaves the end of no answer, that is among what is refused.

    Raises UserError (exit code 1) where those are all that were looked at.
    """
    if not looked.helps:
        return []
    from clustertune.data.tokenizer import ENDLESS
    from clustertune.data.tokens import SPLITTING

    train = made.recipe["train"]
    size = int(train.get("max_length") or MAX_LENGTH)
    if made.recipe["data"].get("format") in ("text", "prompt") or train.get("packing_strategy") in SPLITTING:
        return []
    gone = [length for length in looked.helps if length == 0 or length > size]
    ends = [length for length in looked.ends if length]
    if ends and min(ends) > size and train.get("truncation_mode") != "keep_end" and len(gone) < len(looked.helps):
        fix = f"train.max_length={max(ends)} behind the options keeps the ends of the first {len(ends)}"
        looked.refused.append(f"no answer ends within train.max_length={size}: {ENDLESS} -> {fix}")
    if not gone:
        return []
    fix = f"train.max_length={max(gone)}" if max(gone) else "give pairs of answers that differ"
    text = f"{len(gone)} of the first {len(looked.helps)} conversations have nothing to train on within train.max_length={size}"
    if len(gone) == len(looked.helps):
        raise UserError(text, ExitCode.FAILED, file="command line", key="train.max_length", fix=f"{fix} behind the options")
    return [f"{text}: they are left out; {fix} keeps all of them"]


def choose(made: Draft, folder: Path, calibrated: CalibratedCluster, method: str) -> tuple[Draft, int]:
    """The draft in ``folder`` with the fastest distribution that fits and that this program starts; and its burdens: what has
    none goes first whatever it takes, as offloading depends on the node most.

    The base stays as the method says. Raises NothingFits, with the fewest nodes on which FSDP2 would fit.
    """
    source = RecipeSource(resolve(folder))
    nodes = source.resolved.recipe.slurm.nodes
    machine = calibrated.machine(nodes)
    roomy = replace(machine, usable_bytes=int(ROOM * machine.usable_bytes))
    advice = advise(source, roomy, calibrated.constants, nodes=[nodes], lengths=made.lengths)

    def allowed(option: CostedCandidate) -> bool:
        used = option.strategy
        quantised = used.weight_bytes < 1
        return used.kind in _KINDS and quantised == (method == "qlora") and used.cp == used.tp == 1

    fitting = sorted(filter(allowed, advice.fitting), key=lambda option: option.burdens)
    chosen = next(iter(fitting), None)
    if chosen is None:
        why = next((option.why for option in advice.losing if allowed(option)), "no strategy is possible")
        enough = fewest_nodes(source.resolved, calibrated.constants, machine.usable_bytes, cudnn=machine.has_cudnn_attention)
        fix = f"FSDP2 fits on {enough} such nodes" if enough and enough > nodes else "take larger GPUs"
        fix += {"full": ", or --method lora", "lora": ", or --method qlora", "qlora": ""}[method]
        if left := _left_by_quantisation(made.architecture, source.resolved.train_args["model_init_kwargs"] or {}):
            why = f"{why}; {left}"
        raise NothingFits(f"nothing fits on {machine.name}: {why}", file="command line", key="--gpus", fix=fix)
    arguments = chosen.candidate.arguments(source.resolved)
    document, _, _ = read_overrides(arguments)
    recipe = laid_over(made.recipe, document.data, null_removes=True)
    accelerate = {key: value for key, value in source.changed(arguments).accelerate.items() if value is not None}
    reason = f"{chosen.candidate.family} is the fastest that fits on {machine.name}: {chosen.step_s:.3g} s a step, "
    reason += f"{chosen.needed / GIB:.0f} of {machine.usable_bytes / GIB:.0f} GiB"
    chosen_draft = replace(made, recipe=recipe, accelerate=accelerate, assumed=[*made.assumed, reason])
    return chosen_draft, chosen.burdens


@contextmanager
def folder_of(made: Draft, name: str) -> Iterator[Path]:
    """The draft as a recipe folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="clustertune-") as parent:
        folder = Path(parent, name)
        folder.mkdir()
        write(made, folder)
        yield folder


def write(made: Draft, folder: Path) -> None:
    """``recipe.yaml``, ``accelerate.yaml``, ``model.json`` and the draft's other files."""
    import yaml

    def text(body: Mapping[str, Any]) -> str:
        return yaml.safe_dump(dict(body), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)

    try:
        (folder / "recipe.yaml").write_text(text(made.recipe), encoding="utf-8")
        (folder / "accelerate.yaml").write_text(text(made.accelerate), encoding="utf-8")
        keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in made.architecture.items())
        (folder / "model.json").write_text(f"{{\n{keys}\n}}\n", encoding="utf-8")
        for name, content in made.files.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise storage_error(error, "cannot be written", folder) from None


def page(made: Draft, name: str, model: FoundModel, following: Sequence[str], refused: Sequence[str] = ()) -> str:
    """``README.md`` of a new recipe: what it is, what was assumed, and the commands from here, or what comes before them."""
    what = f"{model.section['name']}, {size_of(made.architecture)} parameters. **Planned, not measured.** Assumed:"
    lines = [f"# {name}", "", what, "", *(f"- {one}" for one in made.assumed)]
    following = ["Before it runs:", "", *(f"- {one}" for one in refused)] if refused else ["```sh", *following, "```"]
    return "\n".join([*lines, "", *following, ""])


def commands(recipe: str, options: Sequence[str]) -> list[str]:
    """The commands from a recipe to a run: plan, a tiny run, the links, storage, submit. Without ``options``, which name the
    GPUs: the run on this machine."""
    if not options:
        return [f"clustertune run {recipe}", f"clustertune plan {recipe} --gpus {SAME_RANKS}"]
    cluster = shlex.join(options) if options[0] == "--cluster" else "--cluster NAME"
    return [
        f"clustertune plan {recipe} {shlex.join(options)}",
        f"clustertune run {recipe} --tiny --to export",
        f"clustertune nccl-check {cluster}",
        f"clustertune submit {recipe} {cluster}",
    ]


def read_options(
    model: str | None, data: str | None, method: str, gpus: str | None, cluster: str | None, *,
    needs_data: bool = False, of_data: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What the options name: the model, the measured data (None without), the place. Raises UserError with every problem.

    ``of_data``: keys of the section ``data`` that the command line states.
    """
    problems: list[Problem] = []
    if method not in METHODS:
        fix = did_you_mean(method, METHODS)
        problems.append(Problem(f"{method!r} is not a method", file="command line", key="--method", fix=fix))
    if model is None:
        fix = f"--model OWNER/NAME or a config.json; known without the Hub: {', '.join(known_models())}"
        problems.append(Problem("missing", file="command line", key="--model", fix=fix))
    if data is None and needs_data:
        fix = "--data FILE, a folder, or a dataset of the Hub"
        problems.append(Problem("missing", file="command line", key="--data", fix=fix))
    if gpus is not None and cluster is not None:
        text = "--gpus and --cluster exclude each other: a cluster file says which GPUs there are"
        problems.append(Problem(text, file="command line", key="--gpus", fix="leave one out"))
    made_of = measured = at = None
    if model is not None:
        with collect_problems(problems):
            made_of = find_model(model)
    if data is not None:
        with collect_problems(problems):
            measured = measure(data, of_data)
    with collect_problems(problems):
        at = where(gpus, cluster)
    raise_if(problems)
    return made_of, measured, at


def target(name: str) -> Path:
    """The folder of a new recipe. Raises UserError where the name is none, or the folder exists."""
    folder = Path(name) if "/" in name else Path("recipes", name)
    text = fix = None
    if not re.fullmatch(NAME, folder.name):
        text = "must be letters, digits, '.', '_' and '-', 64 at most, the first a letter or digit"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        text, fix = "exists already: nothing is overwritten", "choose another name, or remove it"
    elif not folder.parent.is_dir() and "/" in name:
        text, fix = f"{folder.parent} is not a folder", "make it first"
    if text:
        raise UserError(text, file=str(folder), key="NAME", fix=fix)
    return folder
