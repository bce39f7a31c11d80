"""What trained is what serves: the exported and the merged model stop where the training stops, in its chat template."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from clustertune.data.local_model import train_tokenizer
from clustertune.errors import UserError
from clustertune.export.companions import stop_ids
from clustertune.export.export import export, export_model
from clustertune.manifest import find_problems
from clustertune.merge import merge
from tests.command import run
from tests.damage import refused
from tests.export.conftest import ARCHITECTURE, LORA, save_shards, seal_checkpoint, write_recipe

STOP, BASE_STOP, OTHER = "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
SIZES = {**ARCHITECTURE, "vocab_size": 400}


def make_base(folder: Path, *, generation: bool = True, template: bool = True, pad: bool = True, **config: Any) -> Path:
    """A model that answers nothing but ``<|eot_id|>``, at which its own files do not stop: as of Qwen2.5 or Llama 3 base."""
    tokenizer = train_tokenizer(["what is it that is said here"] * 20, 400, 256)
    tokenizer.eos_token = BASE_STOP
    if not pad:
        tokenizer.pad_token = None
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(0)
    eos = tokenizer.convert_tokens_to_ids(BASE_STOP)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=eos, pad_token_id=None, **config))
    with torch.no_grad():  # the hidden state is constant: only the head decides
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(STOP)] = 1
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=eos)
    model.save_pretrained(folder)
    if not generation:
        (folder / "generation_config.json").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def make_checkpoint(folder: Path, base: Path, lora: dict[str, Any] | None, template: str | None, **train: str) -> Path:
    """A checkpoint of a training of ``base`` that changed nothing but the vocabulary's meaning."""
    if lora is None:
        tensors = {f"model.{name}": tensor for name, tensor in AutoModelForCausalLM.from_pretrained(base).state_dict().items()}
    else:
        from clustertune.export.export import build_expected

        shapes = build_expected(SIZES, lora, "example/tiny", None).tensors
        tensors = {f"model.{name}": torch.randn(shape) * 1e-3 for name, shape in shapes.items()}
    save_shards(folder / "pytorch_model_fsdp_0", tensors)
    write_recipe(folder, lora, SIZES, None, train, chat_template=template)
    return seal_checkpoint(folder)


def serve(tmp_path: Path, base: Path, how: str, template: str | None = None, **train: str) -> Path:
    """The model folder that a LoRA run or one of all parameters leaves; ``by hand``: the adapter is TRL's."""
    recorded = {} if how == "by hand" else train
    checkpoint = make_checkpoint(tmp_path / "checkpoint", base, None if how == "full" else LORA, template, **recorded)
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    if how == "full":
        export_model(checkpoint, merged, base)
        return merged
    export(checkpoint, adapter, None if how == "by hand" else base)
    if how == "by hand":
        tokenizer = AutoTokenizer.from_pretrained(base, **train)
        tokenizer.save_pretrained(adapter)
        (adapter / "MANIFEST.json").unlink()
    else:
        assert not find_problems(adapter, "adapter")
        assert AutoTokenizer.from_pretrained(adapter).eos_token == train.get("eos_token", BASE_STOP)
    merge(base, adapter, merged)
    return merged


