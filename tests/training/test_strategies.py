"""Every strategy trains the same: loss curves against one process, placements, checkpoints, and each guard taken away."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clustertune.chain import open_run
from clustertune.checkpoint.store import newest_whole, verify
from clustertune.errors import ExitCode
from clustertune.export.whole import export_either
from clustertune.manifest import read_manifest
from clustertune.resolve.resolve import resolve
from tests.command import events
from tests.training.benches import DDP, FSDP1, FULL, SAME, Bench, distributed, fsdp, make_bench, output_of, problems
from tests.training.forked import Forge

pytestmark = pytest.mark.timeout(900)

STEPS = 3
LOSS, NORM = 5e-6, 1e-4
"""Relative. The strategies add the same numbers in another order: a loss of 8 in float32 moves by one or two of its last bits
(measured: 1e-6 absolute after three steps). A gradient norm moves more, as one thread's float32 ``vector_norm`` is itself off:
0.881236 for the output projection's 786,432 elements, where double precision and two shards say 0.881264."""

WEIGHTS = 1e-4
"""Relative, over all. Adam divides by the gradient's own size: where that is near 0, a whole update may turn round."""


SHARDED = "dp_shard_cp: shard 0"
STRATEGIES: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "ddp": (2, DDP, {"whole"}),
    "fsdp1": (2, FSDP1, {"dp_shard: flat"}),
    "fsdp2": (2, fsdp(), {"dp_shard: shard 0"}),
    "fsdp2-offload": (2, fsdp({"fsdp_offload_params": True}), {"dp_shard: shard 0"}),
    "hsdp": (4, fsdp(dp_replicate=2, dp_shard=2), {f"dp_replicate: replicate, {SHARDED}"}),
    "tp": (4, fsdp(dp_shard=2, tp=2), {f"{SHARDED}, tp: {how}" for how in ("shard 0", "shard 1", "replicate")}),
    "cp": (2, fsdp(cp=2), {SHARDED}),
    "cp-dp": (4, fsdp(dp_shard=2, cp=2), {SHARDED}),
}
"""Name -> ranks, accelerate file, where parameters lie."""
FAST = {("cp", "lora")}
"""Those of ``make test``; the others are whole jobs."""


def refused(bench: Bench, broken: str, ranks: int, accelerate: Mapping[str, Any]) -> str:
    """What rank 0 says where a part of the program has been taken away."""
    path = bench.make(broken, ranks, accelerate)
    assert 0 not in bench.go(path, ranks, breaks=broken), output_of(path)
    return " ".join(problem["message"] for problem in problems(path))


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


def apart(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """How far apart two sets of tensors are, relative (L2 over all); the names must be the same."""
    assert tensors.keys() == others.keys()
    difference = sum(float((tensors[name] - other).double().square().sum()) for name, other in others.items())
    return math.sqrt(difference / sum(float(other.double().square().sum()) for other in others.values()))


def cases() -> list[Any]:
    """Every strategy with LoRA and with all parameters trained."""
    pairs = [(name, trained) for name in STRATEGIES for trained in ("lora", "full")]
    return [pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.jobs], id="-".join(pair)) for pair in pairs]


@pytest.mark.parametrize(("name", "trained"), cases())
def test_a_strategy_learns_what_one_process_learns(bench: Bench, name: str, trained: str) -> None:
    """A wrong divisor, a batch seen twice, a lost gradient or a lost state shows within three steps.

    Each is asked to stop by one rank, resumed, and exported from its shards; the parameters lie where they should.
    """
    ranks, accelerate, placements = STRATEGIES[name]
    more = FULL if trained == "full" else []
    path, alone = bench.train(name, ranks, accelerate, *more, stop=True), bench.alone(*more)
    compare(path, alone)
    found = distributed(path)
    assert set(found["placements"]) == placements
    assert found["mesh"] == (sizes(accelerate) or {"dp" if name == "ddp" else "dp_shard": 2})
    assert found["offloaded"] == (1.0 if name == "fsdp2-offload" else 0.0)
    assert found["attention"] == ("clustertune_context" if name.startswith("cp") else "sdpa")
    assert found["replicas"] == ("equal" if name in ("ddp", "hsdp") else None)
    assert apart(exported(path), exported(alone)) < WEIGHTS


