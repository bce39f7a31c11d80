"""``clustertune cluster up|down|status|run`` and ``demo-slurm``: a temporary Slurm to try a job on."""

from __future__ import annotations

import os
import re
import subprocess
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.arguments import AsJson, RecipeArgument, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import emit_json, reply, say
from clustertune.errors import ExitCode, UserError

with deferred():
    from clustertune.launch import cluster_paths
    from clustertune.recipe import schema
    from clustertune.testbed import cluster as testbed
    from clustertune.testbed import keeper, spec
    from clustertune.testbed import rehearsal as rehearsing
DEMO = "recipes/llama405b-oasst2"
SCRIPT = Path("launch", "run.sbatch")


class Isolation(StrEnum):
    """How the nodes are kept apart."""

    auto = "auto"
    netns = "netns"
    none = "none"


Nodes = Annotated[str, typer.Option(metavar="N|NAME,NAME", help="How many nodes (1 to 16), or their names.")]
Gpus = Annotated[int, typer.Option(help="GPUs per node: Slurm allocates them, but they do not exist.")]
IsolationOption = Annotated[
    Isolation, typer.Option(help="netns: each node in its own namespaces; none: not isolated; auto: netns if possible.")
]
Name = Annotated[str, typer.Option(help="Name of the cluster, if there are several.")]


def add(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(no_args_is_help=True, help="Start a temporary Slurm on this machine, to try things on.")
    group.command()(up)
    group.command()(down)
    group.command()(status)
    passed_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    group.command(context_settings=passed_on)(run)
    app.add_typer(group, name="cluster")
    app.command("demo-slurm")(demo_slurm)


# --- clustertune cluster -----------------------------------------------------------------------------------------------


def up(
    nodes: Nodes = "2",
    gpus: Gpus = 2,
    name: Name = "default",
    isolation: IsolationOption = Isolation.auto,
    as_json: AsJson = False,
) -> None:
    """Start a real Slurm on this machine; `cluster down` stops it.

    Installs and changes nothing on the machine. Needs no root if user namespaces are allowed.
    """
    state = keeper.up(_name(name), _spec(nodes, gpus, isolation))
    which = "" if name == "default" else f" --name {name}"
    apart = "" if state.prefix else "; no namespaces on this machine: the nodes share this machine's name and network"
    reply(
        as_json,
        _as_dict(state),
        f"cluster {name} is up: {', '.join(state.nodes)} with {state.gpus} GPUs each (only counted){apart}",
        f"  clustertune cluster run{which} -- sinfo    runs any command on its login node: sbatch, squeue, scancel, bash",
        f"  clustertune cluster status{which}          its nodes and jobs",
        f"  clustertune cluster down{which}            ends it; nothing is left",
    )


def down(name: Name = "default", as_json: AsJson = False) -> None:
    """Stop a cluster and all its jobs, and remove its files."""
    found = keeper.down(_name(name))
    gone = f"there is no cluster {name}{_others()}: nothing to end"
    text = f"cluster {name} is down, nothing is left of it" if found else gone
    reply(as_json, {"name": name, "ended": found is not None}, text)


def status(
    name: Annotated[str | None, typer.Option(help="Only this cluster. Default: all.")] = None, as_json: AsJson = False
) -> None:
    """List the clusters that are up, with their nodes and jobs.

    Exit code 0: one is up; 1: none.
    """
    states = [found for one in ([_name(name)] if name else keeper.names()) if (found := keeper.read(one))]
    clusters = [_status(state) for state in states]
    if as_json:
        emit_json({"clusters": clusters})
    else:
        for cluster in clusters:
            _show(cluster)
        if not clusters:
            say(f"there is no cluster{f' {name}' if name else ''} -> clustertune cluster up starts one")
    if not any(cluster["up"] for cluster in clusters):
        raise typer.Exit(int(ExitCode.FAILED))


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, with its arguments.")],
    name: Name = "default",
) -> None:
    """Run a command on the cluster's login node, in this folder.

    Passes the command's input, output and exit code through.
    """
    state = _alive(keeper.read(_name(name)), name)
    command_line = state.command(command, Path.cwd())
    try:
        os.execvpe(command_line[0], command_line, testbed.commands_environment(state.conf))  # noqa: S606 (no shell: the point is to become it)
    except OSError as error:
        raise UserError(f"cannot be run: {error.strerror}", file=command_line[0], fix="is it installed?") from None


def _name(name: str) -> str:
    if not re.fullmatch(schema.NAME, name):
        fix = "letters, digits and . _ -, beginning with a letter or digit, at most 64"
        raise UserError(f"{name!r} cannot be a cluster's name", file="command line", key="--name", fix=fix)
    return name


