"""``clustertune new`` and ``plan --model``: from a model, data and GPUs to a recipe that plans and runs."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl.chat_template_utils import _CHAT_TEMPLATES_DIR

from clustertune.cluster.load import of_gpus
from clustertune.data.local_model import EOS
from clustertune.data.prepare import measure
from clustertune.errors import UserError
from clustertune.export import companions
from clustertune.recipe.layers import RECIPES
from clustertune.resolve.models import find_model
from clustertune.resolve.resolve import resolve
from tests.command import REPO, run

QWEN3 = (_CHAT_TEMPLATES_DIR / "qwen3.jinja").read_text()
CONVERSATIONS = RECIPES / "tiny-oasst2" / "conversations.jsonl"
GPUS = ("--gpus", "2x8xh100-sxm")
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "q" * 400}, {"role": "assistant", "content": "a" * 360}]},
    "alpaca": {"instruction": "q" * 300, "input": "q" * 98, "output": "a" * 360},
    "lima": {"conversations": ["q" * 400, "a" * 360]},
    "preference": {"prompt": "q" * 400, "chosen": "a" * 360, "rejected": "b" * 360},
    "sharegpt": {"conversations": [{"from": "human", "value": "q" * 400}, {"from": "gpt", "value": "a" * 360}]},
}


def rows(path: Path, row: dict[str, Any], count: int = 200) -> Path:
    """A file of rows that differ, also in what the model is asked."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        for number in range(count):
            text = json.dumps(row).replace("aaa", f"{number:03d}"[-3:], 1)
            file.write(text.replace("qqqqqq", f"{number:06d}", 1) + "\n")
    return path


def test_data_are_recognised_counted_and_measured(tmp_path: Path) -> None:
    """190 of 200 are trained on; 760 bytes are 190 tokens, and two messages add five each. Data of no known format are named by
    their columns."""
    for name, row in ROWS.items():
        found = measure(str(rows(tmp_path / f"{name}.jsonl.gz", row)))
        assert found.section["format"] == name and found.tokens == {200: 190}
        assert found.section["expect"] == {"train": 190, "eval": 10, "mean_tokens": 200}
    file = rows(tmp_path / "chat.jsonl", {"talk": [{"by": "human", "said": "x"}], "id": "1"})
    with pytest.raises(UserError, match="id, talk are of no format"):
        measure(str(file))


def test_without_its_client_nothing_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The light base has none: what is unknown is named, with a way that needs no download."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for look, fix in ((find_model, "--model FILE"), (measure, "file or folder")):
        with pytest.raises(UserError, match="needs huggingface_hub, which is not installed") as caught:
            look("acme/unknown")
        assert fix in (caught.value.problems[0].fix or "")


def test_the_command_line_names_columns_and_settings(tmp_path: Path) -> None:
    """Columns of other names are read, and every other key of the recipe stands in it; a key that is none is named."""
    file = rows(tmp_path / "qa.jsonl", {"question": "q" * 400, "answer": "a" * 360})
    words = ("--model", "Qwen/Qwen3-8B", "--data", file, *GPUS, "data.columns={prompt: question, completion: answer}")
    done = run("new", tmp_path / "mine", *words, "train.max_length=4096", "--json")
    assert done.code == 0, done.err
    recipe = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())
    assert recipe["data"]["columns"] == {"prompt": "question", "completion": "answer"} and recipe["train"]["max_length"] == 4096
    assert recipe["data"]["format"] == "prompt-completion" and recipe["data"]["expect"]["train"] == 190
    assert run("plan", *words, "--json").code == 0
    refused = run("new", tmp_path / "other", *words, "data.colums={}")
    assert refused.code == 2 and "columns" in refused.err and not (tmp_path / "other").exists()


def test_a_recipe_from_a_model_and_a_file(tmp_path: Path) -> None:
    """The folder resolves, plans as it was said, and holds what was assumed; nothing is overwritten."""
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 500)
    words = ("new", tmp_path / "my-qwen", "--model", "Qwen/Qwen3-8B", "--data", data, *GPUS)
    done = run(*words, "--json")
    assert done.code == 0, done.err
    document = done.json
    assert document["files"] == ["README.md", "accelerate.yaml", "model.json", "recipe.yaml"]
    assert document["hours"] and document["total"]["cost"]["on_demand"] > 0
    resolved = resolve(tmp_path / "my-qwen")
    assert resolved.recipe.model.revision and resolved.recipe.slurm.nodes == 2 and resolved.world_size == 16
    assert resolved.recipe.data.input == str(data.resolve()) and resolved.recipe.data.expect.train == 475  # type: ignore[union-attr]
    assert all(one in (tmp_path / "my-qwen" / "README.md").read_text() for one in document["assumed"])
    planned = run("plan", tmp_path / "my-qwen", *GPUS, "--json").json
    assert planned["fits"] and planned["step_s"] == pytest.approx(document["step_s"], rel=0.05)
    again = run(*words)
    assert again.code == 2 and "nothing is overwritten" in again.err


