"""Recipes spoiled by rule, well over a hundred: each is refused in words that name the place, or means the same as before."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from clustertune.errors import UserError
from clustertune.recipe.load import nearest
from clustertune.resolve.resolve import resolve
from tests.recipe.conftest import Refuse, check_form

REPO = Path(__file__).resolve().parents[2]
RECIPES = ("tiny-oasst2", "llama405b-oasst2")


VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64,
    0.5, 1.5, 1e-9, 1e30, float("nan"), float("inf"), "", " ", "x y", "../../etc", "yes", "1e-4",
    "0x10", "auto", "none", [], [1], ["a", "a"], {}, {"a": 1}, 10**30, -(10**30), "\u202ex", "a" * 5000, "1_000", "$HOME", "~",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every path of a document with what stands there, inner mappings too."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key), inner
        yield from places(inner, (*path, key))


def mutate(path: Path, chance: Random) -> str:
    """Spoil a YAML or JSON file; returns what was done."""
    text = path.read_text()
    if chance.random() < 0.25:
        data = bytearray(text.encode())
        for _ in range(chance.choice([1, 1, 3])):
            at = chance.randrange(len(data))
            what = chance.randrange(4)
            if what == 0:
                data[at] = chance.randrange(256)
            elif what == 1:
                del data[at : at + chance.randint(1, 9)]
            elif what == 2:
                data[at:at] = data[at : at + chance.randint(1, 30)]
            else:
                del data[max(1, at) :]
        path.write_bytes(data)
        return f"{path.name}: bytes"
    body = yaml.safe_load(text)
    where, value = chance.choice(list(places(body)))
    inner = body
    for key in where[:-1]:
        inner = inner[key]
    last, how = where[-1], chance.choice(["typo", "value", "value", "value", "near", "near", "drop", "more"])
    if how == "typo" and isinstance(last, str):
        at = len(last) // 2
        inner[last[:at] + chance.choice("qxz_-. ") + last[at:]] = inner.pop(last)
    elif how == "drop":
        del inner[last]
    elif how == "more" and isinstance(inner, dict):
        inner["a_key_of_nobody"] = chance.choice(VALUES)
    elif how == "near" and isinstance(value, bool | int | float):
        number = float(value)
        inner[last] = chance.choice(
            [number, int(number), -value, value * 2, value / 2, value + 1, str(value), [value], not value]
        )
    else:
        inner[last] = chance.choice(VALUES)
    shown = repr(inner.get(last) if isinstance(inner, dict) else inner)[:80]
    path.write_text(json.dumps(body) if path.suffix == ".json" else yaml.safe_dump(body, sort_keys=False, allow_unicode=True))
    return f"{path.name}: {how} at {'.'.join(map(str, where))}: {shown}"


def read(relative: str) -> dict[str, Any]:
    body = yaml.safe_load((REPO / "recipes" / relative).read_text())
    assert isinstance(body, dict)
    return body


def leaves(body: dict[str, Any]) -> list[tuple[str, ...]]:
    """The path of every key, also of a section."""
    return [path for path, _ in places(body) if all(isinstance(key, str) for key in path)]


def replace(body: dict[str, Any], path: tuple[str, ...], name: str | None, value: Any) -> dict[str, Any]:
    """A copy of the mapping with one key renamed, its value replaced, or (``name`` None) the key left out."""
    changed = copy.deepcopy(body)
    section = functools.reduce(dict.__getitem__, path[:-1], changed)
    old = section.pop(path[-1], None)
    if name is not None:
        section[name] = old if value is KEEP else value
    return changed


KEEP = object()


def typo(word: str) -> str:
    """Two letters exchanged in the middle, or one left out."""
    at = len(word) // 2
    changed = word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if len(word) > 3 else word + "x"
    return changed if changed != word else word[:at] + word[at + 1 :]


FILES = [f"{recipe}/{file}" for recipe in RECIPES for file in ("recipe.yaml", "accelerate.yaml")]
FILES += ["_base/sft-lora.yaml"]


def options(file: str) -> tuple[str, list[str]]:
    """The recipe to resolve for a file, and the overrides that bring the file in."""
    folder, name = file.split("/")
    folder = "tiny-oasst2" if folder == "_base" else folder
    return folder, [f"accelerate={name}"] if name.startswith("accelerate") else []


@pytest.mark.parametrize("file", FILES)
def test_a_typo_in_any_key(file: str, recipes: Path, refused: Refuse) -> None:
    body, (folder, overrides) = read(file), options(file)
    for path in leaves(body):
        wrong = typo(path[-1])
        (recipes / file).write_text(yaml.safe_dump(replace(body, path, wrong, KEEP), sort_keys=False))
        problems = refused(recipes / folder, overrides)
        named = [problem for problem in problems if problem.key == ".".join((*path[:-1], wrong))]
        assert named, problems
        assert f"{file.split('/')[1]}:" in named[0].file, named[0].file  # the file, and the line in it
        if len(path[-1]) > 3 and nearest(wrong, [path[-1]]):
            assert path[-1] in (named[0].fix or ""), named[0]


@pytest.mark.parametrize(
    "file", [f"{name}/recipe.yaml" for name in RECIPES] + ["_base/sft-lora.yaml", "tiny-oasst2/accelerate.yaml"]
)
def test_every_value_of_every_key(file: str, recipes: Path) -> None:
    """Refused in a readable form, with the key among the problems or a key that depends on it; or resolved."""
    original = read(file)
    folder, overrides = options(file)
    count = 0
    for index, path in enumerate(leaves(original)):
        for value in [VALUES[(5 * index + step) % len(VALUES)] for step in range(3)]:
            (recipes / file).write_text(yaml.safe_dump(replace(original, path, path[-1], value), sort_keys=False))
            try:
                resolve(recipes / folder, overrides)
            except UserError as error:
                check_form(error)
                count += 1
    assert count > 0.8 * len(leaves(original))


BAD = {
    "learning_rate": ["abc", True, -1, 0, 1, float("nan"), [1], "nan", "inf", None, {}],
    "global_batch_size": [0, -4, "x", 1.5, True, None, 5],
    "max_length": [0, 7, -1, "long", 10**6], "per_device_train_batch_size": [0, -1, 1.5, True, "x", None],
    "num_train_epochs": [0, -1, "x", None], "warmup_steps": [-1, "x", 1.5], "weight_decay": [-0.1, 1, "x"],
    "seed": [-1, 1.5, "x", True, 2**32], "save_steps": [0, -1, 1.5, "x"], "logging_steps": [0, -2], "eval_steps": [0, -2, "x"],
    "save_total_limit": [0, -3, "x"], "packing": ["maybe", 2, [True]], "lr_scheduler_type": ["cosin", 3, None],
    "optim": ["adamw", "adam_torch"], "eval_strategy": ["step", 1, True], "report_to": ["wandbb", 3], "bf16": ["perhaps", 3],
    "packing_strategy": ["ffd"], "save_strategy": ["step"], "include_for_metrics": ["loss"],
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_a_wrong_value_is_named(key: str, recipes: Path, refused: Refuse) -> None:
    body = read("tiny-oasst2/recipe.yaml")
    for value in BAD[key]:
        body["train"][key] = value
        (recipes / "tiny-oasst2" / "recipe.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
        problems = refused(recipes / "tiny-oasst2")
        assert [problem.key for problem in problems] == [f"train.{key}"]
        assert "recipe.yaml:" in problems[0].file


@pytest.mark.parametrize("section", ["model", "data", "train"])
def test_a_section_that_is_none(section: str, recipes: Path, refused: Refuse) -> None:
    for base in (recipes / "_base").glob("*.yaml"):
        base.write_text("slurm: {nodes: 1}\n")
    for value in (None, 3, "x", [], [1], ...):
        body = replace(read("llama405b-oasst2/recipe.yaml"), (section,), None if value is ... else section, value)
        (recipes / "llama405b-oasst2" / "recipe.yaml").write_text(yaml.safe_dump(body))
        assert section in {str(problem.key).split(".")[0] for problem in refused(recipes / "llama405b-oasst2")}


@pytest.mark.parametrize("file", ["recipe.yaml", "accelerate.yaml", "model.json", "../_base/sft-lora.yaml"])
def test_a_file_that_is_none(file: str, recipes: Path, refused: Refuse) -> None:
    """tests/recipe/test_yamlfile.py has the texts that are no YAML."""
    path = recipes / "tiny-oasst2" / file
    for content in (None, b"", b"- model\n", b"a: [\n", bytes(range(256)), "link", "folder"):
        path.unlink(missing_ok=True)
        if content == "folder":
            path.mkdir()
        elif content == "link":
            path.symlink_to("nowhere")
        elif content is not None:
            path.write_bytes(content)  # type: ignore[arg-type]
        problems = refused(recipes / "tiny-oasst2")
        assert any(path.name in problem.file or problem.key == "base" for problem in problems), content


HOSTILE = [
    "../x", "/etc/passwd", "a;rm -rf /", "$(id)", "`id`", "a\nb", "-rf", "a b", "\u202ex", "x" * 300, "a/b/c", "\x00", "é",
]  # fmt: skip


@pytest.mark.parametrize("key", ["model.name", "data.name", "base", "accelerate", "model.chat_template"])
def test_hostile_names(key: str, recipes: Path, refused: Refuse) -> None:
    section, _, name = key.rpartition(".")
    for hostile in HOSTILE:
        body = read("tiny-oasst2/recipe.yaml")
        (body[section] if section else body)[name] = hostile
        (recipes / "tiny-oasst2" / "recipe.yaml").write_text(json.dumps(body))
        assert any(problem.key in {key, None} for problem in refused(recipes / "tiny-oasst2"))


def test_hostile_recipe_arguments(refused: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*HOSTILE, "", "nothing-here"):
        assert refused(name)


HARMLESS = [
    ("learning_rate: 2.0e-3", "learning_rate: 2e-3"), ("learning_rate: 2.0e-3", "learning_rate: '0.002'"),
    ("bf16: false", "bf16: no"), ("bf16: false", "bf16: 'False'"), ("nodes: 1", "nodes: '1'"), ("nodes: 1", "nodes: 1.0"),
    ("base: sft-lora", "base: 'sft-lora'   # a comment"), ("eval_on_start: true", "eval_on_start: TRUE"),
    ("base: sft-lora", "\nbase: sft-lora\n\n"), ("base: sft-lora", "---\nbase: sft-lora"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), HARMLESS)
def test_other_ways_to_write_the_same(old: str, new: str, recipes: Path) -> None:
    file = recipes / "tiny-oasst2" / "recipe.yaml"
    text = re.sub(r"learning_rate: [^ \n]+", "learning_rate: 2.0e-3", file.read_text())
    file.write_text(text)
    before = resolve(recipes / "tiny-oasst2")
    assert old in text
    file.write_text(text.replace(old, new))
    after = resolve(recipes / "tiny-oasst2")
    assert (after.recipe, after.train_args, after.fingerprint()) == (before.recipe, before.train_args, before.fingerprint())


@pytest.mark.parametrize("file", ["recipe.yaml", "accelerate.yaml", "model.json"])
def test_random_damage(file: str, recipes: Path) -> None:
    """Bytes and values exchanged, dropped, doubled, cut: never anything but a result or a user's error."""
    path = recipes / "tiny-oasst2" / file
    original, chance, refusals = path.read_bytes(), Random(7), 0
    for _ in range(40):
        path.write_bytes(original)
        mutate(path, chance)
        try:
            resolve(recipes / "tiny-oasst2")
        except UserError as error:
            check_form(error)
            refusals += 1
    assert refusals > 12


@pytest.mark.parametrize(
    "key", ["train.hub_token", "train.api_key", "model.token", "wandb_api_key", "train.run_name", "data.input"]
)
def test_a_secret_is_refused_and_never_shown(key: str, refused: Refuse) -> None:
    for secret in ("hf_" + "a1B2" * 8, "sk-" + "a1B2" * 8, "ghp_" + "a1B2" * 8):
        problems = refused("tiny-oasst2", [f"{key}={secret}"])
        assert any(problem.key == key for problem in problems)
        assert not any(secret in str(problem) for problem in problems)


def test_a_plain_secret_under_an_unknown_key_is_not_shown(refused: Refuse) -> None:
    for key in ("train.wandb_key", "lora.hub_token", "data.password", "secret"):
        assert "hunter2" not in str(refused("tiny-oasst2", [f"{key}=hunter2"])[0])