def _spec(nodes: str, gpus: int, isolation: Isolation) -> spec.ClusterSpec:
    wanted = int(nodes) if re.fullmatch(r"[0-9]{1,9}", nodes) else tuple(nodes.split(","))
    return spec.ClusterSpec(nodes=wanted, gpus=gpus, isolation=isolation.value)


def _others() -> str:
    names = keeper.names()
    return f" (there is {', '.join(names)})" if names else ""


def _alive(state: keeper.KeeperState | None, name: str) -> keeper.KeeperState:
    if state is None:
        message = f"there is no cluster {name}{_others()}"
        raise UserError(message, fix="clustertune cluster up starts one, --name chooses among several")
    if not state.alive:
        message = f"the process that kept the cluster {name} was killed, and the cluster ended with it"
        raise UserError(message, fix="clustertune cluster up starts a new one")
    return state


def _as_dict(state: keeper.KeeperState) -> dict[str, Any]:
    body = {"name": state.name, "up": state.alive, "isolated": state.prefix is not None, "gpus_per_node": state.gpus}
    return {**body, "slurm_conf": str(state.conf), "nodes": state.nodes}


def _status(state: keeper.KeeperState) -> dict[str, Any]:
    body = {**_as_dict(state), "uptime_seconds": round(state.uptime), "jobs": []}
    body["nodes"] = [{"name": one, "state": "gone"} for one in state.nodes]
    if not body["up"]:
        return body
    found = dict(line.split("|") for line in _ask(state, "sinfo", "--Node", "--partition=gpu", "--format=%N|%T"))
    body["nodes"] = [{"name": one, "state": found.get(one, "unknown")} for one in state.nodes]
    keys = ("id", "state", "reason", "nodes", "name")  # the name last: it may hold anything
    lines = _ask(state, "squeue", "--format=%i|%T|%r|%N|%j")
    body["jobs"] = [dict(zip(keys, line.split("|", len(keys) - 1), strict=True)) for line in lines]
    return body


def _ask(state: keeper.KeeperState, *words: str) -> list[str]:
    command = state.command([words[0], "--noheader", *words[1:]], Path("/"))
    environment = testbed.commands_environment(state.conf)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    return done.stdout.splitlines()


def _show(rehearsal: dict[str, Any]) -> None:
    if not rehearsal["up"]:
        say(f"{rehearsal['name']}: the process that ran the cluster was killed, and the cluster ended with it")
        say(f"  clustertune cluster down --name {rehearsal['name']} removes it, clustertune cluster up starts a new one")
        return
    minutes, seconds = divmod(rehearsal["uptime_seconds"], 60)
    gpus = rehearsal["gpus_per_node"]
    say(f"{rehearsal['name']}: up for {minutes // 60} h {minutes % 60} min {seconds} s, {gpus} GPUs per node")
    for node in rehearsal["nodes"]:
        say(f"  {node['name']}: {node['state']}")
    for job in rehearsal["jobs"]:
        where = job["nodes"] or job["reason"]
        say(f"  job {job['id']} {job['name']}: {job['state']} ({where})")
    if not rehearsal["jobs"]:
        say("  no jobs")


# --- demo-slurm --------------------------------------------------------------------------------------------------------


def demo_slurm(
    recipe: RecipeArgument = DEMO,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that replace the recipe's.")
    ] = None,
    nodes: Nodes = "2",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node; each is one CPU process.")] = 1,
    isolation: IsolationOption = Isolation.auto,
    run_dir: Annotated[Path | None, path_option("Run folder. Default: a new one in runs/rehearsal/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scaled-down recipe on a temporary Slurm.

    Starts the cluster, submits the real job script launch/run.sbatch, follows the job to its end, and stops the cluster.
    """
    if not SCRIPT.is_file():
        raise UserError("no such file", file=str(SCRIPT), fix="call this in the checkout of clustertune")
    if "=" in recipe:  # the recipe is left out, and this is the first of the overrides
        recipe, overrides = DEMO, [recipe, *(overrides or [])]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(recipe).name)
    new = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = run_dir or cluster_paths.runs(cluster_paths.local_cluster()) / "rehearsal" / new
    arguments = [recipe, *(overrides or []), "--tiny", "--run-dir", str(folder.resolve())]
    ended = rehearsing.rehearse(_spec(nodes, gpus, isolation), SCRIPT, arguments, folder)
    document = {"job": ended.job, "state": ended.state, "run_dir": str(folder), "log": str(ended.log)}
    reply(as_json, {**document, "exit_code": ended.code})
    if ended.code:
        raise typer.Exit(ended.code)
