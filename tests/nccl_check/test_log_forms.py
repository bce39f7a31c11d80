"""Logs as people paste them: cut, of one rank, of plugins, of torch or vLLM alone. Wording and values are made up."""

from __future__ import annotations

import pytest

from clustertune.check.log_read import Log, read, records
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding
from clustertune.nccl_check.judge import headline, judge, judge_log

VERSION = "n1:7:7 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"


def found(text: str) -> tuple[Log, list[Finding]]:
    """A text's log and what is judged of it alone."""
    log = read([text])
    return log, judge_log({}, log)


BLAMED = {
    "an NVLink SHARP call that says nothing": (
        "n1:1:2 [3] transport/nvls.cc:301 NCCL WARN Cuda failure 1 'invalid argument'",
        "nvls",
    ),
    "NVLink SHARP before 2.27 in torch's words": (
        "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.5\nLast error:\n"
        "Cuda failure 401 'the operation cannot be performed in the present state'",
        "nvls",
    ),
    "a GPU of another container": (
        "[2026-01-02 03:04:05] n1:1:2 [0] transport/p2p.cc:280 NCCL WARN Cuda failure 101 'invalid device ordinal'",
        "p2p-refused",
    ),
    "IPC on AMD": (
        "n1:1:2 [0] src/transport/p2p.cc:212 NCCL WARN hipIpcOpenMemHandle failed : invalid argument",
        "p2p-refused",
    ),
    "a driver before its echo": (
        "n1:1:2 [0] enqueue.cc:810 NCCL WARN Cuda failure 'API call is not supported in the installed CUDA driver'\n"
        "n1:1:2 [0] init.cc:900 NCCL WARN Cuda failure 'invalid device ordinal'",
        "driver",
    ),
    "a file of shared memory that is gone": (
        "n1:1:2 [0] misc/shmutils.cc:90 NCCL WARN shared memory segment /dev/shm/nccl-A, error: No such file or directory (2)",
        "shm-lost",
    ),
    "a queue that the limit of locked memory stops": (
        "n1:1:2 [4] ibvwrap.c:131 NCCL WARN Call to ibv_create_qp failed",
        "low-memlock",
    ),
    "a queue with another reason": (
        "n1:1:2 [4] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_qp failed with error Invalid argument",
        "rdma-connect",
    ),
    "nccl-tests alone": ("gpu3: Test NCCL failure common.cu:801 'unhandled system error'", "unexplained-error"),
    "a virtual interface of a container": (
        "DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled system error, NCCL version 2.19.3\nLast error:\n"
        "socketStartConnect: Connect to fe80::1%veth9<500> failed : Software caused connection abort",
        "link-local",
    ),
    "AMD's library, whose place is a long path": (
        "n1:1:2 [0] /src/rccl/graph/paths.cc:80 NCCL WARN Failed to find reverse path from remNode 0/2 nlinks 3 to node 0/7\n"
        "n1:1:2 [0] NCCL INFO /src/rccl/group.cc:69 -> 3 [Async thread]",
        "unexplained-error",
    ),
    "XLA's words": (
        "n1:1:2 [0] misc/socket.cc:400 NCCL WARN socketTryAccept: Accept failed: Bad file descriptor\n"
        "INTERNAL: nccl_utils.cc:300: NCCL operation ncclCommInitRank(&comm, n, id, rank) failed: unhandled system error",
        "unexplained-error",
    ),
    "torch 1.9 alone": ("RuntimeError: NCCL Error 2: unhandled system error", "unexplained-error"),
    "vLLM alone": ("RuntimeError: NCCL error: unhandled system error", "unexplained-error"),
    "torch's summary of a hang": (
        "[E1] Some NCCL operations have failed or timed out. Subsequent GPU operations may run on bad data.",
        "collective-hung",
    ),
    "a hang in a wrapped terminal": (
        "what(): [Rank 1] Watchdog caught colle\nctive operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST)",
        "collective-hung",
    ),
    "a call that failed after a warning that only warns": (
        "n1:1:2 [0] graph/xml.cc:340 NCCL WARN Could not find real path of /sys/class/pci_bus/0000:0c/../../0000:0c:00.0\n"
        "n1:1:2 [0] NCCL INFO graph/xml.cc:650 -> 2\nn1:1:2 [0] NCCL INFO group.cc:75 -> 2 [Async thread]",
        "unexplained-error",
    ),
    "nodes that share a name, one of them over a tunnel": (
        "".join(
            f"worker:{n}:{n} [0] NCCL INFO Bootstrap : Using [0]tnl9:fe80::{n}%tnl9<0> [1]net0:2001:db8::{n}<0>\n"
            for n in (5, 6)
        ),
        "link-local",
    ),
    "TCP on IPoIB of nodes that share a name": (
        "".join(
            f"u:{n}:{n} [0] NCCL INFO NET/Socket : Using [0]ib0:10.9.0.{n}<0>\nu:{n}:{n} [0] NCCL INFO Using network Socket\n"
            for n in (5, 6)
        ),
        "socket-fallback",
    ),
}


