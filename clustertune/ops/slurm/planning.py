"""The difference between what a machine has of Slurm and what the cluster file asks for, and the steps around it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.check.rule import FAIL, Finding, as_json, in_order
from clustertune.cluster.schema import Cluster, Host
from clustertune.errors import Problem, UserError, collect_problems, raise_if, storing
from clustertune.host import probe
from clustertune.host.credentials import mask_settings
from clustertune.ops.files import NODE, Change, block, diff, exclusive, foreign, inside, put, read, with_block
from clustertune.ops.nodes import is_here, require_here, tool
from clustertune.ops.slurm import texts
from clustertune.ops.slurm.judge import NodeFacts, SlurmSubject, ask, blocks, collect, judge, slurm_parser
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
class SlurmPlan:
    """Everything about one machine."""

    cluster: Cluster
    node: Host
    facts: NodeFacts
    version: texts.Version | None
    version_from: str
    accounting: bool
    files: tuple[FileChange, ...]
    modes: tuple[texts.Mode, ...]
    findings: tuple[Finding, ...]
    before: Mapping[str, str | None]
    """Path to text; None: there was no file."""
    after: Mapping[str, str]
    bare: bool
    """Whether nothing was looked at: another machine, and no tree of it."""

    @property
    def changes(self) -> int:
        """How many files and folders are to be touched."""
        return len(self.files) + len(self.modes)

    @property
    def blocked(self) -> list[Finding]:
        """What keeps ``apply`` from writing."""
        return blocks(self.findings)

    def steps(self, *, applied: bool = False) -> list[SetupStep]:
        """What an operator does, in order."""
        return list(find_steps(self, applied=applied))

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
    seen = facts if facts is not None else NodeFacts(False) if bare else collect(cluster, node, root)
    version, version_from = _version(cluster, seen)
    with_accounting = cluster.slurm.accounting if accounting is None else accounting
    wanted = texts.wanted_files(cluster, node, version=version, accounting=with_accounting, hybrid=seen.cgroup == "hybrid")
    files, problems = list[FileChange](), list[Problem]()
    contents: dict[str, str | None] = {}
    after: dict[str, str] = {}
    others: dict[str, list[tuple[int, str]]] = {}
    for want in wanted:
        before = None if bare else read(root, want.path)
        with collect_problems(problems):
            others[want.path] = foreign(before, texts.BLOCK, shown=want.path)
            item = _file(cluster, want, before, others[want.path], force=force)
            files += [item] if item.change.needed else []
            contents[want.path] = None if before is None else _decode(before)
            after[want.path] = _decode(item.change.after)
    raise_if(problems)
    modes = _modes(node, wanted, seen)
    lost = {item.change.path: len(item.taken_over) for item in files if item.taken_over is not None}
    own = [want for want in wanted if not want.shared and want.path not in lost]
    subject = SlurmSubject(
        cluster,
        node,
        seen,
        version,
        hosts=others.get(texts.HOSTS, ()),
        foreign={} if adopt else lost,
        repeated=[(want.path, *line) for want in own for line in repeated(others[want.path], want.lines)],
    )
    findings = tuple(in_order(judge(subject)))
    return SlurmPlan(
        cluster, node, seen, version, version_from, with_accounting, tuple(files), modes, findings, contents, after, bare
    )


def all_texts(plan: SlurmPlan) -> dict[str, str]:
    """The files of all roles together, by path: what a rehearsal of the whole cluster needs."""
    everywhere = plan.node.model_copy(update={"roles": ("compute", "slurmctld")})
    wanted = texts.wanted_files(plan.cluster, everywhere, version=plan.version, accounting=plan.accounting, hybrid=False)
    return {want.path: "\n".join(want.lines) + "\n" for want in wanted}


def _version(cluster: Cluster, facts: NodeFacts) -> tuple[texts.Version | None, str]:
    """The release that reads the files: what is installed here, which is certain, else what the cluster file says."""
    for answer in facts.versions:
        if (found := texts.parse_version(answer)) is not None:
            return found, "installed here"
    stated = cluster.slurm and cluster.slurm.version
    return (texts.parse_version(stated), "slurm.version of the cluster file") if stated else (None, "unknown")


def _file(
    cluster: Cluster, want: texts.WantedFile, before: bytes | None, others: Sequence[tuple[int, str]], *, force: bool
) -> FileChange:
    """What becomes of one file; ``others``: its lines that are not ours."""
    if want.shared or not any(entries(line) for _, line in others) or block(before, texts.BLOCK, shown=want.path) is not None:
        after = with_block(before, texts.BLOCK, want.lines, shown=want.path, origin=cluster.name, force=force)
        return FileChange(Change(want.path, before, after, mode=want.mode), want.owner)
    before = before or b""
    after = with_block(None, texts.BLOCK, want.lines, shown=want.path, origin=cluster.name)
    lost = tuple(losses(*(data.decode(errors="replace") for data in (before, after))))  # what is shown is valid text
    return FileChange(Change(want.path, before, after, mode=want.mode), want.owner, lost)


def _modes(node: Host, wanted: Sequence[texts.WantedFile], facts: NodeFacts) -> tuple[texts.Mode, ...]:
    """Folders that are missing, and owners and modes that are not as they should be."""
    strict = [texts.Mode(want.path, want.owner, want.mode, False) for want in wanted if want.owner != "root"]
    found = []
    for item in (*texts.wanted_folders(node), *strict):
        state = facts.places.get(item.path)
        if state is None:
            found += [item] if item.folder else []
            continue
        ids = (facts.users or {}).get(item.owner) if item.owner != "root" else (0, 0)
        wrong = ids is not None and state.uid != ids[0] and (facts.owns or facts.local)
        if state.folder != item.folder:
            fix = "move it away"
            raise UserError(Problem(f"is {'a folder' if state.folder else 'a file'}", file=item.path, fix=fix))
        if wrong or state.mode != item.mode:
            found.append(replace(item, was=f"owner {state.uid}, mode {state.mode:04o}"))
    return (*found, *_unreadable(wanted, facts))


def _unreadable(wanted: Sequence[texts.WantedFile], facts: NodeFacts) -> list[texts.Mode]:
    """What every user must read and cannot, or could write: ``put`` leaves a file that is there with the mode that it has."""
    found = []
    for path, mode in [
        (texts.ETC, 0o755),
        *((want.path, want.mode) for want in wanted if want.owner == "root" and not want.shared),
    ]:
        state = facts.places.get(path)
        if state is not None and (mode & 0o555 & ~state.mode or state.mode & 0o002):
            found.append(texts.Mode(path, "root", mode, state.folder, f"owner {state.uid}, mode {state.mode:04o}"))
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
    raise_if(_problems(cluster))


def _problems(cluster: Cluster) -> Iterator[Problem]:
    file = cluster.source
    if cluster.name == "local":
        fix = "write it down first: docs/clusters.md, then --cluster NAME|FILE"
        yield Problem("local describes this machine as it is, not a plan for it", file="command line", key="--cluster", fix=fix)
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
    if slurm.version is not None and texts.parse_version(slurm.version) is None:
        text = f"{slurm.version!r} is not a release of Slurm"
        yield Problem(text, file=file, key="slurm.version", fix='write it as "22.05" or "24.11.5"; sinfo --version shows it')
    if re.fullmatch(r"[0:-]+", slurm.max_time):
        text = f"{slurm.max_time} is no time: no job may run"
        yield Problem(text, file=file, key="slurm.max_time", fix="UNLIMITED, or as 1-00:00:00")
    if texts.real_memory(cluster) < cluster.compute.threads:
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


def parsed(cluster: Cluster, contents: Mapping[str, str]) -> str:
    """What ``slurmd -G`` (keys, nodes, GPUs) or, without it, ``scontrol`` (keys alone) complains of.

    They are read from a folder of their own, for the first node of the cluster, with devices and folders that are there.
    Nothing is asked of a controller. Empty where they take the files, and where neither program is installed.
    """
    slurmd, scontrol = tool("slurmd"), tool("scontrol")
    if texts.SLURM_CONF not in contents or not (slurmd or scontrol):
        return ""
    with tempfile.TemporaryDirectory(prefix="clustertune-slurm-") as name:
        folder = Path(name)
        conf = _write(folder, cluster, contents)
        node = cluster.compute_nodes[0].name
        output = _run([scontrol, "show", "hostnames", "x"], conf) if scontrol else ""
        if not output and slurmd:
            output = _run([slurmd, "-G", "-N", node, "-f", str(conf)], conf)
    return mask_settings(re.sub(re.escape(name) + r"\S*/", "", output))  # it quotes the line that it cannot read


def _write(folder: Path, cluster: Cluster, contents: Mapping[str, str]) -> Path:
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
    conf = re.sub(r"(?mi)^\s*include\s.*$", "", texts.move_conf(contents[texts.SLURM_CONF], moved))
    (folder / "slurm.conf").write_text(conf, errors="surrogateescape")
    (folder / "gres.conf").write_text(
        texts.move_gres(contents.get(texts.GRES_CONF, ""), str(folder), cores=False), errors="surrogateescape"
    )
    (folder / "cgroup.conf").write_text(contents.get(texts.CGROUP_CONF, ""), errors="surrogateescape")
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
    installed = texts.parse_version(answer)
    if installed is None or (plan.version is not None and plan.version != installed):
        return plan
    answer = parsed(plan.cluster, plan.after)
    found = slurm_parser(SlurmSubject(plan.cluster, plan.node, plan.facts, plan.version, parser=answer))
    return replace(plan, findings=tuple(in_order([*plan.findings, *found])))


# --- what stands in a file of Slurm's form that others wrote, and what of it a new one lacks -------------------------


RECORDS = ("nodename", "partitionname", "downnodes", "nodeset", "frontendname", "name")
"""Keys that stand several times, each with a name (``Name`` in gres.conf)."""
_PAIR = re.compile(r'(?<!\S)[\w.]+ ?[-*+/]?= ?(?:"[^"]*"|\S+)(?= |$)')
"""One of several settings that stand in one line, as Slurm's own parser takes them."""