def answer(folder: Path, tokens: int = 12) -> int:
    """The tokens that transformers generates, by the model folder's own files alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("what is it", return_tensors="pt", add_special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return int(made.shape[1] - inputs["input_ids"].shape[1])


def read(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / name).read_bytes()))


@pytest.mark.parametrize("how", ["lora", "full", "by hand"])
@pytest.mark.parametrize("generation", [True, False], ids=["", "no generation_config"])
def test_an_answer_ends_at_the_eos_of_the_training(tmp_path: Path, how: str, generation: bool) -> None:
    base = make_base(tmp_path / "base", generation=generation)
    assert answer(base) == 12
    merged = serve(tmp_path, base, how, eos_token=STOP)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    stop = tokenizer.convert_tokens_to_ids(STOP)
    assert tokenizer.eos_token == STOP and answer(merged) == 1
    for name in ("config.json", "generation_config.json"):
        assert read(merged, name)["eos_token_id"] in (stop, [stop, tokenizer.convert_tokens_to_ids(BASE_STOP)])


@pytest.mark.parametrize("base_has", ["generation_config.json", "config.json"])
def test_an_adapter_alone_stops_where_the_training_does(tmp_path: Path, base_has: str) -> None:
    """Under plain transformers and PEFT, which take the base's generation settings unless they are given the adapter's: its
    folder holds them, as vLLM's ``--generation-config`` takes them too."""
    from peft import AutoPeftModelForCausalLM

    base, adapter = make_base(tmp_path / "base", generation=base_has == "generation_config.json"), tmp_path / "adapter"
    if base_has == "generation_config.json":  # settings of the base stay
        settings = base / base_has
        settings.write_text(json.dumps(read(base, base_has) | {"temperature": 0.5, "do_sample": True}))
    export(make_checkpoint(tmp_path / "checkpoint", base, LORA, None, eos_token=STOP), adapter, base)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(read(adapter, config.name) | {"base_model_name_or_path": str(base)}))
    tokenizer, stops = AutoTokenizer.from_pretrained(adapter), GenerationConfig.from_pretrained(adapter)
    assert (stops.temperature == 0.5) == (base_has == "generation_config.json")
    inputs = tokenizer("what is it", return_tensors="pt")

    def answer(load: Any, **more: Any) -> int:
        model = load(adapter, **more)
        return int(model.generate(**inputs, max_new_tokens=12, do_sample=False).shape[1] - inputs["input_ids"].shape[1])

    for load in (AutoPeftModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert answer(load) == 12, "the base's own settings do not stop it"
        assert answer(load, generation_config=stops) == 1


@pytest.mark.parametrize("part", ["adapter", "merged"])
def test_lm_eval_stops_where_the_training_does(tmp_path: Path, part: str) -> None:
    """It decodes the EOS of the tokenizer and stops at that text; vLLM 0.30.0 takes its id, and those of generation_config.json
    (``SamplingParams.update_from_generation_config``). So the folder of an adapter, which has no configuration, needs it."""
    from lm_eval.models.huggingface import HFLM

    base = make_base(tmp_path / "base")
    merged = serve(tmp_path, base, "lora", eos_token=STOP)
    of_adapter = {"pretrained": str(base), "peft": str(tmp_path / "adapter"), "tokenizer": str(tmp_path / "adapter")}
    for words, expected in (
        (of_adapter if part == "adapter" else {"pretrained": str(merged)}, 1),
        ({"pretrained": str(base)}, 9),
    ):
        lm = HFLM(**words, device="cpu", dtype="float32", batch_size=1, max_length=64)
        context = lm.tokenizer("what is it", return_tensors="pt")["input_ids"]
        until = [lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)]
        made = lm._model_generate(context=context, max_length=context.shape[1] + 9, stop=until)
        assert made.shape[1] - context.shape[1] == expected


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_template_that_trained_is_served(tmp_path: Path, how: str) -> None:
    base = make_base(tmp_path / "base", template=False)
    merged = serve(tmp_path, base, how, TEMPLATE, eos_token=STOP)
    for folder in [merged, *([tmp_path / "adapter"] if how == "lora" else [])]:
        assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    done = run("chat", merged, "--prompt", "What is 3?", "--greedy", "--max-new-tokens", "12", stack=True)
    assert done.code == 0 and not done.out.strip(), done


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_padding_of_the_training_is_served(tmp_path: Path, how: str) -> None:
    base = make_base(tmp_path / "base", pad=False)
    assert AutoTokenizer.from_pretrained(base).pad_token is None
    merged = serve(tmp_path, base, how, pad_token=OTHER)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.pad_token == OTHER
    for name in ("config.json", "generation_config.json"):
        assert read(merged, name)["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("how", ["lora", "full"])
def test_what_the_training_did_not_change_stays_the_base_s(tmp_path: Path, how: str) -> None:
    """Also keys of ``config.json`` that no class knows, and an EOS that stops an answer already."""
    base = make_base(tmp_path / "base")
    for name, more in {"config.json": {"eos_token_id": [6, 1], "own_key": 7}, "generation_config.json": {"top_k": 3}}.items():
        (base / name).write_text(json.dumps(read(base, name) | more | {"pad_token_id": 2}))
    merged = serve(tmp_path, base, how)
    for path in base.glob("*.json*"):
        if path.name == "config.json" and how == "full":
            assert read(merged, path.name) == read(base, path.name)
        elif path.name != "model.safetensors":
            assert (merged / path.name).read_bytes() == path.read_bytes(), path.name
    assert (merged / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()


def test_a_base_that_cannot_be_seen_is_asked_for(tmp_path: Path) -> None:
    """Where the training changed the EOS or the template: else nothing would stop, without a message."""
    base = make_base(tmp_path / "base")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", base, LORA, None, eos_token=STOP)
    with refused("tokenizer"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("how", ["lora", "full"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_pipe_in_place_of_a_base_s_file_is_refused(tmp_path: Path, how: str, name: str) -> None:
    """Read it would wait for ever, and left out the export would stop elsewhere, or have another template."""
    base = make_base(tmp_path / "base")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", base, LORA if how == "lora" else None, None, eos_token=STOP)
    (base / name).unlink()
    os.mkfifo(base / name)
    with refused("plain file"):
        (export if how == "lora" else export_model)(checkpoint, tmp_path / "out", base)


def test_an_adapter_with_an_older_template_keeps_it(tmp_path: Path) -> None:
    """transformers 4 writes the template into ``tokenizer_config.json``; the base's own file would go before it."""
    base = make_base(tmp_path / "base")
    export(make_checkpoint(tmp_path / "checkpoint", base, LORA, None), tmp_path / "adapter", base)
    adapter = Path(shutil.copytree(tmp_path / "adapter", tmp_path / "own"))
    (adapter / "MANIFEST.json").unlink()
    (adapter / "chat_template.jinja").unlink()
    config = adapter / "tokenizer_config.json"
    config.write_text(json.dumps(read(adapter, config.name) | {"chat_template": TEMPLATE}))
    merge(base, adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE


FILES: dict[str, dict[str, Any]] = {
    "added tokens": {"tokenizer.json": {"added_tokens": [{"id": 9, "content": "<e>"}], "model": {"vocab": {"<e>": 9}}}},
    "vocabulary": {"tokenizer.json": {"model": {"vocab": {"a": 1, "<e>": 9}}}},
    "unigram": {"tokenizer.json": {"model": {"vocab": [["x", 0.0]] * 9 + [["<e>", 0.0]]}}},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"9": {"content": "<e>"}}}},
    "vocab.json": {"vocab.json": {"<e>": 9}},
    "added_tokens.json": {"added_tokens.json": {"<e>": 9}},
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("token", ["<e>", {"content": "<e>", "lstrip": False}], ids=["text", "object"])
@pytest.mark.parametrize("named_in", ["tokenizer_config.json", "special_tokens_map.json"])
def test_ids_are_read_from_any_form_of_a_tokenizer(tmp_path: Path, kind: str, token: Any, named_in: str) -> None:
    bodies: dict[str, dict[str, Any]] = {name: dict(body) for name, body in FILES[kind].items()}
    bodies.setdefault(named_in, {})["eos_token"] = token
    for name, body in bodies.items():
        (tmp_path / name).write_text(json.dumps(body))
    assert stop_ids({name: tmp_path / name for name in bodies}) == {"eos_token_id": 9}


MALFORMED: dict[str, tuple[str, Any]] = {
    "decoder is a list": ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    "decoder is a text": ("tokenizer_config.json", {"added_tokens_decoder": "x"}),
    "decoder by name": ("tokenizer_config.json", {"added_tokens_decoder": {"nine": {"content": "<e>"}}}),
    "decoder of the map": ("special_tokens_map.json", {"added_tokens_decoder": [1]}),
    "added tokens by name": ("tokenizer.json", {"added_tokens": {"<e>": 9}}),
    "added tokens are a text": ("tokenizer.json", {"added_tokens": "x"}),
    "added tokens are texts": ("tokenizer.json", {"added_tokens": ["<e>"]}),
    "added token without id": ("tokenizer.json", {"added_tokens": [{"content": "<e>"}]}),
    "id is a list": ("tokenizer.json", {"added_tokens": [{"content": "<e>", "id": [9]}]}),
    "content is a list": ("tokenizer.json", {"added_tokens": [{"content": ["<e>"], "id": 9}, 3]}),
    "model is a list": ("tokenizer.json", {"model": [1]}),
    "vocabulary is a text": ("tokenizer.json", {"model": {"vocab": "abc"}}),
    "vocabulary of numbers": ("tokenizer.json", {"model": {"vocab": [1, 2]}}),
    "vocabulary of nothing": ("tokenizer.json", {"model": {"vocab": [[]]}}),
    "id is no number": ("vocab.json", {"<e>": "nine"}),
    "id is null": ("added_tokens.json", {"<e>": None}),
    "id without end": ("vocab.json", {"<e>": float("inf")}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_tokenizer_files_of_another_form_are_one_sentence(tmp_path: Path, case: str) -> None:
    name, body = MALFORMED[case]
    bodies = {"tokenizer_config.json": {"eos_token": "<e>"}}
    bodies[name] = {**bodies.get(name, {}), **body}
    for file, content in bodies.items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        stop_ids({file: tmp_path / file for file in bodies})
    assert caught.value.problems[0].file == str(tmp_path / name)


def test_a_padding_token_without_a_row_is_not_named(tmp_path: Path) -> None:
    """``[PAD]`` that a tool added to the tokenizer alone: an embedding of that index would not be made."""
    base = make_base(tmp_path / "base")
    export(make_checkpoint(tmp_path / "checkpoint", base, LORA, None), tmp_path / "adapter", base)
    (tmp_path / "adapter" / "MANIFEST.json").unlink()
    text = (tmp_path / "adapter" / "tokenizer.json").read_text()
    body = json.loads(text)
    body["added_tokens"].append({**body["added_tokens"][0], "id": 400, "content": "[PAD]"})
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(body))
    config = tmp_path / "adapter" / "tokenizer_config.json"
    config.write_text(re.sub(r'"pad_token": "[^"]*"', '"pad_token": "[PAD]"', config.read_text()))
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
