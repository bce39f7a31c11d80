"""What the lint says: the finding, and for each rule why it is one and where people met it."""

from __future__ import annotations

from dataclasses import dataclass

_SBATCH = "https://slurm.schedmd.com/sbatch.html"


@dataclass(frozen=True)
class Rule:
    """Why something is a mistake, in one line, and a public place that shows it."""

    why: str
    link: str


@dataclass(frozen=True)
class Finding:
    """One mistake in a batch script."""

    line: int
    """From 1."""
    rule: str
    message: str
    remedy: str
    link: str


def finding(line: int, rule: str, message: str, remedy: str) -> Finding:
    """A finding of one of :data:`RULES`."""
    return Finding(line, rule, message, remedy, RULES[rule].link)


RULES = {
    # the file
    "crlf": Rule("sbatch refuses a script with DOS line ends, and bash reads the \\r as part of the last word", _SBATCH),
    "bom": Rule("a byte order mark in front of #! hides it: sbatch refuses the script", _SBATCH),
    "shebang": Rule("the first line must be #! and the path of an interpreter, else sbatch refuses the script", _SBATCH),
    # the directives
    "variable-in-directive": Rule(
        "sbatch reads directives without a shell: $NAME, $(...) and ~ stay as they are",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3038",
    ),
    "not-a-directive": Rule(
        "only a line that begins with #SBATCH is one; anything else with a # is a comment, passed over in silence",
        "https://github.com/LambdaLabsML/distributed-training-guide/blob/main/03-job-launchers/job.sbatch",
    ),
    "late-directive": Rule("sbatch stops reading at the first command: what follows is passed over in silence", _SBATCH),
    "unknown-option": Rule("sbatch refuses a script with an option that it does not know", _SBATCH),
    "loose-word": Rule("a word without -- in a directive: sbatch refuses the script", _SBATCH),
    "cut-value": Rule("in a directive # ends the line, also inside of a value", _SBATCH),
    "repeated-option": Rule("of two directives for one option the last counts, in silence", _SBATCH),
    "log-folder": Rule("Slurm makes no folder for --output: the job fails at once, without a log that says so", _SBATCH),
    "no-time": Rule(
        "without --time the partition's limit holds: a long wait in the queue, or an end in the middle without warning",
        _SBATCH,
    ),
    "log-truncated": Rule("a requeued job opens its log anew: what led to the requeue is gone", _SBATCH),
    "requeue-refused": Rule("--no-requeue and scontrol requeue exclude each other", _SBATCH),
    # signals
    "signal-misses-shell": Rule("--signal without B: goes to the steps only, the batch shell's trap never runs", _SBATCH),
    "signal-kills-shell": Rule("a signal without a trap ends bash, and with it the job, ahead of its time limit", _SBATCH),
    "trap-without-signal": Rule(
        "nothing sends this signal: Slurm warns only jobs that ask for it",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3007",
    ),
    "trap-waits": Rule(
        "bash runs a trap only after the command in the foreground has ended: that is after the time limit",
        "https://www.gnu.org/software/bash/manual/bash.html#Signals",
    ),
    # tasks
    "expanded-too-early": Rule(
        "the batch shell, itself task 0 on the first node, puts the value in: every task gets the same one",
        "https://github.com/huggingface/alignment-handbook/blob/main/recipes/launch.slurm",
    ),
    "tasks-times-processes": Rule(
        "each task starts a launcher of its own, and each of these all ranks of the node",
        "https://github.com/pytorch/pytorch/issues/137402",
    ),
    "gpus-per-task": Rule(
        "each task sees only its own GPU: NCCL finds no peer to peer transport, cuda:1 is an invalid device",
        "https://github.com/NVIDIA/nccl/issues/1066",
    ),
    "cpus-lost-in-srun": Rule(
        "since Slurm 22.05 srun does not take sbatch's --cpus-per-task: the task is bound to one core",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/18650",
    ),
    # rendezvous
    "nodelist-as-host": Rule("the node list is written node[1-4], which is the name of no host", _SBATCH),
    "fixed-port": Rule(
        "two jobs on a node, or a process left over from the last one, take the same port: address already in use",
        "https://github.com/NVIDIA-NeMo/DataDesigner/issues/929",
    ),
    "port-range": Rule(
        "the kernel hands out ports from 32768 on to any connection, and ports below 1024 are root's",
        "https://github.com/NVIDIA/enroot/issues/243",
    ),
    "localhost-fallback": Rule(
        "where the name of the first node is not found each node trains alone, in silence",
        "https://github.com/pytorch/pytorch/issues/73656",
    ),
    # secrets
    "secret-in-file": Rule("a secret in a script is kept by Slurm (scontrol write batch_script) and by git", _SBATCH),
    "secret-in-export": Rule("the value stands in the job's record or on a command line, which others can read", _SBATCH),
    "secret-in-arguments": Rule(
        "every user of the node reads command lines (ps)", "https://man7.org/linux/man-pages/man5/proc_pid_cmdline.5.html"
    ),
    "secret-in-log": Rule("the job's log is often readable by all, and is sent along with questions", _SBATCH),
    "dotenv-sourced": Rule(
        ".env is run as a program, and with set -a all of it goes to every process of the job",
        "https://www.gnu.org/software/bash/manual/bash.html#index-source",
    ),
}
"""Each rule by its id."""