@dataclass(frozen=True)
class ConfEntry:
    """One setting, or one record."""

    line: int
    """From 1."""
    key: str
    """Lower case; of a record with its name: ``partitionname=debug``."""
    text: str
    """The line without comment, with single blanks; secrets are hidden."""


def entries(text: str) -> list[ConfEntry]:
    """The settings of ``slurm.conf``, ``gres.conf``, ``cgroup.conf`` or ``slurmdbd.conf``; lines ended by ``\\`` continue."""
    found = []
    pending, start = list[str](), 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"(?<!\\)#.*", "", raw.rstrip("\r"))
        start = start or number
        pending.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        joined = " ".join(" ".join(pending).split())
        found += [ConfEntry(start, _key(shown), shown) for shown in map(mask_settings, _parts(joined))]
        pending, start = [], 0
    return found


def _parts(text: str) -> list[str]:
    """The settings of one line. A record counts as one setting, and so does a line of any other form."""
    pairs = _PAIR.findall(text)
    if _key(text).partition("=")[0] in RECORDS or " ".join(pairs) != text:
        return [text] if text else []
    return pairs


def _key(text: str) -> str:
    if text.lower().startswith("include "):
        return text.lower()
    key, _, value = text.partition("=")
    key = key.strip().lower()
    return f"{key}={(value.split() or [''])[0]}" if key in RECORDS else key


