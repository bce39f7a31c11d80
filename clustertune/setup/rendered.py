"""The folder that ``clustertune setup`` writes: files by name, one of them a script that installs the others.

They are verified before they are applied: fstab by systemd's generator, Slurm's by the Slurm installed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.cluster.schema import Cluster, Host
from clustertune.errors import Problem, UserError, raise_if, storing
from clustertune.host import system
from clustertune.host.credentials import mask_settings
from clustertune.manifest import open_plain, write_durably
from clustertune.process import captured
from clustertune.setup import slurm_files
from clustertune.setup.setup_machine import is_here, render, tool
from clustertune.setup.storage_layout import EXPORT_FILE, FstabMount, layout

STORAGE_SCRIPT, SLURM_SCRIPT = "setup-storage.sh", "setup-slurm.sh"
MARK = "# --- sha256 of what setup wrote: it replaces nothing else\n"
"""Above the list at the end of each script."""
_LISTED = re.compile(rb"^# [0-9a-f]{64}  \S+\n", re.MULTILINE)
FSTAB = Path("/etc/fstab")
_BLOCK = re.compile(rb"^# BEGIN clustertune$.*?^# END clustertune$\n", re.MULTILINE | re.DOTALL)
"""The lines that the script put there before."""
PACKAGES = {"nfs": "nfs-common", "pool": "mergerfs"}
"""What mounts need to be installed, by their kind."""


@dataclass(frozen=True)
class Rendered:
    """Files of one node, by their name in the folder, and what to know about them."""

    files: dict[str, str]
    notes: tuple[str, ...]
    verified: str | None
    """What read the files without an objection; None: it is not installed here."""

    def write(self, out: Path) -> None:
        """Write the files; the script is executable. Raises UserError where ``out`` holds what setup did not write."""
        scripts = (STORAGE_SCRIPT, SLURM_SCRIPT)
        if out.resolve().is_relative_to("/etc"):
            fix = "name another folder; the script in it writes to /etc when root runs it"
            raise UserError(Problem("setup writes nothing into /etc", file=str(out), key="--out", fix=fix))
        if out.is_symlink() or next((path for path in sorted(out.glob("*")) if path.is_symlink()), None):
            fix = "name a folder that is new, or remove the link: root would run and install what it leads to"
            raise UserError(Problem("is a link, or holds one", file=str(out), key="--out", fix=fix))
        self._require_own(out)
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or any((out / name).is_file() for name in scripts))):
            fix = "name a folder that is new, empty, or was written by setup"
            raise UserError(Problem("exists and is not a folder of setup", file=str(out), key="--out", fix=fix))
        with storing("cannot be written", out):
            out.mkdir(parents=True, exist_ok=True)
            for name, text in sorted(self.files.items(), key=lambda item: item[0] not in scripts):
                write_durably(out / name, text + self._list() if name in scripts else text)
                (out / name).chmod(0o755 if name in scripts else 0o644)

    def _list(self) -> str:
        """The end of the script: the digest of each file, of the script itself that of the lines above."""
        return MARK + "".join(f"# {_digest(text.encode())}  {name}\n" for name, text in sorted(self.files.items()))

    def _require_own(self, out: Path) -> None:
        """Raise UserError with each file that would be replaced and does not hold what setup wrote last."""
        written, problems = _written(out), []
        for name in self.files:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fd = open_plain(out / name, os.O_RDONLY)
                with os.fdopen(fd, "rb") as file:
                    content, _, listed = file.read().partition(MARK.encode())
                own = content == self.files[name].encode() or _digest(content) == written.get(name)
                if not own or _LISTED.sub(b"", listed):
                    fix = "move it away, or name another folder"
                    problems.append(
                        Problem("is not as setup wrote it: it would be lost", file=str(out / name), key="--out", fix=fix)
                    )
        raise_if(problems)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _written(out: Path) -> dict[str, str]:
    """By name the digest of what setup wrote into a folder, as its scripts list it; nothing where it wrote none."""
    written: dict[str, str] = {}
    for script in (STORAGE_SCRIPT, SLURM_SCRIPT):
        with contextlib.suppress(OSError, UserError), os.fdopen(open_plain(out / script, os.O_RDONLY), "rb") as file:
            listed = file.read().partition(MARK.encode())[2].decode(errors="replace")
            written |= {name: digest for digest, name in re.findall(r"^# ([0-9a-f]{64})  (\S+)$", listed, re.MULTILINE)}
    return written


def storage(cluster: Cluster, node: Host) -> Rendered:
    """One node's lines of fstab and exports, and the script. Raises UserError: too little in the file, or it would not boot."""
    plan = layout(cluster, node.name)
    fstab = "".join(f"{mount.line}\n" for mount in plan.mounts)
    present = _BLOCK.sub(b"", FSTAB.read_bytes()) if is_here(cluster, node) and FSTAB.exists() else b""
    objections = complaints(present, present + b"\n" + fstab.encode(), plan.mounts)
    if objections:
        fix = "fix the cluster file, or the lines of /etc/fstab that are named"
        problems = [
            Problem(f"systemd would not boot with these lines: {line}", file=cluster.source, fix=fix) for line in objections
        ]
        raise UserError(problems)
    packages = {package for kind, package in PACKAGES.items() if any(mount.kind == kind for mount in plan.mounts)}
    packages |= {"nfs-kernel-server"} if plan.exports else set()
    script = render(
        f"storage/{STORAGE_SCRIPT}",
        node=node.name,
        source=cluster.source,
        mounts=plan.mounts,
        folders=plan.folders,
        local=plan.local,
        own=plan.own,
        exports=EXPORT_FILE if plan.exports else None,
        packages=sorted(packages),
        notes=plan.notes,
    )
    files = {"fstab": fstab, STORAGE_SCRIPT: script}
    if plan.exports:
        files["exports"] = "".join(f"{line}\n" for line in plan.exports)
    return Rendered(files, plan.notes, None if objections is None else "systemd's fstab generator")


