"""The facts of a machine: of a recorded tree, of this one, and of one on which something hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertune.doctor import wire
from clustertune.host import collect as look
from clustertune.host import credentials, gpus, mounts, network, probe_process, system
from clustertune.host import gpus as gpu_text
from clustertune.host.collect import collect
from clustertune.host.facts import from_dict
from clustertune.host.gpus import driver, module_version, topology
from clustertune.host.network import nccl_files
from clustertune.host.packages import parse_torch_version
from clustertune.host.probe import ABSENT, CommandOutput, Probe, ask
from clustertune.host.system import format_cpu_list, numa_cpus, readable_cpus
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
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
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
    "ip": "2: bond0    inet 10.0.0.11/24 brd 10.0.0.255 scope global bond0\\       valid_lft forever\n"
    "2: bond0    inet6 fe80::1/64 scope link\n3: eth1@if4    inet6 2001:db8::2/64 scope global\n",
    "dmesg": "[1.0] usb 1-1: x\n[100.5] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n",
    "chronyc": "A9FEA97B,169.254.169.123,4,1795283000.1,-0.000012345,0.00001,0.00002,1.2,0.01,0.02,0.0003,0.0001,16.1,Normal\n",
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
    (tmp_path / NET / "ens1/device/driver").symlink_to("/sys/bus/pci/drivers/mlx5_core")
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
    assert f.os == "Ubuntu 24.04.1 LTS"
    assert (f.memory_bytes, f.memory_available_bytes) == (1056768 << 10, 528384 << 10)
    assert (f.memory_limit_bytes, f.cpus, f.numa_cpus) == (1 << 30, 64, {"0": "0-31", "1": "32-63"})
    assert (f.driver, f.peermem, f.nvidia_devices) == ("580.65.06", True, 1)
    assert (f.iommu, f.acs_redirect) == (True, ["0000:17:00.0"])
    assert f.kernel_log_read and f.xids == ["[100.5] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."]
    assert (f.clock_synchronised, f.clock_offset_s) == (True, 0.000012345)
    assert f.exports == {"/data": "10.0.0.0/24(rw,sync)   10.0.1.0/24(ro)", "/with space": "*(ro)", "/more": "*(ro)"}
    assert f.nccl_conf == {"NCCL_ALGO": "Tree (/etc/nccl.conf)"}
    assert f.environment == {} and f.affinity is None and f.memlock_bytes is None, (
        "that is this process, not the recorded machine"
    )
    assert from_dict(json.loads(json.dumps(f.as_dict()))) == f


def test_recorded_interfaces(tree: Path) -> None:
    """A bond with one link down, IPoIB, loopback, a veth that is down; the folder also holds a file."""
    nics = {nic.name: nic for nic in collect(root=str(tree), command=recorded).nics}
    assert set(nics) == {"bond0", "ens1", "ens2", "ib0", "lo", "veth1"}
    bond = nics["bond0"]
    assert (bond.bond_mode, bond.bond_hash) == ("802.3ad", "layer3+4")
    assert (bond.bond_links, bond.bond_links_up) == (["ens1", "ens2"], ["ens1"])
    assert (bond.mbit, bond.virtual, bond.addresses, bond.mtu, bond.up) == (100000, False, ["10.0.0.11/24"], 9000, True)
    assert (nics["ens1"].driver, nics["ens1"].numa, nics["ens2"].numa, nics["ens2"].mbit) == ("mlx5_core", 1, None, None)
    assert [nics[name].kind for name in ("ib0", "lo", "ens1")] == ["infiniband", "loopback", "ethernet"]
    assert (nics["lo"].up, nics["veth1"].up, nics["ens2"].up) == (True, False, False)
    assert (nics["veth1"].virtual, nics["ib0"].virtual) == (True, False)


def test_recorded_rdma(tree: Path) -> None:
    """An InfiniBand port that is up, a RoCE port that is not, and the providers that are installed."""
    f = collect(root=str(tree), command=recorded)
    up, down = f.rdma
    assert (up.device, up.port, up.active, up.gbit, up.link_layer, up.numa, up.firmware) == (
        "mlx5_0", 1, True, 400.0, "InfiniBand", 0, "28.1",
    )  # fmt: skip
    assert (down.active, down.state, down.physical, down.link_layer, down.numa) == (False, "DOWN", "Disabled", "Ethernet", None)
    assert f.verbs_providers == ["efa", "mlx5"] and f.rdma_devices == ["/dev/infiniband/uverbs0"]


def test_recorded_mounts(tree: Path) -> None:
    """File systems that hold files; the options of the mount and of what is mounted; a read-only one is not writable."""
    found = {mount.point: mount for mount in mounts.parse_mounts(MOUNTINFO)}
    assert set(found) == {"/", "/dev/shm", "/shared", "/pool two", "/data"}
    assert (found["/shared"].kind, found["/shared"].source) == ("nfs4", "10.0.0.9:/export")
    assert "hard" in found["/shared"].options and "ro" in found["/data"].options and "rw" not in found["/data"].options


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


def test_configuration_spaces() -> None:
    """Redirection is two bits of six; without root only 64 bytes are there; lists that run in circles end."""
    assert gpus.acs_control(acs(0x1D)) == 0x1D and gpus.acs_control(acs(0)) == 0
    assert gpus.acs_control(bytes(4096)) is None
    with pytest.raises(ValueError, match="root"):
        gpus.acs_control(acs(0x1D)[:64])
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert gpus.acs_control(bytes(circle)) is None


@pytest.mark.parametrize(
    ("types", "cmdline", "on"),
    [("identity", "", False), ("DMA identity", "", True), ("-", "iommu=pt", False), ("-", "quiet", True), ("", "", False)],
)
def test_an_iommu_that_translates(tmp_path: Path, types: str, cmdline: str, on: bool) -> None:
    """In passthrough it is in nobody's way; old kernels do not tell the type."""
    (tmp_path / "sys/kernel/iommu_groups" / ("0" if types else "")).mkdir(parents=True)
    told = {f"sys/kernel/iommu_groups/{n}/type": kind for n, kind in enumerate(types.split()) if kind != "-"}
    fill(tmp_path, {**told, "proc/cmdline": f"root=/dev/sda {cmdline}\n"})
    assert gpus.iommu(Probe(tmp_path)) == {"iommu": on}