def test_a_quantised_base_and_a_node_that_is_large_enough(tmp_path: Path) -> None:
    """QLoRA of 70B takes one GPU of 141 GB where LoRA takes more; full fine-tuning finds the nodes it needs, or says so."""
    words = ("--model", "meta-llama/Llama-3.3-70B-Instruct", "--data", CONVERSATIONS)
    done = run("new", tmp_path / "q", *words, "--method", "qlora", "--gpus", "1x1xh200-sxm")
    assert done.code == 0, done.err
    body = yaml.safe_load((tmp_path / "q" / "recipe.yaml").read_text())
    assert body["train"]["model_init_kwargs"]["quantization_config"]["load_in_4bit"] is True
    assert "finetune_right_pad" in body["train"]["pad_token"]
    refused = run("new", tmp_path / "l", *words, "--gpus", "1x1xh200-sxm")
    assert refused.code == 2 and "nothing fits on 1x1xh200-sxm" in refused.err and "qlora" in refused.err
    assert not (tmp_path / "l").exists()
    full = run("new", tmp_path / "f", *words, "--method", "full", "--cluster", "dgx-h100")
    assert full.code == 0 and resolve(tmp_path / "f").recipe.slurm.nodes > 1, full.err
    offloaded = run("new", tmp_path / "o", *words, "--method", "full", "--gpus", "1x8xh100-sxm")
    assert offloaded.code == 0 and resolve(tmp_path / "o").distribution.offload_params == "cpu", offloaded.err


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    done = run("new", "../x y", "--model", "Qwen/Qwen3-8B", "--data", "no-such-file")
    assert done.code == 2 and "letters, digits" in done.err
    done = run("new", tmp_path / "x", "--method", "dora", "--gpus", "8h100", "--cluster", "dgx-h100")
    keys = ("--method", "--model", "--data", "--gpus")
    assert done.code == 2 and all(key in done.err for key in keys) and "exclude each other" in done.err


def test_a_model_is_planned_without_files(tmp_path: Path) -> None:
    """Hours and money with the evaluation and the merge; what was assumed; without data, what is missing."""
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 400)
    words = ("plan", "--model", "Qwen/Qwen2.5-72B-Instruct", *GPUS, "--method", "lora")
    found = run(*words, "--data", data, "--json").json
    assert found["fits"] and found["hours"] and found["parameters"] == 72_706_203_648
    evaluation, total = found["evaluation"]["gpu_hours"], found["total"]
    assert total["stages"]["merge"]["seconds"] > 60 and evaluation > 0
    assert total["gpu_hours"] == pytest.approx(found["gpu_hours"] + evaluation)
    assert total["cost"]["on_demand"] == pytest.approx(total["gpu_hours"] * total["cost"]["per_gpu_hour"]["on_demand"])
    assert any("380 training conversations" in line for line in found["assumptions"])
    assert any("is assumed (hardware" in line and "2x8xh100-sxm" in line for line in found["assumptions"])
    bare = run(*words, "--json").json
    assert bare["fits"] and bare["hours"] is None and bare["total"]["gpu_hours"] is None
    shown = run(*words, "--advise").out
    assert "clustertune plan --model Qwen/Qwen2.5-72B-Instruct --gpus 2x8xh100-sxm --method lora" in shown


def test_a_recipe_is_planned_on_gpus_and_on_other_data(tmp_path: Path) -> None:
    data = rows(tmp_path / "mine.jsonl", ROWS["alpaca"], 2000)
    found = run("plan", "llama8b-lima", "--gpus", "1x4xa100-sxm-80", "--data", data, "--json").json
    assert found["cluster"] == "1x4xa100-sxm-80" and found["fits"] and found["hours"]
    assert found["gpu_hours"] == pytest.approx(4 * found["hours"])


def test_without_a_cluster_those_there_are_are_listed() -> None:
    done = run("plan", "llama8b-lima", "--cluster", "local")
    assert done.code == 2 and "--gpus 2x8xh100-sxm" in done.err and "nebius-h100" in done.err


