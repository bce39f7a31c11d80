"""The shape of a temporary cluster, what this machine lacks for one, the ways to keep its nodes apart, and its files."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.process import captured
from clustertune.recipe.sections import NAME
from clustertune.setup.slurm_files import move_conf, move_gres, move_hosts
from clustertune.testbed import inside

LOGIN = "ctl"
"""Name of the login node, which is the controller's host too."""
SUBNET = "10.99.0"
"""Of the nodes, inside of the cluster's own network: it clashes with no other."""
LOGIN_ADDRESS = f"{SUBNET}.254"
MAX_NODES = 16
NODE_NAME = NAME.replace("63}", "47}")
"""Shorter than other names: slurmd's sockets hold the node's name, and a socket's path has 107 bytes (unix(7))."""

_PROGRAMS = {
    "slurmctld": ("slurmctld",), "slurmd": ("slurmd",), "munge": ("munged",), "util-linux": ("unshare", "nsenter", "setpriv"),
    "slurm-client": ("sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel"),
}  # fmt: skip
PACKAGES: Mapping[str, str] = {program: package for package, programs in _PROGRAMS.items() for program in programs}
"""Program to package, by the names of Debian 12 and Ubuntu 24.04."""
PACKAGES_ISOLATED: Mapping[str, str] = {"ip": "iproute2", "tc": "iproute2", "mount": "mount"}
"""What separate nodes need besides."""

AS_ROOT = ("unshare", *inside.NAMESPACES)
AS_USER = ("unshare", "--user", "--map-current-user", "--keep-caps", *inside.NAMESPACES)
"""In a user namespace where the caller stays who he is: as "root" slurmd ends with "Failed to drop supplementary groups"."""


@dataclass(frozen=True)
class ClusterSpec:
    """What a temporary cluster looks like. Nothing here is a limit of the machine: CPUs, memory and GPUs are only claimed."""

    nodes: int | tuple[str, ...] = 2
    """Their number (1 to 16; named node1, node2, ...) or their names."""
    gpus: int = 1
    """GPUs per node, each a link to /dev/null; 0 leaves the resource out."""
    gpu_type: str = "rtx_pro_6000"
    cpus: int = 256
    """Hardware threads per node."""
    memory_mb: int = 3_900_000
    isolation: str = "auto"
    """``netns``: each node in namespaces of its own; ``none``: all daemons side by side; ``auto``: the first where it works."""
    kill_wait: int = 2
    """Seconds between SIGTERM and SIGKILL at a job's end."""
    slurmd_timeout: int = 5
    """Seconds of silence after which a node is down."""
    grace: int = 30
    """Seconds between the warning and the end of a job that is preempted."""
    cred_expire: int = 10
    """Seconds a requeued job waits at least: until its old credential has expired. Slurm's own default makes it 120."""
    given: GivenFiles | None = None
    """Files for a real cluster, to be started in place of the ones that are made here. They need ``netns``."""

    def names(self, *, isolated: bool) -> list[str]:
        """The nodes' names. Side by side they are loopback addresses where none are given: no other name would resolve."""
        if isinstance(self.nodes, int):
            return [f"node{i}" if isolated else f"127.0.0.{i}" for i in range(1, self.nodes + 1)]
        return list(self.nodes)

    def problems(self) -> list[Problem]:
        """What is wrong with it."""
        names = () if isinstance(self.nodes, int) else self.nodes
        count = self.nodes if isinstance(self.nodes, int) else len(names)
        faults = []

        def wrong(key: str, text: str, fix: str) -> None:
            faults.append(Problem(text, key=key, fix=fix))

        if not 1 <= count <= MAX_NODES:
            wrong("nodes", f"{count} nodes", f"1 to {MAX_NODES}")
        for name in names:
            if re.search(r"\d{10}$", name):
                wrong("nodes", f"{name!r} ends in a number of ten digits or more", "Slurm counts with it")
            if not re.fullmatch(NODE_NAME, name) or name.lower() in (LOGIN, "default", "all", "localhost"):
                fix = f"letters, digits and . _ -, at most 48; not {LOGIN}, default, all or localhost"
                wrong("nodes", f"{name!r} cannot be a node's name", fix)
        if len({name.lower() for name in names}) < len(names):
            wrong("nodes", "two nodes of one name", "give each its own")
        return faults


def search_path() -> str:
    """Where programs are looked for: daemons lie in sbin, which an ordinary user's PATH often lacks."""
    return os.environ.get("PATH", "") + ":" + inside.PATH


