"""``clustertune nccl-check``: what the links carry, whether that is what they should, and what to do where it is not."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from clustertune import chain
from clustertune import job as job_program
from clustertune.check.ignored import ignored
from clustertune.check.rule import EXIT
from clustertune.cli.arguments import path_argument
from clustertune.cli.options import NcclCheckArguments
from clustertune.cluster import load, schema
from clustertune.console import emit_json, escape, reply, say
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if, storage_error, storing
from clustertune.launch import allocation, cluster_paths, slurm
from clustertune.manifest import read_whole
from clustertune.nccl_check import link_check, link_measure, link_rules, nccl_log
from clustertune.process import Stopped
from clustertune.recipe import layers

GPU_SECONDS, CPU_SECONDS = 300.0, 60.0
WAIT_SECONDS = 5.0
"""Between two questions to Slurm about a job that is waited for."""
GIVEN_TO_JOB = ("seconds", "largest", "collectives", "scopes", "backend", "ranks", "save")
"""What of the command line the job's has too."""


def answer(args: NcclCheckArguments) -> int:
    """Do what the command line says, here. Returns the exit code. Raises UserError."""
    raise_if(_usage(args))
    if args.submit:
        return submit(args)
    if args.logs:
        return _judge_logs(args)
    cluster = load.load_cluster(args.cluster)
    ignored(cluster)  # a name that is no rule is refused before anything is measured
    target, options = _target(args, cluster)
    if args.dry_run:
        _show(target, options, args)
        return 0
    return _check(args, cluster, target, options)


def _usage(args: NcclCheckArguments) -> Iterator[Problem]:
    def wrong(key: str, text: str, fix: str) -> Problem:
        return Problem(text, file="command line", key=key, fix=fix)

    if args.logs and not args.files:
        yield wrong("--logs", "no file was given", "clustertune nccl-check --logs FILE...")
    if args.files and not args.logs:
        yield wrong("FILE", f"{args.files[0]}: files are read only with --logs", "clustertune nccl-check --logs FILE...")
    for key, text, known in (
        ("--collectives", args.collectives, link_rules.COLLECTIVES),
        ("--scopes", args.scopes, link_measure.SCOPES),
    ):
        for word in text.split(",") if text is not None else []:
            if word not in known:
                fix = layers.did_you_mean(word, known) or "name some of them"
                yield wrong(key, f"unknown: {word!r}; known: {', '.join(known)}", fix)
    if args.backend not in ("auto", "nccl", "gloo"):
        yield wrong("--backend", f"{args.backend!r} is not a backend", "auto, nccl or gloo")
    try:
        link_check.parse_size(args.largest or "1G")
    except ValueError as error:
        yield wrong("--max", str(error), "write 1K, 64M or 1G")
    here = not args.submit
    for is_so, key, fix in (
        (args.wait and here, "--wait", "without a job the verdict is there at the end"),
        (args.time is not None and here, "--time", "--seconds limits the check itself"),
        (args.nodes is not None and here, "--nodes", "inside a job all its nodes are measured"),
    ):
        if is_so:
            yield wrong(key, "is read only with --submit", fix)


# --- recorded logs -----------------------------------------------------------------------------------------------------


def _judge_logs(args: NcclCheckArguments) -> int:
    files, problems = [file if file == "-" else str(path_argument(file)) for file in args.files or []], list[Problem]()
    for file in files:
        with collect_problems(problems), storing("cannot be read", file):
            if file != "-":
                Path(file).stat()
    raise_if(problems)
    cluster = load.load_cluster(args.cluster) if args.cluster is not None else None
    left_out = ignored(cluster) if cluster else ()
    with storing("cannot be read", ", ".join(files)):
        log = nccl_log.read_files(files)
    if not log.lines and not log.faults and not log.versions:
        raise UserError(Problem("no line of NCCL", file=", ".join(files), fix="run the job with NCCL_DEBUG=INFO"))
    measured_before = {"schema": link_measure.SCHEMA, **({"expected": link_check.expected(cluster)} if cluster else {})}
    _, judged = link_check.judged(measured_before, log, left_out)
    document = {"schema": link_measure.SCHEMA, "logs": files, "log": nccl_log.as_dict(log), "verdict": judged}
    reply(args.as_json, document, *nccl_log.summary(log), *link_check.verdict(judged))
    return EXIT[judged["status"]]


# --- where and what ----------------------------------------------------------------------------------------------------