def test_the_node_around_the_gpus() -> None:
    """NVLink and a port for each GPU where the GPU has it; PCI Express else; and a note that it is assumed."""
    for text, says in (("8xh100-sxm", "NODESxGPUSxNAME"), ("2x8xh100", "h100-sxm"), ("0x8xh100-sxm", "NODES")):
        with pytest.raises(UserError, match=says):
            of_gpus(text)
    found, plain, one = of_gpus("4x8xh100-sxm"), of_gpus("1x2xl40s"), of_gpus("1x1xh100-sxm")
    assert (found.compute.interconnect, found.network.ports, len(found.compute_nodes)) == ("nvlink4", 8, 4)
    assert plain.compute.interconnect == "pcie4" and plain.network.kind == "ethernet" and one.compute.interconnect is None
    assert all("is assumed" in cluster.notes[0] for cluster in (found, plain, one))


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: without generation marks."""
LOCAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "its own template, padding is EOS": ({"chat_template": CHATML, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, {}),
    "no padding token": ({"chat_template": CHATML, "eos_token": "<|im_end|>", "pad_token": None}, {}),
    "answers end with another token": ({"chat_template": CHATML}, {"train": {"eos_token": "<|im_end|>"}}),
    "a base model": ({"chat_template": None}, {"model": {"chat_template": "mistral.jinja"}}),
    "answers that cannot be told apart": (
        {"chat_template": "{{ messages | length }}" + CHATML, "eos_token": "<|im_end|>"},
        {"train": {"assistant_only_loss": False}},
    ),
}  # fmt: skip


def with_weights(model: Path) -> None:
    """Random ones, of the architecture of ``config.json``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(model))).save_pretrained(model)


@pytest.mark.parametrize("case", LOCAL)
def test_what_new_writes_for_a_local_model_is_what_prepare_takes(case: str, tmp_path: Path) -> None:
    from clustertune.data.local_model import train_tokenizer

    settings, written = LOCAL[case]
    model = tmp_path / "hf"
    tokenizer = train_tokenizer(["user assistant words"] * 9, 400, 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    for key, value in settings.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(model)
    small = {"num_hidden_layers": 2, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    small |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (model / "config.json").write_text(json.dumps({**find_model("Qwen/Qwen3-8B").architecture, **small}))
    with_weights(model)
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 300)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--gpus", "1x2xh100-sxm", "--json", stack=True)
    assert done.code == 0, done.err
    recipe = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())
    for section, keys in written.items():
        assert recipe[section].items() >= keys.items()
    assert {"eos_token", "assistant_only_loss"} & recipe["train"].keys() == set(written.get("train", {}))
    assert recipe["model"]["name"] != "hf" and ("chat_template" in recipe["model"]) is ("model" in written)
    made = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", "--json", stack=True)
    assert made.code == 0 and made.json["tokens"] and 0 < made.json["labelled_share"] <= 1, made.err


@pytest.mark.parametrize(("count", "gpus"), [(300, "1x8xh100-sxm"), (60, "1x2xh100-sxm"), (20_000, "2x8xh100-sxm")])
def test_few_rows_make_enough_steps(count: int, gpus: str, tmp_path: Path) -> None:
    """Batch, epochs and packing follow from the data, and it is said; large data keep the recipes' own."""
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], count)
    done = run("new", tmp_path / "mine", "--model", "Qwen/Qwen3-8B", "--data", data, "--gpus", gpus, "--json")
    assert done.code == 0, done.err
    train = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())["train"]
    plan = run("plan", tmp_path / "mine", "--gpus", gpus, "--json").json
    steps = plan["steps"] if "steps" in plan else plan["schedule"]["steps"]
    assert steps >= (20 if count == 60 else 30) and any(f"{steps:,} optimizer steps" in line for line in done.json["assumed"])
    assert (train["global_batch_size"] == 32 and "num_train_epochs" not in train) is (count == 20_000)
    assert not any("learns little" in line for line in plan["assumptions"])


def test_few_steps_are_warned_of_and_one_without_a_rate_is_refused(tmp_path: Path) -> None:
    """By show, plan and submit; a warm-up of none is a way out."""
    cluster = ["--cluster", "dgx-h100"]
    for words in (["show"], ["plan", *cluster], ["submit", *cluster, "--dry-run"]):
        few = run(*words, "llama8b-lima", "train.max_steps=5")
        assert few.code == 0 and "5 steps" in " ".join((few.out + few.err).split()), few.err
    idle = run("show", "llama8b-lima", "train.max_steps=1", "train.warmup_steps=0.1")
    assert idle.code == 2 and "train.warmup_steps" in idle.err
    assert run("show", "llama8b-lima", "train.max_steps=1", "train.warmup_steps=0").code == 0


@pytest.mark.parametrize("command", [("new", "x"), ("plan",)], ids=lambda words: words[0])
def test_a_folder_whose_config_is_no_file_is_said(command: tuple[str, ...], tmp_path: Path) -> None:
    """By its name, not that of a recipe; and a recipe's own model.json is not passed over for another recipe's."""
    words = [str(tmp_path / word) if word == "x" else word for word in command]
    made = tmp_path / "model"
    made.mkdir()
    for given, word in ((made, "neither config.json nor recipe.yaml"), (made, "config.json: is not a file")):
        done = run(*words, "--model", given, "--data", CONVERSATIONS, *GPUS)
        assert done.code == 2 and word in done.err, done.err
        os.mkfifo(made / "config.json") if "neither" in word else None
    done = run(*words, "--model", made / "config.json", "--data", CONVERSATIONS, *GPUS)
    assert done.code == 2 and "config.json: is not a file" in done.err
    shutil.copytree(RECIPES / "tiny-oasst2", tmp_path / "mine")
    (tmp_path / "mine" / "model.json").unlink()
    os.mkfifo(tmp_path / "mine" / "model.json")
    assert run("show", tmp_path / "mine").code == 2


