"""The facts of a machine: of a recorded tree, of this one, and of one on which something hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertune.host import credentials, mounts
from clustertune.host.adapters import nccl_files
from clustertune.host.collect import collect, decode, probe_command
from clustertune.host.facts import from_dict
from clustertune.host.system import ABSENT, CommandOutput, Probe
from tests.folders import fill, program

REPO = Path(__file__).resolve().parents[2]
NET, IB, PCI = "sys/class/net", "sys/class/infiniband", "sys/bus/pci/devices"
MOUNTINFO = r"""21 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw,errors=remount-ro
22 21 0:5 / /proc rw - proc proc rw
23 21 0:22 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 21 0:30 / /home rw - autofs systemd-1 rw,direct
25 21 0:31 / /shared rw,noatime - nfs4 10.0.0.9:/export rw,vers=4.2,hard,local_lock=none
26 21 0:32 / /pool\040two rw - fuse.mergerfs a:b rw,user_id=0
27 21 8:3 / /data ro,relatime - xfs /dev/sdb1 rw
28 21 0:40 / /sys/fs/cgroup rw - cgroup2 cgroup rw
29 21 0:41 / /run/credentials rw - tmpfs tmpfs rw
broken line
"""
FILES = {
    "proc/sys/kernel/hostname": "gpu01\n",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/uptime": "864000.12 1.0\n",
    "proc/meminfo": "MemTotal:       1056768 kB\nMemAvailable:    528384 kB\nSwapTotal:  2048 kB\nSwapFree:  1024 kB\n",
    "proc/self/mountinfo": MOUNTINFO,
    "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
    "sys/fs/cgroup/slurm/job_1/memory.max": "1073741824\n",
    "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    "proc/modules": "nvidia 1 0 - Live 0x0\n",
    "etc/exports": "# none\n/data 10.0.0.0/24(rw,sync) \\\n  10.0.1.0/24(ro)\n\"/with space\" *(ro)\n",
    "etc/exports.d/more.exports": "/more *(ro)\n",
    "etc/nccl.conf": "# set in 2023\nNCCL_ALGO=Tree # why?\nnonsense\n",
    "sys/devices/system/cpu/online": "0-63\n",
    "sys/devices/system/node/node0/cpulist": "0-31\n",
    "sys/devices/system/node/node1/cpulist": "32-63\n",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never\n",
    "sys/kernel/iommu_groups/0/type": "DMA-FQ\n",
    f"{NET}/bonding_masters": "bond0\n",
    f"{NET}/bond0/operstate": "up", f"{NET}/bond0/type": "1", f"{NET}/bond0/mtu": "9000", f"{NET}/bond0/carrier": "1",
    f"{NET}/bond0/bonding/mode": "802.3ad 4\n", f"{NET}/bond0/bonding/slaves": "ens1 ens2\n",
    f"{NET}/bond0/bonding/xmit_hash_policy": "layer3+4 1\n", f"{NET}/bond0/speed": "-1",
    f"{NET}/ens1/operstate": "up", f"{NET}/ens1/type": "1", f"{NET}/ens1/speed": "100000",
    f"{NET}/ens1/device/numa_node": "1", f"{NET}/ens1/bonding_slave/mii_status": "up",
    f"{NET}/ens2/operstate": "down", f"{NET}/ens2/type": "1", f"{NET}/ens2/speed": "4294967295",
    f"{NET}/ens2/device/numa_node": "-1", f"{NET}/ens2/bonding_slave/mii_status": "down",
    f"{NET}/ib0/operstate": "up", f"{NET}/ib0/type": "32", f"{NET}/ib0/device/x": "",
    f"{NET}/lo/operstate": "unknown", f"{NET}/lo/type": "772", f"{NET}/lo/flags": "0x9",
    f"{NET}/veth1/operstate": "unknown", f"{NET}/veth1/type": "1", f"{NET}/veth1/flags": "0x1002",
    f"{IB}/mlx5_0/ports/1/state": "4: ACTIVE\n", f"{IB}/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    f"{IB}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n", f"{IB}/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    f"{IB}/mlx5_0/ports/1/gid_attrs/ndevs/0": "ib0\n", f"{IB}/mlx5_0/device/numa_node": "0", f"{IB}/mlx5_0/fw_ver": "28.1\n",
    f"{IB}/rocep1s0/ports/1/state": "1: DOWN\n", f"{IB}/rocep1s0/ports/1/phys_state": "3: Disabled\n",
    f"{IB}/rocep1s0/ports/1/rate": "2.5 Gb/sec (1X SDR)\n", f"{IB}/rocep1s0/ports/1/link_layer": "Ethernet\n",
    "dev/infiniband/uverbs0": "",
    "dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "",
    "usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so": "",
    "usr/lib64/libibverbs/libefa-rdmav57.so": "",
    f"{PCI}/0000:17:00.0/class": "0x060400", f"{PCI}/0000:18:00.0/class": "0x030200", f"{PCI}/0000:18:00.0/vendor": "0x10de\n",
    f"{PCI}/0000:18:00.0/numa_node": "1", f"{PCI}/0000:19:00.1/class": "0x040300", f"{PCI}/0000:19:00.1/vendor": "0x10de",
}  # fmt: skip
ANSWERS = {
    "dmesg": "[1.0] usb 1-1: x\n[100.5] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n",
}


def acs(control: int) -> bytes:
    """A configuration space whose second extended capability is ACS."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A node of one GPU, recorded."""
    fill(tmp_path, FILES)
    (tmp_path / PCI / "0000:17:00.0/config").write_bytes(acs(0x1D))
    return tmp_path