@pytest.mark.parametrize("name", BLAMED)
def test_the_cause_is_found(name: str) -> None:
    """What stands first is what a person fixes first."""
    text, rule = BLAMED[name]
    log, findings = found(text)
    assert (findings[0].rule, findings[0].status) == (rule, FAIL)
    assert headline({}, log, findings).startswith(f"FAIL: {findings[0].found}")
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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("INFO 01-02 pynccl.py:70] vLLM is using nccl==2.21.5\nn1:1:1 [0] NCCL INFO Using network IB\n", "2.21.5"),
        ("RCCL version : 2.22.3-HEAD:0a1b2c3\nn1:1:1 [0] NCCL INFO Kernel version: 5.15.0\n", "2.22.3"),
        ("RCCL version 2.18.3+hip5.7 HEAD:0a1b2c3+\n", "2.18.3"),
        ("vLLM is using nccl==2.21.5\nn1:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n", "2.27.3"),
    ],
)
def test_the_version_in_the_words_of_others(text: str, version: str) -> None:
    """Frameworks tell it where NCCL's own line is not in what was pasted; NCCL's own counts more."""
    assert version in read([text]).versions


def test_gdr_of_newer_plugins() -> None:
    """They write the way of registration in between, in small letters, and may cut the name's end."""
    log = read(["s1:1:2 [0] NCCL INFO NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 1 'roceX1\n"])
    assert log.gdr_on == {"s1": {"roceX1"}}


def test_p2p_that_the_driver_refuses_is_seen() -> None:
    """NCCL 2.10 says it in other words than later ones."""
    log, findings = found("n1:1:2 [0] NCCL INFO Could not enable P2P between dev 1(=1b000) and dev 0(=1a000)\n")
    assert log.p2p_off == {("0", "1")}
    assert [item.rule for item in findings if item.status == WARN] == ["p2p-disabled"]


def test_p2p_is_judged_in_the_log_of_one_rank() -> None:
    """It names one rank only: how many GPUs there are it says elsewhere, or not at all."""
    line = "n1:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.\n"
    form = "n1:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks {0} nNodes 2 localRanks {1} localRank 0 MNNVL 0\n"
    for text, status in ((line, [WARN]), (line + form.format(16, 8), [WARN]), (line + form.format(2, 1), [])):
        assert [item.status for item in found(text)[1] if item.rule == "p2p-disabled"] == status


def test_a_vlan_that_the_name_of_its_line_took() -> None:
    """The log alone shows it: the name continues with a dot. A prefix that is meant (en, eth) is left alone."""
    start = "n1:1:1 [0] NCCL INFO "
    text = f"{start}NCCL_SOCKET_IFNAME set by environment to {{}}\n{start}Bootstrap : Using {{}}:10.0.0.1<0>\n"
    for value, used, status in (("ib0", "ib0.8001", [WARN]), ("=ib0", "ib0", []), ("en,eth", "eth0", []), ("ib0", "ib0", [])):
        assert [item.status for item in found(text.format(value, used))[1] if item.rule == "ifname-prefix"] == status


