"""The reader of NCCL's logs, and its command: every version and launcher's form, lines that run into each other, cuts, size."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding
from clustertune.nccl_check import nccl_log
from clustertune.nccl_check.link_rules import headline_of, judge_log, page
from clustertune.nccl_check.nccl_log import Log, LoggedDevice, fabric_faults, read
from tests.command import run
from tests.nccl_check.command_line import judge_files
from tests.nccl_check.log_maker import PREFIXES, Job, lines, text

VERSIONS = "2.10.3 2.12.12 2.14.3 2.16.5 2.18.6 2.19.3 2.21.5 2.23.4 2.25.1 2.27.5 2.28.9 2.29.7".split()  # noqa: SIM905


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version: str) -> None:
    """What NCCL writes has changed with nearly every version; a cluster has the one that its image has."""
    log = read([text(Job(version=version))])
    assert log.version == version
    assert log.ranks == 16 and log.node_count() == 2
    assert set(log.transports) == {"P2P/CUMEM", "NET/IB/GDRDMA"}
    assert log.between().keys() == {"IB"} and set(log.networks) == {"IB"}
    assert {device.name for device in log.adapters["node1"]} == {f"mlx5_{n}:1" for n in range(8)}
    assert log.bootstrap["node2"] == [LoggedDevice("eth0", "10.0.0.2")]
    assert {edge.device for edge in log.edges} == set(range(8))
    assert not log.faults


@pytest.mark.parametrize("prefix", sorted(PREFIXES))
@pytest.mark.parametrize("version", ["2.10.3", "2.29.7"])
def test_every_prefix_is_read_alike(version: str, prefix: str) -> None:
    """srun, torchrun, mpirun, Ray and web pages put words, colours and entities around the same lines."""
    job = Job(version=version, nodes=2, gpus=2, adapters=("mlx5_0", "mlx5_1"))
    assert read([text(job, prefix)]) == read([text(job)])


def test_logs_of_single_ranks_are_put_together() -> None:
    """NCCL_DEBUG_FILE gives each rank its own file: only all of them tell where the ranks are."""
    job = Job(nodes=2, gpus=2, adapters=("mlx5_0", "mlx5_1"))
    single: dict[int, list[str]] = {}
    for rank, line in lines(job):
        single.setdefault(rank, []).append(line)
    assert read("\n".join(part) for part in single.values()) == read([text(job)])
    one = read(["\n".join(single[0])])
    assert one.node_count() == 2 and one.hosts == {"node1"} and one.between().keys() == {"IB"}


def test_network_inside_a_node_is_told_from_between_nodes() -> None:
    """Ranks that cannot share memory talk over the network card inside a node: no fall-back of the cluster's network."""
    inside = read([text(Job(nodes=1, gpus=2, inside="NET/Socket/0", net="Socket", adapters=()))])
    assert inside.transports == {"NET/Socket": 4} and not inside.between()


def test_the_error_of_torch_is_read() -> None:
    """Without NCCL_DEBUG the last words are in Python's traceback, on the line after "Last error:"."""
    log = read(
        [
            "torch.distributed.DistBackendError: NCCL error in: a.cpp:99, unhandled system error, NCCL version 2.27.5\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
            "Last error:\nError while creating shared memory segment /dev/shm/nccl-a1B2c3 (size 9637888)\n"
        ]
    )
    assert log.version == "2.27.5"
    assert {fault.kind for fault in log.faults} == {"failed", "shm"}