def recorded(command: Sequence[str], seconds: float) -> CommandOutput:
    text = ANSWERS.get(command[0])
    return ABSENT if text is None else CommandOutput(text)


def test_the_users_nccl_file_wins_over_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL reads them: what is reported is in force."""
    system_wide = {"etc/nccl.conf": "NCCL_ALGO=Tree\nNCCL_DEBUG=INFO\n"}
    fill(tmp_path, {**system_wide, "users/me/.nccl.conf": "NCCL_ALGO=Ring # mine\n"})
    monkeypatch.setattr(Probe, "live", True)
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    found = nccl_files(Probe(root=tmp_path))["nccl_conf"]
    assert found == {"NCCL_ALGO": "Ring (/users/me/.nccl.conf)", "NCCL_DEBUG": "INFO (/etc/nccl.conf)"}


def test_a_recorded_machine(tree: Path) -> None:
    """Everything that /proc, /sys and commands tell of a GPU node."""
    f = collect(root=str(tree), command=recorded)
    assert f.unread == [] and (f.hostname, f.kernel, f.uptime_s) == ("gpu01", "6.8.0-45-generic", 864000.12)
    assert (f.memory_bytes, f.memory_available_bytes) == (1056768 << 10, 528384 << 10)
    assert (f.memory_limit_bytes, f.cpus, f.numa_cpus) == (1 << 30, 64, {"0": "0-31", "1": "32-63"})
    assert (f.driver, f.peermem, f.nvidia_devices) == ("580.65.06", True, 1)
    assert (f.iommu, f.acs_redirect) == (True, ["0000:17:00.0"])
    assert f.kernel_log_read and f.xids == ["[100.5] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."]
    assert f.exports == {"/data": "10.0.0.0/24(rw,sync)   10.0.1.0/24(ro)", "/with space": "*(ro)", "/more": "*(ro)"}
    assert f.nccl_conf == {"NCCL_ALGO": "Tree (/etc/nccl.conf)"}
    assert f.environment == {} and f.affinity is None and f.memlock_bytes is None, (
        "that is this process, not the recorded machine"
    )
    assert from_dict(json.loads(json.dumps(f.as_dict()))) == f


def test_a_machine_with_nothing(tmp_path: Path) -> None:
    """An empty tree is not an error."""
    f = collect(root=str(tmp_path), command=lambda *_: ABSENT)
    assert f.unread == [] and f.nvidia_devices is None and f.acs_redirect is None and f.iommu is None and f.nics == []


@pytest.mark.parametrize("junk", ["", "\0", "4: ", "x" * 70000, "-", "0x", "1:2:3", "[", "9" * 400, "\xff\xfe"])
def test_files_full_of_nonsense(tree: Path, junk: str) -> None:
    """A kernel of the future, a disk that is dying: facts or none, no exception."""
    for name in FILES:
        (tree / name).write_text(junk, errors="surrogateescape")
    f = collect(root=str(tree), command=lambda command, seconds: CommandOutput(junk))
    assert [line for line in f.unread if not line.startswith("stack")] == []


def test_secrets_stay_out() -> None:
    """Facts are printed into logs, and sent along with questions."""
    planted = {
        "HF_TOKEN": "hf_abcdefghijklmnop", "WANDB_API_KEY": "0" * 40, "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.x",
        "NCCL_X": "hf_abcdefghijklmnopqrst", "APPTAINER_DOCKER_PASSWORD": "p", "APPTAINERENV_HF_TOKEN": "t", "AWS_SECRET": "s",
        "http_proxy": "http://user:pass@proxy:3128/", "NCCL_DEBUG": "INFO", "HF_HOME": "/shared/hf", "SLURM_JOB_ID": "7",
        "HF_HUB_ETAG_TIMEOUT": "10", "DATABASE_URL": "postgres://u:p@h/", "WANDB_NAME": "f" * 40, "SBATCH_ACCOUNT": "lab",
    }  # fmt: skip
    found = credentials.environment(planted)
    assert found == {
        "http_proxy": "http://***@proxy:3128/", "NCCL_DEBUG": "INFO", "HF_HOME": "/shared/hf", "SLURM_JOB_ID": "7",
        "HF_HUB_ETAG_TIMEOUT": "10", "SBATCH_ACCOUNT": "lab",
    }  # fmt: skip
    assert credentials.has_login(found["http_proxy"])


# --- this machine ------------------------------------------------------------------------------------------------------


def test_a_command_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver that does not answer: the others are reported in time, and its child is killed, too."""
    marker = tmp_path / "pid"
    program(tmp_path / "nvidia-smi", f"trap '' TERM INT\necho half\nsleep 300 &\necho $! > {marker}\nwait\nsleep 300")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    f = collect(seconds=2.0)
    assert "no answer within" in f.nvidia_smi and f.kernel and f.nics
    assert time.monotonic() - began < 60
    child = int(marker.read_text())
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the killed command lives on")