def _target(args: NcclCheckArguments, cluster: schema.Cluster) -> tuple[link_check.CheckTarget, link_measure.CheckOptions]:
    """Where it runs and what it measures. Raises UserError."""
    if os.environ.get("SLURM_JOB_ID"):
        job = allocation.read()
        gpus = job.gpus_per_node if job_program.has_gpus() else 0
        cpus = min(job.cpus_per_node or 1 << 20, len(os.sched_getaffinity(0)))
        where = "step" if cluster.container.runtime == "none" else "container+step"
        return link_check.job_target(job, cluster, os.environ), _options(args, gpus, cpus, len(job.nodes), where)
    name = platform.node() or "here"
    if args.cluster is not None and cluster.nodes and cluster.host(name) is None:
        say(f"warning: {name} is not a node of {cluster.name}: this machine is measured; --submit measures the cluster's nodes")
    options = _options(args, chain.visible_gpus(), len(os.sched_getaffinity(0)), 1, "here")
    return link_check.local_target(name, cluster), options


def _options(args: NcclCheckArguments, gpus: int, cpus: int, nodes: int, where: str) -> link_measure.CheckOptions:
    """``gpus`` and ``cpus`` are those of one node. Raises UserError."""
    backend, why, ranks = _backend(args, gpus, nodes)
    return link_measure.CheckOptions(
        backend=backend,
        backend_why=why,
        ranks_per_node=ranks,
        cpus_per_node=cpus,
        seconds=args.seconds or (GPU_SECONDS if backend == "nccl" else CPU_SECONDS),
        largest=link_check.parse_size(args.largest) if args.largest else link_check.largest_for(backend, nodes),
        # In their own order, which is that of importance.
        collectives=tuple(
            name for name in link_rules.COLLECTIVES if args.collectives is None or name in args.collectives.split(",")
        ),
        scopes=tuple(name for name in link_measure.SCOPES if args.scopes is None or name in args.scopes.split(",")),
        place=where,
    )


def _backend(args: NcclCheckArguments, gpus: int, nodes: int) -> tuple[str, str, int]:
    """Backend, the reason for it, and the ranks of a node."""
    each = args.ranks or gpus
    if args.backend == "nccl" or (args.backend == "auto" and gpus and each * nodes > 1):
        if not gpus:
            text = "this machine has no GPU that NCCL could use"
            raise UserError(text, file="command line", key="--backend", fix="--backend gloo")
        if each > gpus:
            raise UserError(f"{each} ranks for {gpus} GPUs", file="command line", key="--ranks", fix=f"at most {gpus}")
        if each * nodes < 2:
            fix = "--backend gloo measures CPUs; several nodes, or a node of several GPUs, have links"
            raise UserError("one GPU has no peer: there is no link to measure", file="command line", key="--backend", fix=fix)
        return "nccl", f"{each} of {gpus} GPUs" if each != gpus else f"{gpus} GPUs", each
    each = args.ranks or (1 if nodes > 1 else 2)
    if each * nodes < 2:
        raise UserError(Problem("one rank has no peer", file="command line", key="--ranks", fix="--ranks 2"))
    if args.backend == "gloo":
        return "gloo", link_check.REQUESTED, each
    return "gloo", "one GPU has no peer: gloo between CPU ranks" if gpus else "no GPU here: gloo between CPU ranks", each


def new_folder(
    args: NcclCheckArguments, cluster: schema.Cluster, name: str | None = None, where: link_check.CheckTarget | None = None
) -> Path:
    """A new folder below the cluster's folder of runs, or below this machine's where a machine outside the cluster is measured.

    ``name``: what it is called in a dry run. Raises UserError where ``--out`` holds a check already.
    """
    if args.out is None:
        new = f"{cluster.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        outside = where is not None and where.job is None and cluster.host(where.hosts[0]) is None
        runs = cluster_paths.runs(cluster_paths.local_cluster() if outside else cluster)
        return (runs / "nccl-check" / (name or new)).absolute()
    path = args.out.absolute()
    if path.exists() and not path.is_dir():
        raise UserError(Problem("is a file", file=str(path), key="--out", fix="give a new folder"))
    if (path / link_check.RESULT).exists() or (path / link_check.RECORDS).exists():
        raise UserError(Problem("holds a check already", file=str(path), key="--out", fix="give a new folder"))
    return path


# --- as a job ----------------------------------------------------------------------------------------------------------


def submit(args: NcclCheckArguments) -> int:
    """Submit the job, or show it. Returns the exit code. Raises UserError."""
    cluster = load.load_cluster(args.cluster)
    folder = new_folder(args, cluster, "NEW" if args.dry_run else None)
    seconds = args.seconds or (GPU_SECONDS if cluster.compute.gpus else CPU_SECONDS)
    size = link_check.job_shape(cluster, args.nodes, args.time, seconds)
    job = link_check.make_job(size, folder, arguments(args, cluster))
    if args.dry_run:
        job.show(args.as_json)
        return 0
    number = job.submit(cluster, args.as_json and not args.wait, (("the folder", folder),))
    say(f"its log and result.json: {folder}")
    return _await(args, number, folder) if args.wait else 0