@pytest.mark.parametrize("command", [("new", "x"), ("plan",)], ids=lambda words: words[0])
def test_a_place_without_gpus_is_refused_with_what_it_lacks(command: tuple[str, ...], tmp_path: Path) -> None:
    """A cluster of CPUs, and this machine, where it has no GPUs: nothing can be planned for them, and nothing is written."""
    body = yaml.safe_load((REPO / "ops/clusters/nebius-h100.yaml").read_text(encoding="utf-8"))
    body |= {"name": "cpus", "compute": {key: body["compute"][key] for key in ("cores", "threads", "memory_gb")} | {"gpus": 0}}
    body["slurm"].pop("gres", None)
    file = tmp_path / "cpus.yaml"
    file.write_text(yaml.safe_dump(body), encoding="utf-8")
    words = [str(tmp_path / word) if word == "x" else word for word in command]
    done = run(*words, "--model", "meta-llama/Llama-3.2-1B-Instruct", "--data", CONVERSATIONS, "--cluster", file)
    assert done.code == 2 and "compute.gpus" in done.err and not (tmp_path / "x").exists()


def small_model(folder: Path, template: str | None = CHATML) -> Path:
    """A Llama of two layers with its tokenizer and weights, as save_pretrained leaves it. The template ends turns with EOS."""
    from clustertune.data.local_model import make_local_model

    body = json.loads((RECIPES / "tiny-oasst2" / "model.json").read_text())
    make_local_model(body, ["user assistant words"] * 99, folder, 0)
    (folder / "MANIFEST.json").unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template.replace("<|im_end|>", EOS))
    return folder


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("format", ["messages", "text", "preference"])
def test_a_small_model_without_gpus_runs_as_new_wrote_it(format: str, tmp_path: Path) -> None:
    """Two commands, no edits: two processes on CPUs in float32; steps and what GPUs need are said; plan takes GPUs."""
    row = {"text": "q" * 300} if format == "text" else ROWS[format]
    data = rows(tmp_path / "mine.jsonl", row, 300)
    model = small_model(tmp_path / "hf", None if format == "text" else CHATML)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert done.code == 0, done.err
    assert done.json["hours"] is None and done.json["commands"][0] == f"clustertune run {tmp_path / 'mine'}"
    assert any("--gpus" in line and "--cluster" in line for line in done.json["assumed"])
    resolved = resolve(tmp_path / "mine")
    assert resolved.world_size == 2 and not resolved.warnings and resolved.recipe.eval.limit
    assert resolved.recipe.eval.apply_chat_template is (format != "text")
    assert not resolved.train_args["bf16"] and resolved.train_args["report_to"] == "none"
    assert any(30 <= int(found) <= 60 for line in done.json["assumed"] for found in re.findall(r"^(\d+) optimizer steps", line))
    dry = run("run", tmp_path / "mine", "--dry-run", "--run-dir", tmp_path / "run", "--json", stack=True)
    assert dry.code == 0 and not dry.err.count("warning"), dry.err
    assert run("plan", tmp_path / "mine", "--gpus", "1x8xh100-sxm").code == 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("format", ["messages", "text", "preference"])
