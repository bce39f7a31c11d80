"""The chat template of an export has what the training gave it: every program renders what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import trl
from transformers import AutoTokenizer

from clustertune import rundir
from clustertune.data.local_model import train_tokenizer
from clustertune.export import companions
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir

TRL = Path(trl.__file__).parent / "chat_templates"
CHAT = [{"role": "user", "content": "one"}]
DATED = "{{ 'Today: ' ~ strftime_now('%A, %d %B %Y') ~ '\n' }}" + (TRL / "qwen3.jinja").read_text()


def base(folder: Path, place: str, template: str) -> Path:
    """A base model's tokenizer, with its template in one of the places that there are."""
    made = train_tokenizer(["one two three"] * 4, 400, 4096)
    made.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if place == "a file":
        (folder / "chat_template.jinja").write_text(template)
        return folder
    path = folder / "tokenizer_config.json"
    held = template if place == "the configuration" else [{"name": "default", "template": template}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": held}))
    return folder


@pytest.mark.parametrize("place", ["a file", "the configuration", "a list of named ones"])
def test_arguments_and_day_go_on_with_the_export(place: str, tmp_path: Path) -> None:
    folder, stage = base(tmp_path / "base", place, DATED), tmp_path / "stage"
    stage.mkdir()
    resolved = resolve("tiny-oasst2", ['train.chat_template_kwargs={"enable_thinking": false}'])
    companions.copy_tokenizer(folder, stage)
    companions.write_trained(folder, stage, replace(resolved, template_date="2024-02-03"))
    exported = AutoTokenizer.from_pretrained(stage)
    text = exported.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("Today: Saturday, 03 February 2024") and text.endswith("<think>\n\n</think>\n\n")
    text = exported.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert text.endswith("assistant\n")
    # A model that is trained again goes on with both.
    again = tmp_path / "again"
    again.mkdir()
    companions.copy_tokenizer(stage, again)
    companions.write_trained(stage, again, replace(resolve("tiny-oasst2", []), template_date="2030-01-01"))
    text = AutoTokenizer.from_pretrained(again).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("Today: Saturday, 03 February 2024") and text.endswith("<think>\n\n</think>\n\n")


def test_what_rows_agree_on_goes_on_too_and_nothing_else_is_touched(tmp_path: Path) -> None:
    template = (TRL / "qwen3.jinja").read_text()
    folder, resolved = base(tmp_path / "base", "a file", template), resolve("tiny-oasst2", [])
    for name, rows in (("plain", {}), ("rows", {"enable_thinking": False})):
        stage = tmp_path / name
        stage.mkdir()
        companions.copy_tokenizer(folder, stage)
        companions.write_trained(folder, stage, replace(resolved, row_arguments=rows, template_date="2024-02-03"))
        written = (stage / "chat_template.jinja").read_text()
        assert (written == template) == (not rows) and written.endswith(template)


def test_the_day_is_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later command finds the day, and what the rows agree on, in run.json, and is the same run."""
    run, resolved = RunDir(tmp_path / "run"), resolve("tiny-oasst2", [])
    run.create(resolved)
    assert run.read()["recipe"]["template_date"] == date.today().isoformat()
    run.pin({"enable_thinking": False})

    class Later(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 5, 6)

    monkeypatch.setattr(rundir, "date", Later)
    run.describe(resolve("tiny-oasst2", ["train.logging_steps=3"]))
    kept = run.resolved()
    assert (kept.template_date, kept.row_arguments) == (date.today().isoformat(), {"enable_thinking": False})
    assert kept.train_args["logging_steps"] == 3 and run.is_of(resolved)
