"""What ``clustertune doctor sbatch`` says."""

from __future__ import annotations

import sys

from clustertune.check import sbatch as linter
from clustertune.check.rule import Finding, printable
from clustertune.cli.arguments import path_argument
from clustertune.console import emit_json, escape, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error


def lint_scripts(files: list[str], as_json: bool) -> int:
    """Print what is wrong with batch scripts. Returns the exit code. Raises UserError for files that are none."""
    found, problems = [], []
    for file in files:
        try:
            found.append((file, linter.lint_file(str(path_argument(file)))))
        except UserError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem(str(error), file=file, fix="give a batch script"))
        except OSError as error:
            problems += storage_error(error, "cannot be read", file).problems
    raise_if(problems)
    if as_json:
        listing = [{"file": path, "findings": [_at_line(item) for item in findings]} for path, findings in found]
        emit_json({"files": listing, "findings": sum(len(findings) for _, findings in found)})
    for path, findings in found if not as_json else []:
        for item in findings:
            sys.stdout.write(escape(printable(f"{path}:{item.where}: {item.rule}: {item.found} -> {item.fix}")) + "\n")
    count = sum(len(findings) for _, findings in found)
    say(f"{len(found)} files, {count} findings" if len(found) > 1 else f"{count} findings")
    return int(ExitCode.FAILED) if count else 0


def _at_line(item: Finding) -> dict[str, object]:
    return {"line": int(item.where), "rule": item.rule, "message": item.found, "remedy": item.fix, "link": item.link}
