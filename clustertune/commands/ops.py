"""``clustertune ops``: set up the machines of a cluster file. ``ops storage``: bricks, exports, mounts, pool of one node."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clustertune.arguments import AsJson, ClusterOption, existing_folder, path_option
from clustertune.commands import ops_slurm
from clustertune.console import emit_json, escape, say
from clustertune.errors import ExitCode, Problem, UserError

if TYPE_CHECKING:
    from clustertune.config.cluster_schema import Cluster, Host

ops_app = typer.Typer(no_args_is_help=True, help="Set up the machines of a cluster file.")
storage_app = typer.Typer(no_args_is_help=True, help="Set up one node's storage: bricks, exports, mounts, pool.")
ops_app.add_typer(storage_app, name="storage")
ops_slurm.add(ops_app)

NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", help="Machine of the cluster file. Default: this one.", show_default=False),
]
RootOption = Annotated[
    Path | None, path_option("Use this folder, an unpacked image, as the machine; runs no commands.", "--root")
]
Force = Annotated[bool, typer.Option("--force", help="Replace clustertune's block in a file even if it was edited by hand.")]


def add(app: typer.Typer) -> None:
    """Register the group."""
    app.add_typer(ops_app, name="ops")


@ops_app.callback()
def _group() -> None:
    """Set up the machines of a cluster file."""


@contextlib.contextmanager
def compared_tree(cluster: Cluster, node: Host, root: Path | None) -> Iterator[Path]:
    """What a plan compares with: the tree that was given, this machine, or for another machine one that has nothing."""
    from clustertune.ops.files import NODE
    from clustertune.ops.nodes import is_here
    from clustertune.ops.storage.plan import empty_tree

    if root is not None:
        yield existing_folder(root, "a node's tree").resolve()
    elif is_here(cluster, node):
        yield NODE
    else:
        say(f"note: this machine is {socket.gethostname()}: showing everything for a bare {node.name}")
        with empty_tree() as empty:
            yield Path(empty)


@storage_app.command()
def plan(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: RootOption = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show what apply would change: diffs, then commands.

    Exit 0: nothing to do; 1: changes are needed; 2: something prevents them.
    """
    _plan(cluster, node, root, force, as_json)


def _plan(cluster: str | None, node: str | None, root: Path | None, force: bool, as_json: bool) -> None:
    from clustertune.config.cluster import load_cluster
    from clustertune.ops.nodes import choose_node
    from clustertune.ops.storage.plan import as_lines, make_plan

    found = load_cluster(cluster)
    host = choose_node(found, node)
    with compared_tree(found, host, root) as where:
        made = make_plan(found, host.name, where, force=force)
        if as_json:
            emit_json(made.as_dict())
        for line in as_lines(made) if not as_json else []:
            sys.stdout.write(escape(line) + "\n")
    say(f"{host.name}: {'changes are needed (see above)' if made.needed else 'nothing to do'}")
    if made.needed:
        raise typer.Exit(int(ExitCode.FAILED))


@storage_app.command()
def apply(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: RootOption = None,
    force: Force = False,
    format_device: Annotated[
        str | None,
        typer.Option("--format", metavar="DEVICE", help="Make a file system on this device of a brick, if it is blank."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what plan shows; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set up this machine's storage as the cluster file says.

    Running it again changes nothing. Every changed file keeps a dated backup and every line that clustertune did not write.
    Exit 0: done; 1: something remains, which is listed; 2: nothing was changed.
    """
    from clustertune.config.cluster import load_cluster
    from clustertune.ops.files import NODE
    from clustertune.ops.nodes import choose_node, require_here
    from clustertune.ops.storage.apply import apply as run_apply

    if dry_run:
        _plan(cluster, node, root, force, as_json)
        return
    found = load_cluster(cluster)
    host, problems = choose_node(found, node), []
    name = host.name
    if root is None:
        require_here(found, host)
        if os.geteuid() != 0:
            problems.append(Problem("needs root", file="command line", fix="run it with sudo; plan shows what it would do"))
    elif format_device:
        problems.append(Problem("a tree has no disks", file="command line", key="--format", fix="leave out --root"))
    if problems:
        raise UserError(problems)
    where = existing_folder(root, "a node's tree").resolve() if root else NODE
    done = run_apply(found, name, where, force=force, format_device=format_device, report=lambda text: say(f"  {text}"))
    if as_json:
        emit_json({"node": name, **asdict(done)})
    for backup in done.backups:
        say(f"backup: {backup}")
    for note in done.notes:
        say(f"note: {note}")
    for left in done.left:
        say(f"left: {left}")
    say(f"{name}: {f'{len(done.did)} changes' if done.did else 'nothing done' if done.left else 'nothing to do'}")
    if done.left:
        raise typer.Exit(int(ExitCode.FAILED))


@storage_app.command()
def check(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: RootOption = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Time limit for each check, seconds.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine's bricks, pool and exports work.

    Writes a small file and removes it. Exit 0: no findings; 1: warnings; 2: what would stop or spoil a job. A hung brick costs
    twice --seconds at most.
    """
    from clustertune.check import rule
    from clustertune.config.cluster import load_cluster
    from clustertune.ops.files import NODE
    from clustertune.ops.nodes import choose_node, require_here
    from clustertune.ops.storage.collect import collect
    from clustertune.ops.storage.judge import judge
    from clustertune.ops.storage.plan import by_hand, layout_of

    found = load_cluster(cluster)
    host = choose_node(found, node)
    name = host.name
    if root is None:
        require_here(found, host)
    where = existing_folder(root, "a node's tree").resolve() if root else NODE
    wanted = layout_of(found, name, where)
    facts = collect(wanted, where, seconds, found.source)
    facts.by_hand = by_hand(found, name, where)
    findings = judge(facts, wanted)
    if as_json:
        verdict = rule.worst(findings)
        emit_json({"node": name, "verdict": verdict, "findings": rule.as_json(findings), "facts": asdict(facts)})
    for item in findings if not as_json else []:
        if item.status != rule.PASS:
            what = f"{item.where}: {item.found}" if item.where else item.found
            sys.stdout.write(escape(f"{item.status:<8} {item.rule:<24} {what}") + "\n")
            sys.stdout.write(escape(f"{'':<8} {'':<24} -> {item.fix}") + "\n" if item.fix else "")
    counts = {status: sum(item.status == status for item in findings) for status in reversed(rule.STATUSES)}
    say(f"{name}: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
    raise typer.Exit(rule.exit_code(findings))
