"""The process that simulates: ``python -m clustertune.simulate.child SPEC`` imports the libraries once and forks each rank,
and once more the rank that resumes from what it saved.

``SPEC`` is a JSON file that :mod:`clustertune.simulate.simulator` writes. On stdout come lines of JSON: progress, and of
each rank what was counted, or where it failed. What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from clustertune.process import die_with_parent
from clustertune.simulate.scratch import PREFIX, folders, scratch_folder

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def main() -> int:
    """All ranks of the file, one after the other."""
    began = time.perf_counter()
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    parent = os.getpid()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ |= ENVIRONMENT
    guard = None
    if spec["library"] is not None:
        from clustertune.simulate.guard import Guard

        guard = Guard(Path(spec["library"]), spec["ranks"][0]["on_node"])  # before torch: it asks for its hooks once
    from clustertune.simulate import one_rank

    for one in spec["ranks"]:
        with scratch_folder() as folder:
            # On one GPU transformers would read the bytes of whole files.
            for resumes in (False, True) if spec["world"] > 1 else (False,):
                child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    die_with_parent(signal.SIGKILL, parent)
                    os._exit(one_rank.run(spec, one, guard, out, began, folder, resumes=resumes))
                _ranks[:] = [child]
                _, status = os.waitpid(child, 0)
                _ranks.clear()
                if os.WIFSIGNALED(status):
                    out.write(json.dumps({"rank": one["rank"], "signal": os.WTERMSIG(status)}) + "\n")
                if status != 0:
                    break
    return 0


_ranks: list[int] = []
"""The process of the rank that is simulated now."""


def _stop(_number: int, _frame: object) -> None:
    """End at once, and leave nothing: an exception could be caught by a library that is being imported."""
    for rank in _ranks:
        with contextlib.suppress(OSError):
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
    folder = Path(sys.argv[1]).parent
    if folder.name.startswith(PREFIX):
        folders.add(folder)
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
