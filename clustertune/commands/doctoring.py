"""What ``clustertune doctor check`` does: where it looks, at what, and how it tells what it found."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.check import report as reports
from clustertune.check.machine import LOGIN, PLACES, Expects, Machine
from clustertune.check.rule import Finding, as_json, exit_code, worst
from clustertune.config.cluster import argument
from clustertune.console import emit_json, escape, say
from clustertune.errors import Problem, UserError, storage_error
from clustertune.host.collect import collect
from clustertune.host.facts import HostFacts
from clustertune.tree import ROOT

if TYPE_CHECKING:
    from clustertune.config.cluster_schema import Cluster
    from clustertune.config.resolved import Resolved
    from clustertune.launch.allocation import Allocation

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Asked:
    """The command line."""

    recipe: str | None
    overrides: list[str] | None
    cluster: str | None
    tiny: bool
    run_dir: Path | None
    ignore: list[str] | None
    everything: bool
    place: str | None
    here: bool
    seconds: float
    python: Path | None
    submit: bool
    nodes: int | None
    time: str | None
    dry_run: bool
    listing: bool
    out: Path | None
    as_json: bool


def show_rules(out: Path | None, as_document: bool) -> int:
    """The rules, as a list, as JSON, or as the page of the documents."""
    from clustertune.doctor.recipe_findings import all_rules

    if out is not None:
        from clustertune.doctor import page

        try:
            page.write(out)
        except OSError as error:
            raise storage_error(error, "cannot be written", out) from None
        say(f"wrote {out}")
    elif as_document:
        keys = ("id", "title", "why", "link")
        emit_json({"rules": [{key: getattr(rule, key) for key in keys} for rule in all_rules()]})
    else:
        rules = all_rules()
        width = max(len(rule.id) for rule in rules)
        sys.stdout.write("".join(f"{rule.id.ljust(width)}  {rule.title}\n" for rule in rules))
    return 0


def answer(asked: Asked) -> int:
    """Look, tell, and return the exit code. Raises UserError."""
    from clustertune.config.cluster import load_cluster
    from clustertune.doctor import preflight

    if asked.listing:
        return show_rules(asked.out, asked.as_json)
    if problems := list(_contradictions(asked)):
        raise UserError(problems)
    ignore = asked.ignore or []
    preflight.check_rules(ignore, COMMAND_LINE, "--ignore")
    cluster = load_cluster(asked.cluster)
    left_out = (*preflight.ignored(cluster), *ignore)
    if asked.submit:
        return _submit(asked, cluster)
    allocation = _allocation(asked)
    if allocation is not None and allocation.nodes:
        if asked.dry_run:
            return _show_step(asked, cluster, allocation)
        found, facts, hosts = _on_nodes(asked, cluster, allocation)
    elif asked.dry_run:
        raise UserError(
            Problem("there is nothing to run but here", file=COMMAND_LINE, key="--dry-run", fix="--submit --dry-run")
        )
    else:
        found, facts, hosts = _here(asked, cluster)
    found = reports.once(found, _of_recipe(asked, cluster, facts))
    return _tell(asked, cluster, reports.Report(found, left_out), facts, hosts)


def _contradictions(asked: Asked) -> Iterator[Problem]:
    def problem(key: str, message: str, fix: str) -> Problem:
        return Problem(message, file=COMMAND_LINE, key=key, fix=fix)

    if asked.place is not None and asked.place not in PLACES:
        yield problem("--place", f"{asked.place!r} is no place", f"one of {', '.join(PLACES)}")
    if asked.submit and (asked.here or asked.place):
        yield problem("--submit", "a job looks at its own nodes", "leave --here and --place out")
    for key, value in (("--nodes", asked.nodes), ("--time", asked.time)):
        if value is not None and not asked.submit:
            yield problem(key, "is read only with --submit", "inside of a job all its nodes are looked at")
    if asked.recipe is None and (asked.tiny or asked.run_dir):
        yield problem("RECIPE", "a recipe is missing", "clustertune doctor RECIPE ...")


def _allocation(asked: Asked) -> Allocation | None:
    """The Slurm job in which this is called, whose nodes are looked at; None outside of one, and inside of a step."""
    if asked.here or asked.place or not os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_STEP_ID", "").isdigit():
        return None
    from clustertune.launch import allocation

    return allocation.read()


# --- looking -----------------------------------------------------------------------------------------------------------


def _here(asked: Asked, cluster: Cluster) -> tuple[list[Finding], HostFacts | None, list[str]]:
    from clustertune.doctor import nodes

    names = [host.name for host in cluster.nodes] if len(cluster.nodes) <= 64 else []
    storage = cluster.storage
    folders = [storage.shared, storage.scratch, storage.pool.mount if storage.pool else None]
    with _waiting(asked.seconds, "looking at this machine"):
        facts = collect(
            asked.place or _place(cluster),
            asked.seconds,
            names=names if len(names) > 1 else (),
            folders=[folder for folder in folders if folder],
            python=str(asked.python) if asked.python else None,
        )
    plain = nodes.as_plain(cluster) if cluster.name != "local" else {}
    gpus = cluster.compute.gpus if plain and facts.place != LOGIN and cluster.host(facts.hostname) else None
    machine = Machine(facts, plain, Expects(gpus=gpus or None, launched=bool(asked.recipe)))
    return reports.machine_findings(machine), facts, [facts.hostname]


def _place(cluster: Cluster) -> str | None:
    """``login`` for a machine that the cluster file has submit jobs and not run them; else it is found by looking."""
    host = cluster.host(platform.node())
    if host is None or os.environ.get("SLURM_JOB_ID") or Path("/.singularity.d").exists():
        return None
    return LOGIN if "compute" not in host.roles else "here"


def _on_nodes(asked: Asked, cluster: Cluster, allocation: Allocation) -> tuple[list[Finding], HostFacts | None, list[str]]:
    from clustertune.doctor import nodes

    gpus = allocation.gpus_per_node or None
    expects = Expects(gpus=gpus, cpus=allocation.cpus_per_node, nodes=len(allocation.nodes), launched=True)
    binds = [str(path.resolve()) for path in [asked.run_dir] if path is not None and path.exists()]
    with _waiting(asked.seconds, f"looking at {len(allocation.nodes)} nodes"):
        looked = nodes.look(cluster, allocation, binds=binds, seconds=asked.seconds)
    found = nodes.findings(looked, cluster, allocation.nodes, expects)
    return found, next(iter(looked.facts.values()), None), list(allocation.nodes)


def _waiting(seconds: float, words: str) -> Any:
    """A sign of life on a terminal, for as long as it takes."""
    from clustertune import console

    return console.stderr.status(f"{words} (up to {seconds:.0f} s)") if console.stderr.is_terminal else _Quiet()


class _Quiet:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _of_recipe(asked: Asked, cluster: Cluster, facts: HostFacts | None) -> list[Finding]:
    """What the rules of recipe, stack and folders find; one that cannot be resolved is a finding for each of its problems."""
    if asked.recipe is None:
        return []
    from clustertune import chain
    from clustertune.doctor.recipe_findings import recipe_findings
    from clustertune.doctor.recipe_refused import refused
    from clustertune.launch import places

    try:
        resolved = _resolve(asked, cluster)
    except UserError as error:
        return list(refused(error))
    run_dir = asked.run_dir or chain.default_run_dir(resolved, places.runs(cluster))  # as submit takes it
    environment = {**os.environ, **{setting.name: setting.value for setting in places.settings(cluster)}}  # as its jobs have it
    return recipe_findings(resolved, cluster, facts, run_dir=run_dir, environment=environment)


def _resolve(asked: Asked, cluster: Cluster) -> Resolved:
    from clustertune.launch import shape

    assert asked.recipe is not None
    return shape.resolve_on(asked.recipe, asked.overrides or [], cluster, tiny=asked.tiny)[0]


# --- telling -----------------------------------------------------------------------------------------------------------


def _tell(asked: Asked, cluster: Cluster, report: reports.Report, facts: HostFacts | None, hosts: list[str]) -> int:
    place = facts.place if facts else None
    if asked.as_json:
        document = {"place": place, "hosts": hosts, "cluster": cluster.name, "recipe": asked.recipe}
        document["verdict"] = worst(report.counted)
        document["ignored"] = sorted(set(report.ignored))
        emit_json({**document, "findings": as_json(report.counted)})
        return exit_code(report.counted)
    for line in report.lines(everything=asked.everything):
        sys.stdout.write(escape(line) + "\n")
    where = f"{', '.join(hosts[:8])}{f' and {len(hosts) - 8} more' if len(hosts) > 8 else ''}"
    sys.stdout.write(escape(f"{where} ({place or 'no node answered'}): {report.summary()}") + "\n")
    return exit_code(report.counted)


# --- as a job ----------------------------------------------------------------------------------------------------------


def _show_step(asked: Asked, cluster: Cluster, allocation: Allocation) -> int:
    from clustertune.doctor import nodes

    command = nodes.step_command(cluster, allocation, [], asked.seconds)
    if asked.as_json:
        emit_json({"command": command})
    else:
        sys.stdout.write(f"$ {shlex.join(command)}\n")
    return 0


def _submit(asked: Asked, cluster: Cluster) -> int:
    """A job of whole nodes over the body of ops/doctor/doctor.sbatch, which looks at each of them."""
    from clustertune.doctor import nodes
    from clustertune.launch import batch, places
    from clustertune.nccl_check.batch import shape

    wanted = shape(cluster, asked.nodes, asked.time, asked.seconds + nodes.START_SECONDS)
    note = "Derived by clustertune doctor --submit from the cluster file."
    job = batch.BatchJob(
        shape=wanted,
        script=batch.render("doctor", wanted, note, (ROOT / "ops/doctor/doctor.sbatch").read_text(), alone=False),
        folder=(places.runs(cluster) / "doctor" / cluster.name).absolute(),
        arguments=tuple(_arguments(asked, cluster)),
        file="doctor.sbatch",
    )
    if asked.dry_run:
        job.show(asked.as_json)
        return 0
    number = job.submit(cluster, asked.as_json)
    say(f"what it finds: {job.folder}/doctor-{number}.log")
    return 0


def _arguments(asked: Asked, cluster: Cluster) -> list[str]:
    """The command line of the job, with paths that another folder understands."""
    word = argument(asked.cluster or cluster.name)
    recipe = asked.recipe
    if recipe is not None and Path(recipe).exists():
        recipe = str(Path(recipe).absolute())
    words = [*([recipe] if recipe else []), *(asked.overrides or []), "--cluster", word, f"--seconds={asked.seconds:g}"]
    words += ["--tiny"] if asked.tiny else []
    words += ["--all"] if asked.everything else []
    words += [f"--run-dir={asked.run_dir.absolute()}"] if asked.run_dir else []
    return words + [f"--ignore={rule}" for rule in asked.ignore or []]
