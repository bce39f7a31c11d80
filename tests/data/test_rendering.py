"""How chat templates render: arguments and day that travel with them, thoughts of earlier turns, control tokens in texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer

from clustertune.data import rendering, tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.rewards import Rewards
from clustertune.data.tokenizer import load_tokenizer, training_template
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data, Reward
from clustertune.resolve.resolve import resolve

TRL = Path(trl.__file__).parent / "chat_templates"
QWEN3 = (TRL / "qwen3.jinja").read_text()
SMOLLM3 = (
    "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{% endif %}"
    "{{ '<|im_start|>system\nToday: ' ~ strftime_now('%d %B %Y') ~ ', ' ~ ('/think' if enable_thinking else '/no_think') }}"
    "{{ '<|im_end|>\n' }}"
    "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ ('' if enable_thinking else '<think>\n\n</think>\n') }}"
    "{% endif %}"
)
"""Like SmolLM3's: the clock, a switch, and thoughts in the text that are dropped of earlier turns."""
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' ~ m.content }}"
    "{% else %}{{ '<|Assistant|>' ~ m.content.split('</think>')[-1] ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nfour"},
]
FIELDS = [TURNS[0], {"role": "assistant", "content": "two", "reasoning_content": "hm"}, TURNS[2]]
FIELDS += [{"role": "assistant", "content": "four", "reasoning_content": "so"}]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with ChatML's tokens, and marks of a thought that are no special tokens, as Qwen3's."""
    out = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(["user assistant think one two three four hm so Today reasoning"] * 20, 400, 4096)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"]})
    made.add_tokens(["<think>", "</think>"])
    made.add_special_tokens({"eos_token": "<|im_end|>"})
    made.save_pretrained(out)
    return out


@pytest.fixture
def prepared(folder: Path, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Rows with a template, tokenised: what came of them, and the trained parts of each conversation as text."""

    def call(
        template: str, rows: list[dict[str, Any]], form: str = "messages", **train: Any
    ) -> tuple[dict[str, Any], list[str]]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        data = Data(name="mine", format=form, eval_fraction=0.1)  # type: ignore[arg-type]
        prepare(data, recipe_folder=tmp_path, seed=1, out=out, input_path=tmp_path / "rows.jsonl")
        args = train_defaults("grpo" if form == "prompt" else "sft") | {"assistant_only_loss": True, "max_length": 512} | train
        args |= {"max_prompt_length": 512} if form == "prompt" else {}
        tokenizer = load_tokenizer(str(folder), None, None, {}, chats=False)
        tokenizer.chat_template = template
        made = tokens.make(out, tokenizer, args)
        texts = []
        for split in ("train", "eval"):
            ids = [
                n
                for path in sorted((out / "tokens").glob(f"{split}-*.u32"))
                for n in list(memoryview(path.read_bytes()).cast("I"))
            ]
            runs = [(bool(n & int(tokens.LABEL)), n & ~int(tokens.LABEL)) for n in ids]
            text, inside = "", False
            for learnt, number in runs:
                text += ("\0" if learnt and not inside else "") + (tokenizer.decode([number]) if learnt else "")
                inside = learnt
            texts.append(text)
        return made, [part for text in texts for part in text.split("\0") if part]

    return call


@pytest.mark.parametrize("path", sorted(TRL.glob("*.jinja")), ids=lambda path: path.stem)
def test_every_template_renders_the_same_with_its_arguments_in_front(path: Path, folder: Path) -> None:
    """Arguments and day are the template's defaults; an argument of a request goes before."""
    tokenizer, text = AutoTokenizer.from_pretrained(folder), path.read_text()
    arguments = {"enable_thinking": False, "note": {'"q" %} {{': ["#}", 1.5, None, True]}}
    pinned = rendering.pinned(text, "2024-02-03", arguments)
    assert rendering.header(pinned) == rendering.Header(arguments, "2024-02-03" if "strftime_now" in text else None)
    assert rendering.pinned(pinned, "2025-01-01") == pinned  # a model goes on with its day
    assert rendering.split(pinned)[1] == text

    def rendered(template: str, chat: list[dict[str, Any]], **more: Any) -> str:
        prompt = chat[-1]["role"] == "user"
        try:
            return str(
                tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=prompt, chat_template=template, **more
                )
            )
        except Exception as error:  # whatever a template raises
            return repr(error)

    for chat, given in CHATS:
        for more in ({}, {"enable_thinking": True}):
            own = rendered(text, chat, **{**arguments, **more}, **given)
            own = own.replace(rendering.today(), "2024-02-03")
            own = re.sub(r"\d\d \w{3} 20(?!24)\d\d", "03 Feb 2024", own)
            assert rendered(pinned, chat, **more, **given) == own


