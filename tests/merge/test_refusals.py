"""What does not fit is refused in words, all of it at once, before a byte is written; and no damage is merged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub._local_folder import write_download_metadata
from safetensors.torch import load_file, save_file

from clustertune import manifest
from clustertune.errors import Problem, UserError
from clustertune.merge import merge, plan, streaming
from tests.damage import flip_somewhere, refused
from tests.merge.conftest import edit_json, save_adapter, save_llama

CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "peft_type": ({"peft_type": "LOHA"}, "only LORA"),
    "use_dora": ({"use_dora": True}, "DoRA"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, "replicated"),
    "target_parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "no parameter"),
    "init_lora_weights": ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
    "use_new_thing": ({"use_new_thing": True}, "unknown setting"),
    "r": ({"r": 0}, "greater than"),
    "lora_alpha": ({"lora_alpha": "16"}, "valid number"),
    "rank_pattern": ({"rank_pattern": [1]}, "not a section"),
    "alpha_pattern": ({"alpha_pattern": {"q_(": 3}}, "not a regular expression"),
    "target_modules": ({"target_modules": ["q_proj", "w1"]}, "no module 'w1'"),
    "modules_to_save": ({"modules_to_save": [3]}, "valid string"),
    "exclude_modules": ({"exclude_modules": 3}, "neither a list"),
}


@pytest.mark.parametrize("key", CONFIG_REFUSALS)
def test_settings_that_change_the_arithmetic(own_adapter: Path, base: Path, tmp_path: Path, key: str) -> None:
    changes, word = CONFIG_REFUSALS[key]
    edit_json(own_adapter / "adapter_config.json", **changes)
    with refused(word) as caught:
        merge(base, own_adapter, tmp_path / "out")
    assert any((p.key or "").startswith(key) and "adapter" in (p.file or "") for p in caught.value.problems)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own-adapter"]


def test_every_setting_of_the_installed_peft_is_judged() -> None:
    """A new field of a later PEFT is refused until somebody has looked at what it does to the weights."""
    from peft import LoraConfig

    from clustertune.merge import lora

    assert set(LoraConfig().to_dict()) - lora._NEUTRAL - set(lora._PLAIN_ONLY) == set()


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


KEY = "base_model.model.model.layers.1.self_attn.q_proj"


def put(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def copied(part: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({k.replace(part, other): v.clone() for k, v in tensors.items() if part in k})


def drop(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(n) for n in names] and None


TENSOR_REFUSALS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "A without B": (drop(f"{KEY}.lora_B.weight"), "has lora_A but no lora_B"),
    "no module": (drop(f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"), "no tensors for model.layers.1.self_attn.q_proj"),
    "empty": (lambda t: t.clear(), "contains no tensors"),
    "NaN": (lambda t: t[f"{KEY}.lora_A.weight"].view(-1)[5].fill_(float("nan")), "layers.1.* has NaN or infinity"),
    "shape of A": (put(f"{KEY}.lora_A.weight", 8, 71), r"A \[8, 71\]"),
    "other rank": (
        lambda t: t.update({f"{KEY}.lora_A.weight": torch.zeros(4, 72), f"{KEY}.lora_B.weight": torch.zeros(72, 4)}),
        "do not fit rank 8",
    ),
    "unknown module": (copied("layers.1", "layers.9"), "the base has no model.layers.9"),
    "not selected": (copied("q_proj", "o_proj"), "target_modules does not select"),
    "embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", 8, 301), "neither LoRA"),
    "bias": (put(f"{KEY}.lora_B.bias", 72), "neither LoRA"),
    "adapter name inside": (put(f"{KEY}.lora_A.default.weight", 8, 72), "neither LoRA"),
    "whole tensor the base lacks": (put("base_model.model.score.weight", 2, 72), "no tensor score.weight"),
    "resized vocabulary": (put("base_model.model.lm_head.weight", 400, 72), r"shape \[400, 72\], the base's has \[301, 72\]"),
    "saved and updated": (put(f"{KEY}.weight", 72, 72), "both saved whole and updated"),
    "double": (lambda t: t.update({f"{KEY}.lora_A.weight": torch.zeros(8, 72, dtype=torch.float64)}), "neither float32"),
}


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_tensors_that_do_not_fit(own_adapter: Path, base: Path, tmp_path: Path, case: str) -> None:
    change, word = TENSOR_REFUSALS[case]
    retensor(own_adapter, change)
    with pytest.raises(UserError, match=word):
        merge(base, own_adapter, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own-adapter"]


def truncate(path: Path) -> None:
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - 1)


def test_a_base_that_is_not_whole(own_base: Path, adapter: Path, tmp_path: Path) -> None:
    """Both broken shards are named in one go."""
    one, two, *_ = sorted(own_base.glob("*.safetensors"))
    truncate(one)
    two.unlink()
    with pytest.raises(UserError) as caught:
        merge(own_base, adapter, tmp_path / "out")
    assert {Path(p.file or "").name for p in caught.value.problems} == {one.name, two.name}
    assert not (tmp_path / "out").exists()


INDEX = "model.safetensors.index.json"


def shards(base: Path) -> list[Path]:
    return sorted(base.glob("*.safetensors"))


def rewrite(base: Path, change: Callable[[dict[str, torch.Tensor]], object], index: bool = True) -> None:
    """Change the tensors of the files that ``change`` raises no KeyError for, and the index with them."""
    weights = {}
    for path in shards(base):
        tensors = load_file(path)
        with contextlib.suppress(KeyError):
            change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        weights |= dict.fromkeys(tensors, path.name)
    if index:
        edit_json(base / INDEX, weight_map=weights)


def unlisted(base: Path, name: str) -> None:
    weights = json.loads((base / INDEX).read_text())["weight_map"]
    edit_json(base / INDEX, weight_map={key: file for key, file in weights.items() if key != name})


def swap(base: Path) -> None:
    one, two, *_ = shards(base)
    one.rename(base / "between")
    two.rename(one)
    (base / "between").rename(two)


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated file": (lambda b: truncate(shards(b)[0]), "model-00001"),
    "flipped byte": (lambda b: flip_somewhere(shards(b)[1], 1), "model-00002"),
    "missing shard": (lambda b: shards(b)[1].unlink(), "model-00002"),
    "swapped shards": (swap, "not in the file"),
    "no head": (lambda b: rewrite(b, lambda t: t.pop("lm_head.weight")), "lm_head.weight"),
    "no last norm": (lambda b: rewrite(b, lambda t: t.pop("model.norm.weight")), "model.norm.weight"),
    "no norm of a layer": (lambda b: rewrite(b, lambda t: t.pop(NORM)), NORM),
    "renamed tensor": (lambda b: rewrite(b, lambda t: t.update(other=t.pop(NORM))), NORM),
    "stale index": (lambda b: rewrite(b, lambda t: t.pop(NORM), index=False), NORM),
    "index without a tensor": (lambda b: unlisted(b, NORM), NORM),
    "fewer layers in the files": (lambda b: edit_json(b / "config.json", num_hidden_layers=4), "layers.3"),
    "more layers in the files": (lambda b: edit_json(b / "config.json", num_hidden_layers=2), "up to number 2: 1 of them"),
    "NaN in a norm": (lambda b: rewrite(b, lambda t: t[NORM][3:4].fill_(float("nan"))), f"{NORM} has NaN"),
    "infinity in the head": (
        lambda b: rewrite(b, lambda t: t["lm_head.weight"][-1:].fill_(-float("inf"))),
        "lm_head.weight has NaN",
    ),
    "eight bits without scales": (
        lambda b: rewrite(b, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        f"{NORM} is stored in F8_E4M3",
    ),
    "integers without scales": (
        lambda b: rewrite(b, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)})),
        "lm_head.weight is stored in I8",
    ),
    "another width": (lambda b: edit_json(b / "config.json", intermediate_size=102), "mlp"),
    "another vocabulary": (lambda b: edit_json(b / "config.json", vocab_size=302), "lm_head|embed_tokens"),
    "other heads": (lambda b: edit_json(b / "config.json", num_key_value_heads=4), "k_proj"),
    "heads that do not divide": (lambda b: edit_json(b / "config.json", num_attention_heads=5), "config.json|proj"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_base_is_refused_and_nothing_is_published(own_base: Path, adapter: Path, tmp_path: Path, case: str) -> None:
    """By what evaluation compares, and by the digests that the Hub's client noted where the structure is the same."""
    change, word = DAMAGE[case]
    for path in shards(own_base) if case in ("flipped byte", "swapped shards") else ():
        write_download_metadata(own_base, path.name, "f" * 40, manifest.hash_file(path).sha256)
    change(own_base)
    with refused(word):
        merge(own_base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".out.merging/model*")]


