"""Which tokens the assistant says, without marks in the template: the same as with them, or the conversation is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from jinja2 import TemplateError

from clustertune.data import sequences, tokens
from clustertune.data.local_model import CHAT_TEMPLATE, train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.tokenizer import NotPrefixPreserving, answer_spans, has_generation_markers, tokens_within
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data

TRL = Path(trl.__file__).parent / "chat_templates"
MARKED = [path for path in [*sorted(TRL.glob("*.jinja")), CHAT_TEMPLATE] if has_generation_markers(path.read_text())]
BEGIN_EARLIER = (
    "deepseek", "diffusion", "gemma4", "gptoss", "muse", "nemotron", "qwen2_5_training", "qwen3_5", "qwen3_6", "qwen3_8",
    "glm4moe",
)  # fmt: skip
"""TRL's marks in these begin within the generation prompt (``<|start|>assistant``, ``<think>``, a line's end), which the model
is given and does not say."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}"
)
FORGETS_THOUGHTS = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
COUNTS_MESSAGES = "{{ messages | length }} messages\n" + CHATML

CALL = {"type": "function", "id": "call12345", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
MULTI = [user("one"), assistant("two words"), user("three"), assistant("four!"), user("five"), assistant("six")]
TOOL = {"role": "tool", "content": "42", "name": "f", "tool_call_id": "call12345"}
ASKS_TOOL = [user("call"), assistant("", tool_calls=[CALL]), TOOL, assistant("it is 42"), user("again"), assistant("no")]
THINKS = [user("one"), assistant("<think>\nhm\n</think>\n\ntwo"), user("three"), assistant("<think>\nso\n</think>\n\nfour")]
REASONS = [user("one"), assistant("two", reasoning_content="hm"), user("three"), assistant("four", reasoning_content="so")]
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one answer": (MULTI[:2], None),
    "several": (MULTI, None),
    "a system prompt": ([SYSTEM, *MULTI], None),
    "tools": (ASKS_TOOL, TOOLS),
    "thoughts": (THINKS, None),
    "reasoning": (REASONS, None),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["one two three four five six hello you it is words"] * 9, 400, 4096)
    special = ["<|im_end|>", "<|im_start|>", "<|end|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]", "<end_of_turn>"]
    made.add_special_tokens({"additional_special_tokens": special})
    return made


def computed(tokenizer: Any, template: str, chat: str) -> tuple[list[int], list[bool]]:
    turns, tools = CHATS[chat]
    render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template, tools=tools)
    ids, mask = tokens_within(tokenizer, *answer_spans(turns, render))
    return ids.tolist(), mask.tolist()


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_the_tokens_are_those_between_marks(path: Path, tokenizer: Any) -> None:
    """Of every template with marks that is at hand, those of TRL among them; where these begin within the generation prompt,
    the answers' own part of them."""
    template, compared = path.read_text(), 0
    for name, (turns, tools) in CHATS.items():
        try:
            marked = tokenizer.apply_chat_template(
                turns, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = computed(tokenizer, template, name)
        except (TemplateError, TypeError, NotPrefixPreserving):
            continue
        if "gemma" in path.stem and name == "tools":  # no generation prompt behind a tool's answer, and a header all the same
            continue
        compared += 1
        theirs = [bool(bit) for bit in marked["assistant_masks"]]
        assert ids == list(marked["input_ids"])
        if not path.stem.startswith(BEGIN_EARLIER):
            assert mask == theirs, name
        else:
            assert all(marks or not ours for ours, marks in zip(mask, theirs, strict=True)), name
            assert any(mask) and mask[-1] == theirs[-1], name
    assert compared or path.stem == "llava_next_training"


def prepared(folder: Path, turns: list[dict[str, Any]], count: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    rows = folder / "rows.jsonl"
    lines = ({"messages": [*turns[:-1], {**turns[-1], "content": f"{turns[-1]['content']} {n}"}]} for n in range(count))
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = Data(name="made", format="messages", eval_fraction=0.2)
    prepare(data, recipe_folder=folder, seed=1, out=folder / "data", input_path=rows)
    return folder / "data"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["two words<|im_end|>\n", "four!<|im_end|>\n", "six 0<|im_end|>\n"]),
        (MISTRAL, [" two words<|eot_id|>", " four!<|eot_id|>", " six 0<|eot_id|>"]),
        (FORGETS_THOUGHTS, ["two words<|im_end|>\n", "four!<|im_end|>\n", "six 0<|im_end|>\n"]),
    ],
    ids=["chatml", "mistral", "forgets thoughts"],
)
@pytest.mark.parametrize("packing", [True, False])
def test_a_template_without_marks_trains_the_answers(
    template: str, said: list[str], packing: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """What is prepared is what a rank maps, packed and not."""
    tokenizer.chat_template = template
    dataset, settings = prepared(tmp_path, MULTI), train_defaults() | {"packing": packing, "max_length": 256}
    settings["assistant_only_loss"] = True
    tokens.make(dataset, tokenizer, settings)
    rows, _ = sequences.load(dataset / tokens.FOLDER, dataset, tokenizer, settings)
    for row in rows.select(range(2)):
        learnt = tokenizer.decode([label for label in row["labels"] if label != -100])
        first = "".join(said[:2])
        assert learnt.startswith(first) and learnt.count(first) == (learnt.count("six")) and first.replace(" ", "")
    shown = sequences.shown(dataset / tokens.FOLDER, tokenizer, 1, ("[[", "]]"))[0]
    parts = [part.partition("]]")[0] for part in shown.split("[[")[1:]]
    assert parts[:2] == said[:2] and parts[2].startswith(said[2].partition("0")[0])


def test_a_template_that_is_not_prefix_preserving_is_refused_with_both_ways_out(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = COUNTS_MESSAGES
    dataset = prepared(tmp_path, MULTI)
    with pytest.raises(UserError) as caught:
        tokens.make(dataset, tokenizer, train_defaults() | {"assistant_only_loss": True, "max_length": 256})
    [problem] = caught.value.problems
    assert problem.file == f"{dataset / 'train.jsonl'}:1"
    assert "train.assistant_only_loss=false" in (problem.fix or "") and "model.chat_template" in (problem.fix or "")
    tokens.make(dataset, tokenizer, train_defaults() | {"assistant_only_loss": False, "max_length": 256})
