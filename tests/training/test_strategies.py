"""Every strategy trains the same: loss curves against one process, placements, checkpoints, and each guard taken away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from clustertune.chain import open_run
from clustertune.checkpoint.store import verify
from clustertune.export.whole import export_either
from clustertune.manifest import read_manifest
from tests.command import events
from tests.training.benches import (
    FULL,
    MIXTRAL,
    STRATEGIES,
    Bench,
    Benches,
    curve,
    digests,
    distributed,
    output_of,
    problems,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 3
LOSS, NORM = 5e-6, 1e-4
"""Relative. The strategies add the same numbers in another order: a loss of 8 in float32 moves by one or two of its last bits
(measured: 1e-6 absolute after three steps). A gradient norm moves more, as one thread's float32 ``vector_norm`` is itself off:
0.881236 for the output projection's 786,432 elements, where double precision and two shards say 0.881264."""
LOSS_BF16 = 1e-4
"""Relative: products in bfloat16 are right to 8 bits each, and their errors average out over 100 tokens (measured: 1e-5)."""
WEIGHTS = 1e-4
"""Relative, over all. Adam divides by the gradient's own size: where that is near 0, a whole update may turn round."""

SHARDED = "dp_shard_cp: shard 0"
PLACEMENTS = {
    "ddp": {"whole"},
    "fsdp2": {"dp_shard: shard 0"},
    "fsdp2-offload": {"dp_shard: shard 0"},
    "hsdp": {f"dp_replicate: replicate, {SHARDED}"},
    "tp": {f"{SHARDED}, tp: {how}" for how in ("shard 0", "shard 1", "replicate")},
    "cp": {SHARDED},
    "cp-dp": {SHARDED},
}
"""The strategies, and where parameters lie."""
TRAINED: dict[str, list[str]] = {"lora": [], "full": FULL}


def each(*names: str) -> list[tuple[str, str]]:
    """Strategies with LoRA and with all parameters trained."""
    return [(name, trained) for name in names for trained in TRAINED]


def losses(path: Path) -> list[float]:
    return [event["loss"] for event in events(path, "step")]


def compare(path: Path, other: Path) -> None:
    """The same loss and gradient norm at each step, and the same evaluation."""
    for key, tolerance in (("loss", LOSS), ("grad_norm", NORM)):
        assert [e[key] for e in events(path, "step")] == pytest.approx([e[key] for e in events(other, "step")], rel=tolerance)
    [found], [expected] = events(path, "eval"), events(other, "eval")
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=LOSS)
    # One of some 380 tokens may be predicted otherwise by another order of sums.
    assert found["eval_token_accuracy"] == pytest.approx(expected["eval_token_accuracy"], abs=3e-3)
    assert [e["step"] for e in events(path, "step")] == list(range(1, STEPS + 1))


def exported(path: Path) -> dict[str, Any]:
    """The tensors that ``clustertune export`` takes out of the final checkpoint."""
    from safetensors.torch import load_file

    summary = export_either(path)
    tensors = {k: v for file in sorted(Path(summary["out"]).glob("*.safetensors")) for k, v in load_file(file).items()}
    assert len(tensors) == summary["tensors"]
    return tensors


def same_weights(path: Path, other: Path) -> None:
    """The exports have the same names, and values that are near (L2 over all)."""
    tensors, others = exported(path), exported(other)
    assert tensors.keys() == others.keys()
    difference = sum(float((tensors[name] - other).double().square().sum()) for name, other in others.items())
    assert math.sqrt(difference / sum(float(other.double().square().sum()) for other in others.values())) < WEIGHTS


IN_MAKE_TEST = ("cp", "lora")
"""The one that is no whole job of CI's."""
ONES = [pytest.param(*one, marks=[] if one == IN_MAKE_TEST else pytest.mark.jobs) for one in each(*PLACEMENTS)]


