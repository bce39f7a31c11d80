"""What a public repository needs beside its code: notice, contact, citation, workflows that only read."""

from __future__ import annotations

import re
from typing import Any

import yaml

from clustertune import __version__
from tests import tree

PLACEHOLDERS = {
    "PLACEHOLDER-AUTHORS": "CITATION.cff",
    "PLACEHOLDER-REPOSITORY": "CITATION.cff",
    "PLACEHOLDER-SECURITY-CONTACT": "SECURITY.md",
}
"""Names and addresses that whoever publishes the repository puts in, and the file of each."""
PUBLIC = ("NOTICE", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "CITATION.cff", ".github/")


def read(name: str) -> Any:
    return yaml.safe_load(tree.texts()[name])


def test_the_notice_names_every_chat_template() -> None:
    named = {path for path in tree.files() if path.endswith(".jinja") and not path.endswith((".html.jinja", ".md.jinja"))}
    assert named and {path for path in named if path not in tree.texts()["NOTICE"]} == set()


def test_placeholders_stand_where_the_list_says_and_no_contact_is_invented() -> None:
    found = {
        (word, name)
        for name, text in tree.texts().items()
        if name != "tests/test_public.py"
        for word in re.findall(r"PLACEHOLDER-[A-Z][A-Z-]*", text)
    }
    assert found == set(PLACEHOLDERS.items())
    texts = {name: text for name, text in tree.texts().items() if name.startswith(PUBLIC)}
    assert {name: found for name, text in texts.items() if (found := re.findall(r"[\w.]+@[\w-]+\.\w+", text))} == {}


def test_the_citation_is_of_this_version() -> None:
    assert read("CITATION.cff")["version"] == __version__


def test_workflows_only_read() -> None:
    for name in (name for name in tree.files() if name.startswith(".github/workflows/")):
        assert read(name)["permissions"] == {"contents": "read"} and "pull_request_target" not in tree.texts()[name]
