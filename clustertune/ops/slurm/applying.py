"""Write a plan: folders, then files, each whole or not at all; owners and modes last. Again after a kill, it completes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clustertune.errors import Problem, UserError, storage_error
from clustertune.host.probe import ask
from clustertune.ops.files import NODE, exclusive, inside, put
from clustertune.ops.nodes import require_here
from clustertune.ops.slurm.planning import Mode, SlurmPlan
from clustertune.ops.slurm.texts import DROP_IN

LOCK = "clustertune-slurm.lock"
_RELOAD_SECONDS = 60.0
"""For ``systemctl daemon-reload``, which runs the generators of all units."""


@dataclass(frozen=True)
class Applied:
    """What was written."""

    written: tuple[str, ...]
    backups: tuple[str, ...]
    modes: tuple[str, ...]
    notes: tuple[str, ...]


def require_right_to_apply(plan: SlurmPlan, root: Path) -> None:
    """Raises UserError where this is another machine, not root, or something stands in the way: all of it at once."""
    problems = []
    if root == NODE:
        try:
            require_here(plan.cluster, plan.node)
        except UserError as error:
            problems += error.problems
        if os.geteuid() != 0:
            problems.append(Problem("files below /etc are root's", fix="run it as root: sudo, or into a tree with --root DIR"))
    problems += [Problem(item.found, file=item.where or None, key=item.rule, fix=item.fix) for item in plan.blocked]
    if problems:
        raise UserError(problems)


def apply_plan(plan: SlurmPlan, root: Path = NODE) -> Applied:
    """Write what the plan says. Raises UserError before anything is written, or exit 73 where storage fails on the way."""
    require_right_to_apply(plan, root)
    with exclusive(root, LOCK, "sets up Slurm here"):
        return _apply(plan, root)


def _apply(plan: SlurmPlan, root: Path) -> Applied:
    written, backups, modes, notes = list[str](), list[str](), list[str](), list[str]()
    for mode in plan.modes:
        if mode.folder:
            notes += _set(plan, root, mode)
            modes.append(mode.path)
    for item in plan.files:
        backup = put(root, item.change)
        if backup and not item.change.mode & 0o077:
            backup.chmod(item.change.mode)  # what others must not read stands in the old one too
        written.append(item.change.path)
        backups += [str(backup)] if backup else []
        if item.owner != "root":
            notes += _set(plan, root, Mode(item.change.path, item.owner, item.change.mode, False, ""))
    for mode in plan.modes:
        if not mode.folder:
            notes += _set(plan, root, mode)
            modes += [] if mode.path in written else [mode.path]
    if DROP_IN in written and root == NODE and plan.facts.systemd:
        notes += _reload()
    return Applied(tuple(written), tuple(backups), tuple(modes), tuple(dict.fromkeys(notes)))


def _set(plan: SlurmPlan, root: Path, mode: Mode) -> Iterable[str]:
    """Make a folder, or set owner and mode of what is there; says what could not be."""
    target = inside(root, mode.path)
    ids = (0, 0) if mode.owner == "root" else (plan.facts.users or {}).get(mode.owner)
    try:
        if mode.folder:
            target.mkdir(parents=True, exist_ok=True)
        target.chmod(mode.mode)
        if ids is not None and os.geteuid() == 0:
            os.chown(target, *ids)
    except OSError as error:
        raise storage_error(error, "cannot be made as it should be", mode.path) from None
    if ids is None or os.geteuid() != 0:
        return [f"owners are not set in this tree: no user {mode.owner} in its /etc/passwd, or not root"]
    return []


def _reload() -> list[str]:
    """``systemctl daemon-reload``; a failure is reported; it is no reason to undo."""
    answer = ask(["systemctl", "daemon-reload"], _RELOAD_SECONDS)
    return [] if answer.good else [f"systemctl daemon-reload: {answer.fault or 'is not installed'}"]