def missing(*, isolated: bool = False) -> dict[str, str]:
    """The programs that are not installed, with their packages."""
    packages = {**PACKAGES, **(PACKAGES_ISOLATED if isolated else {})}
    return {program: package for program, package in packages.items() if not shutil.which(program, path=search_path())}


@cache
def can_isolate() -> tuple[str, ...] | None:
    """The command that gives a cluster namespaces of its own here, found by trying; None where none does."""
    if missing(isolated=True):
        return None
    for prefix in (AS_ROOT, AS_USER):
        command = [*prefix, sys.executable, "-I", str(Path(inside.__file__)), "probe"]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
        if done.returncode == 0:
            return prefix
    return None


def has_address() -> bool:
    """Whether a network device other than loopback has an address: without, Slurm refuses 127.0.0.1 too (AI_ADDRCONFIG)."""
    families = {"AF_INET", "AF_INET6"}
    return any(
        a.family.name in families for name, addresses in psutil.net_if_addrs().items() if name != "lo" for a in addresses
    )


def choose(spec: ClusterSpec) -> tuple[str, ...] | None:
    """The command for the namespaces of a cluster of this shape, None for side by side.

    Raises UserError with everything that stands in the way.
    """
    problems = spec.problems()
    if lacking := missing(isolated=spec.isolation == "netns"):
        packages = " ".join(sorted(set(lacking.values())))
        message = f"a Slurm for the rehearsal needs {', '.join(lacking)}, not found here"
        problems.append(Problem(message, fix=f"on Debian or Ubuntu: apt-get install --no-install-recommends {packages}"))
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        message = f"user {os.getuid()} has no name on this machine, and Slurm runs nothing for him"
        problems.append(Problem(message, fix="add this user to /etc/passwd"))
    raise_if(problems)
    prefix = None if spec.isolation == "none" else can_isolate()
    if prefix is None and spec.isolation == "netns":
        fix = "run it as root, or allow user namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
        fix += "kernel.apparmor_restrict_unprivileged_userns=0); in a container add SYS_ADMIN and NET_ADMIN"
        raise UserError(Problem("this user cannot give the nodes namespaces of their own here", fix=fix))
    if prefix is None and not has_address():
        message = "no namespaces for the nodes, and no network address but loopback, which Slurm does not take"
        fix = "run it as root, allow user namespaces, or give this machine (container) a network"
        raise UserError(Problem(message, fix=fix))
    return prefix


# --- given ----------------------------------------------------------------------------------------------------------------

# Slurm files that were made for a real cluster, started here: what a rehearsal changes of them stands in this file alone.

_INSTALL_SECONDS = 120.0
"""mariadb-install-db takes 1.5 s on an idle machine."""


