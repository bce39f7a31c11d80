"""The files of a temporary cluster: slurm.conf, gres.conf, names, a key. A comment says what each is for."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.testbed.spec import LOGIN, ClusterSpec

SUBNET = "10.99.0"
"""Of the nodes, inside of the cluster's own network: it clashes with no other."""
LOGIN_ADDRESS = f"{SUBNET}.254"

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
        given = self.spec.given
        body: dict[str, Any] = {
            "isolated": self.isolated,
            "nodes": self.names,
            "addresses": self.addresses,
            "address": LOGIN_ADDRESS if self.isolated else "127.0.0.1",
        }
        hosts = [("127.0.0.1", "localhost"), (LOGIN_ADDRESS, LOGIN), *zip(self.addresses, self.names, strict=True)]
        if given is not None:
            moved = given.moved(self.root, names=self.names, addresses=self.addresses, login=LOGIN, login_address=LOGIN_ADDRESS)
            body["daemons"] = given.daemons(self.root)
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
