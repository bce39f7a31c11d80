"""Which servers a model gets, by its bytes and the cluster's GPUs."""

from __future__ import annotations

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.host.system import GIB
from clustertune.launch.serving import (
    FEWEST,
    GPU_OVERHEAD,
    GPU_SHARE,
    SEQUENCE_TOKENS,
    Evaluation,
    ModelSize,
    evaluation,
    serving,
)
from clustertune.launch.shape import stage_shapes, warnings
from clustertune.resolve.resolve import resolve
from tests.conftest import REPO

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
SIZES = {
    "8B": ModelSize.of({**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}, 16.06e9),
    "70B": ModelSize.of({**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}, 141.1e9),
    "405B": ModelSize.of({**LLAMA, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128}, 811.7e9),
}
H100, H200, PRO_6000 = 79.11 * GIB, 139.72 * GIB, 94.97 * GIB


@pytest.mark.parametrize(
    ("size", "gpu", "gpus", "nodes", "servers", "tensor", "pipeline"),
    [
        ("8B", H100, 8, 1, 8, 1, 1),
        ("8B", H100, 1, 1, 1, 1, 1),
        ("8B", 23.6 * GIB, 4, 1, 2, 2, 1),  # 16 GB fit into one of 24 GB, and the cache of 16 sequences does not
        ("70B", H100, 8, 1, 2, 4, 1),
        ("70B", H200, 8, 4, 4, 2, 1),
        ("405B", PRO_6000, 8, 2, 1, 8, 2),
        ("405B", H200, 8, 1, 1, 8, 1),
        ("405B", H100, 8, 4, 1, 8, 2),
        ("8B", None, 0, 1, 1, 1, 1),
    ],
)
def test_shapes(size: str, gpu: float | None, gpus: int, nodes: int, servers: int, tensor: int, pipeline: int) -> None:
    found = serving(SIZES[size], gpu, gpus, nodes)
    assert found is not None
    assert (found.servers, found.tensor_parallel, found.pipeline_parallel) == (servers, tensor, pipeline)
    if gpu is not None:  # the sequences fit beside the weights
        room = (GPU_SHARE * gpu - GPU_OVERHEAD) * tensor * pipeline - SIZES[size].weights
        assert FEWEST <= found.max_num_seqs <= room / (SIZES[size].cache * SEQUENCE_TOKENS)
    assert found.concurrent == servers * found.max_num_seqs


def on(cluster: str, gpu: str | None = None, **container: object) -> Cluster:
    """A shipped cluster file, with another GPU or container."""
    found = load_cluster(str(REPO / "ops" / "clusters" / f"{cluster}.yaml"))
    compute = found.compute.model_copy(update={"gpu": gpu}) if gpu else found.compute
    return found.model_copy(update={"compute": compute, "container": found.container.model_copy(update=container)})


@pytest.mark.parametrize(
    ("recipe", "overrides", "cluster", "gpu", "container", "nodes", "gpus", "message"),
    [
        ("llama405b-oasst2", [], "rno-rtxpro6000", None, {}, 2, 8, "over 2 nodes, tensor parallel 8 x pipeline parallel 2"),
        ("llama405b-oasst2", [], "dgx-h100", "h200-sxm", {}, 1, 8, "1 server, tensor parallel 8"),
        ("llama405b-oasst2", [], "dgx-h100", None, {"vllm": None}, 2, 8, "1 server over 2 nodes"),
        ("llama70b-fsdp2", [], "dgx-h100", None, {}, 1, 8, "2 servers, tensor parallel 4"),
        ("llama8b-lima", [], "dgx-h100", None, {}, 1, 8, "8 servers, tensor parallel 1"),
        ("llama8b-lima", [], "dgx-h100", None, {"vllm": None}, 1, 1, "eval backend hf"),
        ("llama8b-lima", ["eval.backend=hf"], "dgx-h100", None, {}, 1, 1, "eval backend hf"),
        ("llama70b-fsdp2", ["eval.tensor_parallel_size=16"], "dgx-h100", None, {}, 2, 8, "over 2 nodes, tensor parallel 16"),
    ],
)  # fmt: skip
def test_the_stage_s_job(
    recipe: str,
    overrides: list[str],
    cluster: str,
    gpu: str | None,
    container: dict[str, object],
    nodes: int,
    gpus: int,
    message: str,
) -> None:
    resolved, machine = resolve(recipe, overrides), on(cluster, gpu, **container)
    found, job = evaluation(resolved, machine), stage_shapes(resolved, machine)["eval"]
    assert message in str(found)
    assert (job.nodes, job.gpus_per_node) == (nodes, gpus)
    if found.seconds is not None:
        assert found.seconds / 60 < job.minutes < 48 * 60
    lacking = [text for text in warnings(resolved, machine) if "container.vllm" in text]
    assert bool(lacking) == (found.backend == "vllm" and container.get("vllm", "") is None)


