"""The schema of a recipe: what is trained, on what data, how it is judged. Keys that belong to TRL and PEFT stay theirs.

``train`` and ``lora`` are open mappings here: :mod:`clustertune.recipe.native_rules` checks their keys against the pinned
``SFTConfig`` (``DPOConfig``, ``GRPOConfig``) and ``LoraConfig``, so that a field which a new release removes is an error before
the queue.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The form of every name that becomes a path, a job name or an argument."""


def refuse_bool(value: Any) -> Any:
    """``true`` is 1 for pydantic; in a recipe a number that reads ``true`` is a mistake."""
    if isinstance(value, bool):
        raise ValueError("true or false is not a number")
    return value


def check_time(value: str) -> str:
    """A time as sbatch(1) reads ``--time``: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``; 0 would be no limit.

    Raises ValueError.
    """
    days, _, clock = value.rpartition("-")
    first, *rest = (int(part) for part in clock.split(":"))
    if any(part > 59 for part in rest) or (days and first > 23):
        raise ValueError("minutes and seconds are below 60, and hours below 24 after days")
    if not any((int(days or 0), first, *rest)):
        raise ValueError("Slurm takes 0 as no limit: write the hours that the partition allows")
    if int(days or 0) > 365:
        raise ValueError("longer than a year")
    return value


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def parse_minutes(text: str) -> float | None:
    """Minutes of Slurm's forms of a time; None for ``UNLIMITED`` and what is no time.

    ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S`` (sbatch(1), --time).
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(match[name]) for name in ("first", "second", "third") if match[name] is not None]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(match["days"]) * 1440 + hours * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)


LARGEST = 10**15
"""The largest number that a file may hold, well above every size, count and rate: products of a few still fit a float."""


def within(least: float, most: float) -> AfterValidator:
    """A validator of numbers whose sizes lie between two: with others, what is derived from them overflows or is 0."""

    def check(value: float) -> float:
        if value and not least <= abs(value) <= most:
            raise ValueError(f"should lie between {least:g} and {most:g}")
        return value

    return AfterValidator(check)


Number = Annotated[float, BeforeValidator(refuse_bool), Field(allow_inf_nan=False), within(1e-30, LARGEST)]
Score = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=LARGEST)]
Positive = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=LARGEST)]


def form(pattern: str, example: str) -> AfterValidator:
    """A validator of texts of one form, which errors say in ``words``."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"is not {example}")
        return text

    return AfterValidator(check)


Plain = Annotated[str, form(NAME, "a name of letters, digits, '.', '_' and '-'")]
HubName = Annotated[
    str, form(rf"({NAME}/)?{NAME}", "a Hub id such as owner/name, or a plain name (letters, digits, '.', '_' and '-')")
]
HubCommit = Annotated[str, form(r"[0-9a-f]{40}", "a Hub commit of 40 hex digits in lower case")]
DataSplit = Annotated[
    str, form(r"[A-Za-z0-9_.-]{1,100}(\[[0-9:%+-]{1,40}\])?", "the name of a split such as train or train[:10%]")
]
LocalPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]

TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}$")]
"""lm-eval's name of a task, a group or a tag."""
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,80}(,[A-Za-z0-9_.+-]{1,80})?$")]
"""lm-eval's ``METRIC``, or ``METRIC,FILTER``."""
FIRST_TASK = "ifeval"
"""What ``eval.tasks`` is by default."""
OWN_PROMPTS = "own_prompts"
"""What the rows of ``eval.data`` are called among the tasks."""

Scores = dict[TaskName, dict[MetricName, Score]]
Differences = dict[TaskName, dict[MetricName, Annotated[Number, Field(ge=-1, le=1)]]]


