"""The merged bytes are PEFT's, over dtypes, ranks, scalings, patterns, odd shapes and threads; and the output's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune.merge import merge, pieces
from clustertune.merge.lora import is_finite
from clustertune.merge.pieces import Scratch, add_update, row_blocks
from tests.merge.conftest import SHAPES, load_all, peft_merged, same_bytes, save_adapter, save_llama

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    "plain": (BF16, F32, {}),
    "rank 1": (BF16, F32, {"r": 1, "target_modules": ALL}),
    "rank 256": (BF16, F32, {"r": 256, "lora_alpha": 64, "target_modules": ALL}),
    "rslora": (BF16, F32, {"r": 24, "use_rslora": True, "target_modules": ALL}),
    "bf16 adapter": (BF16, BF16, {"target_modules": ALL}),
    "fp32 base": (F32, F32, {"target_modules": ALL}),
    "fp16 base": (F16, F32, {"target_modules": ALL}),
    "fp16 base, fp16 adapter": (F16, F16, {"target_modules": ALL, "modules_to_save": ["lm_head"]}),
    "patterns": (
        BF16,
        F32,
        {
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.(up|gate)_proj": 17, "down_proj": 2},
            "alpha_pattern": {r"model\.layers\.0\..*": 3, "v_proj|k_proj": 50},
        },
    ),
    "patterns with rslora": (BF16, F32, {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 9}}),
    "regular expression": (BF16, F32, {"target_modules": r".*layers\.[12]\..*(q|v)_proj"}),
    "some layers, named": (BF16, F32, {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}),
    "all-linear": (BF16, F32, {"target_modules": "all-linear"}),
    "head": (BF16, F32, {"target_modules": ["lm_head", "q_proj"]}),
    "saved modules": (BF16, F32, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norm in fp32": (F32, BF16, {"modules_to_save": ["input_layernorm", "norm"]}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {dtype: save_llama(folder / str(dtype), dtype) for dtype in (BF16, F16, F32)}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_peft(
    bases: dict[torch.dtype, Path], tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_dtype, adapter_dtype, settings = CASES[case]
    base = bases[base_dtype]
    adapter = save_adapter(tmp_path / "adapter", base, adapter_dtype, **settings)
    monkeypatch.setattr(pieces, "BLOCK_ELEMENTS", 40 * 72)  # several blocks for most tensors of so small a model
    monkeypatch.setattr(pieces, "CHUNK", 15_000)  # and several pieces
    monkeypatch.setattr(pieces, "STEP", 1_000)  # whole elements
    done = merge(base, adapter, tmp_path / "out", shard_size="90KB", workers=3)
    expected, found, before = peft_merged(base, adapter), load_all(tmp_path / "out"), load_all(base)
    assert set(found) == set(expected)
    assert [n for n in expected if not same_bytes(found[n], expected[n])] == []
    changed = {n for n in found if not same_bytes(found[n], before[n])}
    assert len(changed) == done["merged"] + done["replaced"] > 0


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTURES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "one matrix for each expert": ("qwen3_moe", False, {"target_parameters": EXPERTS}),
    "all experts in one tensor": ("qwen3_moe", True, {"target_parameters": EXPERTS}),
    "other names in the files": ("mixtral", False, {"target_parameters": EXPERTS, "rank_pattern": {r".*\.gate_up_proj": 3}}),
    "one parameter alone": ("mixtral", True, {"target_parameters": EXPERTS[1:], "target_modules": [], "use_rslora": True}),
    "all-linear, a router too": ("qwen3_moe", False, {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_the_bytes_of_experts_are_those_of_peft(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fused, settings = MIXTURES[case]
    shapes = {**SHAPES, "num_experts_per_tok": 2, "head_dim": 18, "num_local_experts": 5}
    if kind == "qwen3_moe":
        shapes |= {"num_experts": 5, "moe_intermediate_size": 45, "mlp_only_layers": [0]}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shapes, tie_word_embeddings=False), dtype=BF16)
    base = tmp_path / "base"
    model.save_pretrained(base)
    if fused:
        save_file(model.state_dict(), base / "model.safetensors", metadata={"format": "pt"})
    (base / "tokenizer.json").write_text("{}")
    adapter = save_adapter(tmp_path / "adapter", base, **{"target_modules": ["q_proj"], **settings})
    monkeypatch.setattr(pieces, "BLOCK_ELEMENTS", 40 * 72)
    monkeypatch.setattr(pieces, "CHUNK", 15_000)
    merge(base, adapter, tmp_path / "out", shard_size="90KB", workers=3)
    expected = peft_merged(base, adapter)
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict())
    assert [n for n in expected if not same_bytes(found[n], expected[n])] == []
    changed = {n.rpartition(".")[2] for n, before in model.state_dict().items() if not same_bytes(found[n], before)}
    assert {name.rpartition(".")[2] for name in settings.get("target_parameters", EXPERTS)} <= changed


def test_the_adapters_own_copy_of_the_head_counts(bases: dict[torch.dtype, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = save_adapter(tmp_path / "adapter", bases[BF16], target_modules=["lm_head"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.base_layer.weight"] += 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    merge(bases[BF16], adapter, tmp_path / "out")
    expected, found = peft_merged(bases[BF16], adapter), load_all(tmp_path / "out")
    assert [n for n in expected if not same_bytes(found[n], expected[n])] == []


def test_one_rounding_and_not_two(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the update before the addition, as ``safe_merge=True`` does, gives other bytes: the comparison can see it."""

    def twice(weight: Any, a: Any, b: Any, scaling: float, _scratch: Scratch, **_rounded: bool) -> None:
        weight += ((b @ a) * scaling).to(weight.dtype)

    expected, safe = peft_merged(base, adapter), peft_merged(base, adapter, safe_merge=True)
    monkeypatch.setattr(pieces, "add_update", twice)
    merge(base, adapter, tmp_path / "out")
    found = load_all(tmp_path / "out")
    assert all(same_bytes(found[n], safe[n]) for n in safe)
    assert any(not same_bytes(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(4097, 1025, 1), (2200, 1000, 8), (131, 20011, 256), (300_007, 1, 8), (300_007, 2, 8)]
)
def test_blocks_of_a_large_product_are_the_whole_product(rows: int, columns: int, rank: int) -> None:
    """For 1 and 2 threads, at the real block size and at shapes of which it makes several blocks (but of a single column)."""
    torch.manual_seed(rank)
    a, b, weight = torch.randn(rank, columns), torch.randn(rows, rank), torch.randn(rows, columns).bfloat16()
    wholes, scratch = [], Scratch()
    for threads in (2, 1):
        torch.set_num_threads(threads)
        whole = weight.clone()
        whole += (b @ a) * 0.7
        wholes.append(whole)
    for start, end in row_blocks(rows, columns):
        add_update(weight[start:end], a, b[start:end], 0.7, scratch)
    assert (len(row_blocks(rows, columns)) > 1) == (columns > 1)
    assert same_bytes(wholes[0], wholes[1])
    assert same_bytes(weight, wholes[0])


def test_same_bytes_whatever_the_file_size_and_the_workers(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge(base, adapter, tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    expected = load_all(tmp_path / "one")
    for size, workers in [("40KB", 1), ("40KB", 4), (1, 3)]:
        out = tmp_path / f"{size}-{workers}"
        merge(base, adapter, out, shard_size=size, workers=workers)
        found = load_all(out)
        assert found.keys() == expected.keys() and all(same_bytes(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nan_and_infinity_of_both_signs_are_noticed_anywhere(dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    largest = torch.finfo(dtype).max
    plain = torch.tensor([0.0, -0.0, largest, -largest, 1.0, -1.0] * 9).to(dtype)
    assert is_finite(memoryview(plain.view(torch.uint8).numpy()), name)
    for value in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 31, 53):
            spoilt = plain.clone()
            spoilt[at] = value
            for values in (spoilt, -spoilt):
                assert not is_finite(memoryview(values.view(torch.uint8).numpy()), name)
