"""Slurm files that were made for a real cluster, started here: what a rehearsal changes of them stands in this file alone."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.ops.slurm.elsewhere import move_conf, move_gres, move_hosts
from clustertune.process import captured

_INSTALL_SECONDS = 120.0
"""mariadb-install-db takes 1.5 s on an idle machine."""


@dataclass(frozen=True)
class Given:
    """The files of a cluster, as texts."""

    slurm_conf: str
    gres_conf: str = ""
    hosts: str = ""
    dbd_conf: str | None = None
    """``slurmdbd.conf``: a database and slurmdbd are started too. None: no accounting."""
    partition: str = "gpu"
    user: str = ""
    """Whom the daemons run as; empty: whoever starts them."""

    def moved(
        self, root: Path, *, names: Sequence[str], addresses: Sequence[str], login: str, login_address: str
    ) -> dict[str, str]:
        """File name to text. ``names`` are the nodes that are started; others of the file stay down."""
        me = self.user or pwd.getpwuid(os.getuid()).pw_name
        places = {
            # Who and where: addresses, users, sockets, folders.
            "SlurmctldHost": f"{login}({login_address})",
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
            places |= {"AccountingStorageHost": login, "AccountingStoragePass": f"{root}/run/munge.sock"}
        known = dict(zip(names, addresses, strict=True))
        listed = {word for line in self.hosts.splitlines() for word in line.split()[1:]}
        others = "".join(f"{known[name]} {name}\n" for name in names if name not in listed)  # a name server knows them
        files = {
            "slurm.conf": move_conf(self.slurm_conf, places, addresses=False),
            "gres.conf": move_gres(self.gres_conf, f"{root}/dev", cores=True),
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": f"127.0.0.1 localhost\n{login_address} {login}\n{move_hosts(self.hosts, known)}{others}",
        }
        if self.dbd_conf is not None:
            database = {
                "AuthInfo": f"socket={root}/run/munge.sock",
                "DbdHost": login,
                "DbdAddr": login_address,
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