@pytest.mark.parametrize(("name", "trained"), ONES)
def test_a_strategy_learns_what_one_process_learns(bench: Bench, name: str, trained: str) -> None:
    """A wrong divisor, a batch seen twice, a lost gradient or a lost state shows within three steps.

    Each is asked to stop by one rank, resumed, and exported from its shards; the parameters lie where they should.
    """
    path, alone = bench.train(name, *TRAINED[trained], stop=True), bench.alone(*TRAINED[trained])
    compare(path, alone)
    found = distributed(path)
    assert set(found["placements"]) == PLACEMENTS[name]
    assert found["mesh"] == (sizes(name) or {"dp" if name == "ddp" else "dp_shard": 2})
    assert found["offloaded"] == (1.0 if name == "fsdp2-offload" else 0.0)
    assert found["attention"] == ("clustertune_context" if name.startswith("cp") else "sdpa")
    assert found["replicas"] == ("equal" if name in ("ddp", "hsdp") else None)
    same_weights(path, alone)


def sizes(name: str) -> dict[str, int]:
    section = STRATEGIES[name][1].get("parallelism_config", {})
    return {key.removeprefix("parallelism_config_").removesuffix("_size"): size for key, size in section.items()}


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "trained"), each(*PLACEMENTS))
def test_a_save_behind_training_has_the_bytes_of_one_that_training_waits_for(bench: Bench, name: str, trained: str) -> None:
    """A run that is stopped waits for its save; one that is not takes the next step meanwhile."""
    waited, behind = (bench.train(name, *TRAINED[trained], stop=stop) for stop in (True, False))
    copied = [e["save_copy_s"] for path in (waited, behind) for e in events(path, "checkpoint") if e["step"] == 2]
    assert copied[0] == 0 < copied[1]
    found = [read_manifest(path / "checkpoints/step-000002") for path in (waited, behind)]
    shards = [{k: record for k, record in made.files.items() if k.endswith((".distcp", "tensors", "zer.pt"))} for made in found]
    assert shards[0] == shards[1] and shards[0] and found[0].meta["state_digests"] == found[1].meta["state_digests"]
    assert verify(behind / "checkpoints/step-000002") == []


WAYS = [
    ("fsdp2", "fsdp2-4"), ("fsdp2-4", "fsdp2"), ("hsdp", "fsdp2"), ("fsdp2-4", "tp"), ("tp", "fsdp2"),
    ("ddp", "ddp-4"),
]  # fmt: skip


def reshaped(bench: Bench, before: str, after: str, *more: str) -> Path:
    """A run that is stopped after two steps and continued on another shape."""
    path = bench.make(before, *more)
    bench.stop(path, STRATEGIES[before][0])
    open_run(bench.resolved(after, *more), path, ["test"])
    bench.end(path, STRATEGIES[after][0])
    return path


@pytest.mark.jobs
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_run_goes_on_on_another_shape(bench: Bench, before: str, after: str, trained: str) -> None:
    """Stopped after two steps and continued by other ranks or on another mesh: losses and weights of one process."""
    path, alone = reshaped(bench, before, after, *TRAINED[trained]), bench.alone(*TRAINED[trained])
    assert [e["world_size"] for e in events(path, "start")] == [STRATEGIES[before][0], STRATEGIES[after][0]]
    compare(path, alone)
    same_weights(path, alone)


@pytest.mark.jobs
def test_in_bfloat16_a_run_on_another_shape_stays_in_the_spread_of_both(bench: Bench) -> None:
    """Its losses are no farther from those of a run on either shape than these are from each other, in any step."""
    more = "train.model_init_kwargs.dtype=bfloat16"
    two, four = (losses(bench.train(name, more)) for name in ("fsdp2", "fsdp2-4"))
    found = losses(reshaped(bench, "fsdp2-4", "fsdp2", more))
    spread = max(abs(one - other) for one, other in zip(two, four, strict=True))
    assert 0 < spread < 0.01, (two, four)
    for one, other, value in zip(two, four, found, strict=True):
        assert min(one, other) - spread <= value <= max(one, other) + spread, (two, four, found)


