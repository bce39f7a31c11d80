"""The end of launch/run.sbatch: what it does where the job's program could not requeue the job itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from clustertune.host.credentials import may_name_secret, names_secret
from clustertune.launch.stage_jobs import SCRIPT
from tests.slurm import wait_for

PROGRAM = """#!/usr/bin/env bash
# Stands in for the job's program: warned, it ends as one that was not ready for it.
trap 'exit 75' USR1
touch ready
for _ in {1..600}; do sleep 0.1; done
"""
SQUEUE = """#!/usr/bin/env bash
echo "squeue $*" >> calls
echo "$STATE"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> calls
exit 1
"""


def checkout(folder: Path) -> Path:
    """A checkout whose Python is a stand-in, with stand-ins for Slurm's commands in ``bin``."""
    for name, text in ((".venv/bin/python", PROGRAM), ("bin/squeue", SQUEUE), ("bin/scontrol", SCONTROL)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "launch").mkdir()
    shutil.copy(SCRIPT, folder / "launch" / "run.sbatch")
    return folder


@pytest.mark.parametrize(
    ("number", "environment", "calls"),
    [
        (signal.SIGUSR1, {}, ["--jobs=7 ", "scontrol requeue 7"]),
        (signal.SIGUSR1, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, ["--jobs=7_2 ", "scontrol requeue 7_2"]),
        (signal.SIGUSR1, {"STATE": "COMPLETING"}, ["--jobs=7 "]),  # the program did it, or somebody cancelled the job
        (signal.SIGUSR1, {"SLURM_RESTART_COUNT": "100"}, []),
        (None, {}, []),  # ended by itself
    ],
)
def test_a_warning_that_came_too_early_is_not_lost(
    tmp_path: Path, number: signal.Signals | None, environment: dict[str, str], calls: list[str]
) -> None:
    """A job that is preempted while its Python starts would end as failed; a refusal of Slurm leaves the exit code."""
    folder = checkout(tmp_path)
    slurm = {"SLURM_JOB_ID": "7", "STATE": "RUNNING", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    with subprocess.Popen(["bash", "launch/run.sbatch"], cwd=folder, env={**inherited, **slurm}) as script:
        wait_for((folder / "ready").exists, "the program")
        if number is not None:
            script.send_signal(number)
        else:
            children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGUSR1)
        assert script.wait(60) == 75
    made = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    assert len(made) == len(calls) and all(part in f"{line} " for part, line in zip(calls, made, strict=True))


def test_tokens_of_the_login_environment_stay_outside(tmp_path: Path) -> None:
    """Whatever sbatch brought along: of names that say that they hold a secret the program and its ranks see none.

    The script's pattern and the package's agree: what is surely a secret goes, and what cannot be one stays.
    """
    folder = checkout(tmp_path)
    (folder / ".venv/bin/python").write_text("#!/usr/bin/env bash\nenv\n")
    secret = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_CREDENTIALS_FILE", "SECRET_SAUCE"}
    words = ("TOKEN", "APIKEY", "API_KEY", "ACCESS_KEY", "SECRET", "SECRET_KEY", "PASSWORD", "PASSWD", "KEY", "CREDENTIALS")
    names = {*secret, *(f"{prefix}{word}" for prefix in ("", "X_") for word in words), "x_api_key", "http_password"}
    names |= {"HF_HOME", "MONKEYS", "PASSENGER", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "MODULEPATH"}
    given = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **dict.fromkeys(names, "canary")}
    done = subprocess.run(["bash", "launch/run.sbatch"], cwd=folder, env=given, capture_output=True, text=True, check=True)
    removed = names - {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert secret | set(filter(names_secret, names)) <= removed <= set(filter(may_name_secret, names))
    assert {"HF_HOME", "MONKEYS", "PASSENGER", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "MODULEPATH"} <= names - removed
