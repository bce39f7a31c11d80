"""What the Slurm that is installed here says of the files, before they replace anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clustertune.check.rule import FAIL, UNKNOWN, Finding, finding, in_order
from clustertune.config.cluster_schema import Cluster
from clustertune.ops.slurm.elsewhere import move_conf, move_gres
from clustertune.ops.slurm.judge import PARSER
from clustertune.ops.slurm.node import ask, search_path
from clustertune.ops.slurm.planning import Plan
from clustertune.ops.slurm.reading import hide
from clustertune.ops.slurm.texts import CGROUP_CONF, GRES_CONF, SLURM_CONF
from clustertune.ops.slurm.version import parse_version
from clustertune.process import captured

SECONDS = 30.0
"""For a program to read the files; it looks up names of nodes, and a name server may be slow."""


def parsed(cluster: Cluster, texts: Mapping[str, str]) -> list[Finding]:
    """What ``slurmd -G`` (keys, nodes, GPUs) or, without it, ``scontrol`` (keys alone) says; [] where they take the files.

    They are read from a folder of their own, for the first node of the cluster, with devices and folders that are there.
    Nothing is asked of a controller. [] also where neither program is installed.
    """
    slurmd, scontrol = (shutil.which(name, path=search_path()) for name in ("slurmd", "scontrol"))
    if SLURM_CONF not in texts or not (slurmd or scontrol):
        return []
    with tempfile.TemporaryDirectory(prefix="clustertune-slurm-") as name:
        folder = Path(name)
        conf = _write(folder, cluster, texts)
        node = cluster.compute_nodes[0].name
        said = _run([scontrol, "show", "hostnames", "x"], conf) if scontrol else ""
        if not said and slurmd:
            said = _run([slurmd, "-G", "-N", node, "-f", str(conf)], conf)
    if not said:
        return []
    if re.search(r"auth/|munge", said, re.IGNORECASE):  # a machine that is not set up yet, or a Slurm without auth/none
        fix = "start munge, then plan again; or plan --try where it can be"
        return [finding(PARSER, UNKNOWN, "slurmd -G wants to prove who it is before it reads nodes and GPUs", fix, SLURM_CONF)]
    text = hide(re.sub(re.escape(name) + r"\S*/", "", said))  # it quotes the line that it cannot read
    fix = "slurm.version of the cluster file must be what is installed; sinfo --version tells"
    return [finding(PARSER, FAIL, text, fix, SLURM_CONF)]


def _write(folder: Path, cluster: Cluster, texts: Mapping[str, str]) -> Path:
    (folder / "spool").mkdir()
    for gpu in range(cluster.compute.gpus):
        (folder / f"nvidia{gpu}").symlink_to("/dev/null")
    me = re.sub(r"[^A-Za-z0-9_-]", "", os.environ.get("USER", "")) or "root"
    moved = {
        "SlurmUser": "root" if os.geteuid() == 0 else me,
        "SlurmdSpoolDir": str(folder / "spool"),
        "SlurmdLogFile": None,
        # 24.11 makes a credential at once, and on a new machine munge is not up yet.
        "AuthType": "auth/none",
        "CredType": "cred/none",
    }
    # What is included lies on the machine itself, which may be another.
    conf = re.sub(r"(?mi)^\s*include\s.*$", "", move_conf(texts[SLURM_CONF], moved))
    (folder / "slurm.conf").write_text(conf, errors="surrogateescape")
    (folder / "gres.conf").write_text(move_gres(texts.get(GRES_CONF, ""), str(folder), cores=False), errors="surrogateescape")
    (folder / "cgroup.conf").write_text(texts.get(CGROUP_CONF, ""), errors="surrogateescape")
    return folder / "slurm.conf"


def _run(words: list[str], conf: Path) -> str:
    """What a program complains of, in one line; empty where it took the files."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    try:
        done = captured(words, SECONDS, {**kept, "SLURM_CONF": str(conf)})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(words[0]).name}: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error:" in line or "fatal:" in line]
    return "; ".join(lines[:6]) or f"{Path(words[0]).name} ended with {done.returncode}"


def checked(plan: Plan) -> Plan:
    """``plan`` with what Slurm's own parser says, where the release that will read the files is the one that is installed."""
    answer = next((text for name in ("slurmd", "sinfo") if (text := ask(name, "-V"))), "")
    here = parse_version(answer)
    if here is None or (plan.version is not None and plan.version != here):
        return plan
    return replace(plan, findings=tuple(in_order([*plan.findings, *parsed(plan.cluster, plan.seen.after)])))