def losses(before: str, after: str) -> list[str]:
    """What of ``before`` is not in ``after``, and what has another value there; a sentence each, with the line."""
    ours = {entry.key: entry for entry in entries(after)}
    lines = []
    for entry in entries(before):
        new = ours.get(entry.key)
        if new is None:
            lines.append(f"line {entry.line} is lost: {entry.text}")
        elif _same(new.text) != _same(entry.text):
            lines.append(f"line {entry.line} changes: {entry.text} becomes {new.text}")
    return lines


def repeated(outside: Sequence[tuple[int, str]], block: Sequence[str]) -> list[tuple[int, str]]:
    """Lines of an operator that set again what our block sets: Slurm takes the last one. Records of other names are no such."""
    ours = {entry.key for entry in entries("\n".join(block))}
    lines = []
    for number, text in outside:
        lines += [(number, entry.text) for entry in entries(text) if entry.key in ours]
    return lines


def settings(text: str) -> dict[str, str]:
    """Key to its line, of the settings and records."""
    return {entry.key: entry.text for entry in entries(text)}


def _same(text: str) -> str:
    return re.sub(r"\s*=\s*", "=", text).lower()


# --- what an operator does around the files, in order ----------------------------------------------------------------


LIVE = frozenset(
    {
        "defmempercpu", "enforcepartlimits", "jobrequeue", "killwait", "maxmempercpu", "minjobage", "preemptmode",
        "preemptparameters", "propagateresourcelimitsexcept", "returntoservice", "slurmctldlogfile", "slurmctldparameters",
        "slurmdlogfile", "slurmdtimeout", "unkillablesteptimeout",
    }
)  # fmt: skip
"""Settings that ``scontrol reconfigure`` takes; slurm.conf(5) says about the others that daemons must be restarted, or is not
clear. Partitions are taken too."""
SHAPE = ("sockets", "corespersocket", "threadspercore", "realmemory", "gres", "cpus", "boards", "socketsperboard")
"""What of a node's line is its shape: jobs that run on it were placed by the old one."""
HOLDS_JOBS = ("slurmdspooldir", "proctracktype", "selecttype")
"""Where and how slurmd and slurmctld find running jobs again: with another value they are lost to them."""
OLD_STATE = "/var/spool"
"""StateSaveLocation of a slurm.conf that names none (slurm.conf(5))."""


