"""Mistakes in batch scripts that the queue would show late, or never. Most are rows of ``sbatch.yaml``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.check import batch_steps
from clustertune.check.batch_script import TABLE, Option, Script, pattern_of, unquoted
from clustertune.check.batch_steps import Hit
from clustertune.check.rule import SCRIPT, WARN, Check, Finding, Seen, rule_of
from clustertune.host.credentials import holds_secret, names_secret
from clustertune.manifest import read_whole

MAX_BYTES = 256 * 1024
"""A batch script is some kB; Slurm itself refuses more than 4 MB (max_script_size)."""


# --- the rules ------------------------------------------------------------------------------------------------------------


def _texts(script: Script) -> dict[str, Iterable[tuple[int, str]]]:
    """By kind the texts that patterns are held against, each with its first line."""
    rows = [(number, row) for number, row in enumerate(script.rows, 1)]
    free = [(number, row) for number, row in rows if number not in script.inside]
    return {
        "directive": [(number, row) for number, row in rows[: script.first or None] if row.startswith("#SBATCH")],
        "comment": [(number, row) for number, row in free if not row.startswith("#SBATCH")],
        "late": [(number, row) for number, row in free if 0 < script.first < number],
        "option": [(option.line, f"--{option.name}={option.value}") for option in script.options],
        "command": script.commands,
        "document": script.here,
        "body": [(1, script.body)],
        "line": script.lines,
        "shell": [(start, unquoted(text)) for start, text in script.lines],
        "expanded": [(start, script.expand(text, start)) for start, text in script.lines],
        "task": [(start, script.expand(unquoted(text), start, early=True)) for start, text in script.lines],
    }


def _matches(script: Script) -> Iterator[Hit]:
    """What the patterns of the rows find."""
    kinds = _texts(script)
    nodes, tasks, cpus = script.least_nodes, script.tasks, script.value("cpus-per-task")
    stated = {"first": script.first, "nodes": nodes, "tasks": tasks, "total": nodes * tasks, "cpus": cpus}
    for name, row in ((rule["id"], one) for rule in TABLE["rules"] for one in rule.get("patterns", ())):
        if any(script.conditions[word.lstrip("!")] == word.startswith("!") for word in row.get("when", "").split()):
            continue
        kind = next(key for key in row if key in kinds)
        pattern, unless = pattern_of(row[kind]), pattern_of(row.get("unless", "(?!)"))
        for start, text in kinds[kind]:
            match = pattern.search(text)
            if match and not unless.search(text):
                words = {key: word for key, word in match.groupdict().items() if word is not None}
                at = match.start("here" if "here" in pattern.groupindex else 0)
                yield name, start + text.count("\n", 0, at), {**stated, "text": match[0].strip(), **words}
                if row.get("once"):
                    break


def _header(script: Script) -> Iterator[Hit]:
    """What more than one line of the header says."""
    seen: dict[str, Option] = {}
    for option in script.options:
        before = seen.setdefault(option.name, option)
        if before.value != option.value:
            yield (
                "repeated-option",
                option.line,
                {"name": option.name, "value": option.value, "other": before.value, "at": before.line},
            )
    if script.options and not {"time", "time-min"} & set(script.directives):
        yield "no-time", max(option.line for option in script.options), {}
    job, folders = script.value("job-name") or Path(script.path).name, set()
    for name in ("output", "error"):
        folder = script.value(name).rpartition("/")[0].replace("%x", job)
        if not folder.strip("./") or re.search(r"[$`]|^~|%u", folder) or folder in folders:
            continue
        folders.add(folder)
        late = re.search(r"%\d*[AaJjNnst]", folder)
        places = (script.cwd / (script.value("chdir") or "."), script.cwd, Path(script.path).parent)
        if late or not any(_is_folder(place / folder) for place in places):
            what = "has a name that is known only when the job runs" if late else "does not exist here"
            yield "log-folder", script.directives[name].line, {"name": name, "folder": folder, "what": what}


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that cannot be one
        return False


def _secrets(script: Script) -> Iterator[Hit]:
    """Keys that stand in the script. None is repeated."""
    hint = re.compile(r"your|xxx|\.\.\.|change|example|placeholder|insert|dummy|none|true|false", re.IGNORECASE)
    for number, row in enumerate(script.rows, 1):
        if holds_secret(row):
            yield "secret-in-file", number, {}
    for name in filter(names_secret, script.assigned):
        for one in script.assigned[name]:
            if re.fullmatch(r"[A-Za-z0-9_+=.:-]{8,}", one.text) and re.search(r"\d", one.text) and not hint.search(one.text):
                yield "secret-in-file", one.line, {}


READERS: tuple[Callable[[Script], Iterator[Hit]], ...] = (_matches, _header, _secrets, *batch_steps.READERS)


def _hits(script: Script) -> dict[str, dict[int, dict[str, Any]]]:
    """By rule and line what its texts name in braces; read once for a script."""
    if script.hits is None:
        script.hits = {}
        for reader in READERS:
            for name, line, words in reader(script):
                script.hits.setdefault(name, {}).setdefault(line, words)
    return script.hits


def _made(row: Mapping[str, Any]) -> Check:
    def look(script: Script) -> Iterator[Seen]:
        """What was found of one rule, once a line."""
        for line, words in _hits(script).get(row["id"], {}).items():
            named = {"path": script.path, **words}
            yield Seen(WARN, row["found"].format(**named), row["fix"].format(**named), str(line))

    return Check(rule_of(row["id"], row), look, SCRIPT)


RULES = tuple(map(_made, TABLE["rules"]))
"""The rules, in the order of the table."""


def lint(text: str, path: str, cwd: Path | None = None) -> list[Finding]:
    """The mistakes in a batch script, by line. ``cwd`` is where sbatch would be called: log folders lie below it.

    Any text is taken; nothing is run, and no file is read but for the question whether a log folder exists.
    """
    script = Script(text, path, cwd or Path.cwd())
    return sorted((item for rule in RULES for item in rule(script)), key=lambda item: (int(item.where), item.rule))


def lint_file(path: str) -> list[Finding]:
    """As :func:`lint`, of a file. Raises OSError, and ValueError where it cannot be a script."""
    file = Path(path)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes: no batch script")
    if not file.is_file():
        raise ValueError("is not a file")
    return lint(read_whole(file).decode("utf-8", errors="replace"), path)
