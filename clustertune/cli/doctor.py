"""``clustertune doctor``: look for what goes wrong on clusters before it does."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune.check.machines import LOGIN, PLACES, Expects, Machine, machine_findings
from clustertune.check.rule import Finding, Report, as_json, exit_code, listed, printable, worst
from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, path_argument, path_option, takes
from clustertune.cluster import load, schema
from clustertune.console import emit_json, escape, reply, say
from clustertune.doctor import preflight, recipe_context
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error, storing
from clustertune.host import collect
from clustertune.host.facts import HostFacts
from clustertune.launch import allocation, cluster_paths, shape, stage_jobs
from clustertune.manifest import require_replaceable, write_durably
from clustertune.nccl_check import link_check as links
from clustertune.rundir import default_run_dir
from clustertune.tree import ROOT

COMMAND_LINE = "command line"
Looked = tuple[list[Finding], HostFacts | None, list[str]]
"""What was found, the facts of one machine if any answered, and the machines looked at."""


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine, or all nodes of this job, and a recipe.

    Exit 0: nothing found; 1: warnings; 2: what would stop or spoil a job.
    """

    recipe: OptionalRecipe = None
    overrides: Overrides = None
    cluster: ClusterOption = None
    tiny: Tiny = False
    run_dir: Annotated[Path | None, path_option("Run folder. Default: as for submit.")] = None
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="RULE", help="Skip a rule; repeatable.")] = None
    everything: Annotated[bool, typer.Option("--all", help="Also show what passed or could not be checked.")] = False
    place: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Where: login, here, step, container, container+step; else detected.")
    ] = None
    here: Annotated[bool, typer.Option("--here", help="Inside a Slurm job, check only this machine.")] = False
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Time limit for checking one machine, seconds.")] = 30
    python: Annotated[Path | None, path_option("Python of the ranks. Default: this one.", metavar="FILE")] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit the check as a Slurm job on whole nodes.")] = False
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit: number of nodes. Default: all.")] = None
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's time limit.", show_default=False)] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False
    listing: Annotated[bool, typer.Option("--list", help="Print the rules.")] = False
    out: Annotated[Path | None, path_option("With --list: write docs/doctor.md to this file.", "--out", metavar="FILE")] = None
    as_json: AsJson = False


class WithDefault(TyperGroup):
    """A group whose first command is meant where none is named: ``doctor RECIPE`` is ``doctor check RECIPE``."""

    default = "check"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in front, unless a command or the group's own help is asked for."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(cls=WithDefault)


@doctor_app.callback()
def _group() -> None:
    """Look for mistakes before they cost a job.

    clustertune doctor [RECIPE] [OPTIONS] is short for clustertune doctor check [RECIPE] [OPTIONS].
    """


# --- check -------------------------------------------------------------------------------------------------------------


def show_rules(out: Path | None, as_document: bool) -> int:
    """The rules, as a list, as JSON, or as the page of the documents."""
    from clustertune.doctor import recipe_rules  # it holds rules

    rules = recipe_rules.all_rules()
    if out is not None:
        with storing("cannot be written", out):
            text = recipe_rules.render()
            require_replaceable(out, text.partition("\n")[0])
            write_durably(out, text)
        say(f"wrote {out}")
    elif as_document:
        emit_json({"rules": [{key: getattr(rule, key) for key in ("id", "title", "why", "link")} for rule in rules]})
    else:
        width = max(len(rule.id) for rule in rules)
        sys.stdout.write("".join(f"{rule.id.ljust(width)}  {rule.title}\n" for rule in rules))
    return 0


def answer(args: DoctorArguments) -> int:
    """Look, tell, and return the exit code. Raises UserError."""
    if args.listing:
        return show_rules(args.out, args.as_json)
    raise_if(list(_contradictions(args)))
    ignore = load.check_rules(args.ignore or [], COMMAND_LINE, "--ignore")
    cluster = load.load_cluster(args.cluster)
    left_out = (*load.ignored(cluster), *ignore)
    if args.submit:
        return _submit(args, cluster)
    # The Slurm job in which this is called, whose nodes are looked at; none outside of one, and inside of a step.
    outside = args.here or args.place or not os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_STEP_ID", "").isdigit()
    job = None if outside else allocation.read()
    if job is None or not job.nodes:
        if args.dry_run:
            raise UserError(Problem("--dry-run needs --submit", file=COMMAND_LINE, key="--dry-run", fix="add --submit"))
        findings, facts, hosts = _look_locally(args, cluster)
    elif args.dry_run:
        command = preflight.step_command(cluster, job, [], args.seconds)
        reply(args.as_json, {"command": command}, lambda: sys.stdout.write(f"$ {shlex.join(command)}\n"))
        return 0
    else:
        findings, facts, hosts = _on_nodes(args, cluster, job)
    return _tell(args, cluster, Report([*findings, *_of_recipe(args, cluster, facts)], left_out), facts, hosts)