def _await(args: NcclCheckArguments, job: str, folder: Path) -> int:
    """Wait for a job and tell what it found. Returns the exit code of its verdict. Raises UserError where it left none.

    Ctrl-C ends the waiting and not the job.
    """
    state = "PENDING"
    while state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"):
        time.sleep(WAIT_SECONDS)
        with contextlib.suppress(slurm.Unreachable):
            state = (slurm.show_job(job) or {}).get("JobState", "forgotten by Slurm")
    try:
        result = json.loads(read_whole(folder / link_check.RESULT))
        code = EXIT[result["verdict"]["status"]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        problem = Problem(f"job {job} ended without a result ({state})", file=str(folder), fix="its log is there")
        raise UserError(problem, ExitCode.FAILED) from None
    _tell(args, result)
    return code


def _tell(args: NcclCheckArguments, result: dict[str, Any]) -> None:
    """The document on stdout, or its table for people."""
    reply(args.as_json, result, lambda: link_check.show(result))


def arguments(args: NcclCheckArguments, cluster: schema.Cluster) -> list[str]:
    """The command line of the job: what was given here, and the cluster in a form that another folder understands."""
    line = ["--cluster", load.reference(cluster)]
    for name in GIVEN_TO_JOB:
        value = getattr(args, name)
        if value != getattr(NcclCheckArguments, name):  # the default
            key = {"largest": "max"}.get(name, name)
            words = [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
            line += [f"--{key}", *words]
    return line


# --- what is done ------------------------------------------------------------------------------------------------------


def _check(
    args: NcclCheckArguments, cluster: schema.Cluster, target: link_check.CheckTarget, options: link_measure.CheckOptions
) -> int:
    folder, began = new_folder(args, cluster, where=target), time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        where = f"{options.backend} on {', '.join(target.hosts[:4])}{' ...' if len(target.hosts) > 4 else ''}"
        say(f"{where}: {options.seconds:g} s of measuring, over within {options.seconds + link_measure.MARGIN_SECONDS:g} s")
        part = link_check.measure(target, options, folder)
        result = link_check.document(target, options, part, time.monotonic() - began)
        link_check.judge(result, cluster, part.logs())
        link_check.write(result, folder / link_check.RESULT)
    except OSError as error:
        raise storage_error(error, "cannot hold the check", error.filename or folder) from None
    except Stopped as stopped:
        fix = "the measurements are there; run it again, where --out was given with another one"
        raise UserError(Problem(f"stopped by {stopped}", file=str(folder), fix=fix), ExitCode.AGAIN) from None
    _tell(args, result)
    say(f"result: {folder / link_check.RESULT}")
    _keep(args, cluster, result)
    return EXIT[result["verdict"]["status"]]


def _keep(args: NcclCheckArguments, cluster: schema.Cluster, result: dict[str, Any]) -> None:
    """Keep the result for plans: where that was asked for, or where it is one of the cluster that was named."""
    if not args.save and (args.cluster is None or link_check.not_kept(result, cluster)):
        return
    try:
        say(f"kept for plan: {link_check.keep(result, cluster)}")
    except OSError as error:
        known = storage_error(error, "the result could not be kept", error.filename or cluster.source)
        if args.save:
            raise known from None
        say(f"note: {known.problems[0]}")


def _show(target: link_check.CheckTarget, options: link_measure.CheckOptions, args: NcclCheckArguments) -> None:
    """What would be run: hosts, environment, command, sizes."""
    setup = link_check.make_setup(target, options)
    command = target.command(new_folder(args, target.cluster, "NEW", target) / link_check.RECORDS)
    debug = link_measure.DEBUG if options.backend == "nccl" else {}
    if args.as_json:
        emit_json({"setup": {**vars(setup), "environment": {**setup.environment, **debug}}, "command": command})
        return
    lines = [
        f"{options.backend} ({options.backend_why}): {setup.world_size} ranks on {', '.join(target.hosts)}",
        f"scopes {', '.join(link_measure.shapes(setup))}; collectives {', '.join(setup.collectives)}",
        f"sizes up to {link_check.show_size(setup.largest)}; "
        f"{setup.seconds:g} s of measuring; the check ends after at most {setup.seconds + link_measure.MARGIN_SECONDS:g} s",
        "# environment of every rank",
        *(f"{name}={value}" for name, value in {**setup.environment, **debug}.items()),
        f"$ {shlex.join(command)}",
    ]
    for line in lines:
        typer.echo(escape(line))
