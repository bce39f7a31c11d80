"""What ``--advise`` and a plan that does not fit print: overrides that, resolved again, give what was said; a ranking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.host.system import GIB
from clustertune.plan import advise as advisor
from clustertune.plan.advise import Advice, Goal, Remedy, advise, remedies
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine, machine
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import Lengths
from clustertune.plan.strategy import Strategy
from clustertune.resolve.overrides import RecipeSource
from clustertune.resolve.resolve import resolve
from tests.plan.world import FSDP2, LLAMA_8B, LLAMA_70B, LORA_SECTION, ZERO3, write_cluster, write_recipe

REFERENCE = "rno-rtxpro6000"
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 8192,
}  # fmt: skip
HSDP = FSDP2 | {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"}
QLORA = {"model_init_kwargs": {"dtype": "bfloat16", "quantization_config": NF4}}
CASES: dict[str, dict[str, Any]] = {
    "8B full, FSDP2": {"nodes": 2},
    "8B full, nothing recomputed": {"nodes": 2, "activation_checkpointing": {"ratio": 0}},
    "8B full, a ratio": {"nodes": 2, "activation_checkpointing": {"ratio": 0.5}},
    "8B full, HSDP": {"nodes": 2, "accelerate": HSDP},
    "8B full, DDP": {"accelerate": {"distributed_type": "MULTI_GPU"}},
    "8B full, ZeRO-3": {"accelerate": ZERO3},
    "8B full, Megatron": {
        "nodes": 2, "megatron": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    },
    "8B full, float32, not packed": {"train": {"model_init_kwargs": {}, "packing": False, "per_device_train_batch_size": 2}},
    "8B LoRA, one GPU": {"lora": LORA_SECTION, "gpus": 1, "accelerate": {"distributed_type": "NO"}},
    "8B LoRA, float32 base": {"lora": LORA_SECTION, "train": {"model_init_kwargs": {}}},
    "70B LoRA": {"lora": LORA_SECTION, "model": LLAMA_70B, "nodes": 2},
    "70B QLoRA": {"lora": LORA_SECTION, "model": LLAMA_70B, "nodes": 2, "train": QLORA},
    "mixture of experts": {"model": EXPERTS, "nodes": 2},
}  # fmt: skip


@pytest.fixture
def where(tmp_path: Path) -> Callable[[int], PlanMachine]:
    """The machine of so many nodes of a cluster of 4 with 8 H100 each."""
    cluster = load_cluster(str(write_cluster(tmp_path / "hgx.yaml", nodes=4)))
    return lambda nodes: machine(cluster, nodes=nodes)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer micro batches and shares of recomputation: these tests are of the distributions."""
    monkeypatch.setattr("clustertune.plan.advise.MICRO", (1, 4))
    monkeypatch.setattr("clustertune.plan.advise.RATIOS", (0.0, 0.5, 1.0))


def ask(
    source: RecipeSource, machine_of: PlanMachine, goal: Goal = "time", lengths: Lengths | None = None, nodes: Any = None
) -> Advice:
    return advise(
        source, machine_of, Constants(), nodes=nodes or [source.resolved.recipe.slurm.nodes], goal=goal, lengths=lengths
    )  # fmt: skip


def check(advice: Advice, source: RecipeSource, at: PlanMachine, lengths: Lengths | None = None) -> int:
    """Of each sort the printed line gives the strategy, the step time and the memory that stand beside it."""
    named = advisor.overrides(advice, source)
    sorts = {_sort(option.strategy): option for option in reversed(advice.fitting)}
    for option in sorts.values():
        arguments = named[option.candidate.family]
        again = resolve(source.resolved.folder, arguments, tiny=source.resolved.tiny)
        plan = make_plan(again, at, lengths=lengths, sure=False)
        expected = replace(
            option.strategy, notes=(), sequence=plan.strategy.sequence, conversation=plan.strategy.conversation
        )  # both follow from the lengths
        assert asdict(replace(plan.strategy, notes=())) == asdict(expected), (option.candidate.family, arguments)
        assert plan.step.seconds == pytest.approx(option.step_s, rel=1e-9), option.candidate.family
        assert plan.needed == pytest.approx(option.needed, rel=1e-9), option.candidate.family
        assert plan.fits, option.candidate.family
    for option in [*advice.fitting, *advice.losing]:
        _check_name(option.candidate.family, option.strategy)
    return len(sorts)


