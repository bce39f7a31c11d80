"""Attention over packed conversations: equal to one conversation at a time, and no more computed than that needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from clustertune.resolve.kernels import PACKED
from clustertune.training import packing
from clustertune.training.recompute import choose_layers
from tests.training.benches import Operations, curve, distributed, make_bench
from tests.training.forked import Forge
from tests.training.test_compiled import compiled

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 20},  # shorter than the longest conversations, and than two short ones
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
LENGTHS = ((1, 30, 51), (73, 2, 7))
"""Tokens of the conversations in the two packed rows of a micro batch."""
ROUNDING = {
    "cpu": {torch.float32: 2e-6, torch.bfloat16: 2e-2},
    "cuda": {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4},
}
"""Of logits and gradients, as a share of the largest. (The windowed layers of Gemma compute their scale in float32.)"""


@pytest.fixture(autouse=True)
def registered() -> None:
    packing.register()


def model(
    kind: str, attention: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind], **changes})
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).to(device)
    return made


def conversations() -> list[list[int]]:
    torch.manual_seed(0)
    return [torch.randint(10, 96, (length,)).tolist() for row in LENGTHS for length in row]


def batch(device: str = "cpu") -> dict[str, Any]:
    """What TRL's collator makes of the two rows."""
    flat, rows = iter(conversations()), []
    for lengths in LENGTHS:
        row = [next(flat) for _ in lengths]
        rows.append({"input_ids": [token for one in row for token in one], "seq_lengths": list(lengths)})
    made = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    made.pop("labels")
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in made.items()}


def alone(one: PreTrainedModel) -> torch.Tensor:
    """The logits of each conversation by itself, laid end to end."""
    return torch.cat([one(input_ids=torch.tensor([c], device=one.device), use_cache=False).logits[0] for c in conversations()])


def compare(packed: PreTrainedModel, single: PreTrainedModel, given: dict[str, Any], tolerance: float) -> None:
    """Logits and all gradients."""
    found, wanted = packed(**given, use_cache=False).logits.flatten(0, 1), alone(single)
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    for logits in (found, wanted):
        logits.float().square().sum().backward()
    for (name, one), other in zip(packed.named_parameters(), single.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).abs().max() <= tolerance * other.grad.abs().max(), name


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_CPU = [*((kind, torch.float32) for kind in KINDS), ("gemma3_text", torch.bfloat16)]
ON_GPU = [pytest.param(kind, dtype, "cuda", marks=gpu) for kind in KINDS for dtype in ROUNDING["cuda"]]


@pytest.mark.parametrize(("kind", "dtype", "device"), [*((*case, "cpu") for case in ON_CPU), *ON_GPU])
def test_packed_is_one_conversation_at_a_time(kind: str, dtype: torch.dtype, device: str) -> None:
    """Heads of 16, grouped, with windows; float32 has no kernel on a GPU and goes conversation by conversation."""
    packed, single = (model(kind, attention, dtype, device) for attention in (PACKED, "sdpa"))
    compare(packed, single, batch(device), ROUNDING[device][dtype])


def test_no_mask_is_made() -> None:
    """sdpa's holds an entry for every two tokens of the micro batch."""
    given, square = batch(), sum(map(sum, LENGTHS)) ** 2
    seen = {}
    for attention in (PACKED, "sdpa"):
        with Operations() as seen[attention]:
            model("llama", attention)(**given, use_cache=False).logits.sum().backward()
    assert seen["sdpa"].largest >= square > seen[PACKED].largest
    assert seen[PACKED].names.count("torch_attn._varlen_attn.default") == SMALL["num_hidden_layers"]


def test_a_policy_keeps_its_result() -> None:
    """Recomputation alone runs it twice; kept, once, and the gradients are the same bits."""
    counts, gradients = {}, []
    for save in (None, (), ("attention",), ("attention", "every_second_matmul")):
        one = model("llama", PACKED, torch.bfloat16).train()
        if save is not None:
            one.gradient_checkpointing_enable()
            choose_layers(one, 1.0, save)
        with Operations() as seen:
            one(**batch(), use_cache=False).logits.float().square().sum().backward()
        counts[save] = seen.names.count("torch_attn._varlen_attn.default") // int(SMALL["num_hidden_layers"])
        gradients.append([p.grad for p in one.parameters()])
    assert list(counts.values()) == [1, 2, 1, 1]
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