FAULTS = {
    "shm": "Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
    "shm-lost": "Error while attaching to shared memory segment /dev/shm/nccl-x (size 1), error: No such file or directory (2)",
    "memlock": "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "no-verbs": "Failed to open libibverbs.so[.1]",
    "rdma-open": "NET/IB : Unable to open device mlx5_bond_0",
    "rdma-timeout": "NET/IB: Got completion from peer n2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=SEND(0) vendor_err=129",
    "rdma-error": "NET/IB : Got completion from peer n2<1> with error 4, opcode 0, len 0, vendor err 81 (Send)",
    "rdma-connect": "Call to ibv_modify_qp failed with 101 Network is unreachable, on dev mlx5_0:1",
    "rdma-link": "NET/IB : mlx5_0:1 Got async event : port error",
    "duplicate-gpu": "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
    "nccl-versions": "Mismatched NCCL version detected : rank 0 version 22809 rank 8 version 22105",
    "collectives-differ": "NET/Socket : peer 10.0.0.2<59> message truncated : receiving 1048576 bytes instead of 65536",
    "no-algorithm": "Error : no algorithm/protocol available for function AllGather with datatype ncclInt8.",
    "net-plugin": "Failed to initialize any NET plugin",
    "no-interface": "Bootstrap : no socket interface found",
    "p2p-refused": "Cuda failure 217 'peer access is not supported between these two devices'",
    "p2p-broken": "P2P is disabled between NVLINK connected GPUs 0 and 3. This should not be the case given their connectivity",
    "imex": "MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX configuration.",
    "nvls": "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 801 'operation not supported'.",
    "driver": "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'",
    "gpu-missing": "Cuda failure 101 'invalid device ordinal'",
    "nccl-memory": "Cuda failure 2 'out of memory'",
    "gpu-fault": "Cuda failure 214 'uncorrectable ECC error encountered'",
    "cuda": "Cuda failure 'invalid argument'",
    "no-transport": "No transport found for rank 0[1000] -> rank 1[2000]",
    "peers-disagree": "socketFinalizeAccept from 10.0.0.3<1>: wrong type 4 != 3",
    "refused": "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort",
    "peer-lost": "socketProgress: Connection closed by remote peer n2<42830>",
    "hung": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)",
    "descriptors": "Call to socket failed: Too many open files",
    "follows": "[Proxy Service 3] Failed to execute operation Connect from rank 3, retcode 2",
    "failed": "ncclInternalError: Internal check failed.",
    "other": "Attribute busid of node nic not found",
}


@pytest.mark.parametrize(("kind", "words"), FAULTS.items(), ids=list(FAULTS))
def test_each_fault_is_known_by_its_words(kind: str, words: str) -> None:
    """The words are those of NCCL's sources; each kind has a rule or is the echo of another."""
    assert nccl_log.kind_of(words) == kind
    assert {fault.kind for fault in read([f"n1:1:2 [0] file.cc:3 NCCL WARN {words}"]).faults} == {kind}


def test_a_retry_is_no_fault() -> None:
    """Ranks that start first are refused until the others listen: NCCL says so with INFO and tries again."""
    assert not read(["n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying"]).faults


PIECES = """
NCCL_|INFO_|WARN_|TRACE_|n1:1:2_|[0]_|a.cc:3_|_via_NET/|IB/0/GDRDMA|NET/IB_:_Using_[0]|mlx5_0:1/IB_|Channel_00/0_:_0[0]_->_1[0]_|[send]
@|ESC[0m|&gt;|NCCL_version_|2.28.|+cuda|comm_0x1_rank_|0_nranks_2|_set_by_environment_to_|NCCL~ALGO|Last_error:@|GPU/1_(1/2.0/NVL)_|<0>
](http|99999999999|Avg_bus_bandwidth_:_|Out_of_bounds_values_:_|P2P_is_disabled_between_GPUs_|Bootstrap_:_Using_|(f)_
"""
PIECES_LIST = [p.replace("_", " ").replace("@", "\n").replace("~", "_") for p in PIECES.replace("\n", "|").split("|") if p]
ODD = ["\r", "\x1b[1m", "\0", "\u2028", "\ud800"]


@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from([*PIECES_LIST, *ODD]), max_size=40).map("".join)))
def test_any_text_is_read(anything: str) -> None:
    """Files come from anybody: a reader that fails says nothing about the other ranks' logs either."""
    log = read([anything])
    assert headline_of({}, log, judge_log({}, log))