def test_little_data_make_ten_steps_on_cpus(format: str, tmp_path: Path) -> None:
    """17 rows, or one text of 11 kB: what plan, show and submit do not warn of."""
    model = small_model(tmp_path / "hf", CHATML)
    if format == "text":
        data = tmp_path / "plain.txt"
        data.write_text("words of a text " * 700)
    else:
        data = rows(tmp_path / "mine.jsonl", ROWS[format], 18)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert done.code == 0, done.err
    assert any(10 <= int(found) <= 30 for line in done.json["assumed"] for found in re.findall(r"^(\d+) optimizer steps", line))
    dry = run("run", tmp_path / "mine", "--dry-run", "--run-dir", tmp_path / "run", "--json", stack=True)
    assert dry.code == 0 and not dry.err.count("warning"), dry.err


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("documents", [1, 3])
def test_all_of_a_long_text_is_trained(documents: int, tmp_path: Path) -> None:
    """Documents many times as long as a row are split over rows; where a recipe cuts them, prepare counts the tokens lost."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(documents):
        words = "".join(f"Line {number} {line} of a long document.\n" for line in range(600))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    done = run("new", tmp_path / "mine", "--model", small_model(tmp_path / "hf", None), "--data", folder, stack=True)
    assert done.code == 0, done.err
    made = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", "--json", stack=True)
    assert made.code == 0, made.err
    train, size = made.json["train"], resolve(tmp_path / "mine").train_args["max_length"]
    assert train["labelled"] == train["tokens"] > 2 * size and train["sequences"] > 2 and not train["cut_tokens"]
    cutting = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", "train.packing=false", stack=True)
    assert cutting.code == 0 and f"{train['tokens'] - train['conversations'] * size:,} tokens" in cutting.err, cutting.err


def test_a_tokenizer_that_cannot_be_read_is_said_with_its_remedy(tmp_path: Path) -> None:
    """A SentencePiece file alone: new says that prepare will refuse it, and with which file it does not."""
    model = small_model(tmp_path / "hf")
    for file in model.glob("*token*"):
        file.unlink()
    (model / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 40)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert done.code == 0, done.err
    assert any("will refuse it" in line and "tokenizer.json" in line for line in done.json["assumed"]), done.json["assumed"]


@pytest.mark.usefixtures("no_gpu")
def test_a_recipe_for_gpus_trains_a_small_model_on_cpus_and_refuses_a_large_one(tmp_path: Path) -> None:
    """Nobody edits the recipe; the number of processes is said, with what the recipe asks for."""
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 300)
    words = ("--data", data, "--gpus", "1x8xh100-sxm")
    assert run("new", tmp_path / "small", "--model", small_model(tmp_path / "hf"), *words, stack=True).code == 0
    dry = run("run", tmp_path / "small", "--dry-run", "--run-dir", tmp_path / "run", "--json", stack=True)
    assert dry.code == 0 and "8 GPUs" in dry.err, dry.err
    assert dry.json["train"][dry.json["train"].index("--nproc-per-node") + 1] == "2"
    assert run("new", tmp_path / "large", "--model", "Qwen/Qwen3-8B", *words, "model.revision=" + 40 * "a").code == 0
    refused = run("run", tmp_path / "large", "--dry-run", "--run-dir", tmp_path / "run")
    assert refused.code == 2 and "8 GPUs" in refused.err and "--tiny" in refused.err


def under_another_name(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    save_file({f"language_model.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})


def with_more_layers(model: Path) -> None:
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**body, "num_hidden_layers": 5}))


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("damage", [under_another_name, with_more_layers, cut], ids=lambda one: one.__name__)
def test_weights_that_would_be_random_are_refused_before_a_rank_starts(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """By new, which writes no recipe; by prepare and run, where the folder changed since; by eval. One sentence each."""
    data, model = rows(tmp_path / "mine.jsonl", ROWS["messages"], 60), small_model(tmp_path / "hf")
    words = ("--model", model, "--data", data)
    assert run("new", tmp_path / "before", *words, stack=True).code == 0
    body = json.loads((tmp_path / "before" / "model.json").read_text())
    damage(model)
    if damage is with_more_layers:  # and the recipe says as much
        (tmp_path / "before" / "model.json").write_text(json.dumps({**body, "num_hidden_layers": 5}))
    for command in (
        ("new", tmp_path / "after", *words),
        ("prepare", tmp_path / "before", "--out", tmp_path / "data"),
        ("run", tmp_path / "before", "--run-dir", tmp_path / "run"),
        ("eval", model, "--limit", "1", "--max-gen-toks", "8", "--no-apply-chat-template"),
    ):
        done = run(*command, stack=True)
        assert done.code != 0 and str(model) in done.err and done.err.count("error:") == 1, (command[0], done.err)
        assert "Traceback" not in done.err, done.err
    assert not (tmp_path / "after").exists() and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.usefixtures("no_gpu")
def test_a_folder_without_weights_is_said_and_is_not_trained(tmp_path: Path) -> None:
    """A recipe can be written before the weights are there; what needs them says so."""
    data, model = rows(tmp_path / "mine.jsonl", ROWS["messages"], 60), small_model(tmp_path / "hf")
    (model / "model.safetensors").unlink()
    made = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert made.code == 0 and any("no weights" in line for line in made.json["assumed"]), made.err
    assert made.json["refused"] and not made.json["commands"], "a run would not begin"
    done = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", stack=True)
    assert done.code == 2 and str(model) in done.err and "safetensors" in done.err


def snapshot_of(model: Path, cache: Path, commit: str = 40 * "b") -> Path:
    """A model as the Hub's client keeps it: links into a folder of blobs."""
    snapshot, blobs = cache / "models--acme--Tiny-1M" / "snapshots" / commit, cache / "models--acme--Tiny-1M" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in model.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("given", ["snapshot", "config.json", "link"])
