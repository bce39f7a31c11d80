"""Which faults the tests notice: each of tests/mutations.yaml is put into a scratch copy, and the tests that could see it run.

``make mutations`` writes docs/results/mutations.md. A mutation counts as caught where a test fails that passes without it. What
was recorded is kept, so that the next call continues; a mutation whose text was changed since is run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
MUTATIONS = REPO / "tests" / "mutations.yaml"
RESULTS = REPO / "docs" / "results" / "mutations.json"
PAGE = RESULTS.with_suffix(".md")
COLUMNS = ("before", "after")
MARKS = "not long and not gpu and not jobs and not containers"
"""The tests of ``make test``."""
ROOMS = {"check": "doctor"}
"""Folders of tests that are not called as the package's folder is."""
UNSTABLE_LIMIT = 3
"""Tests that fail without the mutation too, after which a copy is given up."""


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    first: str = ""
    """Tests that are likely to see it, with blanks between them: they run before the others."""

    @property
    def digest(self) -> str:
        """What a recorded result belongs to."""
        return hashlib.sha256(json.dumps([self.file, self.old, self.new]).encode()).hexdigest()[:12]

    def apply(self, tree: Path) -> str | None:
        """Put the fault into ``tree``, return the file's text before; None where ``old`` does not stand there exactly once."""
        path = tree / self.file
        text = path.read_text() if path.is_file() else ""
        if text.count(self.old) != 1:
            return None
        path.write_text(text.replace(self.old, self.new))
        return text


def read_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """All of them, in the order of the file."""
    return [Mutation(**entry) for entry in yaml.safe_load(path.read_text())]


def covering_tests(tree: Path, file: str) -> list[str]:
    """Test files that could see a change of ``file``: those that name the module first, then all of its room."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    shown = module if file.endswith(".py") else Path(file).name

    def named(text: str) -> bool:
        return shown in text or (f"from {package} import " in text and re.search(rf"\b{re.escape(name)}\b", text) is not None)

    room = file.split("/")[1] if file.startswith("clustertune/") else file.split("/", maxsplit=1)[0]
    folder = f"tests/{ROOMS.get(room, room)}/"
    texts = _test_files(tree)
    direct = [path for path, text in texts.items() if named(text)]
    top = room == "commands" or room.endswith(".py")  # their room is the command line: the tests beside the folders
    own = [path for path in texts if (path.count("/") == 1 if top else path.startswith(folder)) and path not in direct]
    # The file that is called as the module is comes first: what a test catches is then known soon.
    direct.sort(key=lambda path: (Path(path).stem != f"test_{name}", not path.startswith(folder), path))
    return [*direct, *own]


@cache
def _test_files(tree: Path) -> dict[str, str]:
    files = sorted((tree / "tests").rglob("test_*.py"))
    return {path.relative_to(tree).as_posix(): path.read_text() for path in files}


def copy_tree(source: Path, target: Path) -> None:
    """A copy of a checkout's files with an environment of its own, whose ``clustertune`` is the copy and nothing else."""
    listed = subprocess.run(
        ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target / ".venv")], check=True)
    own, given = target / ".venv" / "bin", Path(sys.executable).parent
    # Plain paths: .pth files inside of the second one, such as that of the editable install, are not read.
    packages = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    link = next((target / ".venv" / "lib").glob("python*/site-packages")) / "copy.pth"
    link.write_text("".join(f"{path}\n" for path in (target, *packages)))
    for script in given.iterdir():
        if script.is_file() and not (own / script.name).exists():
            head, newline, rest = script.read_bytes().partition(b"\n")
            if head.startswith(b"#!") and b"python" in head:
                (own / script.name).write_bytes(f"#!{own}/python".encode() + newline + rest)
                (own / script.name).chmod(0o755)
            else:
                (own / script.name).symlink_to(script)


def run_tests(tree: Path, tests: list[str], deselected: list[str], seconds: float) -> tuple[int, str, str]:
    """Run tests up to the first failure: pytest's exit code (124: the time was up), the test that failed, the last lines."""
    words = [
        str(tree / ".venv/bin/python"),
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-m",
        MARKS,
    ]
    words += [word for name in deselected for word in ("--deselect", name)]
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        environ = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": scratch,
        }
        child = subprocess.Popen(
            [*words, *tests], cwd=tree, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 15)
            out, _ = child.communicate()
            return 124, "", out[-2000:]
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", out, re.MULTILINE)  # a parameter may have blanks
    return child.returncode, failed[1] if failed else "", out[-2000:]