class Section(BaseModel):
    """Every section refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Part = TypeVar("Part", bound=Section)


def read_section(section: type[Part], values: Any) -> Part | None:
    """A section of a recipe's values; None where it is absent, or wrong in a way that the schema's problems tell."""
    try:
        return section.model_validate(values) if values is not None else None
    except ValidationError:
        return None


class Model(Section):
    """The base model."""

    name: HubName
    """Its id on the Hub, or a plain name for a model that the project makes itself."""
    revision: HubCommit | None = None
    """The commit on the Hub, 40 hex digits. Demanded where the weights come from the Hub."""
    weights: Literal["hub", "random"] = "hub"
    """``hub``: the published weights. ``random``: made locally from ``model.json`` with a locally trained tokenizer."""
    path: LocalPath | None = None
    """A local folder with the weights and the tokenizer, instead of the Hub."""
    chat_template: Annotated[str, form(NAME, "the name of a file in the recipe folder")] | None = None
    """A Jinja file in the recipe folder that is installed where the tokenizer has no chat template."""


class ExpectedSplits(Section):
    """How many conversations each split must have; a difference is a warning with both numbers."""

    train: Count | None = None
    eval: Count | None = None
    mean_tokens: Annotated[Number, Field(gt=0, le=10_000_000)] | None = None
    """Tokens of a train conversation on average, chat template included and cut at ``train.max_length``: for ``plan``."""


OF_THE_TEMPLATE = ("tools", "chat_template_kwargs")
"""Columns that TRL hands to the chat template, row by row."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", *OF_THE_TEMPLATE),
    "sharegpt": ("conversations", "system", *OF_THE_TEMPLATE),
    "prompt-completion": ("prompt", "completion", *OF_THE_TEMPLATE),
    "preference": ("prompt", "chosen", "rejected", *OF_THE_TEMPLATE),
    "prompt": ("prompt",),
    "alpaca": ("instruction", "input", "output", "system", "history", *OF_THE_TEMPLATE),
    "oasst-tree": (
        *("message_id", "parent_id", "message_tree_id", "text", "role", "lang", "rank", "deleted", "review_result"),
        *("prompt", "replies"),
    ),
    "lima": ("conversations", *OF_THE_TEMPLATE),
    "text": ("text",),
}
"""The columns that each format reads; ``data.columns`` gives them other names. Of ``prompt`` all others are kept."""

FORMATS = tuple(COLUMNS)


def is_address(text: str) -> bool:
    """Whether ``data.input`` is an address that fsspec opens, such as ``s3://bucket/rows.jsonl``, and no path."""
    return "://" in text


def check_input(text: str) -> str:
    """A path, or an address without credentials. Raises ValueError."""
    if not is_address(text):
        return text
    parts = urlsplit(text)
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", parts.scheme) or parts.scheme in ("file", "local") or "::" in text:
        raise ValueError("is not an address of an object store; files of this machine are named by their path")
    if "@" in parts.netloc or parts.query:
        raise ValueError("holds credentials or a signature: give them in the environment, as the storage's own tools do")
    return text