DROPPED = "lora.lora_dropout=0.3"
RECOMPUTE: dict[str, list[str]] = {
    "model": ["activation_checkpointing.ratio=1"],
    "ratio": ["activation_checkpointing.ratio=0.5"],
    "attention": ["activation_checkpointing.save=[attention]"],
    "products": ["activation_checkpointing.save=[attention,every_second_matmul]"],
    "model-offload": ["activation_checkpointing.ratio=1", "train.activation_offloading=true"],
}
"""Each way to recompute activations, and to keep in host memory what they start from."""
DROPPING = [(name, how) for name in ("fsdp2", "hsdp", "tp", "ddp", "zero3") for how in RECOMPUTE]


def need(name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def unrecomputed() -> dict[str, Path]:
    """Runs with dropout in which nothing is recomputed, by strategy."""
    return {}


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "how"), DROPPING)
def test_dropout_and_recomputation_give_the_same_bits(bench: Bench, unrecomputed: dict[str, Path], name: str, how: str) -> None:
    """A layer that is computed again must drop what it dropped: else its gradients are those of another loss."""
    need(name)
    if name not in unrecomputed:
        unrecomputed[name] = bench.train(name, DROPPED)
    plain, path = unrecomputed[name], bench.train(name, DROPPED, *RECOMPUTE[how])
    assert (curve(path), digests(path)) == (curve(plain), digests(plain)) and len(curve(path)) == 2 * STEPS + 1
    assert distributed(path)["recomputed_layers"] == ("2 of 4" if how == "ratio" else "4 of 4")


def wrapping(name: str, layer: str) -> tuple[int, dict[str, Any]]:
    ranks, accelerate = STRATEGIES[name]
    return ranks, {**accelerate, "fsdp_config": {**accelerate["fsdp_config"], "fsdp_transformer_layer_cls_to_wrap": layer}}


@pytest.mark.jobs
@pytest.mark.parametrize("trained", TRAINED)
def test_embeddings_that_are_dropped_are_dropped_alike(benches: Benches, trained: str) -> None:
    """With and without recomputation to the last bit; and tensor-parallel ranks drop the same of what all of them hold.

    Two data-parallel ranks each: under ``tp`` a rank that dropped other values than its group would learn another loss.
    """
    phi, more, runs = benches("phi"), TRAINED[trained], {}
    for name in ("fsdp2", "tp"):
        strategy = wrapping(name, "PhiDecoderLayer")
        plain = runs[name] = phi.train(strategy, *more)
        for how in ("model", "model-offload"):
            path = phi.train(strategy, *more, *RECOMPUTE[how])
            assert (curve(path), digests(path)) == (curve(plain), digests(plain)), (name, how)
    compare(runs["tp"], runs["fsdp2"])
    same_weights(runs["tp"], runs["fsdp2"])


IN_BF16 = [*each("fsdp2", "hsdp", "tp", "cp", "ddp", "zero3"), ("fsdp2", "full in float32")]


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "trained"), IN_BF16)
def test_a_loss_in_bf16_is_that_of_float32_arithmetic(bench: Bench, name: str, trained: str) -> None:
    """On the same bf16 weights, before the first update and after; cast to bfloat16 a loss of 8 has steps of 0.06.

    FSDP sums the gradients of adapters in float32, of all parameters as accelerate does, or in the type that the recipe says:
    over ranks and over micro batches; the head, which TRL never calls, among them.
    """
    need(name)
    lora, said = trained == "lora", ["reduce_dtype=float32"] if "float32" in trained else []
    own = ["train.model_init_kwargs={dtype: bfloat16}"] if lora else [*FULL, *said]
    path, alone = bench.train(name, "train.bf16=true", *own), bench.alone(*([] if lora else FULL))
    # Adam's step is as large as its rate however small the gradient: what full training has learnt by then is its own.
    assert losses(path)[:2] == pytest.approx(losses(alone)[:2], rel=LOSS_BF16)
    assert curve(path)[-1] == pytest.approx(curve(alone)[-1], rel=LOSS_BF16 if lora else 1e-3)
    reduced = "float32" if lora or said else "bfloat16"
    assert distributed(path)["reduce_dtype"] == (None if name in ("ddp", "zero3") else reduced)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("broken", "name", "message"),
    [
        ("split", "tp", "tensor parallelism splits 0% of the parameters"),
        ("context", "cp", "the model calls sdpa attention"),
        ("offload", "fsdp2-offload", "0% of the parameters are kept in the CPU's memory"),
        ("fsdp", "fsdp2", "the run is MULTI_CPU, the file asks for FSDP"),
        ("replicas", "ddp", "hold different ones"),
        ("replicas", "hsdp", "hold different ones"),
        ("nan", "tp", "not finite at step 2"),
        ("nan", "cp", "not finite at step 2"),
    ],
)
def test_what_is_taken_away_is_noticed_before_a_step_is_taken(bench: Bench, broken: str, name: str, message: str) -> None:
    """Each part of a strategy, or each guard's subject, gone: the run ends and says so, instead of training something else."""
    path = bench.make(name)
    assert 0 not in bench.go(path, STRATEGIES[name][0], breaks=broken), output_of(path)
    assert message in " ".join(problem["message"] for problem in problems(path))