@dataclass(frozen=True)
class SetupStep:
    """Commands for one kind of machine, and why."""

    where: str
    why: str
    commands: tuple[str, ...]
    """Each as a shell line, for a person to copy."""


def find_steps(plan: SlurmPlan, *, applied: bool) -> Iterator[SetupStep]:  # noqa: PLR0912, PLR0915 - one step after the other
    """The order of things; ``applied``: the files of this machine are in place already."""
    cluster, slurm = plan.cluster, bool(set(plan.node.roles) & set(texts.SLURM_ROLES))
    changed = {path for path in plan.after if plan.after[path] != (plan.before.get(path) or "")}
    new_key = slurm and plan.facts.local and texts.MUNGE_KEY not in plan.facts.places
    files = list(_files(plan, applied)) if changed else []
    if not slurm:
        yield from files
    if not slurm or not (changed or new_key):
        return
    assert cluster.controller
    controller, nodes = cluster.controller.name, texts.fold([host.name for host in cluster.compute_nodes])
    first = plan.before.get(texts.SLURM_CONF) is None
    old, new = settings(plan.before.get(texts.SLURM_CONF) or ""), settings(plan.after.get(texts.SLURM_CONF, ""))
    keys = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    held = "" if first else ", ".join(key for key in HOLDS_JOBS if key in keys)
    gone = plan.before.get(texts.GRES_CONF)
    gres = gone is not None and texts.GRES_CONF in plan.after and settings(gone) != settings(plan.after[texts.GRES_CONF])
    shape = not first and bool(_shapes(old)) and (_shapes(old) != _shapes(new) or gres)
    if shape or held:
        why = "the shape of the nodes changes" if shape else f"{held}: jobs that run would be lost"
        drain = f"scontrol update NodeName={nodes} State=DRAIN Reason='new slurm.conf'"
        yield SetupStep(controller, f"{why}: let jobs end first (drained, not draining)", (drain, f"sinfo -n {nodes}"))
    yield from files
    if first or new_key:
        yield from _munge(cluster, controller)
    stop = "systemctl stop slurmctld"
    state = old.get("statesavelocation", f"={OLD_STATE}").partition("=")[2].strip()
    if not first and state.rstrip("/") != texts.STATE:
        why = "the queue moves with its folder: in an empty one slurmctld knows of no job"
        yield SetupStep(controller, why, (stop, f"cp -a {shlex.quote(state)}/. {texts.STATE}/"))
    before, after = old.get("clustername"), new.get("clustername")
    if before and after and before.lower() != after.lower():
        why = "the cluster's name changes, and slurmctld refuses a state of another (running jobs are forgotten)"
        yield SetupStep(controller, why, (stop, f"rm {texts.STATE}/clustername"))
    if plan.accounting and (changed & {texts.SLURMDBD_CONF, texts.MARIADB} or "accountingstoragetype" in keys):
        sql = (
            f"CREATE USER IF NOT EXISTS '{texts.USER}'@'localhost' IDENTIFIED VIA unix_socket;",
            f"GRANT ALL ON {texts.DATABASE}.* TO '{texts.USER}'@'localhost';",
        )
        commands = ("systemctl restart mariadb", *(f'mariadb -e "{line}"' for line in sql), "systemctl restart slurmdbd")
        why = "the database, whose user is known by its socket: no password; slurmctld enters the cluster by itself"
        yield SetupStep(controller, why, (*commands, "sacctmgr show cluster"))
    if first or new_key:
        yield SetupStep(controller, "the controller first", ("systemctl enable slurmctld", "systemctl restart slurmctld"))
        commands = ("systemctl daemon-reload", "systemctl enable slurmd", "systemctl restart slurmd")
        yield SetupStep(nodes, "then each node", commands)
    else:
        slow = sorted(key for key in keys if key not in LIVE and not key.startswith("partitionname"))
        started = changed & {texts.GRES_CONF, texts.CGROUP_CONF, texts.DROP_IN}
        if slow or texts.GRES_CONF in started:
            what = ", ".join([*slow[:6], *(path.rpartition("/")[2] for path in sorted(started))])
            why = f"changed, and read at a start only: {what}; the queue is kept"
            yield SetupStep(controller, why, ("systemctl restart slurmctld",))
        if slow or started:
            yield SetupStep(nodes, "running jobs live on", ("systemctl daemon-reload", "systemctl restart slurmd"))
        elif keys:
            yield SetupStep(controller, f"changed: {', '.join(sorted(keys)[:6])}", ("scontrol reconfigure",))
    if shape or held:
        yield SetupStep(controller, "take the nodes back", (f"scontrol update NodeName={nodes} State=RESUME",))
    yield SetupStep(controller, "look: all nodes idle", ("scontrol ping", "sinfo -N -l"))


