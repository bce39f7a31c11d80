"""Apptainer definition files: header, sections, build arguments, what is fetched, and shellcheck of what a shell runs.

Apptainer itself says what is wrong only where it builds, which needs the base image; a section that it does not know it
refuses, and other readers drop it without a message. hadolint reads Dockerfiles, and no kept linter reads
definitions: structure and arguments are checked here, the shell by shellcheck.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers.pins import find_tool
from clustertune.errors import Problem, UserError

SHELL = frozenset({"pre", "setup", "post", "test", "environment", "runscript", "startscript"})
BUILDS = frozenset({"pre", "setup", "post"})
"""Those that put something into the image."""
SECTIONS = SHELL | {"arguments", "files", "labels", "help"}
"""https://apptainer.org/docs/user/main/definition_files.html ; app sections are not used here."""
HEADER = frozenset(
    {"bootstrap", "from", "stage", "fingerprints", "include", "mirrorurl", "osversion", "library", "registry", "namespace"}
)
AGENTS = frozenset(
    {"docker", "docker-archive", "oci", "oci-archive", "localimage", "library", "oras", "shub", "debootstrap", "scratch", "yum"}
)
REMOTE = frozenset({"docker", "library", "oras", "shub"})
"""Their images have a digest: ``NAME@sha256:DIGEST``, of library ``NAME:sha256.DIGEST``."""
MIRRORED = frozenset({"debootstrap", "yum"})
_ARGUMENT = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_NOT_HERE = "SC2034,SC2148"
"""A variable that only a later section reads; a section has no #! line."""
LINT_SECONDS = 60


@dataclass(frozen=True)
class DefinitionSection:
    """A section's name, the line of its ``%name``, and its lines."""

    name: str
    line: int
    body: tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """A definition file, taken apart."""

    header: tuple[tuple[int, str, str], ...]
    """Line, key in lower case, value."""
    sections: tuple[DefinitionSection, ...]
    stray: tuple[int, ...]
    """Lines in front of the first section that are no ``Key: value``."""

    def arguments(self) -> dict[str, str]:
        """The build arguments with their defaults."""
        lines = [line.strip() for section in self.sections if section.name == "arguments" for line in section.body]
        return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))

    def value(self, key: str) -> str:
        """A header's value with the defaults put in; empty where it is not there."""
        found = next((value for _, name, value in self.header if name == key), "")
        defaults = self.arguments()
        return _ARGUMENT.sub(lambda match: defaults.get(match[1], match[0]), found)


def read(text: str) -> Definition:
    """A definition's parts. Nothing is refused here."""
    header, sections, stray = [], [], []
    name, start, body = "", 0, [""][:0]
    for number, line in enumerate([*text.splitlines(), "%"], 1):
        opened = re.match(r"%(\S*)", line)
        if opened:
            if name:
                sections.append(DefinitionSection(name, start, tuple(body)))
            name, start, body = opened[1], number, []
        elif name:
            body.append(line)
        elif line.strip() and not line.startswith("#"):
            key = re.fullmatch(r"([A-Za-z]+):\s*(.*?)\s*", line)
            if key:
                header.append((number, key[1].lower(), key[2]))
            else:
                stray.append(number)
    return Definition(tuple(header), tuple(sections), tuple(stray))