def judge(tree: Path, mutation: Mutation, seconds: float) -> dict[str, Any]:
    """Run one mutation in a copy, which is as it was afterwards: ``status`` is caught, missed, cannot-apply or unfinished."""
    began, deselected = time.monotonic(), list[str]()
    batches = [tests for tests in (mutation.first.split(), covering_tests(tree, mutation.file)) if tests]
    before = mutation.apply(tree)
    if before is None:
        return {"status": "cannot-apply", "by": "", "seconds": 0}
    path = tree / mutation.file
    after = path.read_text()
    found: dict[str, Any] = {"status": "unfinished", "by": ""}
    try:
        while len(deselected) <= UNSTABLE_LIMIT:
            path.write_text(after)
            code, test, output = run_tests(tree, batches[0], deselected, seconds)
            if code in (0, 5) and len(batches) > 1:
                batches.pop(0)
                continue
            if code in (0, 5):
                found = {"status": "missed", "by": ""}
                break
            if not test:
                found = {"status": "unfinished", "by": f"exit code {code}: {output.splitlines()[-1] if output else ''}"}
                break
            path.write_text(before)
            if run_tests(tree, [test], [], seconds)[0] == 0:
                found = {"status": "caught", "by": test}
                break
            deselected.append(test)
    finally:
        path.write_text(before)
    return {**found, "seconds": round(time.monotonic() - began), **({"fail_without": deselected} if deselected else {})}


def read_results() -> dict[str, Any]:
    """What was recorded: by mutation, then by column."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def render(mutations: list[Mutation], results: dict[str, Any]) -> str:
    """The page."""

    def cell(mutation: Mutation, column: str) -> str:
        found = results.get(mutation.id, {}).get(column)
        if found is None:
            return "not run"
        first = " (missed at first: a test was added)" if found.get("missed_first") else ""
        return {"caught": f"`{found['by']}`{first}"}.get(found["status"], f"**{found['status']}**")

    counts = {
        column: [sum(results.get(m.id, {}).get(column, {}).get("status") == s for m in mutations) for s in ("caught", "missed")]
        for column in COLUMNS
    }
    lines = [
        "# Small faults that the tests must notice",
        "",
        f"{len(mutations)} faults, chosen for the behaviour that they break (`tests/mutations.yaml`), each put into a copy.",
        "The tests that name its module and those of its room run up to the first failure. A fault is caught where a test",
        "fails that passes without it. `cannot-apply`: the code moved and the fault was not ported, which counts as missed.",
        "`make mutations` runs what is not recorded yet and writes this page.",
        "",
        "| | caught | missed or not ported | not run or not finished |",
        "|---|---|---|---|",
    ]
    for column, (caught, _) in counts.items():
        states = [results.get(m.id, {}).get(column, {}).get("status", "") for m in mutations]
        missed = sum(state in ("missed", "cannot-apply") for state in states)
        lines.append(f"| {column} the rooms were rebuilt | {caught} | {missed} | {len(states) - caught - missed} |")
    lines += ["", "| fault | what it breaks | caught before by | caught after by |", "|---|---|---|---|"]
    lines += [f"| {m.id} | {m.breaks} | {cell(m, 'before')} | {cell(m, 'after')} |" for m in mutations]
    return "\n".join(lines) + "\n"


def _wanted(mutations: list[Mutation], results: dict[str, Any], options: argparse.Namespace) -> Iterator[Mutation]:
    for mutation in mutations:
        known = results.get(mutation.id, {}).get(options.column, {})
        if options.only and not any(mutation.id.startswith(name) for name in options.only):
            continue
        if options.again or known.get("status", "unfinished") == "unfinished" or known.get("digest") != mutation.digest:
            yield mutation


def main(argv: list[str] | None = None) -> int:
    """The command. Exit 0: all are caught; 1: some are not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="ID", help="mutations whose id begins so, such as merge-")
    parser.add_argument("--column", choices=COLUMNS, default="after", help="where the result is recorded")
    parser.add_argument("--tree", type=Path, default=REPO, help="the checkout to copy; without it this one")
    parser.add_argument("--again", action="store_true", help="run also what is recorded")
    parser.add_argument("--seconds", type=float, default=1800, help="for the tests of one mutation")
    options = parser.parse_args(argv)
    mutations = read_mutations()
    wanted = list(_wanted(mutations, read_results(), options))
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        tree = Path(scratch, "checkout")
        if wanted:
            copy_tree(options.tree.resolve(), tree)
        for mutation in wanted:
            found = {**judge(tree, mutation, options.seconds), "digest": mutation.digest}
            sys.stderr.write(f"{mutation.id}: {found['status']} {found['by']} ({found['seconds']} s)\n")
            results = read_results()  # another process may have added some
            known = results.setdefault(mutation.id, {}).get(options.column, {})
            if known.get("missed_first") or (known.get("status"), found["status"]) == ("missed", "caught"):
                found["missed_first"] = True
            results[mutation.id][options.column] = found
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    results = read_results()
    PAGE.write_text(render(mutations, results))
    chosen = [m for m in mutations if not options.only or any(m.id.startswith(name) for name in options.only)]
    return int(any(results.get(m.id, {}).get(options.column, {}).get("status") != "caught" for m in chosen))


if __name__ == "__main__":
    sys.exit(main())
