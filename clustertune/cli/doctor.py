"""``clustertune doctor``: look for what goes wrong on clusters before it does."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune.check.ignored import check_rules, ignored
from clustertune.check.machines import Expects, Machine, machine_findings
from clustertune.check.rule import Finding, Report, as_json, exit_code, worst
from clustertune.cli.options import DoctorArguments
from clustertune.cluster import load, schema
from clustertune.console import emit_json, escape, reply, say
from clustertune.doctor import preflight, recipe_context
from clustertune.errors import Problem, UserError, raise_if, storing
from clustertune.host import collect
from clustertune.host.facts import LOGIN, PLACES, HostFacts
from clustertune.launch import allocation, cluster_paths, shape, stage_jobs
from clustertune.manifest import require_replaceable, write_durably
from clustertune.nccl_check import link_check as links
from clustertune.rundir import default_run_dir
from clustertune.text import listed
from clustertune.tree import ROOT

COMMAND_LINE = "command line"
Looked = tuple[list[Finding], HostFacts | None, list[str]]
"""What was found, the facts of one machine if any answered, and the machines looked at."""


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
    ignore = check_rules(args.ignore or [], COMMAND_LINE, "--ignore")
    cluster = load.load_cluster(args.cluster)
    left_out = (*ignored(cluster), *ignore)
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
        reply(args.as_json, {"command": command}, lambda: sys.stdout.write(escape(f"$ {shlex.join(command)}\n")))
        return 0
    else:
        findings, facts, hosts = _on_nodes(args, cluster, job)
    return _tell(args, cluster, Report([*findings, *_of_recipe(args, cluster, facts)], left_out), facts, hosts)


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
    job_shape = links.job_shape(cluster, args.nodes, args.time, args.seconds + preflight.START_SECONDS)
    note = "Derived by clustertune doctor --submit from the cluster file."
    job = stage_jobs.BatchJob(
        shape=job_shape,
        script=stage_jobs.render_alone("doctor", job_shape, note, (ROOT / "ops/doctor/doctor.sbatch").read_text(), alone=False),
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