def test_limits_of_either_cgroup(tmp_path: Path) -> None:
    """The smallest of those above; v1 writes a huge number where there is none."""
    files = {
        "proc/self/cgroup": "5:memory:/a/b\n3:cpu,cpuacct:/\n0::/a\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096",
        "sys/fs/cgroup/a/memory.max": "8192",
    }
    fill(tmp_path, files)
    assert system.memory_limit(Probe(tmp_path)) == 4096
    (tmp_path / "proc/self/cgroup").unlink()
    assert system.memory_limit(Probe(tmp_path)) is None


def test_small_texts() -> None:
    """CPU lists, versions, chrony, Slurm's words, torch's version file."""
    assert format_cpu_list([3, 1, 2, 8]) == "1-3,8"
    assert readable_cpus("1-3,8") == {1, 2, 3, 8} and readable_cpus("8, x") == set()
    assert system.version("6.8.0-45-generic") == (6, 8, 0) and system.version("x") == ()
    assert system.parse_chrony("7F7F0101,,10,0,1.5,0,0,0,0,0,0,0,0,Not synchronised") == (False, 1.5)
    assert system.parse_chrony("506 Cannot talk to daemon") is None
    config = "TaskPlugin              = task/cgroup\nCgroup Support Configuration:\nConstrainDevices        = yes\nOther = 1\n"
    assert look.parse_config(config) == {"TaskPlugin": "task/cgroup", "ConstrainDevices": "yes"}
    nodes = [
        ("n1", "idle", "none"),
        ("n2", "down*", "Not responding"),
        ("n3", "drained", "bad gpu | x"),
        ("n5", "idle*", "none"),
    ]
    found = look.parse_nodes("".join(f"{name}|{state}|gpu:h100:8|gpu|1-00:00:00|{why}\n" for name, state, why in nodes))
    assert found["slurm_nodes"] == {"n2": "down* (Not responding)", "n3": "drained (bad gpu | x)", "n5": "idle*"}
    assert found["slurm_gres"]["n1"] == "gpu:h100:8" and found["slurm_limits"] == {"gpu": "1-00:00:00"}
    assert parse_torch_version("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n") == "13.0"
    assert parse_torch_version("cuda = '12.1'") == "12.1" and parse_torch_version("cuda: Optional[str] = None") == ""
    assert network.parse_addresses("nonsense\n1: lo    inet 127.0.0.1/8 scope host lo\n") == {"lo": ["127.0.0.1/8"]}


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