@pytest.mark.jobs
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_save_behind_training_has_the_bytes_of_one_that_training_waits_for(bench: Bench, name: str, trained: str) -> None:
    """A run that is stopped waits for its save; one that is not takes the next step meanwhile."""
    strategy, more = STRATEGIES[name][:2], FULL if trained == "full" else []
    waited, behind = (bench.train(name, *strategy, *more, stop=stop) for stop in (True, False))
    copied = [e["save_copy_s"] for path in (waited, behind) for e in events(path, "checkpoint") if e["step"] == 2]
    assert copied[0] == 0 < copied[1]
    found = [read_manifest(path / "checkpoints" / step) for path, step in ((waited, "step-000002"), (behind, "step-000002.a2"))]
    shards = [{k: record for k, record in made.files.items() if k.endswith((".distcp", "tensors", "zer.pt"))} for made in found]
    assert shards[0] == shards[1] and shards[0] and found[0].meta["state_digests"] == found[1].meta["state_digests"]
    assert verify(behind / "checkpoints/step-000002.a2") == []


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, fsdp()),
    "4": (4, fsdp()),
    "hsdp": (4, fsdp(dp_replicate=2, dp_shard=2)),
    "tp": (4, fsdp(dp_shard=2, tp=2)),
    "fsdp1-2": (2, FSDP1),
    "fsdp1-4": (4, FSDP1),
    "ddp-2": (2, DDP),
    "ddp-4": (4, DDP),
}
WAYS = [("2", "4"), ("4", "2"), ("hsdp", "2"), ("4", "tp"), ("tp", "2"), ("fsdp1-4", "fsdp1-2"), ("ddp-2", "ddp-4")]


def reshaped(bench: Bench, before: str, after: str, *more: str) -> Path:
    """A run that is stopped after two steps and continued on another shape."""
    path = bench.make(before, *SHAPES[before], *more)
    assert bench.go(path, SHAPES[before][0], breaks="stop") == [ExitCode.AGAIN] * SHAPES[before][0], output_of(path)
    ranks, accelerate = SHAPES[after]
    (bench.recipe / "other.yaml").write_text(json.dumps(accelerate))
    open_run(resolve(bench.recipe, [*SAME, "accelerate=other.yaml", *more], ranks=ranks), path, ["test"])
    assert bench.go(path, ranks, attempt=2) == [0] * ranks, output_of(path)
    return path


@pytest.mark.parametrize(
    ("before", "after", "trained"),
    [
        pytest.param(*way, trained, marks=[] if (*way, trained) == ("4", "2", "lora") else [pytest.mark.jobs])
        for way in WAYS
        for trained in ("lora", "full")
    ],
)
def test_a_run_goes_on_on_another_shape(bench: Bench, before: str, after: str, trained: str) -> None:
    """Stopped after two steps and continued by other ranks or on another mesh: losses and weights of one process."""
    more = FULL if trained == "full" else []
    path = reshaped(bench, before, after, *more)
    assert [e["world_size"] for e in events(path, "start")] == [SHAPES[before][0], SHAPES[after][0]]
    alone = bench.alone(*more)
    compare(path, alone)
    assert apart(exported(path), exported(alone)) < WEIGHTS


@pytest.mark.jobs
def test_in_bfloat16_a_run_on_another_shape_stays_in_the_spread_of_both(bench: Bench) -> None:
    """Its losses are no farther from those of a run on either shape than these are from each other, in any step."""
    more = ["train.model_init_kwargs.dtype=bfloat16"]

    def losses(path: Path) -> list[float]:
        return [event["loss"] for event in events(path, "step")]

    two, four = (losses(bench.train(name, *SHAPES[name], *more)) for name in ("2", "4"))
    path = reshaped(bench, "4", "2", *more)
    spread = max(abs(one - other) for one, other in zip(two, four, strict=True))
    assert 0 < spread < 0.01, (two, four)
    for one, other, found in zip(two, four, losses(path), strict=True):
        assert min(one, other) - spread <= found <= max(one, other) + spread, (two, four, losses(path))