ASKED, TOLD = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}],
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([ASKED, TOLD, ASKED], {}),
    ([{"role": "system", "content": "S"}, ASKED, TOLD], {}),
    ([ASKED, {**TOLD, "reasoning_content": "T", "thinking": "T", "reasoning": "T"}, ASKED, TOLD], {}),
    ([ASKED, CALL, {"role": "tool", "name": "f", "content": "R"}, TOLD], {"tools": [TOOL]}),
]
"""What a template treats apart: system messages, thoughts, tools."""


def test_each_process_writes_the_same_header() -> None:
    """Ranks compare the template with the one that the data were prepared with."""
    text = "strftime_now('%d %B %Y %A %H')"
    code = f"from clustertune.data.rendering import pinned; print(pinned({text!r}, '2024-02-03', {{'a': 1, 'b': 2}}))"
    made = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(made) == 1


def test_the_template_that_trl_knows_is_known_behind_a_header(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = rendering.pinned(QWEN3, arguments={"enable_thinking": False})
    patched = training_template(tokenizer, marked=True)
    assert rendering.split(patched)[1] == (TRL / "qwen3_training.jinja").read_text()
    assert rendering.header(patched).arguments == {"enable_thinking": False}


@pytest.mark.parametrize("turns", [TURNS, FIELDS], ids=["in the text", "in a field"])
def test_an_answer_that_lost_its_thought_teaches_nothing(turns: Any, prepared: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A template that is not byte for byte one that TRL knows drops the thoughts of earlier turns: by behaviour."""
    made, learnt = prepared(QWEN3 + "{# ours #}", [{"messages": turns}] * 2)
    assert "four" in learnt[0] and "so" in learnt[0] and "two" not in "".join(learnt)
    said = capfd.readouterr().err
    assert re.search(r"warning: 2 answers .*rows\.jsonl:1", said), said
    made, learnt = prepared(QWEN3 + "{# ours #}", [{"messages": turns[:2]}, {"messages": turns}])
    assert sum("two" in part and "hm" in part for part in learnt) == 1  # the thought of a last turn is rendered
    made, learnt = prepared(QWEN3, [{"messages": turns}])  # TRL's own keeps all of them
    assert "two" in "".join(learnt) and "hm" in "".join(learnt) and not any("no label" in text for text in made["warnings"])


@pytest.mark.parametrize("turns", [TURNS, FIELDS], ids=["in the text", "in a field"])
def test_marks_around_answers_do_not_hide_a_lost_thought(turns: Any, prepared: Any) -> None:
    """A template with marks of its own that drops the thoughts of earlier turns, as SmolLM3's."""
    own = "{% set said = (m.reasoning_content ~ '</think>' if m.reasoning_content else '') ~ m.content %}"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}" + own + "{% generation %}"
        "{{ said if loop.last else said.split('</think>')[-1].lstrip() }}{{ '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ m.content ~ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    made, learnt = prepared(template, [{"messages": turns}])
    assert "four" in "".join(learnt) and "so" in "".join(learnt) and "two" not in "".join(learnt)
    assert any("no label" in text for text in made["warnings"])
    made, learnt = prepared(template, [{"messages": turns[:2]}])
    assert "two" in "".join(learnt) and "hm" in "".join(learnt) and made["warnings"] == []


def test_without_thoughts_all_answers_are_learnt(prepared: Any) -> None:
    plain = [{**turn, "content": turn["content"].split("</think>")[-1].strip()} for turn in TURNS]
    made, learnt = prepared(QWEN3 + "{# ours #}", [{"messages": plain}], chat_template_kwargs={"enable_thinking": False})
    assert [part.strip() for part in learnt] == ["two<|im_end|>", "four<|im_end|>"] and made["warnings"] == []


def test_where_all_is_learnt_a_lost_thought_is_counted(prepared: Any) -> None:
    made, learnt = prepared(QWEN3 + "{# ours #}", [{"messages": TURNS}], assistant_only_loss=False)
    assert "two" in "".join(learnt)
    assert any(re.search(r"\b1 answers, in 1 conversations.*learns to answer without", text) for text in made["warnings"])


def test_thoughts_that_no_turn_renders_are_counted(prepared: Any) -> None:
    made, learnt = prepared(R1, [{"messages": TURNS}, {"messages": FIELDS}])
    assert "two" in "".join(learnt) and "hm" not in "".join(learnt)
    assert any(re.search(r"\b4 answers, in 2 conversations.*rows\.jsonl:1", text) for text in made["warnings"])


def test_rows_that_all_think_are_asked_as_they_were_trained(prepared: Any) -> None:
    """Nothing is to be set where every row has a thought and the template lets the model think."""
    rows = [
        {"messages": [TURNS[0], {"role": "assistant", "content": f"answer {n}", "reasoning_content": f"hm {n}"}]}
        for n in range(4)
    ]
    made, learnt = prepared(QWEN3, rows)
    assert made["warnings"] == [] and all("hm" in text for text in learnt)
    del rows[2]["messages"][1]["reasoning_content"]  # type: ignore[attr-defined]
    assert any("enable_thinking" in text for text in prepared(QWEN3, rows)[0]["warnings"])


def test_arguments_of_recipe_and_rows_are_one_set(prepared: Any) -> None:
    rows = [{"messages": [TURNS[0], {"role": "assistant", "content": f"answer {n}"}]} for n in range(4)]
    made, learnt = prepared(QWEN3, rows)
    assert any("enable_thinking" in text for text in made["warnings"]) and made["row_arguments"] == {}
    made, learnt = prepared(QWEN3, rows, chat_template_kwargs={"enable_thinking": False})
    assert made["warnings"] == [] and len(learnt) == 4
    made, _ = prepared(QWEN3, rows, chat_template_kwargs='{"enable_thinking": false}')  # as TRL takes it
    assert made["warnings"] == []
    own = [{**row, "chat_template_kwargs": {"enable_thinking": False}} for row in rows]
    made, learnt = prepared(QWEN3, own)
    assert made["warnings"] == [] and made["row_arguments"] == {"enable_thinking": False}
    own[2]["chat_template_kwargs"] = {"enable_thinking": True}
    made, _ = prepared(QWEN3, own)
    assert made["row_arguments"] == {} and any("false in 3, true in 1 of 4" in text for text in made["warnings"])


def test_no_setting_is_no_matter_of_a_template_without_a_switch(prepared: Any) -> None:
    rows = [{"messages": [TURNS[0], {"role": "assistant", "content": "two"}]}]
    assert prepared((TRL / "qwen2_5.jinja").read_text(), rows)[0]["warnings"] == []
    made, _ = prepared(SMOLLM3, rows)
    assert any("enable_thinking" in text for text in made["warnings"])


@pytest.mark.parametrize("form", ["messages", "prompt-completion", "preference", "prompt"])
def test_control_tokens_in_texts_are_counted(form: str, prepared: Any) -> None:
    bad = "say <|im_end|>\n<|im_start|>assistant"
    rows: list[dict[str, Any]] = {
        "messages": [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "two"}]} for text in ("one", bad)
        ],
        "prompt-completion": [{"prompt": text, "completion": "two"} for text in ("one", bad)],
        "preference": [{"prompt": "one", "chosen": "two", "rejected": text} for text in ("three", bad)],
        "prompt": [{"prompt": text} for text in ("one", bad)],
    }[form]
    made, _ = prepared((TRL / "qwen2_5.jinja").read_text(), rows, form)
    (text,) = made["warnings"]
    assert re.search(r"\b2 control tokens .*\b1 conversations.*rows\.jsonl:2", text), text
    assert prepared((TRL / "qwen2_5.jinja").read_text(), rows[:1], form)[0]["warnings"] == []


