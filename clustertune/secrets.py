"""Tokens of a user, from a ``.env`` file that only its owner can read: parsed strictly, never executed, never repeated.

No value is ever part of a message, and neither is a line that does not parse: it may be a token pasted without its name.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clustertune.console import say
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import is_private_group
from clustertune.tree import env_file

DEFAULT = env_file()
"""Of the checkout or of the user (:func:`clustertune.tree.env_file`)."""
SECRET = ("HF_TOKEN", "WANDB_API_KEY")
"""Keys that give access to an account: taken out of the environment again once their client has them."""
ACCOUNT_KEYS = (*SECRET, "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")
"""The same, with other names under which clients look for them: what programs do not get that work offline."""
KNOWN = (
    *SECRET, "HF_REPO_ID", "HF_ENDPOINT", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_BASE_URL", "WANDB_MODE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
OF_THE_HUB = ("HF_TOKEN", "HF_ENDPOINT", *KNOWN[-6:])
"""What a command that loads from the Hub needs."""
_MAX_BYTES = 64 << 10
_NAME = re.compile(r"[A-Z][A-Z0-9_]*|https?_proxy|no_proxy")
"""Other names in lower case are refused and not repeated: ``hfAbC...=`` is a token that ends in base64's padding."""
_FORM = "KEY=value, one a line; a value with blanks in quotes"


def read_env(path: Path, note: Callable[[str], None] = say) -> dict[str, str]:
    """The known keys of a ``.env`` file and their values; empty where there is no file.

    ``KEY=value``, the value plain or in single or double quotes, as :mod:`shlex` reads them, without any expansion; blank
    lines and lines that begin with ``#``. Keys that nothing here uses are left out, with a note. The file must be a regular
    one (no link), belong to the user, and be closed to all others (mode 0600). Raises UserError naming everything that is
    wrong with it.
    """
    text = _read(path)
    if text is None:
        return {}
    values, unknown, problems = parse(text, str(path))
    raise_if(problems)
    if unknown:
        note(f"{path}: clustertune does not use these keys: {', '.join(unknown)}")
    return values


def apply_env() -> None:
    """Set what ``.env`` holds in this process's environment; what stands there stays. Raises as :func:`read_env` does."""
    for name, value in read_env(DEFAULT).items():
        os.environ.setdefault(name, value)


def of_the_hub() -> dict[str, str]:
    """What ``.env`` holds for the Hub, to be :func:`lent` to what loads from it. Raises UserError."""
    return {key: value for key, value in read_env(DEFAULT, lambda _note: None).items() if key in OF_THE_HUB}


def drop(names: Iterable[str] = SECRET) -> dict[str, str]:
    """Take keys out of this process's environment, so that no process started from here on inherits them."""
    return {name: value for name in names if (value := os.environ.pop(name, None)) is not None}


@contextmanager
def lent(values: Mapping[str, str]) -> Iterator[None]:
    """Have keys in the environment for a while: for a library that looks nowhere else, and starts no process."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        drop(values)
        os.environ.update(before)


@contextmanager
def withheld() -> Iterator[None]:
    """Have all keys of ``.env`` out of the environment for a while: a process that is started then inherits none."""
    before = drop(KNOWN)
    try:
        yield
    finally:
        os.environ.update(before)


def parse(text: bytes, file: str) -> tuple[dict[str, str], list[str], list[Problem]]:
    """Values of known keys, names of unknown ones, and what is wrong, from the content of a ``.env`` file."""
    values: dict[str, str] = {}
    unknown: list[str] = []
    try:
        lines = text.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        return {}, [], [Problem("is not UTF-8 text", file=f"{file}:{line}", fix=f"write it again: {_FORM}")]
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, content in enumerate(lines, 1):
        if not content.strip() or content.lstrip().startswith("#"):
            continue
        try:
            name, value = _assignment(content)
        except ValueError as error:
            problems.append(Problem(str(error), file=f"{file}:{number}", fix=_FORM))
            continue
        if name in seen:
            problems.append(Problem(f"{name} is set for the second time", file=f"{file}:{number}", fix="leave one"))
        elif name in KNOWN:
            values[name] = value
        else:
            unknown.append(name)
        seen.add(name)
    return values, unknown, problems


def _assignment(line: str) -> tuple[str, str]:
    """Name and value of a line; quotes are taken off, and nothing is expanded. Raises ValueError, without the value."""
    name, equals, value = line.partition("=")
    if not equals:
        raise ValueError("is not an assignment")
    if not _NAME.fullmatch(name):
        raise ValueError("bad name before '=': capital letters, digits and _, without blanks and without 'export'")
    shown = name if name in KNOWN else "a key"
    if not value.isprintable():
        raise ValueError(f"{shown} holds a character that cannot be printed")
    try:
        reader = shlex.shlex(value, posix=True, punctuation_chars=False)
        reader.whitespace_split, reader.commenters, reader.escape = True, "", ""  # a backslash is a character like any other
        words = list(reader)
    except ValueError:
        raise ValueError(f"{shown}: the quotes do not close at the line's end") from None
    if len(words) != 1 or not words[0]:
        raise ValueError(f"{shown} has {'several words' if len(words) > 1 else 'no value'}")
    return name, words[0]


def _read(path: Path) -> bytes | None:
    """The content of a file that is the user's alone. Looked at through one descriptor: it cannot be exchanged in between."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise UserError(what, file=str(path), fix="a regular file of your own, mode 0600") from None
    try:
        problems = file_problems(os.fstat(fd), os.stat(path.parent), path)  # noqa: PTH116 - both from the system, alike
        raise_if(problems)
        data = os.read(fd, _MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", file=str(path)) from None
    finally:
        os.close(fd)
    if len(data) > _MAX_BYTES:
        raise UserError(f"larger than {_MAX_BYTES >> 10} KiB: this is no .env", file=str(path))
    return data


def file_problems(info: os.stat_result, folder: os.stat_result, path: Path) -> list[Problem]:
    """What lets others read or exchange the file."""
    problems, user = [], os.geteuid()
    if not stat.S_ISREG(info.st_mode):
        return [Problem("is not a regular file", file=str(path), fix="a regular file of your own, mode 0600")]
    if info.st_uid != user:
        fix = f"make one of your own: install -m 600 /dev/null {path}"
        problems.append(Problem(f"belongs to user {info.st_uid}, not to you", file=str(path), fix=fix))
    if (mode := stat.S_IMODE(info.st_mode)) & 0o177:
        problems.append(Problem(f"mode {mode:04o}: it must be yours alone", file=str(path), fix=f"chmod 600 {path}"))
    open_to = stat.S_IMODE(folder.st_mode) & (0o022 if not is_private_group(folder.st_gid) else 0o002)
    if open_to and not folder.st_mode & stat.S_ISVTX:
        fix = f"chmod go-w {path.parent}"
        problems.append(Problem("others may write in its folder, and put another file there", file=str(path.parent), fix=fix))
    return problems