DROPPED = "lora.lora_dropout=0.3"
RECOMPUTE: dict[str, list[str]] = {
    "wrapper": ["accelerate.fsdp_config.fsdp_activation_checkpointing=true", "train.activation_checkpointing=null"],
    "model": ["train.activation_checkpointing=true"],
    "ratio": ["activation_checkpointing.ratio=0.5", "train.activation_checkpointing=null"],
    "attention": ["activation_checkpointing.save=[attention]", "train.activation_checkpointing=null"],
    "products": ["activation_checkpointing.save=[attention,every_second_matmul]", "train.activation_checkpointing=null"],
    "wrapper-offload": [
        "accelerate.fsdp_config.fsdp_activation_checkpointing=true",
        "accelerate.fsdp_config.fsdp_activation_checkpointing_offload=true", "train.activation_checkpointing=null",
    ],
    "model-offload": ["train.activation_checkpointing=true", "train.activation_offloading=true"],
}  # fmt: skip
"""Each way to recompute activations, and to keep in host memory what they start from."""


def drops() -> list[Any]:
    """Strategies by ways. ``wrapper`` is accelerate's for FSDP; ``make test`` has the pair that was wrong."""
    names = ["fsdp2", "fsdp1", "hsdp", "tp", "ddp", "zero3"]
    pairs = [(name, how) for name in names for how in RECOMPUTE if "wrapper" not in how or name not in ("ddp", "zero3")]
    return [pytest.param(*pair, marks=[] if pair == ("fsdp2", "wrapper") else [pytest.mark.jobs]) for pair in pairs]


def place_of(bench: Bench, name: str) -> tuple[int, dict[str, Any]]:
    """Ranks and accelerate file of a strategy; ZeRO-3's own file is written beside it."""
    if name != "zero3":
        return STRATEGIES[name][:2]
    pytest.importorskip("deepspeed")
    return 2, bench.zero("zero3")


_learnt: dict[tuple[Path, str], Any] = {}


def learnt(path: Path) -> Any:
    """Loss and gradient norm of each step, the evaluation, and a digest of each rank's parameters and optimizer state."""
    steps = [(e["loss"], e["grad_norm"]) for e in events(path, "step")]
    newest, _ = newest_whole(path / "checkpoints")
    assert newest is not None and len(steps) == STEPS
    return steps, [e["eval_loss"] for e in events(path, "eval")], read_manifest(newest.path).meta["state_digests"]


@pytest.mark.parametrize(("name", "how"), drops())
def test_dropout_and_recomputation_give_the_same_bits(bench: Bench, name: str, how: str) -> None:
    """A layer that is computed again must drop what it dropped: else its gradients are those of another loss."""
    strategy = place_of(bench, name)
    if (bench.folder, name) not in _learnt:
        _learnt[bench.folder, name] = learnt(bench.train(name, *strategy, DROPPED))
    path = bench.train(name, *strategy, DROPPED, *RECOMPUTE[how])
    assert learnt(path) == _learnt[bench.folder, name]
    assert distributed(path)["recomputed_layers"] == ("2 of 4" if how == "ratio" else "4 of 4")


PHI = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-05, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "embd_pdrop": 0.2, "resid_pdrop": 0.1, "attention_dropout": 0.0,
}  # fmt: skip
"""Drops some of its embeddings, outside of the layers that are recomputed, and behind each half of a layer."""