def slurm(cluster: Cluster, node: Host, accounting: bool | None = None) -> Rendered:
    """One node's files of Slurm and the script. Raises UserError: too little in the file, or Slurm refuses the files."""
    slurm_files.require_slurm(cluster)
    assert cluster.slurm and cluster.controller
    version, installed = _version(cluster, node)
    with_accounting = cluster.slurm.accounting if accounting is None else accounting
    hybrid = is_here(cluster, node) and Path("/sys/fs/cgroup/unified/cgroup.controllers").exists()
    node_files = slurm_files.node_files(cluster, node, version=version, accounting=with_accounting, hybrid=hybrid)
    contents = {item.path: "\n".join(item.lines) + "\n" for item in node_files}
    verified = installed is not None and (version is None or version == installed)
    if verified and (objection := parsed(cluster, contents)):
        problem = Problem(
            f"Slurm {installed} refuses the files: {objection}", file=cluster.source, fix="fix the keys that it names"
        )
        raise UserError(problem)
    others = [host for host in cluster.nodes if set(host.roles) & set(slurm_files.SLURM_ROLES) and host != node]
    script = render(
        f"slurm/{SLURM_SCRIPT}",
        node=node,
        source=cluster.source,
        files=[(name_of(item.path), item) for item in node_files if not item.shared],
        folders=slurm_files.node_folders(node),
        others=slurm_files.fold([host.name for host in others]),
        accounting=with_accounting,
        controller=cluster.controller.name,
        database=slurm_files.DATABASE,
        user=slurm_files.USER,
        state=slurm_files.STATE,
    )
    files = {name_of(path): text for path, text in contents.items()} | {SLURM_SCRIPT: script}
    return Rendered(files, (), f"Slurm {installed}" if verified else None)


def name_of(path: str) -> str:
    """The name in the folder of a file of the machine: its own, but for slurmd's drop-in."""
    return "slurmd.service.conf" if path == slurm_files.DROP_IN else path.rpartition("/")[2]


def all_texts(cluster: Cluster, *, accounting: bool | None = None) -> dict[str, str]:
    """The files of all roles together, by path: what a temporary Slurm of the cluster needs."""
    slurm_files.require_slurm(cluster)
    assert cluster.slurm
    node = cluster.compute_nodes[0]
    everywhere = node.model_copy(update={"roles": ("compute", "slurmctld")})
    with_accounting = cluster.slurm.accounting if accounting is None else accounting
    version, _ = _version(cluster, node)
    files = slurm_files.node_files(cluster, everywhere, version=version, accounting=with_accounting, hybrid=False)
    return {item.path: "\n".join(item.lines) + "\n" for item in files}


def _version(cluster: Cluster, node: Host) -> tuple[slurm_files.Version | None, slurm_files.Version | None]:
    """The release that will read the files, and the one that is installed on this machine."""
    here = slurm_files.parse_version(installed())
    stated = slurm_files.parse_version(cluster.slurm.version) if cluster.slurm and cluster.slurm.version else None
    return (here or stated if is_here(cluster, node) else stated), here


# --- fstab ----------------------------------------------------------------------------------------------------------------

# Would this fstab boot? systemd's own generator and verifier say so of a text that lies nowhere yet.

GENERATOR = tuple(f"{top}/lib/systemd/system-generators/systemd-fstab-generator" for top in ("", "/usr"))
CLIENT, SECURITY = "nfs-client.target", "rpc-gssd.service"
CLIENT_UNITS = {
    CLIENT: f"[Unit]\nBefore=remote-fs-pre.target\nWants=remote-fs-pre.target {SECURITY}\nAfter={SECURITY}\n",
    SECURITY: "[Service]\nExecStart=/bin/true\n",
}
"""The order of the NFS client (nfs-utils, systemd/nfs-client.target), where it is not installed yet: a mount that
local-fs.target waits for is a cycle with these units alone."""
UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
TARGETS = ("local-fs.target", "remote-fs.target", "multi-user.target")
_BOOT_SECONDS = 60
_RELEVANT = re.compile(r"ordering cycle|\.mount\b|fstab|Failed|[Dd]uplicate|ignoring")