def test_places() -> None:
    """Login node, step, container; nodes that are containers themselves are not an image of the ranks."""
    job, step = {"SLURM_JOB_ID": "7"}, {"SLURM_STEP_ID": "1"}
    for kind, environ, slurm, expected in (
        ("", {}, False, "here"), ("", {}, True, "login"), ("", job, True, "here"), ("", {**job, **step}, True, "step"),
        ("", {**job, "SLURM_STEP_ID": "batch"}, True, "here"), ("apptainer", {}, True, "container"),
        ("apptainer", step, False, "container+step"), ("docker", step, True, "step"), ("docker", {}, False, "here"),
    ):  # fmt: skip
        assert look.find_place(kind, environ, slurm=slurm) == expected


# --- this machine ------------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    """The real thing: what any Linux has, names that resolve or not, and a folder that can be written."""
    f = collect(names=["localhost", "no-such-host.invalid"], folders=[str(tmp_path), "/nonexistent"])
    assert f.unread == [] and f.cpus == os.cpu_count() and f.affinity == len(os.sched_getaffinity(0))
    assert f.memory_bytes and f.kernel and f.nics and f.time > 1.7e9
    assert f.names["localhost"] and f.names["no-such-host.invalid"] == []
    root = next(mount for mount in f.mounts if mount.point == "/")
    assert root.total_bytes and root.free_bytes is not None and not root.silent
    probes = {(probe.folder, probe.what): probe.ok for probe in f.probes}
    assert [probes[str(tmp_path), what] for what in ("mmap", "flock")] == [True, True]
    assert probes["/nonexistent", "mmap"] is None and list(tmp_path.iterdir()) == []
    assert any(package.name == "torch" for package in f.packages) and f.python.startswith("3.")


def test_another_interpreter_is_asked_for_its_packages() -> None:
    """The doctor may run by the system's Python, the ranks by the environment's."""
    found = collect(python=sys.executable + "x")
    assert found.packages == [] and any(line.startswith("stack") for line in found.unread)
    link = shutil.which("python3") or sys.executable
    assert collect(python=link).python


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


def test_commands_that_cannot_be_asked() -> None:
    """Absent, failing, silent, without a right to run."""
    assert ask(["no-such-program-x"], 1) == ABSENT
    assert ask(["sh", "-c", "echo out; echo 'why not' >&2; exit 3"], 5) == CommandOutput("out\n", "why not")
    assert ask(["sh", "-c", "exit 3"], 5).fault == "exit code 3"
    assert ask(["cat"], 5, "text").text == "text"


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
        doctor = [sys.executable, "-m", "clustertune.doctor", f"--folder={tmp_path}/pool", "--seconds=8"]
        command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", POOL, "pool", str(tmp_path), mode, state]
        done = subprocess.run([*command, *doctor], capture_output=True, text=True, timeout=120, check=False, cwd=REPO)
        assert done.returncode == 0, done.stderr
        (facts,) = wire.decode(done.stdout.splitlines())[0].values()
        return facts.as_dict()

    return look