@pytest.mark.jobs
@pytest.mark.parametrize("trained", TRAINED)
def test_experts_are_shared_out_over_the_tensor_parallel_group(benches: Benches, trained: str) -> None:
    """Expert parallelism: each rank has half of the experts, and the mixture learns what one process learns."""
    mixtral, more = benches("mixtral4"), [*TRAINED[trained], "train.router_aux_loss_coef=0.0"]
    path, alone = mixtral.train(wrapping("tp", "MixtralDecoderLayer"), *more, stop=True), mixtral.alone(*more)
    compare(path, alone)
    experts = 2 * 4 * 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]
    assert distributed(path)["placements"][f"{SHARDED}, tp: shard 0"] >= experts
    same_weights(path, alone)
    if trained == "full":
        from transformers import AutoModelForCausalLM

        _, info = AutoModelForCausalLM.from_pretrained(path / "merged", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.jobs
@pytest.mark.parametrize(("trained", "ranks"), [("full", 4), ("full", 2), ("lora", 4)])
def test_fewer_experts_than_ranks_are_split_by_columns(benches: Benches, trained: str, ranks: int) -> None:
    """Two experts on four ranks: saved, continued on as many or on two (of a whole expert each), exported; all as one process."""
    mixtral, more = benches("mixtral2"), [*TRAINED[trained], "train.router_aux_loss_coef=0.0"]
    before, after = (wrapping(name, "MixtralDecoderLayer") for name in ("fsdp2-4", "fsdp2-4" if ranks == 4 else "fsdp2"))
    path, alone = mixtral.make(before, *more), mixtral.alone(*more)
    mixtral.stop(path, 4)
    experts = 2 * 2 * 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]
    assert distributed(path)["placements"]["dp_shard: shard 1"] == experts
    open_run(mixtral.resolved(after, *more), path, ["test"])
    mixtral.end(path, ranks)
    compare(path, alone)
    same_weights(path, alone)


NF4 = {"load_in_4bit": "true", "bnb_4bit_quant_type": "nf4"}
NF4 |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
QLORA = ["train.bf16=true", *(f"train.model_init_kwargs.quantization_config.{key}={value}" for key, value in NF4.items())]


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_a_quantised_base_is_sharded_and_learns_the_same(bench: Bench, name: str) -> None:
    """nf4 in bfloat16's clothes goes through FSDP2; in bfloat16 a loss of 8 has steps of 0.03, and means of them less."""
    pytest.importorskip("bitsandbytes")
    path, alone = bench.train(name, *QLORA, stop=True), bench.alone(*QLORA)
    assert curve(path)[: 2 * STEPS] == pytest.approx(curve(alone)[: 2 * STEPS], rel=0.01)
    found = distributed(path)
    assert set(found["placements"]) == PLACEMENTS[name] and found["sharded_share"] < 0.55
    assert exported(path).keys() == exported(alone).keys()