@pytest.fixture(scope="module")
def phi(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    same = [*SAME, "lora.target_modules=[q_proj, k_proj, v_proj, dense, fc1, fc2]"]
    return make_bench(forge, tmp_path_factory.mktemp("phi"), same, changes=PHI, layer="PhiDecoderLayer")


@pytest.mark.jobs
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_embeddings_that_are_dropped_are_dropped_alike(phi: Bench, trained: str) -> None:
    """With and without recomputation to the last bit; and tensor-parallel ranks drop the same of what all of them hold.

    Two data-parallel ranks each: under ``tp`` a rank that dropped other values than its group would learn another loss.
    """
    more = FULL if trained == "full" else []
    runs = {}
    for name in ("fsdp2", "tp"):
        ranks, accelerate, _ = STRATEGIES[name]
        strategy = (ranks, wrapping(accelerate, "PhiDecoderLayer"))
        runs[name] = phi.train(name, *strategy, *more)
        for how in ("wrapper", "model", "wrapper-offload"):
            assert learnt(phi.train(name, *strategy, *more, *RECOMPUTE[how])) == learnt(runs[name]), (name, how)
    compare(runs["tp"], runs["fsdp2"])
    assert apart(exported(runs["tp"]), exported(runs["fsdp2"])) < WEIGHTS


BF16 = ["train.bf16=true"]
BF16_LORA = [*BF16, "train.model_init_kwargs={dtype: bfloat16}"]


def precisions() -> list[Any]:
    names = ["fsdp2", "fsdp1", "hsdp", "tp", "cp", "ddp", "zero3"]
    pairs = [(name, trained) for name in names for trained in ("lora", "full")]
    return [pytest.param(*pair, marks=[] if pair == ("fsdp2", "lora") else [pytest.mark.jobs]) for pair in pairs]


@pytest.mark.parametrize(("name", "trained"), precisions())
def test_a_loss_in_bf16_is_that_of_float32_arithmetic(bench: Bench, name: str, trained: str) -> None:
    """On the same bf16 weights, before the first update and after; cast to bfloat16 a loss of 8 has steps of 0.06.

    FSDP sums the gradients of adapters in float32, of all parameters as accelerate does.
    """
    more = FULL if trained == "full" else []
    path = bench.train(name, *place_of(bench, name), *more, *(BF16 if more else BF16_LORA))
    alone = bench.alone(*more)
    losses, expected = ([e["loss"] for e in events(run, "step")] for run in (path, alone))
    # Adam's step is as large as its rate however small the gradient: what full training has learnt by then is its own.
    assert losses[:2] == pytest.approx(expected[:2], rel=LOSS_BF16)
    [found], [wanted] = events(path, "eval"), events(alone, "eval")
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=LOSS_BF16 if trained == "lora" else 1e-3)
    assert distributed(path)["reduce_dtype"] == (
        None if name in ("ddp", "zero3") else "bfloat16" if trained == "full" else "float32"
    )


LOSS_BF16 = 1e-4
"""Relative: products in bfloat16 are right to 8 bits each, and their errors average out over 100 tokens (measured: 1e-5)."""


@pytest.mark.jobs
def test_gradients_are_summed_in_the_type_that_the_recipe_says(bench: Bench) -> None:
    """Over ranks and over micro batches; the head, which TRL never calls, among them."""
    ranks, accelerate, _ = STRATEGIES["fsdp2"]
    path = bench.train("fsdp2", ranks, accelerate, *FULL, *BF16, "reduce_dtype=float32")
    alone = bench.alone(*FULL)
    assert distributed(path)["reduce_dtype"] == "float32"
    losses, expected = ([e["loss"] for e in events(run, "step")] for run in (path, alone))
    assert losses[:2] == pytest.approx(expected[:2], rel=LOSS_BF16)


def sizes(accelerate: Mapping[str, Any]) -> dict[str, int]:
    section = accelerate.get("parallelism_config", {})
    return {key.removeprefix("parallelism_config_").removesuffix("_size"): size for key, size in section.items()}