def generator() -> str | None:
    """Where systemd's generator is; None: this machine has none."""
    return next((path for path in GENERATOR if os.access(path, os.X_OK)), None)


def complaints(old: bytes, new: bytes, mounts: Iterable[FstabMount]) -> list[str] | None:
    """What systemd says against ``new`` that it does not say against ``old``; None where it cannot be asked.

    It finds a required mount that is not there, two lines for one place, and a boot that orders in a circle. It knows nothing
    of mergerfs' options.
    """
    program, analyze = generator(), shutil.which("systemd-analyze")
    if program is None or analyze is None:
        return None
    escape = ["systemd-escape", "--path", "--suffix=mount", *(mount.target for mount in mounts)]
    try:
        before = _ask(program, analyze, old)
        after = _ask(program, analyze, new)
        expected = set(captured(escape, _BOOT_SECONDS).stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None
    if not expected <= after[0]:
        # systemd before 246 reads no other file than /etc/fstab: what it says is not of this text.
        return None if not after[0] else [*after[1], "systemd makes no unit of some of the lines"]
    return [line for line in after[1] if line not in before[1]]


def _ask(program: str, analyze: str, text: bytes) -> tuple[set[str], list[str]]:
    """The mount units that come of a text, and the generator's messages."""
    with tempfile.TemporaryDirectory(prefix="clustertune-") as name:
        folder = Path(name)
        places = [folder / part for part in ("normal", "early", "late")]
        for target in places:
            target.mkdir()
        fstab = folder / "fstab"
        fstab.write_bytes(text)
        env = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL")}
        env |= {"SYSTEMD_FSTAB": str(fstab), "SYSTEMD_SYSROOT_FSTAB": os.devnull}
        env |= {"SYSTEMD_LOG_TARGET": "console", "SYSTEMD_LOG_LEVEL": "info"}
        output = _run_systemd([program, *map(str, places)], env)
        units = {path.name for path in places[0].glob("*.mount")}
        env["SYSTEMD_UNIT_PATH"] = f"{places[0]}:"
        missing = not any(Path(folder, CLIENT).exists() for folder in UNITS)
        for file, body in CLIENT_UNITS.items() if missing else ():
            (places[0] / file).write_text(body)
        names = [str(places[0] / name) for name in sorted(units)]
        output += _run_systemd([analyze, "--man=no", "verify", *names, *([CLIENT] if missing else []), *TARGETS], env)
        lines = [line.replace(str(folder), "") for line in output if _RELEVANT.search(line)]
        return units, list(dict.fromkeys(line for line in lines if not line.startswith("Parsing ")))


def _run_systemd(argv: list[str], env: dict[str, str]) -> list[str]:
    done = captured(argv, _BOOT_SECONDS, env)
    failed = [f"{Path(argv[0]).name} Failed with exit status {done.returncode}"] if done.returncode else []
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()] + failed


# --- Slurm ----------------------------------------------------------------------------------------------------------------

# What the Slurm that is installed here says about the files, before they replace anything.

SECONDS = 30.0
"""For a program to read the files; it looks up names of nodes, and a name server may be slow."""


def parsed(cluster: Cluster, contents: Mapping[str, str]) -> str:
    """What ``slurmd -G`` (keys, nodes, GPUs) or, without it, ``scontrol`` (keys alone) complains of.

    They are read from a folder of their own, for the first node of the cluster, with devices and folders that are there.
    Nothing is asked of a controller. Empty where they take the files, and where neither program is installed.
    """
    slurmd, scontrol = tool("slurmd"), tool("scontrol")
    if slurm_files.SLURM_CONF not in contents or not (slurmd or scontrol):
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
    conf = re.sub(r"(?mi)^\s*include\s.*$", "", slurm_files.move_conf(contents[slurm_files.SLURM_CONF], moved))
    (folder / "slurm.conf").write_text(conf, errors="surrogateescape")
    (folder / "gres.conf").write_text(
        slurm_files.move_gres(contents.get(slurm_files.GRES_CONF, ""), str(folder), cores=False), errors="surrogateescape"
    )
    (folder / "cgroup.conf").write_text(contents.get(slurm_files.CGROUP_CONF, ""), errors="surrogateescape")
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


def installed() -> str:
    """What ``slurmd -V`` or ``sinfo -V`` prints here; empty without either."""
    for name in ("slurmd", "sinfo"):
        program = tool(name)
        answer = system.ask([program, "-V"], SECONDS) if program else system.ABSENT
        if answer.good:
            return answer.text.strip()
    return ""