def test_how_many_nodes_there_are() -> None:
    """By addresses where names are alike, by peers of which the log tells nothing; else by names."""
    edge = "n1:1:2 [0] NCCL INFO Channel 00/0 : {} -> {} [send] via NET/Socket/0\n"
    one_way, other_way = edge.format("1[0]", "0[0]"), edge.format("0[0]", "1[0]").replace("n1:1:2", "n1:3:4")
    assert found(one_way)[0].node_count() == 2 and dict(found(one_way)[0].between()) == {"Socket": 1}
    assert found(one_way + other_way)[0].node_count() == 1
    off = "n1:1:2 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1.\n"
    assert found(off + one_way)[0].node_count() == 1
    using = "w:{0}:{0} [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{1}<0> [1]eth1:10.0.1.{1}<0>\n"
    assert found(using.format(1, 1) + using.format(2, 2))[0].node_count() == 2
    assert found(using.format(1, 1) + using.format(2, 1))[0].node_count() == 1


def test_a_log_that_ends_early_is_not_praised() -> None:
    """Before 2.18 nothing says that a rank began to connect; who pastes such a log has a hang."""
    text = "n1:1:1 [0] NCCL INFO Using network Socket\nNCCL version 2.10.3+cuda11.3\n"
    log, findings = found(text)
    assert (
        headline({}, log, findings)
        == "UNKNOWN: with NCCL 2.10.3 and the network Socket, but the log ends before ranks are connected"
    )
    ready = "n1:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE\n"
    log, findings = found(text + ready)
    assert headline({}, log, findings).startswith("PASS: ")
    verbs = "n1:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n"
    log, findings = found(verbs + text)
    assert headline({}, log, findings).startswith("UNKNOWN: ")


def test_the_log_of_one_rank_of_many() -> None:
    """Where nothing says how many ranks a node has, one node of one rank would be wrong."""
    text = "n1:1:1 [0] NCCL INFO comm 0x1 rank 3 nranks 8 cudaDev 3 busId 1000 - Init COMPLETE\n"
    log, findings = found(f"{text}n1:1:1 [3] NCCL INFO Channel 00 : 3[3] -> 4[4] via P2P/IPC\n")
    assert headline({}, log, findings) == "PASS: 8 ranks on 1 node over P2P/IPC"
    start = "n1:1:1 [0] NCCL INFO comm 0x1 rank 3 nRanks 12 nNodes 2 localRanks 8 localRank 3 MNNVL 0\n"
    log, findings = found(f"{start}n1:1:1 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM\n")
    assert headline({}, log, findings) == "PASS: 2 nodes of 8 ranks over P2P/CUMEM"


def test_the_reason_stands_before_its_frame() -> None:
    """torch writes a paragraph around NCCL's words, in one line or in several."""
    frame = "terminate called: NCCL error: remote process exited, NCCL version 2.14.3 ncclRemoteError: A call failed."
    reason = "NET/IB : Got completion from peer 10.0.0.9<4000> with error 12, opcode 0, len 0, vendor err 129"
    for text in (f"{frame} Last error: {reason}\n", f"{frame}\nLast error:\n{reason}\n"):
        assert judge({}, {"log": text})[0].found == reason
    lost = "socketProgressOpt: Call to recv from 10.0.0.9<4000> failed : Connection reset by peer"
    assert judge({}, {"log": f"{frame}\nLast error:\n{lost}\n"})[0].found.startswith(lost)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("2026-05-16T16:39:51.208-07:00ip-10-0-0-3:79:80 [1] NCCL INFO Using network IB", "ip-10-0-0-3"),
        ("2026-05-16T16:39:51Zalgo-1:79:80 [1] NCCL INFO Using network IB", "algo-1"),
        ("a3:79:80 [1] netResult_t progress(netComm*, int):1231 NCCL WARN rx timeout", "a3"),
    ],
)
def test_who_says_it(line: str, host: str) -> None:
    """A time without a space behind it, and the name of a function with spaces in it, hide the host."""
    (record,) = records(line)
    assert (record.host, record.pid, record.gpu) == (host, "79", "1")


def test_interfaces_of_old_versions() -> None:
    """2.2 and 2.3 name one interface in a line."""
    text = "n1:1:1 [0] INFO NET : Using interface ib0:10.1.1.2<0>\nn1:1:1 [0] INFO Using internal Network Socket\n"
    log = read([text])
    assert [device.name for device in log.bootstrap["n1"]] == ["ib0"] and set(log.networks) == {"Socket"}