def _check_name(family: str, used: Strategy) -> None:
    """A family is what its name says."""
    words = family.split()
    named = {
        "TP": "Megatron" if "PP" in words else "FSDP2", "CP": "FSDP2", "HSDP": "FSDP2",
        "one": "FSDP2" if "offload" in words else "NO",
    }  # fmt: skip
    assert used.kind == named.get(words[0], words[0]), family
    sizes = {axis: int(words[words.index(axis) + 1]) for axis in ("TP", "PP", "CP", "EP") if axis in words}
    assert sizes == {axis: getattr(used, axis.lower()) for axis in sizes}, family
    assert (used.replicas > 1) == (words[0] == "HSDP"), family
    assert (used.virtual > 1) == ("interleaved" in words), family
    assert (used.offload_params, used.offload_optimizer) == (
        ("cpu", "cpu") if "CPU offload" in family else ("nvme", "nvme") if "NVMe" in words
        else ("none", "cpu" if "CPU" in words else "none")
    ), family  # fmt: skip
    assert used.reshard == (used.weight_shards > 1 and "without" not in words) or used.kind == "Megatron", family
    if words[-1] in ("nf4", "bf16"):
        assert (used.weight_bytes < 1, used.weight_bytes == 2) == (words[-1] == "nf4", words[-1] == "bf16"), family


def _sort(used: Strategy) -> tuple[object, ...]:
    """What two options must differ in to need other overrides, and not only other numbers."""
    sizes = (used.tp > 1, used.pp > 1, used.cp > 1, used.ep > 1, used.virtual > 1, used.replicas > 1)
    return (used.kind, *sizes, used.reshard, used.offload_params, used.offload_optimizer, used.weight_bytes < 2)


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_gives_what_is_advised(name: str, tmp_path: Path, where: Callable[[int], PlanMachine]) -> None:
    """A line that selects another strategy than the one that won sends people into a queue for nothing."""
    case = CASES[name]
    source = RecipeSource(resolve(write_recipe(tmp_path / "recipe", **case)))
    lengths = Lengths((100, 500, 1500), "test")
    at = where(case.get("nodes", 1))
    advice = ask(source, at, lengths=lengths)
    assert check(advice, source, at, lengths) >= 2, [option.candidate.family for option in advice.losing]
    found = {option.candidate.family.removesuffix(" bf16") for option in [*advice.fitting, *advice.losing]}
    one = {"one GPU", "one GPU with CPU offload"}
    many = {"DDP", "FSDP2", "FSDP2 without resharding", "ZeRO-2", "ZeRO-3 with CPU optimizer", "TP 4 x PP 2"}
    assert found >= (one if case.get("gpus") == 1 else many), (found, advice.refused)


def test_the_reference_recipe_finds_what_its_page_predicts(where: Callable[[int], PlanMachine]) -> None:
    """405B LoRA on 2 x 8 RTX PRO 6000: no weights over Ethernet, a base of 4 bits; TP x PP beats bf16 FSDP."""
    source = RecipeSource(resolve("llama405b-oasst2"))
    at = machine(load_cluster(REFERENCE))
    advice = ask(source, at)
    check(advice, source, at)
    names = [option.candidate.family for option in advice.fitting]
    started = [option.candidate.family for option in advice.fitting if option.starts(load_cluster(REFERENCE))]
    assert started[0].startswith("HSDP") and started[0].endswith("nf4") and not any("PP" in name for name in started)
    assert names.index("TP 8 x PP 2") < names.index("FSDP2 bf16")
    assert "HSDP 8 x 2 bf16" in [option.candidate.family for option in advice.losing]
    assert "TP 2 x PP 8" in names, "126 layers, embedding and loss, as Megatron-Bridge cuts them"
    plan = make_plan(source.resolved, at, sure=False)
    assert plan.step.seconds / advice.fitting[0].step_s > 8


@pytest.mark.usefixtures("few_sizes")
def test_overrides_that_were_given_stay_and_nodes_are_named(tmp_path: Path, where: Callable[[int], PlanMachine]) -> None:
    """What was planned with train.max_length=1024 is advised with it, and what a change replaces is said once. Ranked by time
    the larger job wins here, by money the smaller."""
    words = ("train.max_length=1024", "train.per_device_train_batch_size=2", "slurm.nodes=2", "train.global_batch_size=512")
    source = RecipeSource(resolve(write_recipe(tmp_path / "recipe"), words), words)
    fast, cheap = (ask(source, where(4), goal, nodes=[1, 4]) for goal in ("time", "cost"))  # type: ignore[arg-type]
    assert fast.fitting[0].strategy.nodes == 4 and cheap.fitting[0].strategy.nodes == 1
    assert check(fast, source, where(4))
    named = advisor.overrides(fast, source)
    assert "slurm.nodes=4" in named[fast.fitting[0].candidate.family]
    for arguments in named.values():
        keys = [text.partition("=")[0] for text in arguments]
        assert "train.max_length=1024" in arguments and len(keys) == len(set(keys)), arguments