def test_padded_rows_and_generation_are_sdpa() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(10, 96, (2, 30))
    left = torch.ones_like(tokens)
    left[0, :9] = 0
    ours, theirs = (model("mistral", attention).eval() for attention in (PACKED, "sdpa"))
    for mask in (left, left.flip(1), torch.ones_like(tokens), None):
        one, other = (m(input_ids=tokens, attention_mask=mask).logits for m in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
    words = {"attention_mask": left, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(m.generate(input_ids=tokens, **words) for m in (ours, theirs)))


@pytest.mark.jobs
def test_the_operation_is_one_for_the_compiler() -> None:
    """What torch asks of an operation with a kernel for CPUs; and a compiled layer has no break and the same numbers."""
    begins = torch.tensor([0, 3, 20, 21, 40], dtype=torch.int32)
    tensors = [torch.randn(40, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    for window in (-1, 5):
        given = (*tensors, begins, begins, 19, 19, window < 0, None, [window, 0], True)
        torch.library.opcheck(torch.ops.torch_attn._varlen_attn.default, given)
    plain, made = model("mistral", PACKED), model("mistral", PACKED)
    for layer in made.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    compare(made, model("mistral", "sdpa"), batch(), 2e-6)
    assert torch.equal(*(one(**batch(), use_cache=False).logits for one in (plain, made)))


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("llama", "sdpa"), ("llama", PACKED), ("mixtral", PACKED), ("gemma3_text", PACKED)],
)
def test_conversations_do_not_see_each_other(kind: str, attention: str) -> None:
    """Mixtures too: torch's grouped product of experts takes no float64. The check leaves the random state as it was."""
    before = torch.get_rng_state()
    assert packing.is_isolated({**SMALL, "model_type": kind}, attention)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("attention", [PACKED, "sdpa"])
def test_attention_across_conversations_is_noticed(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: without what tells where a conversation begins they see each other."""
    real, keys = DataCollatorForLanguageModeling.torch_call, ("input_ids", "labels")
    blind = lambda self, rows: {key: value for key, value in real(self, rows).items() if key in keys}  # noqa: E731
    monkeypatch.setattr(DataCollatorForLanguageModeling, "torch_call", blind)
    assert not packing.is_isolated({**SMALL, "model_type": "llama"}, attention)


# -- several ranks --------------------------------------------------------------------------------------------------------

PACKS = [
    "train.max_steps=3", "train.save_steps=3", "train.eval_steps=3", "train.max_length=128", "train.eval_on_start=false",
    "train.report_to=none", "lora.lora_dropout=0", "train.per_device_train_batch_size=2",
]  # fmt: skip
NO = "activation_checkpointing.ratio=0"


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_ranks_train_the_same_as_with_a_mask(forge: Forge, tmp_path: Path) -> None:
    """FSDP2: as it is, recomputed, with results kept, compiled: losses, gradient norms and the evaluation."""
    bench = make_bench(forge, tmp_path, PACKS)
    bench.seconds = 900
    masked = bench.train("fsdp2", NO, "train.model_init_kwargs.attn_implementation=sdpa")
    assert distributed(masked)["attention"] == "sdpa"
    kept = ["activation_checkpointing.ratio=1", "activation_checkpointing.save=[attention,every_second_matmul]"]
    for words in ([NO], ["activation_checkpointing.ratio=1"], kept, None):
        path = bench.train("fsdp2", *words) if words is not None else bench.train(compiled("fsdp2"), NO)
        assert curve(path) == pytest.approx(curve(masked), rel=2e-5, abs=2e-5), words
        assert distributed(path)["attention"] == PACKED
        assert distributed(path)["packing"] == {"isolated": True, "attention": PACKED}


# -- the kernels of a GPU -------------------------------------------------------------------------------------------------


def on_gpu(test: Any) -> Any:
    """A test that takes a GPU."""
    return gpu[0](gpu[1](test))


@on_gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_on_a_gpu_the_kernel_is_the_cpus(size: int) -> None:
    """Output and gradients of the operation alone, of the head sizes that models have, against float64 on the CPU."""
    begins = torch.tensor([0, 700, 701, 1200], dtype=torch.int32)
    for window in (-1, 100):
        torch.manual_seed(0)
        exact = [torch.randn(1200, heads, size, dtype=torch.float64, requires_grad=True) for heads in (8, 2, 2)]
        there = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in exact]
        results = []
        for tensors in (exact, there):
            at = begins.to(tensors[0].device)
            results.append(
                packing.varlen.varlen_attn(*tensors, at, at, 700, 700, window_size=(window, 0), **packing.grouped(True))
            )
            results[-1].square().sum().backward()
        for one, other in zip([*there, None], [*exact, None], strict=True):
            found, wanted = (results[1], results[0]) if one is None else (one.grad, other.grad)
            assert (found.cpu().double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()


@on_gpu
def test_on_a_gpu_the_kernel_is_what_runs() -> None:
    """And compiled layers, recomputed ones, autocast and the check of isolation."""
    given = batch("cuda")
    with Operations() as seen:
        model("llama", PACKED, torch.bfloat16, "cuda")(**given, use_cache=False)
    assert seen.names.count("torch_attn._varlen_attn.default") == SMALL["num_hidden_layers"]
    made = model("mistral", PACKED, torch.bfloat16, "cuda")
    for layer in made.model.layers:
        layer.compile(fullgraph=True)
    compare(made, model("mistral", "sdpa", torch.bfloat16, "cuda"), given, 3e-2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        compare(model("llama", PACKED, device="cuda"), model("llama", "sdpa", device="cuda"), given, 3e-2)
    torch.backends.cuda.matmul.allow_tf32 = True
    for attention in ("sdpa", PACKED, "flex_attention"):
        assert packing.is_isolated({**SMALL, "model_type": "llama"}, attention)
