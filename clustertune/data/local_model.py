"""A model that needs no download: random weights of a given architecture and a tokenizer trained on the run's own text.

It lets every recipe run anywhere, with its own model class and its own distribution files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.data.chats import messages_of
from clustertune.recipe.parameters import parameter_count

KIND = "model"
LARGE = 2_000_000_000
"""Parameters beyond which a model is written shard by shard, from a block of random numbers."""
TEXT = 16 << 20
"""Characters that a local tokenizer learns from at most: more take memory and time, and change little."""
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Turns in the Llama 3.1 form (header tokens around the role, ``<|eot_id|>`` after each turn), with the assistant's part
between generation markers so that TRL can mask the rest."""

PAD = "<|finetune_right_pad_id|>"
EOS = "<|eot_id|>"
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", EOS)
"""The special tokens of Llama 3.1 that a fine-tuning run meets; the ids are the tokenizer's own."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> Any:
    """A byte-level BPE ``PreTrainedTokenizerFast`` with at most ``vocab_size`` tokens; every byte string is encodable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL_TOKENS[0], eos_token=EOS, pad_token=PAD, model_max_length=max_length
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


def local_tokenizer(architecture: Mapping[str, Any], texts: Iterable[str], *, template: bool = True) -> Any:
    """The tokenizer of such a model."""
    tokenizer = train_tokenizer(texts, int(architecture["vocab_size"]), int(architecture["max_position_embeddings"]))
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def make_local_model(
    architecture: Mapping[str, Any], texts: Iterable[str], out: Path, seed: int, *, template: bool = True
) -> Path:
    """Write a bf16 model and its tokenizer to ``out``, whole (with a manifest) or not at all; a whole one is kept.

    ``architecture`` holds the keys of a Hugging Face ``config.json``, ``model_type`` among them. The weights are drawn
    from ``seed`` and do not disturb the caller's random state. Without ``template`` the tokenizer has no chat template, as the
    base models have none for which a recipe names one: its template must reach the exports here too.
    """
    if not manifest.find_problems(out, KIND, hashes=False):
        return out
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = local_tokenizer(architecture, texts, template=template)
    keys = {
        key: value for key, value in architecture.items() if key not in ("architectures", "model_type", "torch_dtype", "dtype")
    }
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(architecture["model_type"], **{**keys, **ids})
    generation = GenerationConfig(**ids)
    if (parameter_count(architecture) or 0) > LARGE:
        parameters = write_random_weights(config, out, seed)
        generation.save_pretrained(out)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
        model.generation_config = generation
        model.save_pretrained(out)
        parameters = sum(p.numel() for p in model.parameters())
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(manifest.file_mode())
    manifest.seal(out, KIND, {"parameters": parameters, "seed": seed, "architecture": dict(architecture)})
    return out


def conversation_texts(folder: Path) -> Iterator[str]:
    """The text of the messages of a prepared dataset, in file order, up to :data:`TEXT`: what a local tokenizer learns from."""
    left = TEXT
    for name in ("train.jsonl", "eval.jsonl"):
        with (folder / name).open(encoding="utf-8") as lines:
            for line in lines:
                if left <= 0:
                    return
                example = json.loads(line)
                texts = [message["content"] for message in messages_of(example)] or [example["text"]]
                left -= sum(map(len, texts))
                yield from texts


# --- random_weights --------------------------------------------------------------------------------------------------------

# Random weights of any size, written shard by shard: what a benchmark of a large architecture trains without any download.
#
# Nothing is held but one shard. The values come from one block of normal numbers, laid over the tensors again and again at
# other places: drawing each of 8 billion numbers takes a CPU minutes, and for speed and memory they do not matter.


BLOCK = (1 << 22) + 9
"""Numbers of the block: odd, so that rows of a matrix do not repeat."""
SHARD_BYTES = 2_000_000_000
STD = 0.02
"""Where the configuration has no ``initializer_range``."""
INDEX = "model.safetensors.index.json"


def write_random_weights(config: Any, out: Path, seed: int, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write bf16 weights for a transformers ``config`` to ``out``: safetensors, their index, and the configuration.

    Matrices are normal with the configuration's deviation, norms 1, biases 0. Returns the number of parameters. Raises
    OSError.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    deviation = float(getattr(config, "initializer_range", None) or STD)
    block = (torch.randn(BLOCK, generator=generator) * deviation).to(torch.bfloat16)
    shards = split_torch_state_dict_into_shards({name: state[name] for name in shapes}, max_shard_size=shard_bytes)
    for name, keys in shards.filename_to_tensors.items():
        save_file({key: _fill(key, shapes[key], block) for key in keys}, out / name, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (out / INDEX).write_text(json.dumps(index) + "\n")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(out)
    return sum(math.prod(shape) for shape in shapes.values())


def _fill(name: str, shape: tuple[int, ...], block: Any) -> Any:
    """One tensor."""
    import torch

    if len(shape) < 2:
        return torch.zeros(shape, dtype=torch.bfloat16) if name.endswith("bias") else torch.ones(shape, dtype=torch.bfloat16)
    made = torch.empty(math.prod(shape), dtype=torch.bfloat16)
    shift = sum(name.encode()) * 7919 % BLOCK
    position = 0
    while position < len(made):
        piece = block[shift : shift + len(made) - position]
        made[position : position + len(piece)] = piece
        position, shift = position + len(piece), 0
    return made.view(shape)
