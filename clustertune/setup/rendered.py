"""The folder that ``clustertune setup`` writes: files by name, one of them a script that installs the others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clustertune.cluster.schema import Cluster, Host
from clustertune.errors import Problem, UserError, storing
from clustertune.setup import slurm_files, verify
from clustertune.setup.setup_machine import is_here
from clustertune.setup.storage_layout import EXPORT_FILE, layout
from clustertune.setup.template import render

STORAGE_SCRIPT, SLURM_SCRIPT = "setup-storage.sh", "setup-slurm.sh"
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
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or any((out / name).is_file() for name in scripts))):
            fix = "name a folder that is new, empty, or was written by setup"
            raise UserError(Problem("exists and is not a folder of setup", file=str(out), key="--out", fix=fix))
        with storing("cannot be written", out):
            out.mkdir(parents=True, exist_ok=True)
            for name, text in sorted(self.files.items(), key=lambda item: item[0] not in scripts):
                (out / name).write_text(text, encoding="utf-8")
                (out / name).chmod(0o755 if name in scripts else 0o644)


def storage(cluster: Cluster, node: Host) -> Rendered:
    """One node's lines of fstab and exports, and the script. Raises UserError: too little in the file, or it would not boot."""
    plan = layout(cluster, node.name)
    fstab = "".join(f"{mount.line}\n" for mount in plan.mounts)
    present = _BLOCK.sub(b"", FSTAB.read_bytes()) if is_here(cluster, node) and FSTAB.exists() else b""
    objections = verify.complaints(present, present + b"\n" + fstab.encode(), plan.mounts)
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
    wanted = slurm_files.node_files(cluster, node, version=version, accounting=with_accounting, hybrid=hybrid)
    contents = {item.path: "\n".join(item.lines) + "\n" for item in wanted}
    verified = installed is not None and (version is None or version == installed)
    if verified and (objection := verify.parsed(cluster, contents)):
        problem = Problem(
            f"Slurm {installed} refuses the files: {objection}", file=cluster.source, fix="fix the keys that it names"
        )
        raise UserError(problem)
    others = [host for host in cluster.nodes if set(host.roles) & set(slurm_files.SLURM_ROLES) and host != node]
    script = render(
        f"slurm/{SLURM_SCRIPT}",
        node=node,
        source=cluster.source,
        files=[(name_of(item.path), item) for item in wanted if not item.shared],
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
    wanted = slurm_files.node_files(cluster, everywhere, version=version, accounting=with_accounting, hybrid=False)
    return {item.path: "\n".join(item.lines) + "\n" for item in wanted}


def _version(cluster: Cluster, node: Host) -> tuple[slurm_files.Version | None, slurm_files.Version | None]:
    """The release that will read the files, and the one that is installed on this machine."""
    installed = slurm_files.parse_version(verify.installed())
    stated = slurm_files.parse_version(cluster.slurm.version) if cluster.slurm and cluster.slurm.version else None
    return (installed or stated if is_here(cluster, node) else stated), installed