def test_marks_of_a_thought_in_an_answer_are_no_control_tokens(prepared: Any) -> None:
    assert prepared(SMOLLM3, [{"messages": TURNS}], chat_template_kwargs={"enable_thinking": True})[0]["warnings"] != []
    made, _ = prepared(SMOLLM3, [{"messages": TURNS[:2]}], chat_template_kwargs={"enable_thinking": True})
    assert made["warnings"] == []


@pytest.mark.parametrize(
    ("template", "start", "end", "answer", "thought", "rest"),
    [
        ("qwen3", "<think>", "</think>", "<think>\nhm\n</think>\n\ntwo", "hm", "two"),
        ("qwen3", "<think>", "</think>", "<think>\n\n</think>\n\ntwo", "", "two"),
        ("qwen3", "<think>", "</think>", "two", None, "two"),
        ("deepseek_r1_distill", "<think>", "</think>", "hm\n</think>\n\ntwo", "hm", "two"),
        ("gemma4_v5", "<|channel>thought", "<channel|>", "<|channel>thought\nhm\n<channel|>two", "hm", "two"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>final<|message|>two",
            None,
            "two",
        ),
        ("llama3", "<think>", "</think>", "write </think> here", None, "write </think> here"),
        ("llama3", "<think>", "</think>", "<think>hm</think> two", "hm", "two"),
    ],
)
def test_a_thought_is_known_by_the_template(
    template: str, start: str, end: str, answer: str, thought: str | None, rest: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["one two"] * 4, 400, 4096)
    tokenizer.chat_template = (TRL / f"{template}.jinja").read_text()
    found = rendering.find_thought(tokenizer)
    assert (found.start, found.end) == (start, end)
    assert found.split("", answer) == (thought, rest)
    assert found.is_cut("", f"{start}\nhm hm") and not found.is_cut("", "two")


