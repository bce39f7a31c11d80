"""``clustertune setup``: one node's storage, or its Slurm, as files and a script in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.arguments import AsJson, ClusterOption, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import reply, say
from clustertune.errors import Problem, UserError

with deferred():
    from clustertune.cluster import load
    from clustertune.setup import rendered, setup_machine
    from clustertune.testbed import rehearsal
setup_app = typer.Typer(no_args_is_help=True, help="Render files that set up a node.")

NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", help="Machine of the cluster file. Default: this one.", show_default=False),
]
OutOption = Annotated[Path, path_option("Folder to write: new, empty, or written by setup before.", "--out")]


def add(app: typer.Typer) -> None:
    """Register the group, and the name that it had."""
    app.add_typer(setup_app, name="setup")
    app.command("ops", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_former)


def _former() -> None:
    """Replaced by setup."""
    fix = "clustertune setup storage|slurm --cluster NAME --node NODE --out DIR, then run the script in DIR as root"
    raise UserError(Problem("ops is replaced by setup, which renders files", file="command line", key="ops", fix=fix))


def _written(made: rendered.Rendered, node: str, out: Path, script: str, as_json: bool, more: dict[str, Any]) -> None:
    made.write(out)
    document = {"node": node, "out": str(out), "files": sorted(made.files), "notes": made.notes, "verified": made.verified}
    reply(as_json, document | more)
    for note in made.notes:
        say(f"note: {note}")
    say(f"verified by {made.verified}" if made.verified else "not verified: what reads these files is not installed here")
    say(f"{node}: {len(made.files)} files in {out}; read {script}, and run it as root on {node}")


@setup_app.command("storage")
def storage(out: OutOption, cluster: ClusterOption = None, node: NodeOption = None, as_json: AsJson = False) -> None:
    """Render fstab lines, exports and a script for a node."""
    loaded = load.load_cluster(cluster)
    host = setup_machine.choose_node(loaded, node)
    _written(rendered.storage(loaded, host), host.name, out, rendered.STORAGE_SCRIPT, as_json, {})


@setup_app.command("slurm")
def slurm(
    out: OutOption,
    cluster: ClusterOption = None,
    node: NodeOption = None,
    accounting: Annotated[
        bool | None,
        typer.Option("--accounting/--no-accounting", help="Set up slurmdbd and sacct. Default: what slurm.accounting says."),
    ] = None,
    try_it: Annotated[bool, typer.Option("--try", help="Start a temporary Slurm with these files on this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Render slurm.conf and the files around it for a node."""
    loaded = load.load_cluster(cluster)
    host = setup_machine.choose_node(loaded, node)
    made = rendered.slurm(loaded, host, accounting)
    more: dict[str, Any] = {}
    if try_it:
        more["tried"] = tried = rehearsal.try_out(loaded, rendered.all_texts(loaded, accounting=accounting))
        say(f"tried here: {', '.join(tried['nodes'])} idle after {tried['seconds']} s, and a job ran on each")
    _written(made, host.name, out, rendered.SLURM_SCRIPT, as_json, more)
