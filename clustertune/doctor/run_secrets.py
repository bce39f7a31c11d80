"""The ``.env`` file: whose it is, who can read it, whether git has it. No value of it is looked at, none is repeated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from clustertune.check.rule import FAIL, RECIPE, WARN, Seen, rule
from clustertune.doctor.recipe_context import Context
from clustertune.errors import UserError
from clustertune.secrets import SECRET, read_env

GIT_SECONDS = 5.0


@rule("env-file", RECIPE)
def readable(context: Context) -> Iterator[Seen]:
    """Looks at: the .env file is yours alone, and can be parsed

    Why: a token that others can read is theirs; a file that is refused leaves the job without its tokens
    See: https://huggingface.co/docs/hub/security-tokens
    """
    if context.env_file.parent in context.silent:
        return
    try:
        read_env(context.env_file, lambda _note: None)
    except UserError as error:
        for problem in error.problems:
            fix = problem.fix or "write it anew: KEY=value, one a line, mode 0600"
            yield Seen(FAIL, problem.message, fix, problem.file or str(context.env_file))


@rule("env-in-git", RECIPE)
def tracked(context: Context) -> Iterator[Seen]:
    """Looks at: git does not have the .env file

    Why: what was committed once goes to everybody who clones, and stays in the history
    See: https://docs.github.com/en/code-security/secret-scanning/introduction/about-secret-scanning
    """
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
        yield Seen(FAIL, "git tracks it", fix, str(path))


@rule("token-in-environment", RECIPE)
def exported(context: Context) -> Iterator[Seen]:
    """Looks at: tokens in the shell's environment

    Why: every process of this shell inherits them, and logs of an environment hold them; jobs of ours take them from .env
    See: https://huggingface.co/docs/hub/security-tokens
    """
    named = [name for name in SECRET if context.environment.get(name)]
    if named and context.cluster.slurm is not None:
        fix = f"unset {' '.join(named)}, and keep them in {context.env_file} with mode 0600"
        yield Seen(WARN, f"{', '.join(named)} set in this shell", fix, context.resolved.name)