def test_a_snapshot_of_the_hubs_cache_is_read_where_it_is(given: str, tmp_path: Path) -> None:
    """The path that ``hf download`` prints: weights, tokenizer and template lie beside the link, and the commit is known."""
    snapshot = snapshot_of(small_model(tmp_path / "hf"), tmp_path / "hub")
    (tmp_path / "mine").symlink_to(snapshot)
    named = {"snapshot": snapshot, "config.json": snapshot / "config.json", "link": tmp_path / "mine"}[given]
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 60)
    (tmp_path / "data.jsonl").symlink_to(data)
    words = ("--data", tmp_path / "data.jsonl", "train.max_length=1024", "--json")
    done = run("new", tmp_path / "r", "--model", named, *words, stack=True)
    assert done.code == 0, done.err
    recipe = yaml.safe_load((tmp_path / "r" / "recipe.yaml").read_text())
    assert recipe["model"].items() >= {"name": "acme/Tiny-1M", "revision": 40 * "b"}.items()
    assert Path(recipe["model"]["path"]) == (named if given == "link" else snapshot)
    assert recipe["data"]["input"] == str(tmp_path / "data.jsonl")
    made = run("prepare", tmp_path / "r", "--out", tmp_path / "out", "--json", stack=True)
    assert made.code == 0 and made.json["tokens"], made.err
    assert "contents are not compared" not in made.err  # the blobs' names are digests
    whole = run("new", tmp_path / "s", "--model", snapshot.parent.parent, "--data", data)
    assert whole.code == 2 and str(snapshot) in whole.err


@pytest.mark.usefixtures("no_gpu")
def test_a_folder_of_links_has_its_own_template(tmp_path: Path) -> None:
    """Not that of the folder to which config.json leads."""
    other, own = small_model(tmp_path / "other"), tmp_path / "own"
    own.mkdir()
    for file in other.iterdir():
        if file.name != "chat_template.jinja":
            (own / file.name).symlink_to(file)
    (own / "chat_template.jinja").write_text(CHATML.replace("im_start", "mine_start").replace("<|im_end|>", EOS))
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 60)
    done = run("new", tmp_path / "r", "--model", own, "--data", data, "train.max_length=1024", stack=True)
    assert done.code == 0, done.err
    made = run("prepare", tmp_path / "r", "--out", tmp_path / "out", "--show", "1", "--json", stack=True)
    assert made.code == 0 and "mine_start" in json.dumps(made.json["samples"]), made.err
    assert "contents are not compared" in made.err and "model.safetensors" in made.err


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHATML
REFUSES_TOOLS = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}" + CHATML


def chats(path: Path, words: int = 3, before: str | None = None, tool: bool = False, count: int = 60) -> Path:
    """A file of conversations, with a system message in every third one."""
    lines = []
    for number in range(count):
        turns = [("system", before)] * (before is not None and number % 3 == 0) + [("user", f"{number} " + "word " * words)]
        turns += [("assistant", "I look."), ("tool", "3")] * tool + [("assistant", f"It is {number}.")]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.usefixtures("no_gpu")
def test_system_messages_that_a_template_refuses_are_counted_and_the_recipe_takes_them(tmp_path: Path) -> None:
    """What new writes is what prepare takes; a recipe that says otherwise holds."""
    data, model = chats(tmp_path / "mine.jsonl", before="Be brief."), small_model(tmp_path / "hf", REFUSES_SYSTEM)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert done.code == 0 and done.json["commands"] and not done.json["refused"], done.err
    told = [line for line in done.json["assumed"] if "system messages" in line]
    assert len(told) == 1 and "20 conversations" in told[0] and "data.system_messages=leave-out" in told[0]
    made = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", "--show", "60", "--json", stack=True)
    assert made.code == 0 and sum("Be brief.\n\n" in text for text in made.json["samples"]) >= 15, made.err
    bare = run("prepare", tmp_path / "mine", "--out", tmp_path / "other", "data.system_messages=template", stack=True)
    assert bare.code == 2 and "20 examples" in bare.err and "data.system_messages" in bare.err
    fewer = ("new", tmp_path / "fewer", "--model", model, "--data", data, "data.system_messages=leave-out", "--json")
    done = run(*fewer, stack=True)
    assert done.code == 0 and resolve(tmp_path / "fewer").recipe.data.expect.train == 38  # type: ignore[union-attr]


@pytest.mark.usefixtures("no_gpu")
def test_next_is_a_run_only_where_one_would_begin(tmp_path: Path) -> None:
    data, model = chats(tmp_path / "mine.jsonl", tool=True), small_model(tmp_path / "hf", REFUSES_TOOLS)
    words = ("new", tmp_path / "mine", "--model", model, "--data", data)
    done = run(*words, "--json", stack=True)
    assert done.code == 0 and done.json["refused"] and not done.json["commands"], done.err
    assert "clustertune run" not in (tmp_path / "mine" / "README.md").read_text().partition("Before it runs")[2]
    shutil.rmtree(tmp_path / "mine")
    last = run(*words, stack=True).err.rstrip().splitlines()[-1]
    assert "no tools here" in last and "->" in last
    assert run("prepare", tmp_path / "mine", "--out", tmp_path / "data", stack=True).code == 2