# --- what hangs, and what a pool cannot do ----------------------------------------------------------------------------

POOL = r"""
set -eu
mkdir -p "$1/a" "$1/b" "$1/pool"
mergerfs -f -o "cache.files=$2,category.create=mfs,allow_other" "$1/a:$1/b" "$1/pool" > /dev/null 2>&1 &
pool=$!
for _ in $(seq 200); do grep -q " $1/pool " /proc/self/mounts && break; sleep 0.05; done
[ "$3" = frozen ] && kill -STOP "$pool"
shift 3
"$@" || true
kill -KILL "$pool"
"""


@pytest.fixture
def pool(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Facts of this machine while a mergerfs pool is mounted, in a mount namespace that ends with it."""
    if shutil.which("mergerfs") is None:
        pytest.skip("not installed: mergerfs (apt-get install mergerfs)")
    if os.geteuid() != 0:
        pytest.skip("mounting a pool needs root")

    def look(mode: str, state: str) -> dict[str, Any]:
        doctor = probe_command("here", 8, folders=[f"{tmp_path}/pool"])
        command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", POOL, "pool", str(tmp_path), mode, state]
        done = subprocess.run([*command, *doctor], capture_output=True, text=True, timeout=120, check=False, cwd=REPO)
        assert done.returncode == 0, done.stderr
        (facts,) = decode(done.stdout.splitlines())[0].values()
        return facts.as_dict()

    return look


def test_a_frozen_file_system_keeps_nobody(pool: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Its server does not answer any more: it is reported as silent, and all else is reported."""
    facts = pool("off", "frozen")
    silent = [m["point"] for m in facts["mounts"] if m["silent"]]
    assert f"{tmp_path}/pool" in silent and "/" not in silent and facts["kernel"]
    assert {p["ok"] for p in facts["probes"] if p["folder"] == f"{tmp_path}/pool"} == {None}
    assert all(p["ok"] is not None for p in facts["probes"] if p["folder"] == "/tmp")


def test_a_file_system_whose_server_is_gone_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error: a pool whose program has died, a stale handle. A folder that is closed to us is none of these."""
    table = "1 0 0:9 / /pool rw - fuse.mergerfs a:b rw\n2 0 0:8 / /x rw - nfs4 s:/x rw\n"
    answers = {("space", "/pool"): {"error": "Transport endpoint is not connected", "errno": 107}}
    answers |= {
        ("space", "/x"): {"error": "Permission denied", "errno": 13},
        ("space", "/dev/shm"): {"total_bytes": 9, "free_bytes": 8},
    }
    monkeypatch.setattr(mounts, "answers", lambda *_args: answers)
    monkeypatch.setattr(Probe, "read", lambda _self, path: table if path.endswith("mountinfo") else "")
    found = mounts.look(Probe(), mounts.MountQuery())
    assert [(m.fault, m.silent) for m in found["mounts"]] == [("Transport endpoint is not connected", False), ("", False)]
    assert (found["shm_bytes"], found["shm_free_bytes"]) == (9, 8), "a folder that is not a mount serves as well"
