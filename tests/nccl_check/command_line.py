"""``nccl-check --submit`` as a command line asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from clustertune.cli import nccl_check as program
from clustertune.cli.app import app
from clustertune.cli.options import NcclCheckArguments
from clustertune.cluster.load import load_cluster
from clustertune.launch.stage_jobs import BatchJob
from clustertune.nccl_check import link_check


def command_line(**changes: Any) -> NcclCheckArguments:
    """A command line with its defaults."""
    return NcclCheckArguments(**{"submit": True, "dry_run": True, **changes})


def job(name: str) -> BatchJob:
    cluster = load_cluster(name)
    wanted = link_check.job_shape(cluster, None, None, program.GPU_SECONDS)
    return link_check.make_job(wanted, Path("/folder"), program.arguments(command_line(cluster=name), cluster))


def judge_files(*words: object) -> Result:
    """``nccl-check --logs`` in this process."""
    return CliRunner().invoke(app, ["nccl-check", "--logs", *map(str, words)])