class DataSource(Section):
    """One set of rows: from the Hub, a file, a folder or an object store."""

    name: HubName
    """Its id on the Hub, or a plain name where ``input`` says which file."""
    revision: HubCommit | None = None
    """The commit on the Hub, 40 hex digits."""
    config: Plain | None = None
    """The dataset's configuration on the Hub; of a folder, the folder in it that is read."""
    split: DataSplit | dict[Literal["train", "eval"], DataSplit] | None = None
    """The split that is read: ``train_sft``, and of the Hub also ``train[:10%]``; or one for ``train`` and one for ``eval``."""
    input: Annotated[LocalPath, AfterValidator(check_input)] | None = None
    """Instead of the Hub, a local file or folder: absolute, or relative to the recipe folder if it exists there; or an address
    in an object store that fsspec opens."""
    format: Literal[FORMATS] | None = None  # type: ignore[valid-type]
    """How rows become examples. Demanded of each set of rows."""
    columns: dict[str, Annotated[str, Field(min_length=1, max_length=200)]] | None = None
    """By the format's name of a column, the input's own."""
    language: Annotated[str, form(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*", "a language code such as en")] | None = None
    """Keep trees whose root has this language code (``oasst-tree`` only)."""
    limit: Positive | None = None
    """Take only the first so many conversations of the input."""

    @model_validator(mode="after")
    def _has_columns(self) -> DataSource:
        if self.format not in (None, "prompt") and (other := sorted(set(self.columns or ()) - set(COLUMNS[self.format]))):
            known = ", ".join(COLUMNS[self.format])
            raise ValueError(f"columns: {', '.join(other)}: {self.format} has no such column, it has {known}")
        return self


CHOOSING = ("config", "split", "columns", "sources")
"""Keys of ``data`` that say what of an input is read; another input takes none of them over."""


class WeightedSource(DataSource):
    """One part of a mixture."""

    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    """How often each example is trained on in an epoch: 0.5 takes half of them, 2 takes each twice, 1.5 half of them twice."""


class Data(DataSource):
    """The conversations."""

    sources: Annotated[list[WeightedSource], Field(min_length=1)] | None = None
    """Several sets of rows instead of one; ``name`` is then that of the mixture."""

    eval_fraction: Annotated[Number, Field(gt=0, le=0.5)] = 0.05
    """Share of conversations that become the eval split where the input has no splits; those of one prompt stay together."""
    system_messages: Literal["template", "before-user", "leave-out"] = "template"
    """``template``: the chat template renders them. Where it refuses them: ``before-user`` puts their text before the user's
    first message, in the template that is saved with the model too; ``leave-out`` leaves these conversations out."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """``skip``: leave bad rows out, count and report them. ``stop``: refuse the input."""
    max_rejected: Score = 0.2
    """Share of the rows that may be bad; above it the input is refused: it is probably not what the recipe takes it for."""
    expect: ExpectedSplits | None = None

    @property
    def parts(self) -> tuple[DataSource, ...]:
        """The sets of rows: those of ``sources``, else the one that the section itself describes."""
        return tuple(self.sources) if self.sources else (self,)

    def keyed_parts(self) -> list[tuple[str, DataSource]]:
        """The same, each with the key that it stands under."""
        return [(f"data.sources.{n}" if self.sources else "data", part) for n, part in enumerate(self.parts)]

    @property
    def has_preferences(self) -> bool:
        """Whether all of it are pairs of answers; none is where others are."""
        return all(part.format == "preference" for part in self.parts)

    @property
    def has_prompts(self) -> bool:
        """Whether all of it are prompts, which the model answers itself; none is where others are."""
        return all(part.format == "prompt" for part in self.parts)

    @property
    def has_chats(self) -> bool:
        """Whether a chat template renders any of it; plain text needs none."""
        return any(part.format != "text" for part in self.parts)


class Slurm(Section):
    """The shape of the job: one rank per GPU (per process on a machine without GPUs)."""

    nodes: Annotated[Positive, Field(le=10_000)] = 1
    gpus_per_node: Annotated[Positive, Field(le=1_000)] = 1
    time: Annotated[
        str, form(r"(\d+-)?\d{1,3}(:\d{2}){0,2}", "a Slurm time such as 48:00:00 or 2-00:00:00"), AfterValidator(check_time)
    ] = "24:00:00"
    """Wall time limit in Slurm's form."""
    signal_seconds: Annotated[Positive, Field(le=65_535)] = 600
    """Seconds before the time limit at which Slurm signals the job, which ends its step, saves and goes back into the queue.
    Slurm keeps the number in 16 bits."""
    stall_seconds: Annotated[Number, Field(ge=60)] | None = None
    """Silence of a rank after which its attempt is ended and begun again; None: 300 s, or 5 times the longest so far."""
    staging: bool | None = None
    """Whether each node copies model and data to ``storage.staging`` before its ranks start; None: where the cluster has
    that, and what is read is on shared storage."""


def _check_scored(value: Any) -> Any:
    if value != "milestone" and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ValueError("is not milestone, nor a number of steps")
    return value


class During(Section):
    """Scores of the checkpoints while the training is under way."""

    every: Annotated[Any, AfterValidator(_check_scored)]
    """A number of optimizer steps, behind which a checkpoint is saved and scored; ``milestone``: the steps of
    ``save.milestones``. The base, as the reference, and the last step are scored besides."""
    tasks: Annotated[list[TaskName], Field(min_length=1)] | None = None
    """Of those in ``eval.tasks``; None: all."""
    limit: Positive = 64
    """Documents of each task."""
    keep: Literal["last", "best"] = "last"
    """What is exported: the last checkpoint, or the one whose paired difference to the base is the largest."""

    def is_due(self, step: int, milestones: Collection[int]) -> bool:
        """Whether the checkpoint of a step is to be scored, the last one's aside."""
        return step in milestones if self.every == "milestone" else step % int(self.every) == 0


TEMPLATE_SETTINGS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Arguments of transformers' ``apply_chat_template`` that are no variables of a template: no row and no recipe sets them."""


def wrong_template_arguments(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with ``chat_template_kwargs``; None: nothing."""
    if taken := sorted(TEMPLATE_SETTINGS & arguments.keys()):
        return f"holds {', '.join(taken)}: only variables that the chat template reads are set"
    if other := sorted(name for name in arguments if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
        return f"{other[0]!r} is no name of a variable"
    return None


def _check_template_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if fault := wrong_template_arguments(arguments):
        raise ValueError(fault)
    return arguments


class Eval(Section):
    """How the model is scored, in lm-eval's names."""

    tasks: list[TaskName] = [FIRST_TASK]
    """lm-eval's names; empty only beside ``data``."""
    data: LocalPath | None = None
    """A file of one's own prompts, which are answered beside ``tasks``: absolute, or relative to the recipe folder if it exists
    there. Rows are those that a training reads, with or without an answer, and with rules."""
    num_fewshot: Annotated[Count, Field(le=256)] | None = None
    """Examples before each question; None: the task's own number. lm-eval cuts off what the model's positions do not hold."""
    limit: Positive | None = None
    """Score only the first documents of each task; never for a published number."""
    batch_size: Positive = 8
    max_gen_toks: Positive | None = None
    """Tokens generated per answer at most; None: the task's own."""
    apply_chat_template: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_template_arguments)] = {}
    """Given to the chat template, of the model and of the base, and overriding what the training gave it."""
    think_end_token: str | Count | None = None
    """What ends a thought: it and what stands before it are taken off an answer before it is scored. None: as the chat template
    and the vocabulary have it; empty: nothing is taken off; a number: the token of this id."""
    backend: Literal["auto", "hf", "vllm"] = "auto"
    """``hf``: one process of transformers; ``vllm``: servers. ``auto``: by the model's size and what the cluster has."""
    tensor_parallel_size: Positive | None = None
    """GPUs that share each layer, of vLLM; None: derived. Without GPUs: processes, one on each node."""
    pipeline_parallel_size: Positive | None = None
    """Stages that share the layers out, of vLLM; None: derived."""
    stall_seconds: Annotated[Number, Field(ge=10)] = 1800
    """Seconds without an answer after which one of vLLM's servers is given up: 1,280 steps of a 405B model at 0.32 s are 7
    minutes."""
    base: bool = False
    """Score the base model too, and compare document by document."""
    during: During | None = None
    pass_mark: Scores = {}
    """Lowest score that passes, by task and metric; the stage fails below."""
    pass_difference: Differences = {}
    """Lowest difference to the base that passes, by task and metric; needs ``base``."""

    def of_checkpoints(self, during: During) -> Eval:
        """What is asked of each checkpoint that is scored while training, and of the base: the same in all else."""
        own = {"tasks": during.tasks or self.tasks, "limit": during.limit, "data": None, "base": False}
        return self.model_copy(update={**own, "pass_mark": {}, "pass_difference": {}})

    @model_validator(mode="after")
    def _has_base(self) -> Eval:
        if not self.tasks and self.data is None:
            raise ValueError("nothing is asked: name tasks of lm-eval, or data: a file of prompts")
        if self.during is not None and not (self.tasks and {*(self.during.tasks or self.tasks)} <= {*self.tasks}):
            raise ValueError("during.tasks are some of eval.tasks: name them there too")
        if self.pass_difference and not self.base:
            raise ValueError("pass_difference compares with the base: set base: true")
        return self


class Expect(Section):
    """What the reference run reached; ``report`` and ``compare`` put it beside the result."""

    tasks: Scores = {}
    """Scores of an evaluation, by task and metric."""
    train_loss: Number | None = None
    eval_loss: Number | None = None
    token_accuracy: Score | None = None
    hours: Annotated[Number, Field(gt=0)] | None = None
    """Wall hours of the training."""
    steps: Positive | None = None
    """Optimizer steps."""
    trainable_parameters: Positive | None = None


class ActivationCheckpointing(Section):
    """Which decoder layers keep only their input and compute the rest again in backward, and what they keep beside it."""

    ratio: Score = 1.0
    """Share of the decoder layers, spread evenly; 0: none, 1: all."""
    save: Annotated[list[Literal["attention", "matmul", "every_second_matmul"]], Field(min_length=1)] | None = None
    """Results that a recomputed layer keeps: those of the attention kernel, of all matrix products, or of the first, third,
    fifth ... of them; ``[attention, every_second_matmul]`` is torchtitan's policy. None: none."""


class Megatron(Section):
    """The distribution for Megatron-Bridge in its own container, in Megatron-Core's names; ``submit`` starts it."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Model chunks per pipeline rank (the interleaved schedule)."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer of the first stage: 126 layers, embedding and loss are 128 over 8 stages."""
    account_for_loss_in_pipeline_split: bool = False
    """The same of the loss, in the last stage."""
    context_parallel_size: Positive = 1
    expert_model_parallel_size: Positive = 1
    expert_tensor_parallel_size: Positive | None = None
    """Tensor parallelism of experts; None: that of the other layers."""
    sequence_parallel: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    use_distributed_optimizer: bool = True
    fp8: Literal["hybrid", "e4m3"] | None = None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model and one sequence."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class PlanFacts(Section):
    """What only ``plan`` reads: how a run that another program starts differs from one of ours, and how long answers are."""

    whole_logits: bool = False
    """The logits of all tokens are in memory at once, with their float32 copy; TRL computes the loss in tiles."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients are reduced, where it is not the one that accelerate takes."""
    overlap_tp: bool = False
    """Tensor-parallel collectives run beside the products (asynchronous TP)."""
    overlap_dp: bool = False
    """Of Megatron-Core: gradients and updated weights are sent beside the products (overlap_grad_reduce, overlap_param_gather);
    FSDP and DDP do so anyway."""
    overlap_pp: bool = False
    """Stages of a pipeline send beside the products (overlap_p2p_comm)."""
    sequence_parallel: bool = False
    """Norms and dropout are split over the tensor-parallel ranks; ``megatron`` has its own key for it."""
    reduce_each: bool = False
    """Gradients are reduced after each micro batch, so that none is kept whole; transformers' Trainer waits for the last."""
    fp8: bool = False
    """Matrix products are computed in float8 (torchao, Transformer Engine)."""
    answer_tokens: Positive | None = None
    """Mean tokens of the model's answers, in evaluation and GRPO: a run's own, where it is known."""


def named_bases(base: object) -> list[str]:
    """One name or several, the weakest first. Raises ValueError."""
    names = base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) and re.fullmatch(NAME, name) for name in names):
        raise ValueError("must be the name of a file in recipes/_base without .yaml, or a list of such names")
    return list(names)