@pytest.mark.usefixtures("no_gpu")
def test_answers_that_never_end_are_refused_and_another_template_helps(tmp_path: Path) -> None:
    """The template's end of a turn is no token of this tokenizer. What the message names is taken in the place of the model's
    own template, also by what is exported."""
    data, model = chats(tmp_path / "mine.jsonl"), small_model(tmp_path / "hf", QWEN3)
    (model / "chat_template.jinja").write_text(QWEN3)
    words = ("new", tmp_path / "mine", "--model", model, "--data", data)
    done = run(*words, "--json", stack=True)
    assert done.code == 0 and not done.json["commands"], done.err
    assert any("never learn to stop" in one and "model.chat_template=mistral.jinja" in one for one in done.json["refused"])
    prepared = run("prepare", tmp_path / "mine", "--out", tmp_path / "data", stack=True)
    assert prepared.code == 2 and "never learn to stop" in prepared.err, prepared.err
    shutil.rmtree(tmp_path / "mine")
    done = run(*words, "model.chat_template=mistral.jinja", "--json", stack=True)
    assert done.json["commands"] and not done.json["refused"], done.err
    shown = run("prepare", tmp_path / "mine", "--out", tmp_path / "other", "--show", "1", stack=True)
    assert shown.code == 0 and "[INST]" in shown.out and "<|im_start|>" not in shown.out, shown.err
    stage = tmp_path / "stage"
    stage.mkdir()
    companions.copy_tokenizer(model, stage)
    companions.write_trained(model, stage, resolve(tmp_path / "mine"))
    assert "[INST]" in (stage / "chat_template.jinja").read_text()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("thoughts", ["none", "some", "all", "set"])
def test_thinking_is_switched_off_where_no_row_thinks_and_nothing_says_it(thoughts: str, tmp_path: Path) -> None:
    data, model = chats(tmp_path / "mine.jsonl"), small_model(tmp_path / "hf", QWEN3)
    bodies = [json.loads(line) for line in data.read_text().splitlines()]
    for number, body in enumerate(bodies):
        if thoughts == "all" or (thoughts == "some" and number % 2):
            body["messages"][-1]["reasoning_content"] = f"hm {number}"
    data.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    own = ["train.chat_template_kwargs={enable_thinking: true}"] if thoughts == "set" else []
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, *own, "--json", stack=True)
    assert done.code == 0, done.err
    written = resolve(tmp_path / "mine").train_args["chat_template_kwargs"]
    assert written == {"none": {"enable_thinking": False}, "set": {"enable_thinking": True}}.get(thoughts)
    assert any("nothing sets it" in note for note in done.json["assumed"]) is (thoughts == "some")


@pytest.mark.usefixtures("no_gpu")
def test_new_says_what_max_length_leaves_out_and_writes_nothing_where_that_is_all(tmp_path: Path) -> None:
    data, model = chats(tmp_path / "mine.jsonl", words=300), small_model(tmp_path / "hf", CHATML)
    words = ("new", tmp_path / "mine", "--model", model, "--data", data)
    done = run(*words, "train.max_length=128", stack=True)
    assert done.code == 1 and not (tmp_path / "mine").exists(), done.err
    (length,) = (int(found) for found in re.findall(r"train\.max_length=(\d+) ", done.err.splitlines()[-1]))
    done = run(*words, f"train.max_length={length}", "--json", stack=True)
    assert done.code == 0 and not any("left out" in line for line in done.json["assumed"]), done.err
    cut, preparing = done.json["refused"], ("prepare", tmp_path / "mine", "--out", tmp_path / "data")
    assert len(cut) == 1 and "never learn to stop" in cut[0] and not done.json["commands"]  # of no answer the end is learnt
    refused = run(*preparing, stack=True)
    assert refused.code == 2 and "never learn to stop" in refused.err, refused.err
    (whole,) = re.findall(r"train\.max_length=\d+", refused.err)
    made = run(*preparing, whole, "--json", stack=True)
    assert made.code == 0 and made.json["train"]["dropped"] == 0
    lines = data.read_text() + chats(tmp_path / "short.jsonl", count=30).read_text().replace('"0 word', '"zero word')
    data.write_text(lines)
    done = run("new", tmp_path / "other", *words[2:], "train.max_length=128", "--json", stack=True)
    assert done.code == 0 and any(f"train.max_length={length}" in line for line in done.json["assumed"]), done.json