doctor_app.command("check")(takes(DoctorArguments, answer))


def _contradictions(args: DoctorArguments) -> Iterator[Problem]:
    contradictions = []
    if args.place is not None and args.place not in PLACES:
        contradictions.append(("--place", f"{args.place!r} is not a place", f"one of {', '.join(PLACES)}"))
    if args.submit and (args.here or args.place):
        contradictions.append(("--submit", "a job looks at its own nodes", "leave --here and --place out"))
    for key, value in (("--nodes", args.nodes), ("--time", args.time)):
        if value is not None and not args.submit:
            contradictions.append((key, "is read only with --submit", "inside of a job all its nodes are checked"))
    if args.recipe is None and (args.tiny or args.run_dir):
        contradictions.append(("RECIPE", "a recipe is missing", "clustertune doctor RECIPE ..."))
    return (Problem(message, file=COMMAND_LINE, key=key, fix=fix) for key, message, fix in contradictions)


# --- looking -----------------------------------------------------------------------------------------------------------


def _look_locally(args: DoctorArguments, cluster: schema.Cluster) -> Looked:
    """What is found here; nothing of a machine that the cluster file does not name, unless that is asked for."""
    names = [host.name for host in cluster.nodes] if 1 < len(cluster.nodes) <= 64 else ()
    storage, host = cluster.storage, cluster.host(platform.node())
    folders = [storage.shared, storage.scratch, storage.pool.mount if storage.pool else None]
    place = args.place
    if place is None and host is not None and not os.environ.get("SLURM_JOB_ID") and not Path("/.singularity.d").exists():
        # A machine that the cluster file has submit jobs and not run them; of others it is found by looking.
        place = LOGIN if "compute" not in host.roles else "here"
    with _waiting(args.seconds, "looking at this machine"):
        python = str(args.python) if args.python else None
        facts = collect.collect(place, args.seconds, names=names, folders=[one for one in folders if one], python=python)
    plain = cluster.model_dump(mode="json") if cluster.name != "local" else {}
    if plain and _is_foreign(cluster, facts.hostname) and not (args.here or args.place or os.environ.get("SLURM_JOB_ID")):
        return [], None, [facts.hostname]
    gpus = cluster.compute.gpus if plain and facts.place != LOGIN and cluster.host(facts.hostname) else None
    machine = Machine(facts, plain, Expects(gpus=gpus or None, launched=bool(args.recipe)))
    return machine_findings(machine), facts, [facts.hostname]


def _is_foreign(cluster: schema.Cluster, hostname: str) -> bool:
    return cluster.name != "local" and cluster.host(hostname) is None


def _on_nodes(args: DoctorArguments, cluster: schema.Cluster, job: allocation.Allocation) -> Looked:
    gpus = job.gpus_per_node or None
    expects = Expects(gpus=gpus, cpus=job.cpus_per_node, nodes=len(job.nodes), launched=True)
    binds = [str(path.resolve()) for path in [args.run_dir] if path is not None and path.exists()]
    with _waiting(args.seconds, f"looking at {len(job.nodes)} nodes"):
        looked = preflight.look(cluster, job, binds=binds, seconds=args.seconds)
    findings = preflight.findings(looked, cluster, job.nodes, expects)
    return findings, next(iter(looked.facts.values()), None), list(job.nodes)


def _waiting(seconds: float, text: str) -> contextlib.AbstractContextManager[Any]:
    """A spinner on a terminal, for as long as it takes."""
    from clustertune import console

    return console.stderr.status(f"{text} (up to {seconds:.0f} s)") if console.stderr.is_terminal else contextlib.nullcontext()


def _of_recipe(args: DoctorArguments, cluster: schema.Cluster, facts: HostFacts | None) -> list[Finding]:
    """What the rules of recipe, stack and folders find; one that cannot be resolved is a finding for each of its problems."""
    if args.recipe is None:
        return []
    from clustertune.doctor import recipe_rules  # it holds rules

    try:
        resolved = shape.resolve_on(args.recipe, args.overrides or [], cluster, tiny=args.tiny)[0]
    except UserError as error:
        return list(recipe_rules.recipe_refused(error))
    run_dir = args.run_dir or default_run_dir(resolved, cluster_paths.runs(cluster))  # as submit takes it
    own = {setting.name: setting.value for setting in cluster_paths.settings(cluster)}  # as its jobs have it
    context = recipe_context.build(resolved, cluster, facts, run_dir=run_dir, environment={**os.environ, **own})
    return recipe_rules.recipe_findings(context)