LONG = ["x", " ", "NCCL INFO ", "NCCL WARN a:1 ", "Channel ", "[0] ", ":1", "a" * 300 + "NCCL INFO ", "\x1b[0"]


@pytest.mark.parametrize("unit", [*LONG, "n1:1:2 [0] NCCL INFO Using [0]eth0:"])
def test_reading_is_linear(unit: str) -> None:
    """A log of a day has gigabytes: twice the text may take twice the time, also where one line never ends."""

    def seconds(size: int) -> float:
        data = (unit * (size // len(unit) + 1))[:size]
        begin = time.process_time()
        read([data])
        return time.process_time() - begin

    small, large = (min(seconds(size) for _ in range(2)) for size in (30_000, 240_000))
    assert large < 24 * small + 0.05, "8 times the text"


# --- logs as people paste them: cut, of one rank, of plugins, of torch or vLLM alone; wording and values are made up -------

VERSION = "n1:7:7 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"


def found(text: str) -> tuple[Log, list[Finding]]:
    """A text's log and what is judged of it alone."""
    log = read([text])
    return log, judge_log({}, log)


BLAMED = {
    # an NVLink SHARP call that says nothing, and before 2.27 in torch's words
    "n1:1:2 [3] transport/nvls.cc:301 NCCL WARN Cuda failure 1 'invalid argument'": "nvls",
    "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.5\nLast error:\n"
    "Cuda failure 401 'the operation cannot be performed in the present state'": "nvls",
    # a GPU of another container, and IPC on AMD
    "[2026-01-02 03:04:05] n1:1:2 [0] transport/p2p.cc:280 NCCL WARN Cuda failure 101 'invalid device ordinal'": "p2p-refused",
    "n1:1:2 [0] src/transport/p2p.cc:212 NCCL WARN hipIpcOpenMemHandle failed : invalid argument": "p2p-refused",
    # a driver before its echo
    "n1:1:2 [0] enqueue.cc:810 NCCL WARN Cuda failure 'API call is not supported in the installed CUDA driver'\n"
    "n1:1:2 [0] init.cc:900 NCCL WARN Cuda failure 'invalid device ordinal'": "driver",
    # a file that is gone; a queue that the limit of locked memory stops, and one with another reason
    "n1:1:2 [0] misc/shmutils.cc:90 NCCL WARN shared memory segment /dev/shm/nccl-A, error: No such file or directory (2)":
        "shm-lost",
    "n1:1:2 [4] ibvwrap.c:131 NCCL WARN Call to ibv_create_qp failed": "low-memlock",
    "n1:1:2 [4] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_qp failed with error Invalid argument": "rdma-connect",
    # a virtual interface of a container
    "DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled system error, NCCL version 2.19.3\nLast error:\n"
    "socketStartConnect: Connect to fe80::1%veth9<500> failed : Software caused connection abort": "port-refused",
    # AMD's library, whose place is a long path; XLA, nccl-tests, torch 1.9 and vLLM alone
    "n1:1:2 [0] /src/rccl/graph/paths.cc:80 NCCL WARN Failed to find reverse path from remNode 0/2 nlinks 3 to node 0/7\n"
    "n1:1:2 [0] NCCL INFO /src/rccl/group.cc:69 -> 3 [Async thread]": "unexplained-error",
    "n1:1:2 [0] misc/socket.cc:400 NCCL WARN socketTryAccept: Accept failed: Bad file descriptor\n"
    "INTERNAL: nccl_utils.cc:300: NCCL operation ncclCommInitRank(&comm, n, id, rank) failed: unhandled system error":
        "unexplained-error",
    "gpu3: Test NCCL failure common.cu:801 'unhandled system error'": "unexplained-error",
    "RuntimeError: NCCL Error 2: unhandled system error": "unexplained-error",
    "RuntimeError: NCCL error: unhandled system error": "unexplained-error",
    # torch's summary of a hang, and a hang in a wrapped terminal
    "[E1] Some NCCL operations have failed or timed out. Subsequent GPU operations may run on bad data.": "collective-hung",
    "what(): [Rank 1] Watchdog caught colle\nctive operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST)": "collective-hung",
    # a call that failed after a warning that only warns
    "n1:1:2 [0] graph/xml.cc:340 NCCL WARN Could not find real path of /sys/class/pci_bus/0000:0c/../../0000:0c:00.0\n"
    "n1:1:2 [0] NCCL INFO graph/xml.cc:650 -> 2\nn1:1:2 [0] NCCL INFO group.cc:75 -> 2 [Async thread]": "unexplained-error",
    # nodes that share a name: one of them over a tunnel, and TCP on IPoIB
    "".join(f"worker:{n}:{n} [0] NCCL INFO Bootstrap : Using [0]tnl9:fe80::{n}%tnl9<0> [1]net0:2001:db8::{n}<0>\n"
            for n in (5, 6)): "wrong-interface",
    "".join(f"u:{n}:{n} [0] NCCL INFO NET/Socket : Using [0]ib0:10.9.0.{n}<0>\nu:{n}:{n} [0] NCCL INFO Using network Socket\n"
            for n in (5, 6)): "socket-fallback",
}  # fmt: skip


@pytest.mark.parametrize("text", BLAMED)
def test_the_cause_is_found(text: str) -> None:
    """What stands first is what a person fixes first."""
    log, findings = found(text)
    assert (findings[0].rule, findings[0].status) == (BLAMED[text], FAIL)
    assert headline_of({}, log, findings).startswith(f"FAIL: {findings[0].found}")
    assert ("nvls.cc" in text) == ("nvls.cc: " in findings[0].found)


@pytest.mark.parametrize(
    "line",
    [
        "+ mpirun -np 16 -x NCCL_MNNVL_ENABLE=0 -x NCCL_NVLS_ENABLE=0 ./all_reduce_perf",
        "runtime_env {'NCCL_MNNVL_ENABLE': '1', 'NCCL_IMEX_CHANNEL': '0'}",
        "launcher: warning: NCCL_MNNVL_ENABLE is not set, NCCL_SHM_DISABLE is not set",
        "(main pid=3) INFO NCCL_TOPO_FILE=/usr/share/aws-ofi-nccl/p5.xml, libfabric 1.22",
        "10.1.2.3: INFO: Function: ofi_init Line: 90: NET/OFI Running on P5 platform, nccl plugin",
        "n1:7:7 [0] NCCL INFO NCCL_CUMEM_ENABLE set by environment to 0.",
        "n1:7:7 [0] NCCL INFO NCCL_TOPO_FILE set by environment to /usr/share/cloud-topo.xml",
        "[rank0]:[W1] Warning: destroy_process_group() ensures that any pending NCCL operations have finished",
        "n1:7:9 [0] NCCL INFO group.cc:70 -> 7 [Async thread]",
        "n1:7:9 [0] NCCL INFO include/net.h:24 -> 2",
    ],
)
def test_what_is_no_fault(line: str) -> None:
    """The name of a variable, of a plugin, a value that a cloud or vLLM sets, a call that is only not ready yet."""
    _, findings = found(f"{VERSION}{line}\n")
    assert {item.status for item in findings} <= {PASS, UNKNOWN}


def test_p2p_that_the_driver_refuses_is_seen() -> None:
    """NCCL 2.10 says it in other words than later ones."""
    log, findings = found("n1:1:2 [0] NCCL INFO Could not enable P2P between dev 1(=1b000) and dev 0(=1a000)\n")
    assert log.p2p_off == {("0", "1")}
    assert [item.rule for item in findings if item.status == WARN] == ["p2p-disabled"]


# --- the command of a login node on recorded logs -----------------------------------------------------------------------

REPO = Path(__file__).resolve().parents[2]
LOGS = Path(__file__).with_name("logs")

RECORDED = {
    # file: exit code, version, a transport or network, an interface or adapter, the main fault's rule
    "silent-sockets-2.27-slurm.txt": (2, "2.27.5", "NET/Socket", "ens18f0", "socket-fallback"),
    "nvlink-infiniband-2.29-files.txt": (0, "2.29.7", "NET/IB/GDRDMA", "mlx5_1:1", ""),
    "shared-memory-2.28-ray.txt": (2, "2.28.9", "SHM/direct", "", "small-shm"),
    "no-interface-torch-2.20.txt": (2, "2.20.5", "", "", "interface-down"),
    "bridges-2.10-mpirun.txt": (2, "2.10.3", "NET/Socket", "br-9f21c0aa41d7", "wrong-interface"),
    "roce-timeout-2.23-kubernetes.txt": (2, "2.23.4", "NET/IBext_v8/GDRDMA", "mlx5_2:1", "rdma-timeout"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logs(name: str) -> None:
    """What a person looks for in such a log: version, transport, interface, and the one thing that is wrong."""
    code, version, transport, device, fault = RECORDED[name]
    done = judge_files(LOGS / name, "--json")
    assert done.exit_code == code
    said, judged = json.loads(done.stdout)["log"], json.loads(done.stdout)["verdict"]
    assert list(said["versions"]) == [version]
    assert not transport or transport in said["transports"]
    listed = [*said["sockets"].values(), *said["adapters"].values()]
    assert not device or any(device in entry for devices in listed for entry in devices)
    assert [item["rule"] for item in judged["findings"] if item["status"] == "fail"][:1] == ([fault] if fault else [])
    assert judged["headline"].startswith(("PASS", "WARN", "FAIL")[code])


def test_a_recorded_log_is_shown() -> None:
    """For people nothing is on stdout; the exit code is the verdict's."""
    shown = run("nccl-check", "--logs", LOGS / "silent-sockets-2.27-slurm.txt")
    assert (shown.code, shown.out) == (2, "") and "2.27.5" in shown.err and "socket-fallback" in shown.err


def test_every_recorded_log_is_read() -> None:
    """A file that no test names may say anything."""
    assert {file.name for file in LOGS.iterdir()} == set(RECORDED)
    assert all(file.read_text(encoding="utf-8").startswith("# ") for file in LOGS.iterdir()), "say which version's format it is"


def test_files_that_are_none(tmp_path: Path) -> None:
    """Each mistake of a caller ends with a sentence that names the file."""
    empty, alien, binary = tmp_path / "empty", tmp_path / "alien.log", tmp_path / "binary"
    empty.touch()
    alien.write_text("epoch 1 loss 0.3\n" * 5)
    binary.write_bytes(bytes(range(256)) * 100)
    for wrong in (tmp_path / "absent", tmp_path, empty, alien, binary):
        done = judge_files(wrong)
        assert done.exit_code and not done.stdout and str(wrong) in str(done.exception), done.exception


def test_a_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Its own words stand in the findings."""
    bad = tmp_path / "bad.log"
    bad.write_text("n1:1:2 [0] a.cc:1 NCCL WARN \x1b]0;title\x07 \x9b31m odd \u202e words\n")
    done = run("nccl-check", "--logs", bad)
    assert done.code == 1 and not set("\x1b\x07\u202e") & set(done.out + done.err)


def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block ends must not matter, and one endless line takes no more memory than two blocks."""
    file = tmp_path / "all.log"
    file.write_text(text(Job()) + "tail without an end " * 500)
    whole = nccl_log.read_files([str(file)])
    for size in (4096, 5003):
        monkeypatch.setattr(nccl_log, "BLOCK", size)
        assert nccl_log.read_files([str(file)]) == whole
        with file.open("rb") as opened:
            assert max(map(len, nccl_log.blocks(opened))) <= 3 * size


def test_a_rule_that_the_cluster_file_ignores_does_not_count(tmp_path: Path) -> None:
    """``doctor.ignore`` is one list for every command; what was ignored is named."""
    body = (REPO / "ops/clusters/nebius-h100.yaml").read_text(encoding="utf-8").replace("name: nebius-h100", "name: mine")
    sockets = LOGS / "silent-sockets-2.27-slurm.txt"
    rules: list[str] = []
    while True:
        cluster = tmp_path / "mine.yaml"
        cluster.write_text(f"{body}\ndoctor: {{ignore: [{', '.join(rules)}]}}\n")
        done = judge_files(sockets, "--cluster", cluster, "--json")
        judged = json.loads(done.stdout)["verdict"]
        left = [item["rule"] for item in judged["findings"] if item["status"] in ("fail", "warn")]
        assert set(judged["ignored"]) == set(rules) and not set(left) & set(rules)
        if not left:
            break
        rules += left
    assert len(rules) > 1 and done.exit_code == 0 and judged["headline"].startswith("PASS")


def test_gdr_that_the_plugin_of_efa_disables() -> None:
    """It says so in its own words, as information; a node whose connections use it anyway is well."""
    job = text(replace(Job(), net="AWS Libfabric", gdr=False))
    said = "node1:1:1 [0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR\n"
    for line, status in ((said, WARN), ("", PASS)):
        _, findings = found(job + line)
        assert (WARN if "gdr-off" in {item.rule for item in findings if item.status == WARN} else PASS) == status


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0xaa", ()), ("0x0", ()), ("0xa9", ("degraded bandwidth",)), ("0x9a", ("unhealthy",)),
        ("0xa5", ("degraded", "recovers")),
        ("0x1aa", ()), ("0x5aa", ("incorrect configuration",)), ("0x8000", ("disconnected",)), ("0x4000", ()),
    ],
)  # fmt: skip
def test_a_fabric_that_is_not_healthy_is_seen(mask: str, words: tuple[str, ...]) -> None:
    """Every field of NVML's mask has a value of its own for well, bad and not supported."""
    line = f"node1:1:1 [0] NCCL INFO MNNVL busId 0x801000 fabric UUID 3f.9c cliqueId 0x7ffe state 3 healthMask {mask}\n"
    log, findings = found(line)
    assert ("fabric-health" in {item.rule for item in findings if item.status != PASS}) == bool(words)
    assert all(word in "".join(fault.text for fault in log.faults) for word in words)


def test_the_layout_of_the_mask_is_nvmls() -> None:
    import pynvml

    names = ("DEGRADED_BW", "ROUTE_RECOVERY", "ROUTE_UNHEALTHY", "ACCESS_TIMEOUT_RECOVERY")
    for name in names:
        shift, true, false = (
            getattr(pynvml, f"NVML_GPU_FABRIC_HEALTH_MASK_{one}") for one in (f"SHIFT_{name}", f"{name}_TRUE", f"{name}_FALSE")
        )
        assert len(fabric_faults(true << shift)) == 1 and not fabric_faults(false << shift)


def test_a_link_local_address_asks_for_no_firewall() -> None:
    said = "socketPollConnect: connect to fe80::1%ib0<4> returned Network is unreachable(101)"
    line = f"node1:1:1 [0] misc/socket.cc:557 NCCL WARN {said}\n"
    _, findings = found(line)
    bad = [item for item in findings if item.status != PASS]
    assert bad[0].rule == "port-refused" and "NCCL_SOCKET_FAMILY=AF_INET" in bad[0].fix and "firewall-cmd" not in bad[0].fix
    _, findings = found(line.replace("fe80::1%ib0", "febf::1%5").replace("Network is unreachable(101)", "Invalid argument"))
    assert [item.rule for item in findings if item.status != PASS] == ["port-refused"]  # the scope of another node's link
    _, findings = found(line.replace("fe80::1%ib0", "10.1.2.3"))
    assert "firewall-cmd" in next(item.fix for item in findings if item.rule == "port-refused")


def test_the_page_of_the_rules_is_current() -> None:
    """``python -m tests.goldens`` writes it."""
    assert page() == (REPO / "docs" / "nccl-verdicts.md").read_text(encoding="utf-8")
