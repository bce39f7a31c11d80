"""No message repeats a token or a password that a person put in the wrong place."""

from __future__ import annotations

import json

import pytest

from clustertune import console
from clustertune.errors import Problem, UserError

TOKEN = "hf_" + "a1" * 17
ADDRESS = "https://user:hunter2secret@hub.example/x"


def test_messages_and_documents_leave_secrets_out(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError(Problem(f"no recipe {ADDRESS}", file=TOKEN, key=TOKEN, fix=f"not {ADDRESS}"))
    console.show_error(error)
    console.say(f"{TOKEN} and {ADDRESS}")
    console.emit_json({"problems": error.as_dict(), "list": [TOKEN]})
    out, err = capsys.readouterr()
    for shown in (out, err):
        assert "a1a1" not in shown and "hunter2" not in shown
        assert "hub.example" in shown
    assert json.loads(out)["list"] == ["(a token, not shown)"]


@pytest.mark.parametrize("text", ["git@host:path", "http://host/a:b@c", "hf_short", "a/b@main", "user@host"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert console.escape(text) == text
