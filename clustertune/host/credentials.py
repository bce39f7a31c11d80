"""What the tokens of well-known services look like: recipes, scripts, environments and uploads must not hold one.

Standard library only, Python 3.8 or later.
"""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|wandb_v1_\w{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Hugging Face, OpenAI, GitHub, GitLab, W&B, Slack, AWS, private keys. Real ones have 20 characters and more behind the prefix:
16 leaves room for a token that was cut, and no name of a model or a dataset is taken for one."""


_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")


def mask(text: str) -> str:
    """``text`` with what has the form of a token, and with user and password of an address, left out."""
    return _IN_ADDRESS.sub("***", TOKEN.sub("(a token, not shown)", text))


def holds_secret(value: object) -> bool:
    """Whether a text holds what has the form of a token."""
    return isinstance(value, str) and bool(TOKEN.search(value))