@pytest.mark.parametrize("where", ["base/tokenizer.json", "base/chat_template.jinja", "adapter/tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_tokenizer_that_is_no_file_is_not_left_out(
    where: str, kind: str, own_base: Path, own_adapter: Path, tmp_path: Path
) -> None:
    """Such as a link into a cache that was cleared: the merged model would have another tokenizer, or none."""
    part, name = where.split("/")
    path = {"base": own_base, "adapter": own_adapter}[part] / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "cleared") if kind == "link" else os.mkfifo(path)
    with refused(name):
        merge(own_base, own_adapter, tmp_path / "out")


@pytest.mark.parametrize("problem", [None, "lacks a layer"])
def test_the_architecture_is_compared_beside_the_copies(
    problem: str | None, own_base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' import takes as long as copying gigabytes. What is refused is not published, and its copies are gone."""
    begun, write = tmp_path / "begun", streaming.write_shards

    def compare(_folder: Path) -> list[Problem]:
        ends = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        return [Problem(text) for text in (problem, None if begun.exists() else "the copies waited for it") if text]

    monkeypatch.setattr(streaming, "check_tensors", compare)
    monkeypatch.setattr(streaming, "write_shards", lambda *words: begun.touch() or write(*words))
    if problem is None:
        merge(own_base, adapter, tmp_path / "out")
        assert (tmp_path / "out" / manifest.MANIFEST).exists()
        return
    with refused(problem):
        merge(own_base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".out.merging/*.safetensors")]


