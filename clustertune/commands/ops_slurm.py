"""``clustertune ops slurm plan|apply``: Slurm's files and folders on each machine, from the cluster file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustertune.arguments import AsJson, ClusterOption, existing_folder, path_option
from clustertune.console import emit_json, escape, say

if TYPE_CHECKING:
    from clustertune.check.rule import Finding
    from clustertune.ops.slurm.planning import SlurmPlan

slurm_app = typer.Typer(no_args_is_help=True, help="Set up Slurm's files and folders on each machine.")

Node = Annotated[str | None, typer.Option(metavar="NAME", help="The machine. Default: this one.", show_default=False)]
Root = Annotated[Path, path_option("Folder that will be that machine's root, such as an unpacked image.")]
Accounting = Annotated[
    bool | None,
    typer.Option("--accounting/--no-accounting", help="Set up slurmdbd and sacct. Default: what slurm.accounting says."),
]
Adopt = Annotated[bool, typer.Option(help="Overwrite files that clustertune did not write; a dated backup of each is kept.")]
Force = Annotated[bool, typer.Option(help="Replace manual edits between clustertune's markers.")]


def add(group: typer.Typer) -> None:
    """Register ``slurm`` in the group ``ops``."""
    group.add_typer(slurm_app, name="slurm")


@slurm_app.callback()
def _group() -> None:
    """Set up Slurm's files and folders on each machine."""


@slurm_app.command()
def plan(
    cluster: ClusterOption = None,
    node: Node = None,
    root: Root = Path("/"),
    accounting: Accounting = None,
    adopt: Adopt = False,
    force: Force = False,
    try_it: Annotated[bool, typer.Option("--try", help="Start a temporary Slurm with these files on this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which Slurm files a machine lacks, and the further steps. Writes nothing.

    Exit 0: nothing to do; 1: something differs; 2: something prevents apply.
    """
    made = _make(cluster, node, root, accounting, adopt, force)
    tried = _try(made) if try_it else None
    _show(made, as_json, {} if tried is None else {"tried": tried})
    raise typer.Exit(made.exit_code())


@slurm_app.command()
def apply(
    cluster: ClusterOption = None,
    node: Node = None,
    root: Root = Path("/"),
    accounting: Accounting = None,
    adopt: Adopt = False,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what plan shows; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write what plan shows, as root. Daemons are left alone: the remaining steps are listed in order."""
    from clustertune.ops.slurm.applying import apply_plan

    made = _make(cluster, node, root, accounting, adopt, force)
    if dry_run:
        _show(made, as_json, {})
        raise typer.Exit(made.exit_code())
    done = apply_plan(made, root)
    left = made.steps(applied=True) if made.changes else []
    if as_json:
        emit_json({**made.as_json(), **asdict(done), "steps": [asdict(step) for step in left], "exit_code": 0})
        return
    _findings(made.findings)
    from clustertune.ops.slurm.steps import shown

    for line in shown(left):
        sys.stdout.write(escape(line) + "\n")
    for note in done.notes:
        say(note)
    for backup in done.backups:
        say(f"the old one is {backup}")
    names = ", ".join([*done.written, *done.modes])
    say(f"{made.node.name}: wrote {names}" if names else f"{made.node.name}: nothing to do")


def _make(cluster: str | None, node: str | None, root: Path, accounting: bool | None, adopt: bool, force: bool) -> SlurmPlan:
    from clustertune.config.cluster import load_cluster
    from clustertune.ops.nodes import choose_node
    from clustertune.ops.slurm.planning import checked, make_plan, require_slurm

    found = load_cluster(cluster)
    require_slurm(found)
    tree = existing_folder(root, "a machine's tree").resolve()
    made = make_plan(found, choose_node(found, node), root=tree, accounting=accounting, adopt=adopt, force=force)
    return checked(made)


def _try(made: SlurmPlan) -> dict[str, Any]:
    from clustertune.cluster.rehearsal import try_out
    from clustertune.ops.slurm.planning import all_texts

    return try_out(made.cluster, all_texts(made))


def _show(made: SlurmPlan, as_json: bool, more: dict[str, Any]) -> None:
    """A plan on stdout, its sum on stderr."""
    from clustertune.ops.slurm.steps import shown

    if as_json:
        emit_json({**made.as_json(), **more})
        return
    for mode in made.modes:
        sys.stdout.write(escape(f"{mode.path}: {mode.was}; owner {mode.owner}, mode {mode.mode:04o}") + "\n")
    for item in made.files:
        for line in item.diff():
            sys.stdout.write(line + "\n")
        for line in item.taken_over or ():
            sys.stdout.write(escape(f"! {item.change.path}: {line}") + "\n")
    _findings(made.findings)
    for line in shown(made.steps()):
        sys.stdout.write(escape(line) + "\n")
    if tried := more.get("tried"):
        say(f"tried here: {', '.join(tried['nodes'])} idle after {tried['seconds']} s, and a job ran on each")
    if made.bare:
        say(f"this machine is not {made.node.name}: shown as if it were bare; --root DIR compares with a tree")
    source = f"Slurm {made.version} ({made.version_from})" if made.version else "Slurm of an unknown release"
    say(f"{made.node.name}: {made.changes} of files and folders differ; {source}")


def _findings(findings: Iterable[Finding]) -> None:
    for item in findings:
        where = f" {item.where}:" if item.where else ""
        fix = f" -> {item.fix}" if item.fix else ""
        sys.stdout.write(escape(f"[{item.status}] {item.rule}:{where} {item.found}{fix}") + "\n")