def test_a_pool_tells_its_settings_and_what_it_cannot_do(pool: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Without page caching a shared mapping is refused; the kernel's table of mounts has neither mode nor branches."""
    facts = pool("off", "running")
    mount = next(m for m in facts["mounts"] if m["point"] == f"{tmp_path}/pool")
    assert mount["kind"] == "fuse.mergerfs" and "cache.files=off" in mount["options"]
    assert any(word.startswith(f"branches={tmp_path}/a") for word in mount["options"])
    probes = {p["what"]: p["ok"] for p in facts["probes"] if p["folder"] == f"{tmp_path}/pool"}
    assert probes["mmap"] is False and probes["flock"] is True
    probes = {p["what"]: p["ok"] for p in pool("auto-full", "running")["probes"] if p["folder"] == f"{tmp_path}/pool"}
    assert probes["mmap"] is True


def test_a_frozen_file_system_keeps_nobody(pool: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Its server does not answer any more: it is reported as silent, and all else is reported."""
    facts = pool("off", "frozen")
    silent = [m["point"] for m in facts["mounts"] if m["silent"]]
    assert f"{tmp_path}/pool" in silent and "/" not in silent and facts["kernel"]
    assert {p["ok"] for p in facts["probes"] if p["folder"] == f"{tmp_path}/pool"} == {None}
    assert all(p["ok"] is not None for p in facts["probes"] if p["folder"] == "/tmp")


def test_bits_that_help_nobody_are_no_fault(tmp_path: Path) -> None:
    """A token of mode 0644 in a home of 0700, and a script of a group that is its owner's own."""
    file = tmp_path / "home" / "token"
    file.parent.mkdir()
    file.write_text("x")
    file.chmod(0o646)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder.stat().st_mode & 0o001 == 0:
            break
    else:
        assert (probe_process.mode(str(file)) or 0) & 0o007 == 0o006
    file.parent.chmod(0o700)
    assert (probe_process.mode(str(file)) or 0) & 0o077 == 0
    assert probe_process.mode(str(tmp_path / "none")) is None


def test_what_waits_for_its_first_use_is_known() -> None:
    """autofs: asking for its room would mount it."""
    text = "30 1 0:30 / /home rw shared:1 - autofs auto.home rw,fd=5\n31 1 0:31 / /x\\040y rw - autofs systemd-1 rw\n"
    text += "32 1 8:1 / / rw - xfs /dev/a rw\n"
    assert mounts.parse_automounts(text) == ["/home", "/x y"]


def test_a_damaged_inforom_is_no_silent_driver(tmp_path: Path) -> None:
    """nvidia-smi ends with 14 then, after a whole answer."""
    text = "<?xml version='1.0' ?>\n<nvidia_smi_log><driver_version>580.95.05</driver_version><gpu id='00000000:18:00.0'/>"
    text += "</nvidia_smi_log>\nWARNING: infoROM is corrupted at gpu 0000:18:00.0\n"
    probe = Probe(tmp_path, lambda *_args: CommandOutput(text, "<?xml version='1.0' ?>"))
    found = gpus.driver(probe)
    assert (found["nvidia_smi"], found["driver"], len(found["gpus"])) == ("", "580.95.05", 1)


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


def test_facts_of_another_kind_are_refused() -> None:
    """A number in place of a list is refused. A null is unknown."""
    assert from_dict({"hostname": "x", "environment": None, "unread": None}).environment == {}
    with pytest.raises(ValueError, match="unread: int, not list"):
        from_dict({"hostname": "x", "unread": 5})


# --- what nvidia-smi prints, in the forms that drivers have had, and where something is wrong ---------------------------

GPU = """
 <gpu id="00000000:18:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <uuid>GPU-00000000-1111-2222-3333-444444444444</uuid>
  <minor_number>3</minor_number>
  <pci>
   <pci_bus_id>00000000:18:00.0</pci_bus_id>
   <pci_gpu_link_info>
    <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen>
     <max_device_link_gen>5</max_device_link_gen><max_host_link_gen>N/A</max_host_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
   </pci_gpu_link_info>
  </pci>
  <clocks_event_reasons>
   <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
   <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
   <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved><used>1203 MiB</used></fb_memory_usage>
  <compute_mode>Exclusive_Process</compute_mode>
  <gpu_recovery_action>Drain and Reset</gpu_recovery_action>
  <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
  <ecc_errors>
   <volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
    <sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_correctable>7</dram_correctable>
    <dram_uncorrectable>2</dram_uncorrectable></volatile>
   <aggregate><dram_uncorrectable>500</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_pending>Yes</remapped_row_pending>
   <remapped_row_failure>No</remapped_row_failure></remapped_rows>
  <processes>
   <process_info><pid>77</pid><type>C</type><process_name>python</process_name><used_memory>600 MiB</used_memory></process_info>
   <process_info><pid>78</pid><type>G</type><process_name>Xorg</process_name></process_info>
   <process_info><pid>79</pid><type>M+C</type><process_name>mps</process_name></process_info>
  </processes>
 </gpu>"""
HEAD = "<?xml version='1.0' ?>\n<!DOCTYPE nvidia_smi_log SYSTEM 'nvsmi_device_v12.dtd'>\n<nvidia_smi_log>"
FULL = f"{HEAD}<driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>{GPU}</nvidia_smi_log>"
POOR = (
    "<nvidia_smi_log><driver_version>390.157</driver_version><gpu id='0000:05:00.0'><product_name>Tesla K80</product_name>"
    "<persistence_mode>Disabled</persistence_mode><mig_mode><current_mig>N/A</current_mig></mig_mode><uuid>GPU-1</uuid>"
    "<fb_memory_usage><total>[Unknown Error]</total><used>N/A</used></fb_memory_usage>"
    "<compute_mode>[Not Supported]</compute_mode>"
    "<ecc_mode><current_ecc>N/A</current_ecc></ecc_mode><ecc_errors><volatile><double_bit><total>3</total></double_bit>"
    "</volatile></ecc_errors><clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active"
    "</clocks_throttle_reason_hw_slowdown></clocks_throttle_reasons><processes>N/A</processes></gpu></nvidia_smi_log>"
)
CSV = (
    "0, NVIDIA A100-SXM4-40GB, GPU-a, 00000000:07:00.0, 40960 MiB, 3 MiB\n"
    "1, NVIDIA A100-SXM4-40GB, GPU-b, 00000001:0F:00.0, [N/A], [Not Supported]\n"
    "Unable to determine the device handle for GPU2: 0000:47:00.0: Unknown Error\n"
)
TOPOLOGY = (
    "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\t0\nGPU1\tNV18\t X \tSYS\t48-95\t1\nNIC0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)


def test_a_new_driver_is_read_in_full() -> None:
    """Every field of a GPU; idle clocks are no reason, displays no users, corrected errors no errors."""
    version, cuda, (gpu,) = gpu_text.parse_xml(FULL)
    assert (version, cuda) == ("580.95.05", "13.0")
    assert (gpu.index, gpu.name, gpu.bus) == (0, "NVIDIA H100 80GB HBM3", "0000:18:00.0")
    assert (gpu.memory_mib, gpu.used_mib, gpu.pids) == (81559, 1203, [77, 79])
    assert (gpu.persistence, gpu.mig, gpu.ecc) == (True, False, True)
    assert gpu.recovery_action == "Drain and Reset"
    assert (gpu.ecc_uncorrected, gpu.remap_pending, gpu.remap_failed) == (3, True, False)
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (5, 5, 8, 16)
    assert gpu.throttle == ["hw_thermal_slowdown"]


def test_an_old_driver_and_a_consumer_card_lack_much() -> None:
    """N/A, [Not Supported] and the like are None, never 0 or False."""
    version, cuda, (gpu,) = gpu_text.parse_xml(POOR)
    assert (version, cuda, gpu.bus) == ("390.157", "", "0000:05:00.0")
    assert (gpu.memory_mib, gpu.used_mib, gpu.pids, gpu.mig, gpu.ecc) == (None, None, None, None, None)
    assert (gpu.persistence, gpu.ecc_uncorrected, gpu.throttle) == (False, 3, ["hw_slowdown"])
    assert (gpu.pcie_gen, gpu.pcie_width, gpu.remap_pending) == (None, None, None)


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log><gpu>", "<html/>x", FULL[:500]])
def test_what_is_no_answer_is_refused(text: str) -> None:
    """Half an answer of a driver that was killed."""
    with pytest.raises(ValueError, match="no answer"):
        gpu_text.parse_xml(text)


def test_complaints_in_front_of_the_answer_are_passed_over() -> None:
    """A driver that has lost one GPU complains on the same stream, and tells of the others."""
    assert len(gpu_text.parse_xml(f"Unable to determine the device handle for GPU1: Unknown Error\n{FULL}")[2]) == 1


def test_pci_addresses_are_the_kernels() -> None:
    """nvidia-smi writes the domain with eight digits, /sys with four, or five behind a VMD."""
    found = [gpu_text.bus_address(f"{domain}1:00.0") for domain in ("00000000:C", "0000:c", "00010000:0", "C")]
    assert found == ["0000:c1:00.0", "0000:c1:00.0", "10000:01:00.0", "0000:c1:00.0"]
    assert gpu_text.bus_address("N/A") == gpu_text.bus_address("") == ""


def test_the_short_answer() -> None:
    """Lines that are not GPUs are skipped."""
    first, second = gpu_text.parse_csv(CSV, "index,name,uuid,pci.bus_id,memory.total,memory.used")
    assert (first.index, first.name, first.bus) == (0, "NVIDIA A100-SXM4-40GB", "0000:07:00.0")
    assert (first.memory_mib, first.used_mib) == (40960, 3)
    assert (second.bus, second.memory_mib, second.used_mib) == ("0001:0f:00.0", None, None)


def test_the_map_of_links() -> None:
    """With the escapes that newer drivers print, and with adapters among the columns."""
    assert gpu_text.gpu_links(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18"}
    assert gpu_text.gpu_links("") == {} == gpu_text.gpu_links("GPU0 X")


def test_the_kernel_modules_version() -> None:
    """Both kinds of kernel modules."""
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
    new = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)"
    assert [module_version(text) for text in (old, new, "")] == ["535.104.05", "580.65.06", ""]


# --- asking ------------------------------------------------------------------------------------------------------------


def probe(**answers: CommandOutput) -> tuple[Probe, list[str]]:
    """A machine whose nvidia-smi answers by the first option; and what was asked."""
    calls: list[str] = []

    def ask(command: object, seconds: float) -> CommandOutput:
        words = list(command)  # type: ignore[call-overload]
        calls.append(words[1])
        assert seconds > 0
        return answers.get(words[1].strip("-").partition("=")[0].replace("-", "_"), ABSENT)

    return Probe(Path("/nonexistent"), ask), calls


def test_a_machine_without_the_program_has_no_fault() -> None:
    """A login node."""
    assert driver(probe()[0]) == {} == topology(probe()[0])


@pytest.mark.parametrize("words", ["Unable to determine the device handle for GPU2", "no answer within 45 s"])
def test_a_driver_that_fails_says_why_and_is_asked_once(words: str) -> None:
    """A second question would hang as well."""
    one, calls = probe(q=CommandOutput("", words))
    assert driver(one) == {"nvidia_smi": words} and calls == ["-q"]


def test_numa_nodes_are_read_in_their_order(tmp_path: Path) -> None:
    """By number, not by name: node10 comes after node2. One that has memory only is none for ranks."""
    for name, text in (("node10", "8-11\n"), ("node2", "4-7\n"), ("node0", "0-3\n"), ("node1", "\n"), ("power", "")):
        (folder := tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    (folder.parent / "online").write_text("0-10\n")
    assert list(numa_cpus(Probe(tmp_path)).values()) == ["0-3", "4-7", "8-11"]
    assert numa_cpus(Probe(tmp_path / "none")) == {}