@dataclass(frozen=True)
class GivenFiles:
    """The files of a cluster, as texts."""

    slurm_conf: str
    gres_conf: str = ""
    hosts: str = ""
    dbd_conf: str | None = None
    """``slurmdbd.conf``: a database and slurmdbd are started too. None: no accounting."""
    partition: str = "gpu"

    def moved(self, root: Path, *, names: Sequence[str], addresses: Sequence[str]) -> dict[str, str]:
        """File name to text. ``names`` are the nodes that are started; others of the file stay down."""
        me = pwd.getpwuid(os.getuid()).pw_name
        places = {
            # Who and where: addresses, users, sockets, folders.
            "SlurmctldHost": f"{LOGIN}({LOGIN_ADDRESS})",
            "SlurmUser": me,
            "SlurmdUser": me,
            "CommunicationParameters": None,
            "AuthInfo": f"socket={root}/run/munge.sock",
            "StateSaveLocation": f"{root}/state",
            "SlurmdSpoolDir": f"{root}/spool/here",
            "SlurmctldPidFile": f"{root}/run/slurmctld.pid",
            "SlurmdPidFile": f"{root}/run/slurmd-%n.pid",
            "SlurmctldLogFile": f"{root}/log/slurmctld.log",
            "SlurmdLogFile": f"{root}/log/slurmd-%n.log",
            "MailProg": "/bin/true",
            # What this machine lacks: cgroups of its own, the CPUs and the memory of the node.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SlurmdParameters": "config_overrides",
        }
        if self.dbd_conf is not None:
            places |= {"AccountingStorageHost": LOGIN, "AccountingStoragePass": f"{root}/run/munge.sock"}
        known = dict(zip(names, addresses, strict=True))
        listed = {word for line in self.hosts.splitlines() for word in line.split()[1:]}
        others = "".join(f"{known[name]} {name}\n" for name in names if name not in listed)  # a name server knows them
        files = {
            "slurm.conf": move_conf(self.slurm_conf, places, addresses=False),
            "gres.conf": move_gres(self.gres_conf, f"{root}/dev", cores=True),
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": f"127.0.0.1 localhost\n{LOGIN_ADDRESS} {LOGIN}\n{move_hosts(self.hosts, known)}{others}",
        }
        if self.dbd_conf is not None:
            database = {
                "AuthInfo": f"socket={root}/run/munge.sock",
                "DbdHost": LOGIN,
                "DbdAddr": LOGIN_ADDRESS,
                "SlurmUser": me,
                "StorageUser": me,
                "LogFile": f"{root}/log/slurmdbd.log",
                "PidFile": f"{root}/run/slurmdbd.pid",
            }
            files["slurmdbd.conf"] = move_conf(self.dbd_conf, database)
        return files

    def prepare(self, root: Path) -> None:
        """What must be there before daemons start: an empty database whose users are known by their socket."""
        if self.dbd_conf is None:
            return
        (root / "slurmdbd.conf").chmod(0o600)
        me = pwd.getpwuid(os.getuid()).pw_name
        command = ["mariadb-install-db", "--no-defaults", f"--user={me}", f"--datadir={root}/db", "--skip-test-db"]
        command += ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={me}"]
        try:
            done = captured(command, _INSTALL_SECONDS)
        except FileNotFoundError:
            fix = (
                "on Debian or Ubuntu: apt-get install --no-install-recommends slurmdbd mariadb-server-core mariadb-client-core"
            )
            raise UserError(Problem("accounting needs mariadb-install-db, not found here", fix=fix)) from None
        if done.returncode:
            raise UserError(Problem(f"mariadb-install-db: {done.stderr.strip()[-300:]}"), ExitCode.FAILED)

    def daemons(self, root: Path) -> list[dict[str, Any]]:
        """What is started before slurmctld, each with the file that shows that it is up; None: a command, until it succeeds."""
        if self.dbd_conf is None:
            return []
        socket = f"{root}/run/mysql.sock"
        mariadbd = ["mariadbd", "--no-defaults", f"--datadir={root}/db", f"--socket={socket}", "--skip-networking"]
        mariadbd += [f"--user={pwd.getpwuid(os.getuid()).pw_name}", f"--pid-file={root}/run/mariadbd.pid"]
        mariadbd += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
        # It is pointed to the database by an environment variable: slurmdbd.conf has no word for a socket.
        slurmdbd = ["env", f"MYSQL_UNIX_PORT={socket}", f"SLURM_CONF={root}/slurm.conf", "slurmdbd", "-D", "-s"]
        return [
            {"command": mariadbd, "ready": socket},
            {"command": slurmdbd, "ready": f"{root}/run/slurmdbd.pid"},
            {"command": ["sacctmgr", "--noheader", "list", "cluster"], "ready": None},
        ]


# --- files ------------------------------------------------------------------------------------------------------------

# slurm.conf, gres.conf, names, a key. A comment says what each is for.

_SLURM_CONF = """\
ClusterName=rehearsal
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire={spec.cred_expire}
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/{spool}
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobcomp.txt
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
# None of these touches a cgroup: containers and hybrid layouts refuse it in many ways.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without it a job that asks for no memory gets all, and every other job waits.
DefMemPerCPU=1024
# Believe the CPUs and the memory below, not the machine.
SlurmdParameters=config_overrides
{gres_types}ReturnToService=2
SlurmdTimeout={spec.slurmd_timeout}
MessageTimeout=5
TCPTimeout=2
KillWait={spec.kill_wait}
UnkillableStepTimeout=60
# Ended jobs stay in "scontrol show job": there is no accounting to ask.
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A preempted job gets the signal of its --signal; 22.05 knows the word here, later ones in PreemptParameters.
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=gpu Nodes={list} Default=YES MaxTime=INFINITE State=UP PriorityTier=10 GraceTime={spec.grace}
PartitionName=urgent Nodes={list} MaxTime=INFINITE State=UP PriorityTier=20 PreemptMode=OFF
"""


