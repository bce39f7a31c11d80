"""Megatron-Core's own verdict over sizes, on a CPU; its output is ``tests/megatron/verdicts.json``.

Each case is given to ``TransformerConfig`` and to ``initialize_model_parallel`` over torch's fake process group of that many
ranks. The recorded file is of megatron-core 0.18.2, whose unpacked wheel was on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

SEVENTY = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64, "num_query_groups": 8}
BIG = {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128, "num_query_groups": 8}
MIXTRAL = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "num_moe_experts": 8,
}  # fmt: skip
MODELS = {"70b": SEVENTY, "405b": BIG, "mixtral": MIXTRAL}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("70b", 64, {"tp": 8, "pp": 4, "sequence_parallel": True}),
    ("70b", 64, {"tp": 8, "pp": 4, "vpp": 2, "sequence_parallel": True}),
    ("405b", 256, {"tp": 8, "pp": 8, "cp": 2, "sequence_parallel": True, **ENDS}),
    ("405b", 256, {"tp": 8, "pp": 8, "cp": 2, "sequence_parallel": True}),
    ("405b", 256, {"tp": 8, "pp": 9, "sequence_parallel": True}),
    ("70b", 64, {"tp": 3, "pp": 4}),
    ("70b", 64, {"tp": 16, "pp": 4}),
    ("70b", 60, {"tp": 8, "pp": 4}),
    ("70b", 64, {"tp": 8, "pp": 3}),
    ("70b", 64, {"tp": 8, "pp": 4, "vpp": 3}),
    ("70b", 64, {"tp": 8, "pp": 1, "vpp": 2}),
    ("70b", 64, {"tp": 1, "pp": 4, "sequence_parallel": True}),
    ("mixtral", 16, {"tp": 2, "pp": 1, "ep": 8, "sequence_parallel": True}),
    ("mixtral", 16, {"tp": 2, "pp": 1, "ep": 8, "etp": 1, "sequence_parallel": True}),
    ("mixtral", 16, {"tp": 2, "pp": 1, "ep": 4}),
    ("mixtral", 16, {"tp": 1, "pp": 1, "ep": 3}),
    ("mixtral", 12, {"tp": 2, "pp": 1, "ep": 4, "sequence_parallel": True}),
    ("70b", 64, {"tp": 8, "pp": 1, "ep": 2, "sequence_parallel": True}),
]
NAMES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
}  # fmt: skip


def verdict(model: str, world: int, given: dict[str, Any]) -> dict[str, Any]:
    """Whether Megatron-Core takes it, in its words, and the data-parallel size that it finds."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel_state = importlib.import_module("megatron.core.parallel_state")
    transformer = importlib.import_module("megatron.core.transformer")
    values = {NAMES.get(key, key): value for key, value in given.items()}
    found: dict[str, Any] = {"model": model, "world": world, "section": values, "refuses": None, "data_parallel": None}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        more = {"pipeline_dtype": torch.bfloat16} if values.get("pipeline_model_parallel_size", 1) > 1 else {}
        transformer.TransformerConfig(
            **MODELS[model], **values, **more, bf16=True, params_dtype=torch.bfloat16, add_bias_linear=False
        )
        sizes = {key: value for key, value in values.items() if key in NAMES.values()}
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        found["data_parallel"] = parallel_state.get_data_parallel_world_size()
    except (ValueError, AssertionError, RuntimeError) as error:
        found["refuses"] = f"{type(error).__name__}: {error}"[:160]
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return found


def main() -> None:
    """One line for each case."""
    lines = [json.dumps(verdict(*case)) for case in CASES]
    sys.stdout.write("[\n " + ",\n ".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
