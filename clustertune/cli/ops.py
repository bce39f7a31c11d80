"""``clustertune ops``: set up the machines of a cluster file: one node's storage, and Slurm's files and folders."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.arguments import AsJson, ClusterOption, existing_folder, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import emit_json, escape, reply, say
from clustertune.errors import ExitCode, Problem, UserError

with deferred():
    from clustertune.check import rule
    from clustertune.check.report import Report
    from clustertune.cluster import ignoring, load, schema
    from clustertune.ops import files, nodes
    from clustertune.ops.slurm import planning as slurm
    from clustertune.ops.storage import node as node_storage
    from clustertune.ops.storage import plan as storage
    from clustertune.testbed import rehearsal
ops_app = typer.Typer(no_args_is_help=True, help="Set up the machines of a cluster file.")
storage_app = typer.Typer(no_args_is_help=True, help="Set up one node's storage: bricks, exports, mounts, pool.")
slurm_app = typer.Typer(no_args_is_help=True, help="Set up Slurm's files and folders on each machine.")
ops_app.add_typer(storage_app, name="storage")
ops_app.add_typer(slurm_app, name="slurm")

NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", help="Machine of the cluster file. Default: this one.", show_default=False),
]
RootOption = Annotated[
    Path | None, path_option("Use this folder, an unpacked image, as the machine; runs no commands.", "--root")
]
Force = Annotated[bool, typer.Option("--force", help="Replace clustertune's block in a file even if it was edited by hand.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what plan shows; change nothing.")]
SlurmRoot = Annotated[Path, path_option("Folder that will be that machine's root, such as an unpacked image.", "--root")]
Accounting = Annotated[
    bool | None,
    typer.Option("--accounting/--no-accounting", help="Set up slurmdbd and sacct. Default: what slurm.accounting says."),
]
SlurmForce = Annotated[bool, typer.Option(help="Replace manual edits between clustertune's markers.")]
Adopt = Annotated[bool, typer.Option(help="Overwrite files that clustertune did not write; a dated backup of each is kept.")]


def add(app: typer.Typer) -> None:
    """Register the group."""
    app.add_typer(ops_app, name="ops")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(escape(line) + "\n")


def _chosen(cluster: str | None, node: str | None) -> tuple[schema.Cluster, schema.Host]:
    found = load.load_cluster(cluster)
    return found, nodes.choose_node(found, node)


# --- storage -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compared_tree(cluster: schema.Cluster, node: schema.Host, root: Path | None) -> Iterator[Path]:
    """What a plan compares with: the tree that was given, this machine, or for another machine one that has nothing."""
    if root is not None:
        yield existing_folder(root, "a node's tree").resolve()
    elif nodes.is_here(cluster, node):
        yield files.NODE
    else:
        say(f"note: this machine is {socket.gethostname()}: showing everything for a bare {node.name}")
        with tempfile.TemporaryDirectory(prefix="clustertune-") as empty:
            yield Path(empty)


def _here(cluster: schema.Cluster, node: schema.Host, root: Path | None) -> Path:
    """The tree that was given, else this machine. Raises UserError where that is another one."""
    if root is not None:
        return existing_folder(root, "a node's tree").resolve()
    nodes.require_here(cluster, node)
    return files.NODE


@storage_app.command("plan")
def storage_plan(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: RootOption = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show what apply would change: diffs, then commands.

    Exit 0: nothing to do; 1: changes are needed; 2: something prevents them.
    """
    found, host = _chosen(cluster, node)
    with compared_tree(found, host, root) as where:
        made = storage.make_plan(found, host.name, where, force=force)
        reply(as_json, made.as_dict(), lambda: _print(storage.as_lines(made)))
    say(f"{host.name}: {'changes are needed (see above)' if made.needed else 'nothing to do'}")
    if made.needed:
        raise typer.Exit(int(ExitCode.FAILED))


