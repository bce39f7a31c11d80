"""Does a packed batch keep its conversations apart? Asked of the model class itself, with the collator that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_isolated(small_architecture: Mapping[str, Any], attention: str) -> bool:
    """True where the logits of a conversation do not depend on the one packed in front of it.

    A model of the same class, two layers small, sees a conversation alone and packed behind another one. It runs where
    training runs (FlashAttention needs the GPU) and leaves the random state as it was. ``attention`` is transformers'
    ``attn_implementation``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from clustertune.training import deepspeed

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if "flash" in attention else torch.float32
    skipped = ("architectures", "model_type", "dtype", "torch_dtype")
    keys = {key: value for key, value in small_architecture.items() if key not in skipped}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        config = AutoConfig.for_model(small_architecture["model_type"], **keys)
        with deepspeed.whole_models():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).to(device).eval()
        tokens = torch.randint(10, int(config.vocab_size), (3, 12)).tolist()
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

        def last_logits(*conversations: list[int]) -> Any:
            row = {"input_ids": [t for c in conversations for t in c], "seq_lengths": [len(c) for c in conversations]}
            batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in collate([row]).items()}
            batch.pop("labels")
            return model(**batch, use_cache=False).logits[0, -len(conversations[-1]) :].float()

        alone, behind_one, behind_other = (last_logits(*c) for c in (tokens[2:], tokens[0::2], tokens[1:]))
    # bf16 keeps 8 bits: its rounding is told from attention to another conversation by two decimal places.
    tolerance = (2e-2 if dtype == torch.bfloat16 else 1e-4) * float(alone.abs().max())
    return max(float((alone - other).abs().max()) for other in (behind_one, behind_other)) <= tolerance
