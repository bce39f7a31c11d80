"""How vLLM servers share GPUs out for one model, from its bytes alone, and how long an evaluation by them may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from clustertune.cluster.hardware import GpuModel, read_hardware
from clustertune.cluster.schema import Cluster
from clustertune.errors import UserError
from clustertune.manifest import open_to_read
from clustertune.plan.constants import SECONDS, Term, total
from clustertune.plan.decoding import (
    LAYER_S,
    SHORT,
    SPEED_FACTOR,
    TP_LAYER_S,
    AnswerLengths,
    Course,
    DecodingSpeed,
    batches,
    continuous,
    products_per_s,
    token_sums,
)
from clustertune.plan.generation_cost import GPU_OVERHEAD, GPU_SHARE, MOST
from clustertune.plan.machine import generation, inside, is_joined
from clustertune.plan.strategy import LONGEST, servers_beside
from clustertune.recipe.eval_tasks import find_task, first_task
from clustertune.recipe.parameters import Values, count, weight_bytes
from clustertune.resolve.resolved import EVAL_DATA, Resolved
from clustertune.resolve.tiny import is_small

KV_BYTES = 2
"""Of one element of the key-value cache: bfloat16, as the weights."""
SEQUENCE_TOKENS = 1400
"""Tokens of a prompt and its answer that the cache is counted for: 120 and 1,280."""
PROMPT_TOKENS = 120
"""Of a prompt, and as many more for each example before it: IFEval's, 37 words on average, with template and margin."""
FEWEST = 16
"""Sequences that a server must hold at once, so that its GPUs are worth their price."""
READ_BYTES_S = 1e9
"""Reading the weights on one node, bytes/s: slow shared storage; assumed."""
IMPORT_S = 60.0
"""Of a start: processes, the client's and the server's imports, the model without its weights; assumed."""
LAYER_START_S = 2.5
"""Of a start of vLLM, for each layer: torch.compile, CUDA graphs, the first request. Published: 205 s of a 70B on eight GPUs
beside reading (vllm#19824), 91 s of a model of 1,131,008 cached tokens (runai-model-streamer#67), 34 to 59 s of a 1B whose
graphs were kept (vllm#20264)."""
LATE_S = 600.0
"""How long a server may need beyond twice the estimate before it is given up."""
OWN_LONGEST = 512
"""Tokens of an answer to one of one's own prompts at most, where the recipe does not say."""


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides how it is served."""

    weights: float
    """Bytes of the parameters as they are served."""
    cache: float
    """Bytes of key-value cache of one token, over all layers."""
    heads: int
    """Query heads: tensor parallel ranks share them out evenly."""
    longest: int
    """Tokens that the model was made for."""
    layers: int
    active: float
    """Parameters that a token passes through."""
    hidden: int

    @classmethod
    def of(cls, architecture: Mapping[str, Any], weights: float) -> ModelSize:
        """Of the keys of a ``config.json`` and the bytes of its weights. Cache: 2 (keys, values) x layers x heads x width."""
        values = Values(architecture)
        cache = 2 * values.layers * values.kv_heads * values.head_dim * KV_BYTES
        positions, counted = int(values.get("max_position_embeddings") or LONGEST), count(architecture)
        active = float(counted.active) if counted else weights / 2
        return cls(weights, cache, values.heads, positions, values.layers, active, values.hidden)


@dataclass(frozen=True)
class Serving:
    """Which servers answer the prompts of an evaluation."""

    servers: int
    """Independent servers on the one node; 1 where a server is larger than a node."""
    tensor_parallel: int
    """GPUs of a node that share each layer; 1 without GPUs."""
    pipeline_parallel: int
    """Nodes that share the layers out."""
    max_model_len: int
    """Tokens of prompt and answer together at most."""
    max_num_seqs: int
    """Sequences that one server answers at once."""

    nodes: int = 1
    """Nodes that one server spans."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs used on each node."""
        return self.servers * self.tensor_parallel * self.pipeline_parallel // self.nodes

    @property
    def concurrent(self) -> int:
        """Requests that the client has under way: more would wait in the servers' queues, where their timeouts run."""
        return max(2, self.servers * self.max_num_seqs)

    def __str__(self) -> str:
        over = f" over {self.nodes} nodes" if self.nodes > 1 else ""
        stages = f" x pipeline parallel {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        count = f"{self.servers} server{'s' if self.servers > 1 else ''}"
        return f"{count}{over}, tensor parallel {self.tensor_parallel}{stages}"