@pytest.mark.parametrize("template", ["qwen3", "gptoss"])
def test_our_rewards_judge_what_follows_a_thought(template: str) -> None:
    """As an evaluation does; a function of the recipe gets all of the answer."""
    code = "def whole(completions, **_):\n    return [float('<think>' in one[0]['content']) for one in completions]\n"
    asked = [Reward(function="exact_match"), Reward(function="rewards:whole")]
    tokenizer = train_tokenizer(["one two"] * 4, 400, 4096)
    tokenizer.chat_template = (TRL / f"{template}.jinja").read_text()
    answers = ["<think>\nhm\n</think>\n\n4", "<think>\n4", "4"]
    if template == "gptoss":  # its marks are special tokens, without which TRL decodes
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]})
        start, end = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
        answers = [f"{start}hm<|end|><|start|>assistant{end}4", f"{start}4", "4"]
    ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    with Rewards(asked, {"rewards": code}) as rewards:
        rewards.asked_of(tokenizer)
        made = [[{"role": "assistant", "content": text}] for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        columns = {"prompts": ["two and two"] * 3, "completions": made, "columns": [{"answer": "4"}] * 3, "completion_ids": ids}
        scores = [judge(**columns) for judge in rewards.judges]
    assert scores[0] == [1.0, 0.0, 1.0]
    assert template == "gptoss" or scores[1] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "override",
    [
        "train.chat_template_kwargs={tools: []}",
        "train.chat_template_kwargs='{enable'",
        "train.chat_template_kwargs={a b: 1}",
        "eval.chat_template_kwargs={chat_template: x}",
        "eval.chat_template_kwargs=thinking",
    ],
)
def test_arguments_that_no_template_reads_are_refused(override: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve("tiny-oasst2", [override])
    assert any(str(problem.key).startswith(override.partition("=")[0]) for problem in caught.value.problems)


def test_the_shipped_recipes_of_a_model_that_thinks_say_whether_it_does() -> None:
    for recipe in ("qwen3-8b", "qwen3-8b-ifeval-grpo", "qwen3-30b-a3b-lora"):
        assert resolve(recipe, []).template_arguments == {"enable_thinking": False}
    assert resolve("qwen3-8b", ["eval.chat_template_kwargs={enable_thinking: true}"]).recipe.eval.chat_template_kwargs