def lint(path: Path) -> list[Problem]:
    """Everything that is wrong with a definition file; of a ``.sh`` that one runs, what it fetches.

    Raises UserError where it cannot be read or shellcheck is not here.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", str(path))) from error
    if path.suffix == ".sh":
        return [Problem(message, f"{path}:{line}", fix=fix) for line, message, fix in unheld(text.splitlines(), 1)]
    definition = read(text)
    found = [*_structure(definition), *_arguments(text, definition), *_shell(definition), *_fetched(definition)]
    return [Problem(message, f"{path}:{line}", fix=fix) for line, message, fix in sorted(found)]


Found = tuple[int, str, str]


def _structure(definition: Definition) -> Iterator[Found]:
    for line in definition.stray:
        yield line, "neither `Key: value` nor a section", "put it into a section"
    keys = [key for _, key, _ in definition.header]
    for line, key, _ in definition.header:
        if key not in HEADER:
            yield line, f"unknown header {key}", f"one of {', '.join(sorted(HEADER))}"
        elif keys.count(key) > 1 and keys.index(key) != [number for number, *_ in definition.header].index(line):
            yield line, f"header {key} appears twice", "leave one"
    for key in {"bootstrap", "from"} - set(keys):
        yield 1, f"no header {key}", "an image starts from something: Bootstrap: docker, From: NAME@sha256:DIGEST"
    agent = definition.value("bootstrap")
    if agent and agent not in AGENTS:
        yield 1, f"Bootstrap: {agent} is unknown", f"one of {', '.join(sorted(AGENTS))}"
    if agent in REMOTE and not re.search(r"(@sha256:|:sha256\.)[0-9a-f]{64}$", definition.value("from")):
        yield 1, f"From: {definition.value('from')} has no digest", "a tag moves: NAME@sha256:DIGEST"
    if agent in MIRRORED:
        yield 1, f"Bootstrap: {agent} takes what its mirror has today", "an image with a digest: Bootstrap: docker"
    seen: set[str] = set()
    for section in definition.sections:
        if section.name not in SECTIONS:
            yield section.line, f"unknown section %{section.name}", f"one of {', '.join(sorted(SECTIONS))}"
        elif section.name in seen:
            yield section.line, f"%{section.name} appears twice", "leave one"
        seen.add(section.name)


def _arguments(text: str, definition: Definition) -> Iterator[Found]:
    given, used = definition.arguments(), set()
    for number, line in enumerate(text.splitlines(), 1):
        for name in _ARGUMENT.findall(line):
            used.add(name)
            if name not in given:
                yield number, f"{{{{ {name} }}}} has no default", "give it one in %arguments"
    for section in definition.sections:
        for number, line in enumerate(section.body, section.line + 1):
            name = line.strip().partition("=")[0]
            if section.name == "arguments" and name in given and name not in used:
                yield number, f"argument {name} is not used", "leave it out"


def _fetched(definition: Definition) -> Iterator[Found]:
    for section in definition.sections:
        if section.name in BUILDS:
            for line, message, fix in unheld(section.body, section.line + 1):
                yield line, f"%{section.name}: {message}", fix


def _shell(definition: Definition) -> Iterator[Found]:
    program = find_tool("shellcheck")
    for section in definition.sections:
        if section.name not in SHELL:
            continue
        script = _ARGUMENT.sub(lambda match: f"ARGUMENT_{match[1]}", "\n".join(section.body)) + "\n"
        command = [program, "--shell", "sh", "--format", "gcc", "--exclude", _NOT_HERE, "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=LINT_SECONDS, check=False)
        for line in done.stdout.splitlines():
            parts = re.fullmatch(r"-:(\d+):\d+: (.*)", line)
            yield (
                section.line + int(parts[1]) if parts else section.line,
                f"%{section.name}: {parts[2] if parts else line}",
                "shellcheck",
            )
        if done.returncode > 1:
            yield section.line, f"%{section.name}: shellcheck failed: {done.stderr.strip()[:200]}", "look at the section"


# --- fetches --------------------------------------------------------------------------------------------------------------

# What the steps of a build fetch: all of it is held to a hash, or comes from the base's own archive.
#
# A digest on ``From:`` says nothing of what ``%post`` downloads. The distribution's packages are exempt: their archive is
# signed, and the bill of materials lists them. hadolint
# (DL3013: versions in pip install) reads Dockerfiles only, and asks for versions and not for hashes.

_SUM = r"\b(?:sha(?:256|384|512)|b2)sum\b"
_CHECKED = re.compile(rf"{_SUM}[^|;&]*\s(?:-c|--check)\b")
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_START = r"""(?:^|[\s"'/(;&|])"""
_PIP = re.compile(rf"{_START}(?:pip[0-9.]*|uv\s+pip|python\S*\s+-m\s+pip)\b[^;&|]*\s(?:install|download|wheel)\s")
_HELD = re.compile(r"--require-hashes\b|--no-index\b")
_SHELL = r"(?:sudo\s+)?(?:ba|da|z)?sh\b"
_PIPED = re.compile(rf"\b(curl|wget)\b.*\|\s*{_SHELL}|{_SHELL}.*[$<]\(\s*(curl|wget)\b|<\(\s*(curl|wget)\b")
_NAMED = re.compile(r"\bapt(?:-get)?\b[^;&|]*\binstall\b[^;&|]*|\bcommand\s+-v\s+\S+")
"""Where a program is named and does not run."""
_LOADED = re.compile(rf"{_START}(curl|wget|aria2c)\s")
_CLONED = re.compile(rf"{_START}git\s+(?:-\S+\s+(?:\S+\s+)?)*(clone|fetch|pull|submodule)\b")
_OTHER = re.compile(
    rf"{_START}((?:conda|mamba|micromamba)\s+(?:install|create|update|env)|npm\s+(?:install|ci|i)|gem\s+install"
    r"|go\s+(?:install|get)|cargo\s+install|pipx\s+(?:install|run)|uvx|uv\s+(?:tool|sync|add)|npx)\s"
)
_ARCHIVE = re.compile(rf"{_START}(add-apt-repository|apt-key\s+(?:add|adv))\b")
_HASH_HINT = "lock it by its hash, and have make build-sif fetch it first"


def commands(lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Each command line with the number of its first line; a backslash joins lines, comments are left out."""
    text, start = "", first
    for number, line in enumerate(lines, first):
        if not text:
            start = number
            if line.lstrip().startswith("#"):
                continue
        text += line.rstrip()
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        if text.strip():
            yield start, re.sub(r"\s#.*$", "", text.strip())
        text = ""
    if text.strip():
        yield start, text.strip()


def unheld(lines: Sequence[str], first: int) -> Iterator[tuple[int, str, str]]:
    """Line, what is fetched without being held to anything, and what to do instead. ``first``: the number of the first line."""
    found = list(commands(lines, first))
    whole = "\n".join(text for _, text in found)
    checked, commit = bool(_CHECKED.search(whole)), bool(_COMMIT.search(whole))
    for number, text in found:
        line = f" {_NAMED.sub('', text)} "
        if match := _PIPED.search(line):
            tool = next(group for group in match.groups() if group in ("curl", "wget"))
            yield number, f"what {tool} loads is run unseen", _HASH_HINT
        elif (match := _LOADED.search(line)) and not checked:
            yield number, f"what {match[1]} loads is held to no hash", f"sha256sum --check, or {_HASH_HINT}"
        if _PIP.search(line) and not _HELD.search(line):
            yield number, "pip takes what the index has today", "--require-hashes with a lock, and --no-index"
        if (match := _CLONED.search(line)) and not commit:
            yield number, f"git {match[1]} takes what the branch is today", "check out a commit by its 40 digits"
        if match := _OTHER.search(line):
            yield number, f"`{match[1].strip()}` takes what its index has today", _HASH_HINT
        if match := _ARCHIVE.search(line):
            yield number, f"{match[1].split()[0]} adds another archive", "take a base that has what is needed"