# --- telling -----------------------------------------------------------------------------------------------------------


def _tell(args: DoctorArguments, cluster: schema.Cluster, report: Report, facts: HostFacts | None, hosts: list[str]) -> int:
    place, code = facts.place if facts else None, exit_code(report.counted)
    if args.as_json:
        document = {"place": place, "hosts": hosts, "cluster": cluster.name, "recipe": args.recipe}
        document |= {"verdict": worst(report.counted), "ignored": sorted(set(report.ignored))}
        emit_json({**document, "findings": as_json(report.counted)})
        return code
    lines = report.lines(everything=args.everything)
    where = listed(hosts, 8)
    skipped = place is None and len(hosts) == 1 and _is_foreign(cluster, hosts[0])
    if skipped:
        text = f"{where} is not in {cluster.name}, so machine checks were skipped. --here runs them anyway; --submit checks"
        lines.append(f"{text} the cluster's nodes.")
    unseen = "machine not checked" if skipped else "no node answered"
    lines.append(f"{where} ({place or unseen}): {report.summary()}")
    sys.stdout.write("".join(escape(line) + "\n" for line in lines))
    return code


# --- as a job ----------------------------------------------------------------------------------------------------------


def _submit(args: DoctorArguments, cluster: schema.Cluster) -> int:
    """A job of whole nodes over the body of ops/doctor/doctor.sbatch, which looks at each of them."""
    shape = links.job_shape(cluster, args.nodes, args.time, args.seconds + preflight.START_SECONDS)
    note = "Derived by clustertune doctor --submit from the cluster file."
    job = stage_jobs.BatchJob(
        shape=shape,
        script=stage_jobs.render_alone("doctor", shape, note, (ROOT / "ops/doctor/doctor.sbatch").read_text(), alone=False),
        folder=(cluster_paths.runs(cluster) / "doctor" / cluster.name).absolute(),
        arguments=tuple(_arguments(args, cluster)),
        file="doctor.sbatch",
    )
    if args.dry_run:
        job.show(args.as_json)
        return 0
    number = job.submit(cluster, args.as_json)
    say(f"what it finds: {job.folder}/doctor-{number}.log")
    return 0


def _arguments(args: DoctorArguments, cluster: schema.Cluster) -> list[str]:
    """The command line of the job, with paths that another folder understands."""
    recipe = args.recipe
    if recipe is not None and Path(recipe).exists():
        recipe = str(Path(recipe).absolute())
    arguments = [*([recipe] if recipe else []), *(args.overrides or [])]
    arguments += ["--cluster", load.reference(cluster), f"--seconds={args.seconds:g}"]
    arguments += ["--tiny"] if args.tiny else []
    arguments += ["--all"] if args.everything else []
    arguments += [f"--run-dir={args.run_dir.absolute()}"] if args.run_dir else []
    return arguments + [f"--ignore={rule}" for rule in args.ignore or []]


# --- batch scripts -----------------------------------------------------------------------------------------------------


@doctor_app.command()
def sbatch(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Batch scripts to check.")],
    as_json: AsJson = False,
) -> None:
    """Find known mistakes in batch scripts, with line and remedy.

    Exit 0: none; 1: findings. Only reads the scripts. Without an installation: uvx --from CHECKOUT clustertune doctor sbatch.
    """
    from clustertune.check import sbatch as linter

    results, problems = [], []
    for file in files:
        try:
            results.append((file, linter.lint_file(str(path_argument(file)))))
        except UserError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem(str(error), file=file, fix="give a batch script"))
        except OSError as error:
            problems += storage_error(error, "cannot be read", file).problems
    raise_if(problems)
    if as_json:
        keys = {"rule": "rule", "message": "found", "remedy": "fix", "link": "link"}
        listing = [
            {"file": path, "findings": [{"line": int(i.where)} | {k: getattr(i, v) for k, v in keys.items()} for i in findings]}
            for path, findings in results
        ]
        emit_json({"files": listing, "findings": sum(len(findings) for _, findings in results)})
    for path, findings in results if not as_json else []:
        for item in findings:
            sys.stdout.write(escape(printable(f"{path}:{item.where}: {item.rule}: {item.found} -> {item.fix}")) + "\n")
    count = sum(len(findings) for _, findings in results)
    say(f"{len(results)} files, {count} findings" if len(results) > 1 else f"{count} findings")
    raise typer.Exit(int(ExitCode.FAILED) if count else 0)