@storage_app.command("apply")
def storage_apply(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: RootOption = None,
    force: Force = False,
    format_device: Annotated[
        str | None,
        typer.Option("--format", metavar="DEVICE", help="Make a file system on this device of a brick, if it is blank."),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Set up this machine's storage as the cluster file says.

    Running it again changes nothing. Every changed file keeps a dated backup and every line that clustertune did not write.
    Exit 0: done; 1: something remains, which is listed; 2: nothing was changed.
    """
    if dry_run:
        storage_plan(cluster, node, root, force, as_json)
        return
    found, host = _chosen(cluster, node)
    name, where = host.name, _here(found, host, root)
    if root is None and os.geteuid() != 0:
        raise UserError(Problem("needs root", file="command line", fix="run it with sudo; plan shows what it would do"))
    if root is not None and format_device:
        raise UserError(Problem("a tree has no disks", file="command line", key="--format", fix="leave out --root"))
    done = storage.apply(found, name, where, force=force, format_device=format_device, report=lambda text: say(f"  {text}"))
    reply(as_json, {"node": name, **asdict(done)})
    for word, texts in (("backup", done.backups), ("note", done.notes), ("left", done.left)):
        for text in texts:
            say(f"{word}: {text}")
    say(f"{name}: {f'{len(done.did)} changes' if done.did else 'nothing done' if done.left else 'nothing to do'}")
    if done.left:
        raise typer.Exit(int(ExitCode.FAILED))


@storage_app.command("check")
def storage_check(
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
    from clustertune.ops.storage.judge import judge  # it holds rules

    found, host = _chosen(cluster, node)
    name, where = host.name, _here(found, host, root)
    wanted, by_hand = storage.look(found, name, where)
    facts = node_storage.collect(wanted, where, seconds, found.source)
    facts.by_hand = by_hand
    findings = Report(judge(facts, wanted), ignoring.ignored(found)).counted
    if as_json:
        verdict = rule.worst(findings)
        emit_json({"node": name, "verdict": verdict, "findings": rule.as_json(findings), "facts": asdict(facts)})
    for item in findings if not as_json else []:
        if item.status != rule.PASS:
            what = f"{item.where}: {item.found}" if item.where else item.found
            _print([f"{item.status:<8} {item.rule:<24} {what}", *([f"{'':<8} {'':<24} -> {item.fix}"] if item.fix else [])])
    counts = {status: sum(item.status == status for item in findings) for status in reversed(rule.STATUSES)}
    say(f"{name}: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
    raise typer.Exit(rule.exit_code(findings))


# --- slurm -------------------------------------------------------------------------------------------------------------


@slurm_app.command("plan")
def slurm_plan(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: SlurmRoot = Path("/"),
    accounting: Accounting = None,
    adopt: Adopt = False,
    force: SlurmForce = False,
    try_it: Annotated[bool, typer.Option("--try", help="Start a temporary Slurm with these files on this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which Slurm files a machine lacks, and the further steps. Writes nothing.

    Exit 0: nothing to do; 1: something differs; 2: something prevents apply.
    """
    made = _slurm_plan(cluster, node, root, accounting, adopt, force)
    made = replace(made, findings=tuple(Report(list(made.findings), ignoring.ignored(made.cluster)).counted))
    more: dict[str, Any] = {}
    if try_it:
        more["tried"] = rehearsal.try_out(made.cluster, slurm.all_texts(made))
    _show(made, as_json, more)
    raise typer.Exit(made.exit_code())


@slurm_app.command("apply")
def slurm_apply(
    cluster: ClusterOption = None,
    node: NodeOption = None,
    root: SlurmRoot = Path("/"),
    accounting: Accounting = None,
    adopt: Adopt = False,
    force: SlurmForce = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write what plan shows, as root. Daemons are left alone: the remaining steps are listed in order."""
    made = _slurm_plan(cluster, node, root, accounting, adopt, force)
    if dry_run:
        _show(made, as_json, {})
        raise typer.Exit(made.exit_code())
    done = slurm.apply_plan(made, root)
    left = made.steps(applied=True) if made.changes else []
    if as_json:
        emit_json({**made.as_json(), **asdict(done), "steps": [asdict(step) for step in left], "exit_code": 0})
        return
    _print([*_findings(made.findings), *slurm.shown(left)])
    for note in [*done.notes, *(f"the old one is {backup}" for backup in done.backups)]:
        say(note)
    names = ", ".join([*done.written, *done.modes])
    say(f"{made.node.name}: wrote {names}" if names else f"{made.node.name}: nothing to do")


def _slurm_plan(
    cluster: str | None, node: str | None, root: Path, accounting: bool | None, adopt: bool, force: bool
) -> slurm.SlurmPlan:
    found = load.load_cluster(cluster)
    slurm.require_slurm(found)
    tree = existing_folder(root, "a machine's tree").resolve()
    ignoring.ignored(found)  # a name that is no rule is refused
    return slurm.checked(
        slurm.make_plan(found, nodes.choose_node(found, node), root=tree, accounting=accounting, adopt=adopt, force=force)
    )


def _show(made: slurm.SlurmPlan, as_json: bool, more: dict[str, Any]) -> None:
    """A plan on stdout, its sum on stderr."""
    if as_json:
        emit_json({**made.as_json(), **more})
        return
    _print(f"{mode.path}: {mode.was}; owner {mode.owner}, mode {mode.mode:04o}" for mode in made.modes)
    for item in made.files:
        for line in item.diff():
            sys.stdout.write(line + "\n")
        _print(f"! {item.change.path}: {line}" for line in item.taken_over or ())
    _print([*_findings(made.findings), *slurm.shown(made.steps())])
    if tried := more.get("tried"):
        say(f"tried here: {', '.join(tried['nodes'])} idle after {tried['seconds']} s, and a job ran on each")
    if made.bare:
        say(f"this machine is not {made.node.name}: shown as if it were bare; --root DIR compares with a tree")
    source = f"Slurm {made.version} ({made.version_from})" if made.version else "Slurm of an unknown release"
    say(f"{made.node.name}: {made.changes} of files and folders differ; {source}")


def _findings(findings: Iterable[rule.Finding]) -> Iterator[str]:
    for item in findings:
        where, fix = f" {item.where}:" if item.where else "", f" -> {item.fix}" if item.fix else ""
        yield f"[{item.status}] {item.rule}:{where} {item.found}{fix}"