@pytest.mark.usefixtures("few_sizes")
def test_what_the_libraries_refuse_is_no_candidate(tmp_path: Path, where: Callable[[int], PlanMachine]) -> None:
    """Context parallelism of packed sequences is refused by the recipe's own checks, a batch that does not divide too."""
    packed = ask(RecipeSource(resolve(write_recipe(tmp_path / "packed"))), where(1))
    assert not any(o.strategy.cp > 1 for o in [*packed.fitting, *packed.losing])
    assert "drops what keeps packed conversations apart" in packed.refused["CP 2 x FSDP2 4"]
    padded = ask(RecipeSource(resolve(write_recipe(tmp_path / "padded", train={"packing": False}))), where(1))
    assert any(o.strategy.cp > 1 for o in [*padded.fitting, *padded.losing])
    small = RecipeSource(resolve(write_recipe(tmp_path / "small", train={"global_batch_size": 8})))
    advice = ask(small, where(4), nodes=[4])
    assert "not a multiple of 32" in advice.refused["FSDP2"]
    assert all(option.strategy.data_parallel_size <= 8 for option in advice.fitting) and advice.fitting


def test_the_strategy_table_of_the_sources_is_covered(tmp_path: Path, where: Callable[[int], PlanMachine]) -> None:
    """7B to 405B and mixtures: DDP, ZeRO, FSDP2, HSDP, TP x FSDP2, TP x PP, interleaved, EP, offload, NF4."""
    wanted = {
        "lora": ("DDP bf16", "DDP nf4", "ZeRO-1 bf16", "ZeRO-2 bf16", "FSDP2 bf16", "HSDP 8 x 2 nf4", "TP 8 x FSDP2 2 bf16"),
        "full": ("ZeRO-3 with CPU optimizer", "ZeRO-3 on NVMe", "FSDP2 with CPU offload", "TP 8 x PP 2",
                 "TP 4 x PP 4 interleaved", "FSDP2 without resharding"),
        "mixture": ("TP 1 x PP 1 x EP 8", "TP 2 x PP 2 x EP 4"),
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {"lora": {"lora": LORA_SECTION}, "full": {}, "mixture": {"model": EXPERTS}}
    for name, changes in cases.items():
        recipe = write_recipe(tmp_path / name, **({"nodes": 2, "model": LLAMA_8B} | changes))
        advice = ask(RecipeSource(resolve(recipe)), where(2))
        assert 150 < advice.searched < 2000, "enough to cover the table, few enough for three seconds"
        found = {option.candidate.family for option in [*advice.fitting, *advice.losing]}
        assert found >= set(wanted[name]), (set(wanted[name]) - found, advice.refused)


@pytest.fixture
def hardware(tmp_path: Path) -> PlanMachine:
    """4 nodes of 8 H100."""
    return machine(load_cluster(str(write_cluster(tmp_path / "hgx.yaml", nodes=4))))


def planned(folder: Path, hardware: PlanMachine, *given: str, **recipe: Any) -> Plan:
    found = make_plan(resolve(write_recipe(folder, **recipe), given), hardware, sure=False)
    assert not found.fits
    return found


def check_remedies(plan: Plan, hardware: PlanMachine, *given: str) -> list[Remedy]:
    """Resolved again with its overrides each fits, and is the plan that was shown."""
    found = remedies(plan, given)
    assert found
    for remedy in found:
        if remedy.arguments is None:
            continue
        again = make_plan(
            resolve(plan.resolved.folder, [*given, *remedy.arguments]), hardware, lengths=plan.lengths, sure=False
        )
        assert again.fits, remedy.what
        assert again.step.seconds == pytest.approx(remedy.plan.step.seconds), remedy.what
        assert again.needed == pytest.approx(remedy.plan.needed), remedy.what
    return found


def names(found: list[Remedy]) -> str:
    return "\n".join(remedy.what for remedy in found)


def test_two_changes_where_one_is_not_enough(tmp_path: Path, hardware: PlanMachine) -> None:
    """Nothing alone suffices: two together are looked for before giving up."""
    train = {"per_device_train_batch_size": 8, "max_length": 8192}
    recipe = {"model": LLAMA_70B, "lora": LORA_SECTION, "train": train, "activation_checkpointing": {"ratio": 0}}
    one = replace(hardware, nodes=1, host_bytes=300 * GIB)
    found = check_remedies(planned(tmp_path / "r", one, **recipe), one)
    assert ", and " in found[0].what


def test_an_evaluation_that_does_not_fit_is_made_smaller(tmp_path: Path, hardware: PlanMachine) -> None:
    """Training fits, its first evaluation would not: the smaller batch comes first, as it changes nothing that is learnt."""
    train = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 32, "max_length": 8192, "eval_strategy": "epoch"}
    recipe = {"model": LLAMA_70B, "lora": LORA_SECTION, "train": train, "activation_checkpointing": {"ratio": 1}}
    plan = planned(tmp_path / "r", hardware, **recipe)
    assert plan.peak.name == "evaluation"
    assert check_remedies(plan, hardware)[0].arguments == ["train.per_device_eval_batch_size=4"]
