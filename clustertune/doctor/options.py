"""What sbatch and srun take on their command lines: Slurm 22.05 to 24.11 (https://slurm.schedmd.com/sbatch.html)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output partition power prefer priority profile qos reservation segment signal
sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
wrap
"""
_WITHOUT_VALUE = """
contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot requeue spread-job stepmgr
test-only usage use-min-nodes verbose version wait
"""
_MAYBE_VALUE = "exclusive get-user-env nice no-kill propagate resv-ports"

SBATCH = {
    **dict.fromkeys(_WITH_VALUE.split(), "required"),
    **dict.fromkeys(_WITHOUT_VALUE.split(), "none"),
    **dict.fromkeys(_MAYBE_VALUE.split(), "maybe"),
}
"""Each long option of sbatch, and whether a value follows."""

SHORT = {
    **{"A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold"},
    **{"J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec"},
    **{"V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error"},
    **{"h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition"},
    **{"q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude"},
}

_SRUN_WITH_VALUE = """
bcast cpu-bind cpu_bind epilog het-group jobid kill-on-bad-exit mem_bind mpi msg-timeout multi-prog prolog relative
send-libs slurmd-debug task-epilog task-prolog threads tree-width wait container-image container-mounts container-name
container-save container-workdir container-env
"""
_SRUN_WITHOUT_VALUE = """
disable-status exact external-launcher interactive label overlap preserve-env pty unbuffered whole accel-bind
container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-writable
no-container-entrypoint container-entrypoint
"""
SRUN = {
    **SBATCH,
    **dict.fromkeys(_SRUN_WITH_VALUE.split(), "required"),
    **dict.fromkeys(_SRUN_WITHOUT_VALUE.split(), "none"),
    **{"kill-on-bad-exit": "maybe", "bcast": "maybe", "send-libs": "maybe", "multi-prog": "none", "pty": "maybe"},
}
"""Each long option of srun, pyxis's (--container-...) included."""

SRUN_SHORT = {
    **SHORT,
    **{"E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait", "X": "disable-status"},
    **{"Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered"},
}

_OTHER_WORDS = {
    "walltime": "time",
    "timelimit": "time",
    "memory": "mem",
    "queue": "partition",
    "num-nodes": "nodes",
    "nnodes": "nodes",
    "num-tasks": "ntasks",
    "gpu": "gpus",
    "num-gpus": "gpus",
    "workdir": "chdir",
    "log": "output",
    "logfile": "output",
    "name": "job-name",
    "email": "mail-user",
    "cpus": "cpus-per-task",
    "mem-per-node": "mem",
}
"""What other schedulers and old releases call an option."""


def full_name(name: str) -> str | None:
    """The option that ``--name`` means: itself, or the only one that begins so (getopt_long takes prefixes)."""
    if name in SBATCH:
        return name
    found = [known for known in SBATCH if known.startswith(name)]
    return found[0] if len(found) == 1 else None


def nearest(name: str) -> str | None:
    """The option of sbatch that a misspelt one most likely means; None where it may be one of a site's own plugin."""
    lowered = name.lower().replace("_", "-")
    return _OTHER_WORDS.get(lowered) or _closest(lowered, SBATCH)


def _closest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return found[0] if found else None