@pytest.mark.parametrize(
    ("broken", "name", "message"),
    [
        ("split", "tp", "tensor parallelism splits 0% of the parameters"),
        pytest.param("context", "cp", "the model calls sdpa attention", marks=pytest.mark.jobs),
        pytest.param("offload", "fsdp2-offload", "0% of the parameters are kept in the CPU's memory", marks=pytest.mark.jobs),
        pytest.param("fsdp", "fsdp2", "the run is MULTI_CPU, the file asks for FSDP", marks=pytest.mark.jobs),
        pytest.param("replicas", "ddp", "hold different ones", marks=pytest.mark.jobs),
        pytest.param("replicas", "hsdp", "hold different ones", marks=pytest.mark.jobs),
        pytest.param("nan", "tp", "not finite at step 2", marks=pytest.mark.jobs),
        pytest.param("nan", "cp", "not finite at step 2", marks=pytest.mark.jobs),
    ],
)
def test_what_is_taken_away_is_noticed_before_a_step_is_taken(bench: Bench, broken: str, name: str, message: str) -> None:
    """Each part of a strategy, or each guard's subject, gone: the run ends and says so, instead of training something else."""
    ranks, accelerate, _ = STRATEGIES[name]
    assert message in refused(bench, broken, ranks, accelerate)


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    "sliding_window": None, "tie_word_embeddings": False, "router_aux_loss_coef": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    same = [*SAME, "lora.target_modules=[q_proj, k_proj, v_proj, o_proj]"]  # its experts are not Linear
    return make_bench(forge, tmp_path_factory.mktemp("mixtral"), same, changes=MIXTRAL, layer="MixtralDecoderLayer")


def wrapping(accelerate: Mapping[str, Any], layer: str) -> dict[str, Any]:
    return {**accelerate, "fsdp_config": {**accelerate["fsdp_config"], "fsdp_transformer_layer_cls_to_wrap": layer}}


@pytest.mark.jobs
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_experts_are_shared_out_over_the_tensor_parallel_group(mixtral: Bench, trained: str) -> None:
    """Expert parallelism: each rank has half of the experts, and the mixture learns what one process learns."""
    more = [*(FULL if trained == "full" else []), "train.router_aux_loss_coef=0.0"]
    path = mixtral.train("ep", 4, wrapping(fsdp(dp_shard=2, tp=2), "MixtralDecoderLayer"), *more, stop=True)
    alone = mixtral.alone(*more)
    compare(path, alone)
    experts = 2 * MIXTRAL["num_local_experts"] * 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]  # type: ignore[operator]
    assert distributed(path)["placements"][f"{SHARDED}, tp: shard 0"] >= experts
    assert apart(exported(path), exported(alone)) < WEIGHTS
    if trained == "full":
        from transformers import AutoModelForCausalLM

        _, info = AutoModelForCausalLM.from_pretrained(path / "merged", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


QLORA = [
    "train.model_init_kwargs.quantization_config.load_in_4bit=true",
    "train.model_init_kwargs.quantization_config.bnb_4bit_quant_type=nf4",
    "train.model_init_kwargs.quantization_config.bnb_4bit_compute_dtype=bfloat16",
    "train.model_init_kwargs.quantization_config.bnb_4bit_quant_storage=bfloat16",
    "train.bf16=true",
]


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_a_quantised_base_is_sharded_and_learns_the_same(bench: Bench, name: str) -> None:
    """nf4 in bfloat16's clothes goes through FSDP2; in bfloat16 a loss of 8 has steps of 0.03, and means of them less."""
    pytest.importorskip("bitsandbytes")
    ranks, accelerate, placements = STRATEGIES[name]
    path, alone = bench.train(name, ranks, accelerate, *QLORA, stop=True), bench.alone(*QLORA)
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in events(path, "step")] == pytest.approx([e[key] for e in events(alone, "step")], rel=0.01)
    found = distributed(path)
    assert set(found["placements"]) == placements and found["sharded_share"] < 0.55
    assert exported(path).keys() == exported(alone).keys()