@pytest.mark.parametrize("settings", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}])
def test_tied_embeddings_are_not_changed_on_one_side(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, **settings)
    with pytest.raises(UserError, match="one tensor") as caught:
        merge(base, adapter, tmp_path / "out")
    assert "tie_word_embeddings" in {p.key for p in caught.value.problems}


def test_where_the_output_may_not_be(own_base: Path, own_adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own_base)
    for out in (own_base, own_base / "x" / "y", own_adapter, tmp_path, tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(UserError, match=r"the (base|adapter)"):
            merge(own_base, own_adapter, out)
    assert not list(tmp_path.rglob(".*.merging"))


def test_what_stands_there_is_never_touched(base: Path, adapter: Path, tmp_path: Path) -> None:
    file, full, other = tmp_path / "file", tmp_path / "full", tmp_path / "other"
    file.write_text("mine")
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    other.mkdir()
    (other / "x").write_text("mine")
    manifest.seal(other, "dataset", {})
    for out, word in ((file, "not a folder"), (full, r"holds thesis\.txt"), (other, "finished dataset")):
        with pytest.raises(UserError, match=word):
            merge(base, adapter, out)
    assert (file.read_text(), (full / "thesis.txt").read_text(), (other / "x").read_text()) == ("mine", "mine", "mine")
    assert not list(tmp_path.glob(".*"))


def test_the_plan_writes_nothing_and_is_what_happens(base: Path, adapter: Path, tmp_path: Path) -> None:
    planned = plan(base, adapter, tmp_path / "new" / "out", shard_size="50KB")
    assert list(tmp_path.iterdir()) == []
    done = merge(base, adapter, tmp_path / "new" / "out", shard_size="50KB")
    assert planned["state"] == "would merge"
    assert planned["bytes"] == done["bytes"] > 0
    files = {p.name: p.stat().st_size for p in (tmp_path / "new" / "out").iterdir()}
    assert planned["files"].items() <= files.items()
    assert set(files) - set(planned["files"]) == {"MANIFEST.json", "model.safetensors.index.json"}
    assert plan(base, adapter, tmp_path / "new" / "out", shard_size="50KB")["state"] == "already merged"


def test_adapters_that_cannot_be_read(own_adapter: Path, base: Path, tmp_path: Path) -> None:
    weights = own_adapter / "adapter_model.safetensors"
    truncate(weights)
    with pytest.raises(UserError, match="truncated"):
        merge(base, own_adapter, tmp_path / "out")
    weights.rename(own_adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle"):
        merge(base, own_adapter, tmp_path / "out")
    (own_adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="missing"):
        merge(base, own_adapter, tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        merge(base, tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        merge(tmp_path / "nowhere", own_adapter, tmp_path / "out")


def test_another_name_is_a_warning_and_another_revision_an_error(base: Path, own_adapter: Path, tmp_path: Path) -> None:
    config = own_adapter / "adapter_config.json"
    edit_json(config, base_model_name_or_path="meta-llama/Llama-9")
    assert "meta-llama/Llama-9" in plan(base, own_adapter, tmp_path / "out")["warnings"][0]
    edit_json(config, base_model_name_or_path=f"somewhere/{base.name}")
    assert plan(base, own_adapter, tmp_path / "out")["warnings"] == []
    snapshot = tmp_path / "models--x--Llama-9" / "snapshots" / ("a" * 40)
    shutil.copytree(base, snapshot)
    edit_json(config, base_model_name_or_path="x/Llama-9", revision="a" * 40)
    assert plan(snapshot, own_adapter, tmp_path / "out")["warnings"] == []
    edit_json(config, revision="b" * 40)
    with pytest.raises(UserError, match="trained on revision bbb"):
        plan(snapshot, own_adapter, tmp_path / "out")


def test_files_beside_the_weights(base: Path, own_adapter: Path, tmp_path: Path) -> None:
    """The base's, but for a tokenizer or a chat template of the adapter's own; never code or pickles."""
    os.umask(umask := os.umask(0))
    own = shutil.copytree(base, tmp_path / "base")
    for name in ("modeling_x.py", "training_args.bin", "README.md", "generation_config.json", "LICENSE.txt", "merges.txt"):
        (own / name).write_text("base" if not name.endswith("json") else "{}")
    merge(own, own_adapter, tmp_path / "one")
    names = {p.name for p in (tmp_path / "one").iterdir()}
    kept = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE.txt", "merges.txt"}
    assert kept < names
    assert not names & {"modeling_x.py", "training_args.bin", "README.md"}
    (own_adapter / "chat_template.jinja").write_text("trained")
    (own_adapter / "tokenizer.json").write_text('{"trained": 1}')
    merge(own, own_adapter, tmp_path / "two")
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "trained"
    assert (tmp_path / "two" / "tokenizer.json").read_text() == '{"trained": 1}'
    assert not (tmp_path / "two" / "merges.txt").exists()
    assert oct((tmp_path / "two" / "model.safetensors").stat().st_mode & 0o777) == oct(0o666 & ~umask)


SEALED = {
    "config.json": '{{"dropped": {}}}', "generation_config.json": '{{"eos_token_id": {}}}',
    "tokenizer_config.json": '{{"model_max_length": {}}}', "tokenizer.json": '{{"version": {}}}',
    "chat_template.jinja": "{{{{ messages }}}} {}",
}  # fmt: skip


@pytest.fixture
def sealed(own_base: Path, own_adapter: Path) -> tuple[Path, Path]:
    """A base and an adapter with all the files that a merge reads, and their manifests."""
    for number, (name, text) in enumerate(SEALED.items()):
        if not (own_base / name).exists():
            (own_base / name).write_text(text.format(number))
    manifest.seal(own_base, "model", {})
    manifest.seal(own_adapter, "adapter", {})
    return own_base, own_adapter


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.jobs) for seed in range(2, 12))])
def test_no_damage_is_merged(sealed: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    base, adapter = sealed
    out = tmp_path / "out"
    files = sorted(path for folder in sealed for path in folder.iterdir() if path.name != "README.md")
    assert len(files) > 10
    for path in files:
        before, times = path.read_bytes(), path.stat()
        flip_somewhere(path, seed)
        with pytest.raises(UserError) as caught:
            merge(base, adapter, out)
        assert path.name in str(caught.value) or path.suffix == ".json", (path, caught.value)
        assert not (out / manifest.MANIFEST).exists(), path
        path.write_bytes(before)
        # Restored with its old times, as by cp -p: nothing that was made of the damaged bytes may be continued.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    merge(base, adapter, out)
    merge(base, adapter, tmp_path / "again")
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_result_that_overflows_is_not_published(base: Path, own_adapter: Path, tmp_path: Path) -> None:
    """float16 holds nothing beyond 65,504."""
    narrow = save_llama(tmp_path / "narrow", torch.float16)
    edit_json(own_adapter / "adapter_config.json", lora_alpha=1e9)
    with pytest.raises(UserError, match="infinity"):
        merge(narrow, own_adapter, tmp_path / "out")
    assert not (tmp_path / "out" / manifest.MANIFEST).exists()