class Budget(Section):
    """What the training may take in all its attempts: at 80 % a warning, at 100 % it saves and ends with exit code 93."""

    usd: Annotated[Number, Field(gt=0)] | None = None
    """By the on-demand price of its GPU in ops/prices.yaml."""
    gpu_hours: Annotated[Number, Field(gt=0)] | None = None
    """Hours of all ranks together: a rank is a GPU, or a process where there is none."""

    @model_validator(mode="after")
    def _says_one(self) -> Budget:
        if self.usd is None and self.gpu_hours is None:
            raise ValueError("neither usd nor gpu_hours: give one, or leave budget out")
        return self


def seconds_of(every: str) -> float:
    """The seconds of ``90s``, ``30m`` or ``2h``."""
    return float(every[:-1]) * {"s": 1, "m": 60, "h": 3600}[every[-1]]


def _check_every(value: Any) -> Any:
    good = isinstance(value, str) and re.fullmatch(r"auto|(?!0*(\.0*)?[smh])\d{1,6}(\.\d+)?[smh]", value)
    if not (good or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)):
        raise ValueError("is not auto, a number of steps, or a time such as 90s, 30m or 2h")
    return value


class Save(Section):
    """When a training saves, instead of ``train.save_steps``."""

    every: Annotated[Any, AfterValidator(_check_every)] = "auto"
    """A number of steps, or a time. ``auto`` weighs the cost of a save against that of a failure, as
    :mod:`clustertune.checkpoint.store` says."""
    milestones: tuple[Positive, ...] = ()
    """Steps that are saved besides, whose checkpoints stay beside those that ``save_total_limit`` counts."""


