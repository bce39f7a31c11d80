"""The ``.env`` file: whose it is, who can read it, whether git has it. No value of it is looked at, none is repeated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from clustertune.check.rule import FAIL, WARN, Finding, Rule, finding
from clustertune.doctor.recipe_context import Context
from clustertune.errors import UserError
from clustertune.secrets import SECRET, read_env

GIT_SECONDS = 5.0

READABLE = Rule(
    "env-file",
    "the .env file is yours alone, and can be parsed",
    "a token that others can read is theirs; a file that is refused leaves the job without its tokens",
    "https://huggingface.co/docs/hub/security-tokens",
)
TRACKED = Rule(
    "env-in-git",
    "git does not have the .env file",
    "what was committed once goes to everybody who clones, and stays in the history",
    "https://docs.github.com/en/code-security/secret-scanning/introduction/about-secret-scanning",
)
EXPORTED = Rule(
    "token-in-environment",
    "tokens in the shell's environment",
    "every process of this shell inherits them, and logs of an environment hold them; jobs of ours take them from .env",
    "https://huggingface.co/docs/hub/security-tokens",
)

RULES = (READABLE, TRACKED, EXPORTED)


def check(context: Context) -> Iterator[Finding]:
    """Everything about tokens."""
    for look in LOOKS:
        yield from look(context)


def _readable(context: Context) -> Iterator[Finding]:
    if context.env_file.parent in context.silent:
        return
    try:
        read_env(context.env_file, lambda _note: None)
    except UserError as error:
        for problem in error.problems:
            fix = problem.fix or "write it anew: KEY=value, one a line, mode 0600"
            yield finding(READABLE, FAIL, problem.message, fix, where=problem.file or str(context.env_file))


def _tracked(context: Context) -> Iterator[Finding]:
    path = context.env_file
    if path.parent in context.silent or not path.exists():
        return
    command = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", "--", path.name]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == 0:
        fix = f"git rm --cached {path.name}, name it in .gitignore, and renew every token that stood in it"
        yield finding(TRACKED, FAIL, "git tracks it", fix, where=str(path))


def _exported(context: Context) -> Iterator[Finding]:
    named = [name for name in SECRET if context.environment.get(name)]
    if named and context.cluster.slurm is not None:
        fix = f"unset {' '.join(named)}, and keep them in {context.env_file} with mode 0600"
        yield finding(EXPORTED, WARN, f"{', '.join(named)} set in this shell", fix, where=context.resolved.name)


LOOKS = (_readable, _tracked, _exported)