def _files(plan: SlurmPlan, applied: bool) -> Iterator[SetupStep]:
    cluster, slurm = plan.cluster, plan.cluster.slurm
    assert slurm
    stated = cluster.name if cluster.source.startswith("ops/clusters/") else cluster.source
    word = f"clustertune ops slurm apply --cluster {shlex.quote(stated)}"
    if plan.accounting != slurm.accounting:  # one slurm.conf for all: what is changed here must be changed there
        word += " --accounting" if plan.accounting else " --no-accounting"
    others = [host.name for host in cluster.nodes if host.name != plan.node.name]
    if not applied:
        yield SetupStep(plan.node.name, "write the files of this machine", (word,))
    if others:
        yield SetupStep(texts.fold(others), "the same on every other machine: Slurm wants one slurm.conf", (word,))


def _munge(cluster: Cluster, controller: str) -> Iterator[SetupStep]:
    others = [
        host.name for host in cluster.nodes if set(host.roles) & set(texts.SLURM_ROLES) and host is not cluster.controller
    ]
    key, why = texts.MUNGE_KEY, "one munge key for all machines; each package makes its own when it is installed"
    make = f"test -s {key} || sudo -u munge mungekey --create --keyfile {key}"
    yield SetupStep(controller, why, (make, f"chown munge: {key} && chmod 400 {key}", "systemctl restart munge"))
    if others:
        take = f"ssh HOST 'umask 077; cat > {key}.new && chown munge: {key}.new && chmod 400 {key}.new && mv {key}.new {key}"
        commands = (f"{take} && systemctl restart munge' < {key}", "munge -n | ssh HOST unmunge")
        yield SetupStep(controller, f"the same key for each HOST of {texts.fold(others)}, and the proof", commands)