class Push(Section):
    """Where the adapter and its card go when the chain has ended; with the token of ``.env``."""

    repo: HubName
    public: bool = False
    """For everybody to see; a new repository is private without it."""


REWARD_OPTIONS: dict[str, tuple[str, ...]] = {
    "ifeval": (),
    "exact_match": ("column", "extract"),
    "regex": ("pattern", "column"),
    "json_schema": ("schema", "column"),
    "length": ("min", "max", "unit"),
}
"""Rewards that are here, each with what it can be told."""
CODE = r"[A-Za-z_]\w{0,63}:[A-Za-z_]\w{0,63}"
"""The form of a reward that the recipe brings: a file of its folder, without ``.py``, and a function in it."""


class Reward(Section):
    """One reward of a completion. ``function`` alone may stand for the section."""

    model_config = ConfigDict(extra="allow", frozen=True)
    function: str
    """``ifeval``, ``exact_match``, ``regex``, ``json_schema``, ``length``, or ``module:function`` of the recipe folder."""
    weight: Annotated[Number, Field(ge=-1000, le=1000)] = 1.0
    """What the reward is multiplied by before all are added."""

    @property
    def name(self) -> str:
        """What it is logged as: the function, without its module."""
        return self.function.rpartition(":")[2]

    @property
    def module(self) -> str | None:
        """The file of the recipe folder that has it, without ``.py``; None: it is one of ours."""
        return self.function.partition(":")[0] if ":" in self.function else None

    @property
    def options(self) -> dict[str, Any]:
        """Its other keys. A function of the recipe's own gets them as keyword arguments."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_known(self) -> Reward:
        known = REWARD_OPTIONS.get(self.function)
        if known is None and not re.fullmatch(CODE, self.function):
            raise ValueError(f"{self.function} is not one of {', '.join(REWARD_OPTIONS)}, nor module:function")
        if known is not None and (other := sorted(self.options.keys() - set(known))):
            raise ValueError(f"{', '.join(other)}: {self.function} takes {', '.join(known) or 'no options'}")
        return self


class TrainerServers(Section):
    """vLLM's servers beside the trainer: they answer for ``rollout: servers``, for scores (``eval.during``), or for both."""

    nodes: Annotated[Positive, Field(le=10_000)] = 1
    """Beside those of ``slurm.nodes``, which train."""
    tensor_parallel_size: Positive = 1
    """GPUs of a node that share each layer; a node with more of them has several servers."""


