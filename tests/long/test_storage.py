"""A disk that fills up, and one that is read-only: a mount of a few MB in a namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long.conftest import STEPS
from tests.long.faults import RECIPE, REPO, SMALL

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

INSIDE = """
import hashlib, json, shutil, subprocess, sys
from pathlib import Path

disk, prepared, room, *command = sys.argv[1:]
disk, run = Path(disk), Path(disk, "run")

def mount(*arguments):
    subprocess.run(["mount", *arguments, str(disk)], check=True)

def go():
    words = [*command, "--run-dir", str(run)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return {"code": done.returncode, "text": done.stdout}

mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")
shutil.copytree(prepared, run)
found = []
if room == "read-only":
    mount("-o", "remount,ro")
    found.append(go())
    mount("-o", "remount,rw")
else:
    with open(disk / "ballast", "wb", buffering=0) as out:
        while (left := shutil.disk_usage(disk).free - int(room)) > 0:
            try:
                if out.write(bytes(min(left, 1 << 16))) == 0:
                    break
            except OSError:
                break
    found.append({**go(), "free": shutil.disk_usage(disk).free})
    (disk / "ballast").unlink()
found.append(go())
adapter = run / "adapter" / "adapter_model.safetensors"
found.append(hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else None)
print(json.dumps(found))
"""


@pytest.mark.parametrize("room", [0, 300_000, 1_500_000, 3_000_000, "read-only"])
def test_no_room_then_room(prepared: Path, reference: str, tmp_path: Path, room: int | str) -> None:
    """Wherever the space runs out (records, metrics, the first save, the second): 73, and with room the same bytes."""
    command = [sys.executable, "-m", "clustertune", "run", RECIPE, "--to", "export", *SMALL, STEPS]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", INSIDE, tmp_path, prepared, str(room), *command],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, again, adapter = json.loads(done.stdout)
    assert full["code"] == 73, full
    assert "Traceback" not in full["text"] + again["text"]
    assert "same command again" in full["text"]
    if room == 3_000_000:
        assert "was not saved" in full["text"] and "needs about" in full["text"]
    assert again["code"] == 0, again
    assert adapter == reference
