"""What ``show`` says, for people and for machines."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from clustertune.resolve import view
from clustertune.resolve.kernels import PACKED
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from tests.goldens import RUNS
from tests.tree import REPO

NAMES = ("tiny-oasst2", "llama405b-oasst2")


def rendered(name: str, *overrides: str, tiny: bool = False, width: int = 100) -> str:
    stream = io.StringIO()
    view.render(resolve(name, overrides, tiny=tiny), Console(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_the_document_says_every_value_and_its_origin(name: str) -> None:
    body = view.as_json(resolve(name, ["lora.r=4"]))
    assert json.loads(json.dumps(body)) == body
    assert body["recipe"] == name
    assert body["values"]["lora.r"] == {"value": 4, "origin": "override"}
    assert body["values"]["train.optim"]["origin"] == "base sft-lora"
    derived = {item["key"]: item for item in body["derived"]}
    key = "train.gradient_accumulation_steps"
    assert body["values"][key]["value"] == derived[key]["value"] == 2
    assert body["values"][key]["origin"] == f"derived: {derived[key]['reason']}"
    for name_of, value in body["train_args"].items():
        assert any(path == f"train.{name_of}" or path.startswith(f"train.{name_of}.") for path in body["values"]), (
            name_of,
            value,
        )


def test_the_table_says_where_each_value_is_from() -> None:
    text = rendered("llama405b-oasst2", "train.seed=7", "data.input='/a/[red]x[/red]'", width=140)
    table = text.split("model.json:")[0]
    for words in ("train.seed", "override", "base sft-lora", "recipe", "derived:", "default", "lora.target_modules"):
        assert words in table
    assert "q_proj, k_proj" in table and "[red]x[/red]" in table, "brackets are no markup"
    assert "be673f326cab4cd22ccfef76109faf68e41aa5f1" in table, "a wide table breaks no revision"
    assert "405,853,388,800 parameters" in text and "404,619,264 trained" in text
    tiny = rendered("llama405b-oasst2", tiny=True)
    assert "--tiny" in tiny and "model.json scaled down" not in tiny.split("model.json:")[0]
    assert [line for line in tiny.splitlines() if "train.max_steps" in line and line.rstrip().endswith("tiny")]


@pytest.mark.parametrize(("name", "tiny"), RUNS)
def test_every_recipe_is_read_packed_and_shown(name: str, tiny: bool) -> None:
    """Nothing of it is lost on the way to the ranks. What is packed attends conversation by conversation, but for the recipe
    that is trained as its source was, whose sdpa costs a mask and says so; Megatron has its own. No section is shown that the
    recipe has not, no number in scientific notation, no empty origin."""
    resolved = resolve(name, tiny=tiny)
    assert Resolved.from_dict(json.loads(json.dumps(resolved.as_dict()))) == resolved
    train = resolved.train_args
    attention = (train["model_init_kwargs"] or {}).get("attn_implementation")
    masks = [text for text in resolved.warnings if "attention mask" in text]
    chosen = [item.value for item in resolved.derived if item.key == "train.model_init_kwargs.attn_implementation"]
    if not train["packing"] or resolved.recipe.megatron is not None:
        assert attention is None and not masks
    elif name == "llama405b-oasst2":
        assert attention == "sdpa" and "remove" in masks[0]
    else:
        assert [attention] == chosen == [PACKED] and not masks
    for key, item in view.as_json(resolved)["values"].items():
        assert item["origin"] not in (None, "None", "derived: ") and item["value"] != {}, key
    for width in (100, 200):
        stream = io.StringIO()
        view.render(resolved, Console(file=stream, width=width))
        table, _, notes = stream.getvalue().partition("model.json:")
        assert "None" not in table and max(map(len, table.splitlines())) <= width
        assert not re.search(r"\de[+-]\d", notes.splitlines()[0])
        assert resolved.lora is not None or "trained (100 %)" in notes
        assert ("accelerate.yaml" in table + notes) == ((REPO / "recipes" / name / "accelerate.yaml").is_file())


# --- the reference recipe has every setting of the published run -------------------------------------------------------------