class Recipe(Section):
    """The sections of a recipe whose keys are clustertune's own, after its base and the overrides are laid over each other."""

    base: Annotated[list[str], BeforeValidator(named_bases)] | None = None
    """A file of ``recipes/_base``, without ``.yaml``, or several, the last the strongest; one level, never a chain."""
    model: Model
    data: Data
    trainer: Literal["sft", "dpo", "grpo"] = "sft"
    """TRL's class that trains: ``SFTTrainer`` on conversations and text, ``DPOTrainer`` on preferences, or ``GRPOTrainer`` on
    the model's own answers to prompts, by their rewards."""
    reward: Annotated[list[Reward], Field(min_length=1)] | None = None
    """What answers are judged by, with ``trainer: grpo``: names, or ``{function: NAME, weight: 1.0, ...options}``."""
    rollout: Literal["colocate", "servers"] = "colocate"
    """Where answers are generated: ``colocate`` on the GPUs that train, or on vLLM's ``servers`` in the same job."""
    servers: TrainerServers | None = None
    """vLLM's servers beside the trainer. Absent: one node of them with ``rollout: servers``, and none without."""
    accelerate: Annotated[str, form(rf"{NAME}\.yaml", "the name of a .yaml file in the recipe folder")] = "accelerate.yaml"
    """The distribution: an accelerate configuration file in the recipe folder."""
    activation_checkpointing: ActivationCheckpointing | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which FSDP sums gradients over ranks and micro batches (``MixedPrecisionPolicy.reduce_dtype``). Absent: float32
    for adapters, bfloat16 where all parameters are trained."""
    megatron: Megatron | None = None
    plan: PlanFacts = PlanFacts()
    slurm: Slurm = Slurm()
    staged: LocalPath | None = None
    """A folder that ``clustertune stage RECIPE --to`` has made: model, data and benchmark come from there, and nothing is
    asked of the network."""
    eval: Eval = Eval()
    expect: Expect = Expect()
    budget: Budget | None = None
    push: Push | None = None
    save: Save | None = None

    @property
    def milestones(self) -> tuple[int, ...]:
        """Steps whose checkpoints stay."""
        return self.save.milestones if self.save is not None else ()

    @property
    def beside(self) -> TrainerServers | None:
        """The servers that run beside the trainer, for its answers, its scores or both; None: there are none."""
        if self.rollout == "servers" or self.scores_beside:
            return self.servers or TrainerServers()
        return None

    @property
    def server_nodes(self) -> int:
        """Nodes of a training's job beside those of the training."""
        return self.beside.nodes if self.beside is not None else 0

    @property
    def scores_beside(self) -> bool:
        """Whether the servers beside the trainer score its checkpoints (``eval.during``), while it goes on."""
        has_servers = self.rollout == "servers" or self.servers is not None
        return has_servers and self.eval.during is not None and self.eval.backend != "hf"


class RecipeFile(Recipe):
    """All that a recipe may say."""

    train: dict[str, Any]
    """Fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``GRPOConfig``, and ``global_batch_size`` (sequences, preferences or
    completions per optimizer step over all ranks), from which gradient accumulation is derived."""
    lora: dict[str, Any] | None = None
    """Fields of PEFT's ``LoraConfig``; absent: all parameters are trained."""
