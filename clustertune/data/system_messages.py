"""System messages for chat templates that refuse them or leave them out, such as Gemma 2's and Mistral 7B's first ones.

What ``data.system_messages`` says goes into the template itself, in front of its text. So the tokenizer that is saved with an
adapter or a merged model renders a system message in evaluation, ``chat`` and every server as it was trained.
"""

from __future__ import annotations

from typing import Any

BEFORE_USER, LEAVE_OUT = "before-user", "leave-out"
"""Values of ``data.system_messages``; the third, ``template``, leaves it to the template."""
FIX = (
    f"data.system_messages={BEFORE_USER} puts their text before the user's first message, as Gemma 3's template does; "
    f"data.system_messages={LEAVE_OUT} leaves these conversations out"
)
_MARK = "{#- clustertune: a system message goes before the user's first -#}\n"
_JOINED = (
    _MARK + "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{%- if messages | length > 1 and messages[1]['role'] == 'user' and messages[1]['content'] is string -%}"
    "{%- set messages = [dict(messages[1], content=messages[0]['content'] ~ '\\n\\n' ~ messages[1]['content'])]"
    " + messages[2:] -%}"
    "{%- else -%}"
    "{%- set messages = [dict(messages[0], role='user')] + messages[1:] -%}"
    "{%- endif -%}"
    "{%- endif %}"
)


def is_rendered_before_user(template: str) -> bool:
    """Whether a template was changed by :func:`rendered_before_user`."""
    return _MARK in template


def rendered_before_user(template: Any) -> Any:
    """A ``chat_template`` that puts the text of a system message, and an empty line, before the text of the user's first.

    A system message that no user's follows becomes one of the user. Several templates by name are all changed.
    """
    if isinstance(template, dict):
        return {name: rendered_before_user(one) for name, one in template.items()}
    if not isinstance(template, str) or _MARK in template:
        return template
    return _JOINED + template
