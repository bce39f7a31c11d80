"""Rules that an answer keeps or not. Own prompts are evaluated by them, and rewards train by the same ones.

Patterns and schemas are foreign, and so are answers: call these in a child with a limit of time.

IFEval's rules count sentences. NLTK's English sentence splitter is shipped in ``nltk_data/``: the official parameters, so that
scores are the official ones. lm-eval downloads ``punkt_tab`` when its scorer is imported; without a network it continues and
fails after the last prompt (EleutherAI/lm-evaluation-harness#2266). Here the data is there before the import.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NLTK_DATA = Path(__file__).with_name("nltk_data")
"""Its NOTICE says where the parameters are from."""


def is_equal(answer: str, expected: Any) -> bool:
    """Whether both have the same words, white space aside."""
    return answer.split() == str(expected).split()


def matches(answer: str, pattern: str) -> bool:
    """Whether the pattern is found in the answer (``re.search``)."""
    return re.search(pattern, answer) is not None


def fits_schema(answer: str, schema: Any) -> bool:
    """Whether the answer is JSON, with or without a Markdown fence around it, and valid by the schema.

    Nothing is fetched for a ``$ref``. Raises an error of jsonschema or referencing where the schema refers to nothing.
    """
    import jsonschema
    import referencing

    found = as_value(schema)
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", answer, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return False
    kind = jsonschema.validators.validator_for(found, default=jsonschema.Draft202012Validator)
    return bool(kind(found, registry=referencing.Registry()).is_valid(value))


def wrong_pattern(pattern: Any) -> str | None:
    """What is wrong with a regular expression; None: nothing."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is not a regular expression of Python's re: {error}"
    return None


def wrong_schema(schema: Any) -> str | None:
    """What is wrong with a JSON schema, or a text that holds one; None: nothing."""
    import jsonschema

    try:
        found = as_value(schema)
        jsonschema.validators.validator_for(found, default=jsonschema.Draft202012Validator).check_schema(found)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    except (jsonschema.SchemaError, AttributeError, TypeError) as error:
        return f"is no JSON schema: {str(error).partition(chr(10))[0]}"
    return None


def as_value(value: Any) -> Any:
    """A value of JSON, or a text that holds one, as tables have it."""
    return json.loads(value) if isinstance(value, str) else value


def use_shipped_punkt() -> None:
    """Make NLTK find the shipped parameters before any others, in this process and those that it forks."""
    import nltk

    if str(NLTK_DATA) not in nltk.data.path[:1]:
        nltk.data.path.insert(0, str(NLTK_DATA))