PROMPTS = {"prompt": "Say the number aaa", "number": "aaa"}
INSTRUCTED = {"prompt": "Say aaa without commas", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("judged", [False, True], ids=["own reward", "ifeval"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_rows_of_prompts_become_a_recipe_for_rewards(judged: bool, method: str, tmp_path: Path) -> None:
    """On CPUs and on GPUs: with IFEval's instructions its reward, else a file in which one is to be written, which is said."""
    data = rows(tmp_path / "mine.jsonl", INSTRUCTED if judged else PROMPTS, 60)
    model = small_model(tmp_path / "hf")
    for name, more in (("cpus", ()), ("gpus", ("--gpus", "1x8xh100-sxm"))):
        words = ("--model", model, "--data", data, "--method", method, *more)
        done = run("new", tmp_path / name, *words, "--json", stack=True)
        assert done.code == 0, done.err
        resolved = resolve(tmp_path / name)
        assert resolved.is_grpo and resolved.recipe.data.format == "prompt"
        assert [reward.function for reward in resolved.recipe.reward or ()] == ["ifeval" if judged else "rewards:reward"]
        assert (tmp_path / name / "rewards.py").exists() is not judged
        assert {"accelerate.yaml", "model.json", "recipe.yaml", "README.md"} <= set(done.json["files"])
        assert any("rewards.py" in line for line in done.json["refused"]) is not judged
        assert resolved.global_batch_size % int(resolved.train_args["num_generations"]) == 0
    made = run("prepare", tmp_path / "cpus", "--out", tmp_path / "out", stack=True)
    assert made.code == 0, made.err


@pytest.mark.usefixtures("no_gpu")
def test_of_prompts_no_token_is_taken_for_the_end_of_an_answer(tmp_path: Path) -> None:
    """A template that writes EOS behind answers alone: the last token of a prompt is not what stops the model."""
    template = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + m.content }}{% endfor %}<|start_header_id|>assistant"
    model, data = small_model(tmp_path / "hf", template), rows(tmp_path / "prompts.jsonl", PROMPTS, 60)
    done = run("new", tmp_path / "mine", "--model", model, "--data", data, "--json", stack=True)
    assert done.code == 0 and "eos_token" not in (tmp_path / "mine" / "recipe.yaml").read_text(), done.err


def test_an_answer_beside_a_prompt_is_asked_about(tmp_path: Path) -> None:
    """It may be what is to be learnt, or what a reward compares with."""
    data = rows(tmp_path / "mine.jsonl", {"prompt": "Say aaa", "answer": "aaa"}, 60)
    words = ("--model", small_model(tmp_path / "hf"), "--data", data, "--gpus", "1x1xh100-sxm")
    asked = run("new", tmp_path / "r", *words, stack=True)
    assert asked.code == 2 and "completion: " in asked.err and "data.format=prompt" in asked.err, asked.err
    assert run("new", tmp_path / "r", *words, "data.format=prompt", stack=True).code == 0
    learnt = run("new", tmp_path / "s", *words, "data.columns={completion: answer}", stack=True)
    assert learnt.code == 0 and not resolve(tmp_path / "s").is_grpo


@pytest.mark.jobs
@pytest.mark.usefixtures("no_gpu")
def test_a_reward_is_written_and_the_recipe_runs(tmp_path: Path) -> None:
    """Until then a tiny run ends with the function's message and its line."""
    data = rows(tmp_path / "mine.jsonl", PROMPTS, 40)
    assert run("new", tmp_path / "r", "--model", small_model(tmp_path / "hf"), "--data", data, stack=True).code == 0
    words = ("run", tmp_path / "r", "--tiny", "--to", "export")
    before = run(*words, "--run-dir", tmp_path / "before")
    assert before.code == 93 and "rewards.py" in before.err and "write what an answer is worth" in before.err, before.err
    file = tmp_path / "r" / "rewards.py"
    text = file.read_text()
    file.write_text(text[: text.index("    raise RuntimeError")] + "    return [float(len(one)) for one in completions]\n")
    after = run(*words, "--run-dir", tmp_path / "after")
    assert after.code == 0 and (tmp_path / "after" / "adapter").is_dir(), after.err


def test_gpt2_is_taken_by_its_own_config(tmp_path: Path) -> None:
    """By both of its names for one size where they agree; GGUF and models of other kinds are named for what they are."""
    from transformers import GPT2Config

    own = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512).to_dict()
    (tmp_path / "gpt").mkdir()
    for body in (own, {**own, "hidden_size": 64}):
        (tmp_path / "gpt" / "config.json").write_text(json.dumps(body, default=str))
        found = find_model(str(tmp_path / "gpt"))
        assert found.architecture["hidden_size"] == 64 and found.architecture["num_hidden_layers"] == 2
    (tmp_path / "x-Q4.gguf").write_bytes(b"GGUF")
    for name in (str(tmp_path / "x-Q4.gguf"), "acme/Some-7B-GGUF"):
        with pytest.raises(UserError, match="GGUF") as caught:
            find_model(name)
        assert "safetensors" in (caught.value.problems[0].fix or "")
    for kind in ("t5", "clip", "qwen9_vl_text"):
        (tmp_path / "gpt" / "config.json").write_text(json.dumps({**own, "model_type": kind}, default=str))
        with pytest.raises(UserError, match="model_type") as caught:
            find_model(str(tmp_path / "gpt"))
        assert "llama" in (caught.value.problems[0].fix or "") and "did you mean" not in (caught.value.problems[0].fix or "")