def serving(size: ModelSize, gpu_bytes: float | None, gpus: int, nodes: int, documents: int | None = None) -> Serving | None:
    """The smallest server that holds the model and :data:`FEWEST` sequences, and as many of them as a node has room for.

    ``gpu_bytes``: memory of one GPU; None or no ``gpus``: one server on the CPU. ``nodes``: those there are at most.
    ``documents``: prompts in all; a server for fewer than :data:`FEWEST` is not started. None: nothing fits.
    """
    length = min(size.longest, LONGEST)
    if not gpus or gpu_bytes is None:
        return Serving(1, 1, 1, length, FEWEST)
    usable = GPU_SHARE * gpu_bytes - GPU_OVERHEAD
    widths = [n for n in range(1, gpus + 1) if gpus % n == 0 and size.heads % n == 0]
    shapes = [(n, 1) for n in widths] + [(widths[-1], stages) for stages in range(2, nodes + 1)]
    for tensor, stages in shapes:
        left = usable * tensor * stages - size.weights
        sequences = math.floor(left / (size.cache * SEQUENCE_TOKENS))
        if sequences >= FEWEST and left >= size.cache * length:
            servers = 1 if stages > 1 else gpus // tensor
            if documents is not None:
                servers = max(1, min(servers, documents // FEWEST))
            return Serving(servers, tensor, stages, length, min(sequences, MOST), stages)
    return None


def beside_serving(resolved: Resolved, gpus: int) -> Serving:
    """The servers of one node beside a trainer that has some. ``gpus``: the node's; 0: one server on the CPU."""
    servers = servers_beside(resolved)
    assert servers is not None
    return Serving(max(1, gpus // servers.gpus), servers.gpus if gpus else 1, 1, servers.longest, MOST)


@dataclass(frozen=True)
class Estimate:
    """The wall time of one model's evaluation by its parts, and the range of it."""

    start: Term
    engine: DecodingSpeed
    lengths: AnswerLengths
    course: Course
    others: tuple[tuple[AnswerLengths, Course], ...]
    """With shorter answers, and where none ends by itself."""

    @property
    def parts(self) -> list[Term]:
        """Start, prompts, answers."""
        return [self.start, self.engine.prompts(self.lengths, self.course), self.engine.answers(self.course)]

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return total(self.parts)

    @property
    def around(self) -> tuple[float, float]:
        """The start, and shorter answers at a higher speed; the longest at a lower one."""
        low, high = (self.engine.seconds(lengths, course) for lengths, course in self.others)
        return self.start.value + low / SPEED_FACTOR, self.start.value + high * SPEED_FACTOR


def _estimate(
    start: Term, engine: DecodingSpeed, lengths: AnswerLengths, course: Callable[[AnswerLengths], Course]
) -> Estimate:
    ends = (replace(lengths, mean=mean) for mean in lengths.ends)
    return Estimate(start, engine, lengths, course(lengths), tuple((one, course(one)) for one in ends))


def by_servers(
    shape: Serving, size: ModelSize, gpu: GpuModel, link: float, documents: int, lengths: AnswerLengths
) -> Estimate:  # fmt: skip
    """An estimate of an evaluation's wall time: start, reading the weights, prompts, and the steps of the longest answers.

    The GPUs of ``tensor_parallel`` share each layer over ``link`` (bytes/s); stages of a pipeline follow one another.
    """
    values: dict[str, float | int | str] = {
        "start": IMPORT_S,
        "each": LAYER_START_S,
        "layers": size.layers,
        "servers": shape.servers,
    }
    values |= {"weights": size.weights / 1e9, "stages": shape.pipeline_parallel, "read": READ_BYTES_S / 1e9}
    text = "{start} s + {each} s x {layers} layers + {servers} servers x {weights} GB / {stages} nodes / {read} GB/s read"
    start = Term("start of the servers", start_seconds(shape, size), SECONDS, text, values)
    mine, engine = math.ceil(documents / shape.servers), _engine(size, gpu, shape.tensor_parallel, link=link)
    return _estimate(start, engine, lengths, lambda one: continuous(one, mine, shape.max_num_seqs, shape.servers))


def _engine(size: ModelSize, gpu: GpuModel, gpus: int = 1, *, link: float = 0.0, least: float = 0.0) -> DecodingSpeed:
    """``gpus`` that share each layer, over a link of so many bytes a second (0: not known); ``least``: of the host, a step."""
    speed = products_per_s((gpu.bf16_tflops or gpu.fp16_tflops or 0.0) * 1e12, generation(gpu))
    weights, cache, work = size.weights / gpus, size.cache / gpus, 2 * size.active / gpus
    beside, sums = size.layers * TP_LAYER_S * (gpus > 1), token_sums(size.layers, size.hidden, gpus, link)
    return DecodingSpeed(weights, cache, work, gpu.hbm_gb_s * 1e9, speed, beside, sums, least)


def start_seconds(shape: Serving, size: ModelSize) -> float:
    """An estimate of the time until the servers answer: processes, and each node's reading of its weights."""
    reading = shape.servers * size.weights / shape.pipeline_parallel / READ_BYTES_S
    return IMPORT_S + LAYER_START_S * size.layers + reading


def deadline_seconds(start: float) -> float:
    """How long servers may take until they answer, by the estimate of :func:`start_seconds`."""
    return 2 * start + LATE_S


def in_one_process(size: ModelSize, gpu: GpuModel, documents: int, lengths: AnswerLengths, batch: int) -> Estimate:
    """As :func:`by_servers`, of transformers in one process: its GPUs compute in turn, :data:`LAYER_S` a layer at least."""
    values = {"start": IMPORT_S, "weights": size.weights / 1e9, "read": READ_BYTES_S / 1e9}
    text = "{start} s + {weights} GB / {read} GB/s read"
    start = Term("start", IMPORT_S + size.weights / READ_BYTES_S, SECONDS, text, values)
    engine = _engine(size, gpu, least=size.layers * LAYER_S)
    return _estimate(start, engine, lengths, lambda one: batches(one, documents, batch))


KEY = "container.vllm"


@dataclass(frozen=True)
class Evaluation:
    """How the stage ``eval`` of a run answers its prompts on a cluster."""

    backend: str
    """``hf`` or ``vllm``."""
    why: str
    serving: Serving | None = None
    """With ``vllm``."""
    gpus_per_node: int | None = None
    """GPUs used on each node; None: not known."""
    models: int = 1
    """2: the base is scored too."""
    seconds: float | None = None
    """An estimate of the wall time, of all models; None: not known."""
    seconds_range: tuple[float, float] | None = None
    """From shorter answers at a higher speed to where none ends by itself; None: not known."""
    lengths: str = ""
    """How long answers are taken to be."""
    start_seconds: float | None = None
    """Of them until the servers of one model answer; None: not known."""
    note: str = ""
    """What keeps it from working; empty: nothing that is known."""
    assumed: str = ""
    """What the estimate takes for granted; empty: nothing, all tasks are known."""
    arithmetic: tuple[str, ...] = ()
    """How :attr:`seconds` come about, a line each; empty where they are not known."""

    @classmethod
    def of(cls, record: Mapping[str, Any], file: Path) -> Evaluation:
        """What the ``run.json`` at ``file`` recorded. Raises UserError where it was edited so that it cannot be read."""
        try:
            return TypeAdapter(cls).validate_python(record)
        except ValidationError as error:
            fix = "clustertune submit again: its jobs read what it writes"
            raise UserError(f"cannot be read: {error.errors()[0]['msg']}", file=str(file), key="evaluation", fix=fix) from None

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of :attr:`seconds`; None: not known."""
        return self._gpu_hours(self.seconds)

    @property
    def gpu_hours_range(self) -> tuple[float, float] | None:
        """The same of :attr:`seconds_range`."""
        low, high = (self._gpu_hours(value) for value in self.seconds_range or (None, None))
        return None if low is None or high is None else (low, high)

    def _gpu_hours(self, seconds: float | None) -> float | None:
        if not self.gpus_per_node or seconds is None:
            return None
        return (self.serving.nodes if self.serving else 1) * self.gpus_per_node * seconds / 3600

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "gpu_hours": self.gpu_hours, "gpu_hours_range": self.gpu_hours_range}

    def __str__(self) -> str:
        gpus = f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node != 1 else ''} in one process" if self.gpus_per_node else ""
        what = f": {self.serving or gpus}" if self.serving or gpus else ""
        both = " for base and tuned model" if self.models > 1 else ""
        time = ""
        if self.seconds and self.gpu_hours:
            around = " ({:.0f} to {:.0f})".format(*(value / 60 for value in self.seconds_range)) if self.seconds_range else ""
            time = f"; about {self.seconds / 60:.0f} min{around}{both}, {self.gpu_hours:.1f} GPU-hours"
            time += f" ({self.assumed})" if self.assumed else ""
        return f"eval backend {self.backend}{what} ({self.why}){time}"


def evaluation(resolved: Resolved, cluster: Cluster) -> Evaluation:
    """How the recipe's tasks are answered on a cluster, with an estimate of the time."""
    settings, like = resolved.recipe.eval, first_task()
    others = [task for task in settings.tasks if find_task(task) is None]
    if settings.data is not None and count_prompts(resolved) is None:
        others.append(EVAL_DATA)
    each = f"{settings.limit or like.documents} prompts each"
    assumed = f"assuming the time of {like.title} for {', '.join(others)}, {each}" if others else ""
    return replace(_evaluation(resolved, cluster), assumed=assumed)


@dataclass(frozen=True)
class WhileTraining:
    """What the scores of checkpoints cost a training (``eval.during``)."""

    times: int | None
    """How many checkpoints are scored; None: the number of steps is not known."""
    each_seconds: float | None
    """That the training stands still for one, its next start included; None: not known."""
    base_seconds: float
    """Of the base, with the first."""
    beside: bool = False
    """The servers beside the trainer answer, and it goes on."""

    @property
    def seconds(self) -> float | None:
        """Of all together; None: not known."""
        return None if self.times is None or self.each_seconds is None else self.times * self.each_seconds + self.base_seconds

    def __str__(self) -> str:
        many = "an unknown number of checkpoints" if self.times is None else f"{self.times} checkpoints"
        if self.beside:
            return f"scores while training: {many}, by the servers beside the trainer, which goes on meanwhile"
        each = "" if self.each_seconds is None else f", about {self.each_seconds / 60:.0f} min each, the next start included"
        return f"scores while training: {many}{each}; the training stands still meanwhile"


def while_training(resolved: Resolved, cluster: Cluster, steps: int | None, start_seconds: float) -> WhileTraining | None:
    """What ``eval.during`` takes; None where the recipe does not ask for it.

    ``steps``: of the training; ``start_seconds``: until its ranks take their first step.
    """
    during = resolved.recipe.eval.during
    if during is None:
        return None
    times = None
    if steps is not None:
        times = sum(during.is_due(step, resolved.recipe.milestones) for step in range(1, steps)) + 1
    asked = resolved.recipe.model_copy(update={"eval": resolved.recipe.eval.of_checkpoints(during)})
    scoring = evaluation(replace(resolved, recipe=asked), cluster)
    if resolved.recipe.scores_beside:  # the job waits for the scores of the last checkpoint alone
        return WhileTraining(times, 0.0, scoring.seconds or 0.0, beside=True)
    each = None if scoring.seconds is None else scoring.seconds + start_seconds
    return WhileTraining(times, each, scoring.seconds or 0.0)


def _evaluation(resolved: Resolved, cluster: Cluster) -> Evaluation:
    """By what the recipe asks for; ``auto``: vLLM where the cluster file names one, or the model is larger than a node."""
    settings, compute = resolved.recipe.eval, cluster.compute
    requested, models = settings.backend, 1 + settings.base
    weights = weight_bytes(resolved.architecture)
    gpu = read_hardware().gpus.get(compute.gpu) if compute.gpus and compute.gpu else None
    tasks = [find_task(task) or first_task() for task in settings.tasks]
    asked = [(settings.limit or task.documents, task.generation_kwargs.max_gen_toks) for task in tasks]
    if settings.data is not None:
        prompts = count_prompts(resolved) or first_task().documents
        asked.append((min(settings.limit or prompts, prompts), OWN_LONGEST))
    documents = sum(number for number, _ in asked)
    tokens = settings.max_gen_toks or max(longest for _, longest in asked)
    prompt = PROMPT_TOKENS * (1 + (settings.num_fewshot or 0))
    lengths = AnswerLengths.of(prompt, tokens, resolved.recipe.plan.answer_tokens, "plan.answer_tokens")
    shape = size = None
    if weights is not None and (gpu or not compute.gpus):
        size = ModelSize.of(resolved.architecture, weights)
        room = float(gpu.usable_bytes) if gpu else None
        shape = serving(size, room, compute.gpus, len(cluster.compute_nodes), documents)
    if settings.tensor_parallel_size or settings.pipeline_parallel_size:
        shape = _given(resolved, compute.gpus, shape)
    named = cluster.container.vllm or cluster.assumes_vllm
    lacking = "" if named else f"{KEY} of {cluster.source} is missing: make build-sif VARIANT=vllm"
    why_hf = ""
    if requested == "hf":
        why_hf = "eval.backend: hf"
    elif requested == "auto" and (reason := _why_in_one_process(resolved, cluster, size, shape)):
        why_hf = reason
    elif requested == "auto" and lacking and shape and shape.nodes == 1:
        why_hf = f"{cluster.name} has no {KEY}"
    if why_hf:
        if not (gpu and size):
            return Evaluation("hf", why_hf, models=models)
        used = size.weights + settings.batch_size * SEQUENCE_TOKENS * size.cache
        gpus = max(1, math.ceil(used / (gpu.usable_bytes - GPU_OVERHEAD)))
        if gpus <= compute.gpus:
            estimate = in_one_process(size, gpu, documents, lengths, settings.batch_size)
            return _timed(Evaluation("hf", why_hf, gpus_per_node=gpus, models=models), estimate)
        note = f"the model needs {gpus} GPUs of this kind, a node has {compute.gpus}: the other layers are computed from host "
        return Evaluation("hf", why_hf, gpus_per_node=compute.gpus, models=models, note=note + "memory, which is slow")
    if shape is None:
        note = "how large the model or the GPUs are is not known, or it fits nowhere"
        return Evaluation("vllm", "eval.backend: vllm", models=models, note=note)
    by_what = KEY if cluster.container.vllm else "assumed, no cluster file names it"
    why = "eval.backend: vllm" if requested == "vllm" else "the model does not fit one node" if shape.nodes > 1 else by_what
    found = Evaluation("vllm", why, shape, min(compute.gpus, shape.gpus_per_node), models, note=lacking)
    if not (gpu and size):
        return found
    link = inside(cluster).bytes_per_s if is_joined(cluster) else 0.0
    return _timed(found, by_servers(shape, size, gpu, link, documents, lengths))


def _timed(found: Evaluation, estimate: Estimate) -> Evaluation:
    """The same with an estimate of the time, of all models, and its arithmetic."""
    models, (low, high), one = found.models, estimate.around, estimate.seconds
    timed = replace(
        found, seconds=models * one, seconds_range=(models * low, models * high), lengths=str(estimate.lengths),
        start_seconds=estimate.start.value if found.serving else None,
    )  # fmt: skip
    gpus = (found.serving.nodes if found.serving else 1) * (found.gpus_per_node or 0)
    lines = [f"{term.name}: {term.arithmetic()}" for term in estimate.parts]
    lines.append(f"lengths: {estimate.lengths}; prompts of {estimate.lengths.prompt:,.0f} tokens")
    text = f"{low:,.0f} s with answers of {SHORT:g} of that length, {SPEED_FACTOR:g} times as fast"
    lines.append(f"range: {text}, to {high:,.0f} s where none ends by itself, at as much less speed")
    whole = f"{models} model{'s' * (models > 1)} x {one:,.0f} s x {gpus} GPUs / 3600 = {timed.gpu_hours:,.2f} GPU-hours"
    return replace(timed, arithmetic=(*lines, whole))


def _why_in_one_process(resolved: Resolved, cluster: Cluster, size: ModelSize | None, shape: Serving | None) -> str:
    """Why ``eval.backend: auto`` asks no server; empty: servers could answer. Weights made at random are served like others."""
    compute = cluster.compute
    if resolved.tiny or (resolved.recipe.model.weights == "random" and is_small(resolved.architecture)):
        return "the run is scaled down (--tiny)" if resolved.tiny else "the model is small, and its weights are random"
    if not compute.gpus:
        return f"{cluster.name} has no GPUs"
    if size is None:
        if weight_bytes(resolved.architecture) is None:
            return f"how large a {resolved.architecture.get('model_type')} model is cannot be counted"
        return f"how large the GPUs of {cluster.name} are is not known (compute.gpu)"
    if shape is None:
        number = compute.gpus * len(cluster.compute_nodes)
        room = f"{number} GPU{'s' if number > 1 else ''} of {cluster.name}"
        return f"too large for vLLM: {size.weights / 1e9:,.0f} GB of weights and {FEWEST} answers do not fit the {room}"
    return ""


def count_prompts(resolved: Resolved) -> int | None:
    """How many of one's own prompts are asked, by the lines of their file; None where that is not known."""
    path = resolved.inputs.get(EVAL_DATA)
    if path is None or path.suffix not in (".jsonl", ".csv", ".tsv", ".txt"):
        return None
    try:
        with open_to_read(path) as file:
            lines = sum(not line.isspace() for line in file)
    except OSError:
        return None
    return max(1, lines - (path.suffix in (".csv", ".tsv")))


def _given(resolved: Resolved, gpus: int, derived: Serving | None) -> Serving:
    """The sizes that the recipe says itself: one server over as many nodes as they take."""
    settings = resolved.recipe.eval
    tensor, stages = settings.tensor_parallel_size or 1, settings.pipeline_parallel_size or 1
    length = derived.max_model_len if derived else LONGEST
    return Serving(1, tensor, stages, length, FEWEST, math.ceil(tensor * stages / (gpus or 1)))