@dataclass(frozen=True)
class ClusterFolder:
    """Where a cluster lies and how it is reached."""

    root: Path
    spec: ClusterSpec
    isolated: bool

    @property
    def names(self) -> list[str]:
        return self.spec.names(isolated=self.isolated)

    @property
    def addresses(self) -> list[str]:
        """Of the nodes, in their order."""
        return [f"{SUBNET}.{i}" if self.isolated else "127.0.0.1" for i in range(1, len(self.names) + 1)]

    def write(self) -> None:
        """Write everything that the daemons read."""
        for folder in ("run", "log", "state", "spool/here", "dev", "scratch"):
            (self.root / folder).mkdir(parents=True)
        for index, name in enumerate(self.names, 1):
            (self.root / "spool" / (str(index) if self.isolated else name)).mkdir()
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # Slurm wants different names of character devices; links to one do, and need no right to make devices.
        for gpu in range(self.spec.gpus):
            (self.root / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")
        for name, text in self.texts().items():
            (self.root / name).write_text(text)
        if self.spec.given is not None:
            self.spec.given.prepare(self.root)

    def texts(self) -> dict[str, str]:
        """File name to content."""
        files = self.spec.given
        body: dict[str, Any] = {
            "isolated": self.isolated,
            "nodes": self.names,
            "addresses": self.addresses,
            "address": LOGIN_ADDRESS if self.isolated else "127.0.0.1",
        }
        hosts = [("127.0.0.1", "localhost"), (LOGIN_ADDRESS, LOGIN), *zip(self.addresses, self.names, strict=True)]
        if files is not None:
            moved = files.moved(self.root, names=self.names, addresses=self.addresses)
            body["daemons"] = files.daemons(self.root)
            return {"cluster.json": json.dumps(body), **moved, "nsswitch.conf": _names_from_files_only()}
        return {
            "cluster.json": json.dumps(body),
            "slurm.conf": self.slurm_conf(),
            "gres.conf": self.gres_conf(),
            # slurmd 22.05 always loads a cgroup plugin; this one does nothing as long as no other plugin uses it.
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": "".join(f"{address} {name}\n" for address, name in hosts),
            "nsswitch.conf": _names_from_files_only(),
        }

    def slurm_conf(self) -> str:
        """``slurm.conf``; without namespaces with free ports of this moment."""
        ports = _free_ports(len(self.names) + 1)
        hostname = socket.gethostname().split(".")[0]
        return _SLURM_CONF.format(
            root=self.root,
            spec=self.spec,
            user=pwd.getpwuid(os.getuid()).pw_name,
            controller=f"{LOGIN}({LOGIN_ADDRESS})" if self.isolated else f"{hostname}(127.0.0.1)",
            port=6817 if self.isolated else ports[0],
            # Each node mounts its own folder there: the name of a node in the path as well would make sockets' paths too long.
            spool="here" if self.isolated else "%n",
            gres_types="GresTypes=gpu\n" if self.spec.gpus else "",
            nodes="\n".join(self._node(i, ports[i]) for i in range(1, len(self.names) + 1)),
            list=",".join(self.names),
        )

    def _node(self, index: int, port: int) -> str:
        spec = self.spec
        where = "" if self.isolated else f" NodeHostname=localhost Port={port}"
        sockets, threads = (2, 2) if spec.cpus % 4 == 0 else (1, 1)
        shape = f"Sockets={sockets} CoresPerSocket={spec.cpus // sockets // threads} ThreadsPerCore={threads}"
        gres = f" Gres=gpu:{spec.gpu_type}:{spec.gpus}" if spec.gpus else ""
        name = f"NodeName={self.names[index - 1]} NodeAddr={self.addresses[index - 1]}{where}"
        return f"{name} {shape} RealMemory={spec.memory_mb}{gres} State=UNKNOWN"

    def gres_conf(self) -> str:
        """``gres.conf``: a device for each GPU. With ``Flags=CountOnly`` slurmd finds none, and the node is invalid."""
        if not self.spec.gpus:
            return ""
        files = f"{self.root}/dev/nvidia" + ("0" if self.spec.gpus == 1 else f"[0-{self.spec.gpus - 1}]")
        return "".join(f"NodeName={name} Name=gpu Type={self.spec.gpu_type} File={files}\n" for name in self.names)


def _free_ports(count: int) -> list[int]:
    """Different TCP ports that are free now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _names_from_files_only() -> str:
    """This machine's nsswitch.conf, but host names from the file: no DNS answers in there."""
    try:
        text = Path("/etc/nsswitch.conf").read_text()
    except OSError:
        text = "passwd: files\ngroup: files\n"
    return re.sub(r"(?m)^\s*hosts:.*\n?", "", text).rstrip("\n") + "\nhosts: files\n"
