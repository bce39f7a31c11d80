"""The difference between what a machine has of Slurm and what the cluster file asks for."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clustertune.check.rule import FAIL, Finding, as_json, in_order
from clustertune.config.cluster_schema import Cluster, Host
from clustertune.errors import Problem, UserError
from clustertune.host.credentials import mask_settings
from clustertune.ops.files import NODE, Change, block, diff, foreign, read, with_block
from clustertune.ops.nodes import is_here, tool
from clustertune.ops.slurm import judge as rules
from clustertune.ops.slurm import node as node_room
from clustertune.ops.slurm.judge import SlurmSubject
from clustertune.ops.slurm.node import NodeFacts, ask
from clustertune.ops.slurm.reading import entries, losses, repeated
from clustertune.ops.slurm.steps import PreviousState, SetupStep, steps
from clustertune.ops.slurm.texts import (
    BLOCK,
    CGROUP_CONF,
    ETC,
    GRES_CONF,
    HOSTS,
    MUNGE_KEY,
    SLURM_CONF,
    ConfFolder,
    Version,
    WantedFile,
    move_conf,
    move_gres,
    parse_version,
    real_memory,
    wanted_files,
    wanted_folders,
)
from clustertune.process import captured


@dataclass(frozen=True)
class FileChange:
    """One file that is to be written."""

    change: Change
    owner: str
    taken_over: tuple[str, ...] | None = None
    """What is lost of a file that others wrote; None: it is ours, or new."""

    def diff(self) -> list[str]:
        """A unified diff; what a password or key is stays hidden."""
        before = self.change.before
        hidden = None if before is None else _encode(mask_settings(_decode(before)))
        return diff(replace(self.change, before=hidden, after=_encode(mask_settings(_decode(self.change.after)))))


@dataclass(frozen=True)
class Mode:
    """A folder that is to be made, or a file or folder whose owner or mode is to be set."""

    path: str
    owner: str
    mode: int
    folder: bool
    was: str
    """``missing``, or what it is now."""


@dataclass(frozen=True)
class SlurmPlan:
    """Everything about one machine."""

    cluster: Cluster
    node: Host
    facts: NodeFacts
    version: Version | None
    version_from: str
    accounting: bool
    files: tuple[FileChange, ...]
    modes: tuple[Mode, ...]
    findings: tuple[Finding, ...]
    seen: PreviousState
    bare: bool
    """Whether nothing was looked at: another machine, and no tree of it."""

    @property
    def changes(self) -> int:
        """How many files and folders are to be touched."""
        return len(self.files) + len(self.modes)

    @property
    def blocked(self) -> list[Finding]:
        """What keeps ``apply`` from writing."""
        return rules.blocks(self.findings)

    def steps(self, *, applied: bool = False) -> list[SetupStep]:
        """What an operator does, in order."""
        key = not self.facts.local or MUNGE_KEY in self.facts.places
        return steps(self.cluster, self.node, self.seen, key_there=key, accounting=self.accounting, applied=applied)

    def exit_code(self) -> int:
        """0: nothing to do; 1: something differs, or a rule failed; 2: something stands in the way."""
        if self.blocked:
            return 2
        return int(bool(self.changes) or any(item.status == FAIL for item in self.findings))

    def as_json(self) -> dict[str, Any]:
        """The ``--json`` document."""
        return {
            "cluster": self.cluster.name,
            "node": self.node.name,
            "roles": list(self.node.roles),
            "slurm": str(self.version) if self.version else None,
            "slurm_from": self.version_from,
            "accounting": self.accounting,
            "files": [
                {
                    "path": item.change.path,
                    "new": item.change.before is None,
                    "owner": item.owner,
                    "mode": f"{item.change.mode:04o}",
                    "lost": None if item.taken_over is None else list(item.taken_over),
                    "diff": item.diff(),
                }
                for item in self.files
            ],
            "modes": [{**asdict(item), "mode": f"{item.mode:04o}"} for item in self.modes],
            "findings": as_json(self.findings),
            "steps": [asdict(step) for step in self.steps()],
            "exit_code": self.exit_code(),
        }


def make_plan(
    cluster: Cluster,
    node: Host,
    *,
    root: Path = NODE,
    accounting: bool | None = None,
    adopt: bool = False,
    force: bool = False,
    facts: NodeFacts | None = None,
) -> SlurmPlan:
    """Compare one machine, or a tree below ``root``, with what the cluster file asks for. Writes nothing.

    ``adopt`` takes over files that others wrote, ``force`` replaces what was edited by hand between our markers.
    A machine that is not this one, without a tree, is taken for bare. Raises UserError with everything that is wrong with the
    cluster file, and for files that cannot be read.
    """
    require_slurm(cluster)
    assert cluster.slurm
    bare = root == NODE and not is_here(cluster, node)
    seen = facts if facts is not None else NodeFacts(False) if bare else node_room.collect(cluster, node, root)
    version, version_from = _version(cluster, seen)
    with_accounting = cluster.slurm.accounting if accounting is None else accounting
    wanted = wanted_files(cluster, node, version=version, accounting=with_accounting, hybrid=seen.cgroup == "hybrid")
    files, problems = list[FileChange](), list[Problem]()
    texts: dict[str, str | None] = {}
    after: dict[str, str] = {}
    others: dict[str, list[tuple[int, str]]] = {}
    for want in wanted:
        before = None if bare else read(root, want.path)
        try:
            others[want.path] = foreign(before, BLOCK, shown=want.path)
            item = _file(cluster, want, before, others[want.path], force=force)
        except UserError as error:
            problems += error.problems
            continue
        files += [item] if item.change.needed else []
        texts[want.path] = None if before is None else _decode(before)
        after[want.path] = _decode(item.change.after)
    if problems:
        raise UserError(problems)
    modes = _modes(node, wanted, seen)
    lost = {item.change.path: len(item.taken_over) for item in files if item.taken_over is not None}
    own = [want for want in wanted if not want.shared and want.path not in lost]
    subject = SlurmSubject(
        cluster,
        node,
        seen,
        version,
        hosts=others.get(HOSTS, ()),
        foreign={} if adopt else lost,
        repeated=[(want.path, *line) for want in own for line in repeated(others[want.path], want.lines)],
    )
    return SlurmPlan(
        cluster=cluster,
        node=node,
        facts=seen,
        version=version,
        version_from=version_from,
        accounting=with_accounting,
        files=tuple(files),
        modes=modes,
        findings=tuple(in_order(rules.judge(subject))),
        seen=PreviousState(texts, after),
        bare=bare,
    )


def all_texts(plan: SlurmPlan) -> dict[str, str]:
    """The files of all roles together, by path: what a rehearsal of the whole cluster needs."""
    everywhere = plan.node.model_copy(update={"roles": ("compute", "slurmctld")})
    wanted = wanted_files(plan.cluster, everywhere, version=plan.version, accounting=plan.accounting, hybrid=False)
    return {want.path: "\n".join(want.lines) + "\n" for want in wanted}


def _version(cluster: Cluster, facts: NodeFacts) -> tuple[Version | None, str]:
    """The release that reads the files: what is installed here, which is certain, else what the cluster file says."""
    for answer in facts.versions:
        if (found := parse_version(answer)) is not None:
            return found, "installed here"
    if cluster.slurm and cluster.slurm.version:
        return parse_version(cluster.slurm.version), "slurm.version of the cluster file"
    return None, "unknown"


def _file(
    cluster: Cluster, want: WantedFile, before: bytes | None, others: Sequence[tuple[int, str]], *, force: bool
) -> FileChange:
    """What becomes of one file; ``others``: its lines that are not ours."""
    if want.shared or not any(entries(line) for _, line in others) or block(before, BLOCK, shown=want.path) is not None:
        after = with_block(before, BLOCK, want.lines, shown=want.path, origin=cluster.name, force=force)
        return FileChange(Change(want.path, before, after, mode=want.mode), want.owner)
    before = before or b""
    after = with_block(None, BLOCK, want.lines, shown=want.path, origin=cluster.name)
    lost = tuple(losses(*(data.decode(errors="replace") for data in (before, after))))  # what is shown is valid text
    return FileChange(Change(want.path, before, after, mode=want.mode), want.owner, lost)


def _modes(node: Host, wanted: Sequence[WantedFile], facts: NodeFacts) -> tuple[Mode, ...]:
    """Folders that are missing, and owners and modes that are not as they should be."""
    strict = [(ConfFolder(want.path, want.owner, want.mode), False) for want in wanted if want.owner != "root"]
    found = []
    for item, is_folder in [*((folder, True) for folder in wanted_folders(node)), *strict]:
        state = facts.places.get(item.path)
        if state is None:
            found += [Mode(item.path, item.owner, item.mode, True, "missing")] if is_folder else []
            continue
        ids = (facts.users or {}).get(item.owner) if item.owner != "root" else (0, 0)
        wrong = ids is not None and state.uid != ids[0] and (facts.owns or facts.local)
        if state.folder != is_folder:
            fix = "move it away"
            raise UserError(Problem(f"is {'a folder' if state.folder else 'a file'}", file=item.path, fix=fix))
        if wrong or state.mode != item.mode:
            found.append(Mode(item.path, item.owner, item.mode, is_folder, f"owner {state.uid}, mode {state.mode:04o}"))
    return (*found, *_unreadable(wanted, facts))


def _unreadable(wanted: Sequence[WantedFile], facts: NodeFacts) -> list[Mode]:
    """What every user must read and cannot, or could write: ``put`` leaves a file that is there with the mode that it has."""
    found = []
    for path, mode in [(ETC, 0o755), *((want.path, want.mode) for want in wanted if want.owner == "root" and not want.shared)]:
        state = facts.places.get(path)
        if state is not None and (mode & 0o555 & ~state.mode or state.mode & 0o002):
            found.append(Mode(path, "root", mode, state.folder, f"owner {state.uid}, mode {state.mode:04o}"))
    return found


def _decode(data: bytes) -> str:
    """Bytes that are not UTF-8 come through unchanged."""
    return data.decode(errors="surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


# --- check ----------------------------------------------------------------------------------------------------------------

# What a cluster file must say, and may not say, before Slurm's files can be made from it.

LONGEST_CLUSTER = 40
"""Characters of a ClusterName (slurm.conf(5))."""
RESERVED = ("all", "default")
"""Names of nodes and partitions that mean something else to Slurm, in any case of letters (slurm.conf(5))."""
LONGEST_NODE = 63
"""Characters of a node's name: a host name's own limit (HOST_NAME_MAX is 64)."""


def require_slurm(cluster: Cluster) -> None:
    """Raises UserError with everything for which no Slurm can be set up from this cluster file."""
    if problems := list(_problems(cluster)):
        raise UserError(problems)


def _problems(cluster: Cluster) -> Iterator[Problem]:
    file = cluster.source
    if cluster.name == "local":
        fix = "write it down first: docs/clusters.md, then --cluster NAME|FILE"
        yield Problem("local is what is found by looking, not what shall be", file="command line", key="--cluster", fix=fix)
        return
    slurm = cluster.slurm
    if slurm is None:
        yield Problem("missing: from it come Slurm's files", file=file, key="slurm", fix="write slurm: {partition: gpu}")
        return
    if len(cluster.name) > LONGEST_CLUSTER:
        text = f"{len(cluster.name)} characters: Slurm takes {LONGEST_CLUSTER} for a cluster's name"
        yield Problem(text, file=file, key="name", fix="shorten it, and the file's name with it")
    if slurm.partition.lower() in RESERVED:
        text = f"{slurm.partition} is not a partition: Slurm means something else by it"
        yield Problem(text, file=file, key="slurm.partition", fix="another name, such as gpu")
    if slurm.version is not None and parse_version(slurm.version) is None:
        text = f"{slurm.version!r} is not a release of Slurm"
        yield Problem(text, file=file, key="slurm.version", fix='write it as "22.05" or "24.11.5"; sinfo --version shows it')
    if re.fullmatch(r"[0:-]+", slurm.max_time):
        text = f"{slurm.max_time} is no time: no job may run"
        yield Problem(text, file=file, key="slurm.max_time", fix="UNLIMITED, or as 1-00:00:00")
    if real_memory(cluster) < cluster.compute.threads:
        text = f"{cluster.compute.memory_gb:g} GiB is less than 1 MiB for each of {cluster.compute.threads} threads"
        yield Problem(text, file=file, key="compute.memory_gb", fix="GiB of one node, as free -g shows")
    for host in cluster.nodes:
        if "compute" in host.roles or "slurmctld" in host.roles:
            for text, fix in _name_problems(host.name):
                yield Problem(text, file=file, key=f"nodes[{host.name}].name", fix=fix)


def _name_problems(name: str) -> Iterator[tuple[str, str]]:
    if name.lower() in RESERVED or name.lower() == "localhost":
        yield f"{name} cannot be a node of Slurm: it means something else", "the machine's own host name"
    if len(name) > LONGEST_NODE:
        yield f"{name[:20]}... has {len(name)} characters, a node's name at most {LONGEST_NODE}", "its name without the domain"
    if re.search(r"\d{10}$", name):
        yield f"{name} ends in a number of ten digits or more, with which Slurm counts", "another host name"


# --- verify ---------------------------------------------------------------------------------------------------------------

# What the Slurm that is installed here says about the files, before they replace anything.

SECONDS = 30.0
"""For a program to read the files; it looks up names of nodes, and a name server may be slow."""


def parsed(cluster: Cluster, texts: Mapping[str, str]) -> str:
    """What ``slurmd -G`` (keys, nodes, GPUs) or, without it, ``scontrol`` (keys alone) complains of.

    They are read from a folder of their own, for the first node of the cluster, with devices and folders that are there.
    Nothing is asked of a controller. Empty where they take the files, and where neither program is installed.
    """
    slurmd, scontrol = tool("slurmd"), tool("scontrol")
    if SLURM_CONF not in texts or not (slurmd or scontrol):
        return ""
    with tempfile.TemporaryDirectory(prefix="clustertune-slurm-") as name:
        folder = Path(name)
        conf = _write(folder, cluster, texts)
        node = cluster.compute_nodes[0].name
        output = _run([scontrol, "show", "hostnames", "x"], conf) if scontrol else ""
        if not output and slurmd:
            output = _run([slurmd, "-G", "-N", node, "-f", str(conf)], conf)
    return mask_settings(re.sub(re.escape(name) + r"\S*/", "", output))  # it quotes the line that it cannot read


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
    # What is included is on the machine itself, which may be another.
    conf = re.sub(r"(?mi)^\s*include\s.*$", "", move_conf(texts[SLURM_CONF], moved))
    (folder / "slurm.conf").write_text(conf, errors="surrogateescape")
    (folder / "gres.conf").write_text(move_gres(texts.get(GRES_CONF, ""), str(folder), cores=False), errors="surrogateescape")
    (folder / "cgroup.conf").write_text(texts.get(CGROUP_CONF, ""), errors="surrogateescape")
    return folder / "slurm.conf"


def _run(arguments: list[str], conf: Path) -> str:
    """What a program complains of, in one line; empty where it took the files."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    try:
        done = captured(arguments, SECONDS, {**environment, "SLURM_CONF": str(conf)})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(arguments[0]).name}: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error:" in line or "fatal:" in line]
    return "; ".join(lines[:6]) or f"{Path(arguments[0]).name} ended with {done.returncode}"


def checked(plan: SlurmPlan) -> SlurmPlan:
    """``plan`` with what Slurm's own parser says, where the release that will read the files is the one that is installed."""
    answer = next((text for name in ("slurmd", "sinfo") if (text := ask(name, "-V"))), "")
    installed = parse_version(answer)
    if installed is None or (plan.version is not None and plan.version != installed):
        return plan
    answer = parsed(plan.cluster, plan.seen.after)
    found = rules.parser(SlurmSubject(plan.cluster, plan.node, plan.facts, plan.version, parser=answer))
    return replace(plan, findings=tuple(in_order([*plan.findings, *found])))