@pytest.mark.parametrize(("recipe", "backend"), [("llama70b-fsdp2", "hf"), ("llama405b-oasst2", "vllm")])
def test_the_time_limit_follows_the_estimate(recipe: str, backend: str) -> None:
    """And not the training's time; the base is scored too where the recipe says so."""

    def limit(*words: str) -> tuple[float, int]:
        resolved = resolve(recipe, [f"eval.backend={backend}", *words])
        machine = on("dgx-h100")
        found = evaluation(resolved, machine).seconds
        assert found is not None
        return found, stage_shapes(resolved, machine)["eval"].minutes

    alone, short, long = (limit(f"eval.base={base}", f"slurm.time={time}") for base, time in
                          (("false", "24:00:00"), ("true", "24:00:00"), ("true", "12:00:00")))  # fmt: skip
    assert short == long
    assert short[0] == 2 * alone[0]
    assert 2 * alone[0] / 60 <= alone[1] < short[1]


def timed(*words: str, gpu: str | None = None) -> Evaluation:
    found = evaluation(resolve("llama8b-lima", ["eval.base=false", *words]), on("dgx-h100", gpu))
    assert found.seconds and found.seconds_range and found.gpu_hours_range and found.gpu_hours
    low, high = found.seconds_range
    assert low <= found.seconds <= high and found.gpu_hours_range[0] <= found.gpu_hours <= found.gpu_hours_range[1]
    return found


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_the_estimate_has_prompts_and_lengths_with_their_source(backend: str) -> None:
    """More examples before a prompt, longer answers and more prompts cost more; a mean of one's own is named."""
    plain = timed(f"eval.backend={backend}")
    assert "assumed: 0.5 of the most" in plain.lengths and any(line.startswith("prompts:") for line in plain.arithmetic)
    for word in ("eval.num_fewshot=25", "plan.answer_tokens=1200", "eval.max_gen_toks=4096"):
        more = timed(f"eval.backend={backend}", word)
        assert (more.seconds or 0) > (plain.seconds or 0), word
    less = timed(f"eval.backend={backend}", "plan.answer_tokens=50")
    assert (less.seconds or 0) < (plain.seconds or 0) and "(plan.answer_tokens)" in less.lengths
    assert (timed(f"eval.backend={backend}", "eval.limit=40").seconds or 0) < (plain.seconds or 0)


def test_batches_of_transformers_wait_where_servers_fill_their_slots() -> None:
    """Answers of 50 tokens, of which the longest of each batch has several times as many."""
    short, long = (timed("eval.backend=hf", f"plan.answer_tokens={mean}") for mean in (50, 400))
    in_batches = (short.seconds or 0) / (long.seconds or 0)
    assert in_batches > 0.125 * 1.1


def test_the_job_has_time_for_answers_that_do_not_end() -> None:
    """A base model may write up to the limit each time: the stage's time limit holds twice of that."""
    resolved = resolve("llama70b-fsdp2", ["eval.backend=hf"])
    found = evaluation(resolved, on("dgx-h100"))
    assert found.seconds_range and stage_shapes(resolved, on("dgx-h100"))["eval"].minutes * 60 >= 2 * found.seconds_range[1]