def _shapes(conf: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    """The different shapes that the nodes of a slurm.conf have, whatever the names; DEFAULT counts for those after it."""
    found, default = set(), dict[str, str]()
    for key, line in conf.items():
        if not key.startswith("nodename="):
            continue
        fields = dict(word.lower().split("=", 1) for word in line.split() if "=" in word)
        shape = {name: fields[name] for name in SHAPE if name in fields}
        if fields["nodename"] == "default":
            default |= shape
        else:
            found.add(tuple(sorted({**default, **shape}.items())))
    return found


def shown(found: Sequence[SetupStep]) -> list[str]:
    """The steps as lines: where and why, then the commands."""
    lines = []
    for number, step in enumerate(found, 1):
        lines.append(f"{number}. {step.where}: {step.why}")
        lines += [f"     {command}" for command in step.commands]
    return lines


# --- apply: folders, then files, each whole or not at all; owners and modes last. Again after a kill, it completes ---


LOCK = "clustertune-slurm.lock"
_RELOAD_SECONDS = 60.0
"""For ``systemctl daemon-reload``, which runs the generators of all units."""


@dataclass
class Applied:
    """What was written."""

    written: list[str] = field(default_factory=list)
    backups: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def require_right_to_apply(plan: SlurmPlan, root: Path) -> None:
    """Raises UserError where this is another machine, not root, or something stands in the way: all of it at once."""
    problems: list[Problem] = []
    if root == NODE:
        with collect_problems(problems):
            require_here(plan.cluster, plan.node)
        if os.geteuid() != 0:
            problems.append(Problem("files below /etc are root's", fix="run it as root: sudo, or into a tree with --root DIR"))
    raise_if([*problems, *(Problem(item.found, file=item.where or None, key=item.rule, fix=item.fix) for item in plan.blocked)])


def apply_plan(plan: SlurmPlan, root: Path = NODE) -> Applied:
    """Write what the plan says. Raises UserError before anything is written, or exit 73 where storage fails on the way."""
    require_right_to_apply(plan, root)
    done = Applied()
    with exclusive(root, LOCK, "sets up Slurm here"):
        for mode in plan.modes:
            if mode.folder:
                done.notes += _set(plan, root, mode)
                done.modes.append(mode.path)
        for item in plan.files:
            backup = put(root, item.change)
            if backup and not item.change.mode & 0o077:
                backup.chmod(item.change.mode)  # what others must not read stands in the old one too
            done.written.append(item.change.path)
            done.backups += [str(backup)] if backup else []
            if item.owner != "root":
                done.notes += _set(plan, root, texts.Mode(item.change.path, item.owner, item.change.mode, False))
        for mode in plan.modes:
            if not mode.folder:
                done.notes += _set(plan, root, mode)
                done.modes += [] if mode.path in done.written else [mode.path]
        if texts.DROP_IN in done.written and root == NODE and plan.facts.systemd:
            answer = probe.ask(["systemctl", "daemon-reload"], _RELOAD_SECONDS)
            # A failure is reported; it is no reason to undo.
            done.notes += [] if answer.good else [f"systemctl daemon-reload: {answer.fault or 'is not installed'}"]
    return replace(done, notes=list(dict.fromkeys(done.notes)))


def _set(plan: SlurmPlan, root: Path, mode: texts.Mode) -> Iterable[str]:
    """Make a folder, or set owner and mode of what is there; says what could not be."""
    target = inside(root, mode.path)
    ids = (0, 0) if mode.owner == "root" else (plan.facts.users or {}).get(mode.owner)
    with storing("cannot be made as it should be", mode.path):
        if mode.folder:
            target.mkdir(parents=True, exist_ok=True)
        target.chmod(mode.mode)
        if ids is not None and os.geteuid() == 0:
            os.chown(target, *ids)
    if ids is None or os.geteuid() != 0:
        return [f"owners are not set in this tree: no user {mode.owner} in its /etc/passwd, or not root"]
    return []
