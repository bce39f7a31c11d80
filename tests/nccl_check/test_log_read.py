"""The reader of NCCL's logs: every version and launcher's form, lines that run into each other, what is cut, and size."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune.check import log_read
from clustertune.check.log_read import Log, LoggedDevice, Record, read, records
from clustertune.nccl_check.judge import headline, judge, judge_log
from tests.nccl_check.log_maker import PREFIXES, Job, lines, text

VERSIONS = (
    "2.10.3",
    "2.12.12",
    "2.14.3",
    "2.16.5",
    "2.18.6",
    "2.19.3",
    "2.21.5",
    "2.23.4",
    "2.25.1",
    "2.27.5",
    "2.28.9",
    "2.29.7",
)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version: str) -> None:
    """What NCCL writes has changed with nearly every version; a cluster has the one that its image has."""
    log = read([text(Job(version=version))])
    assert log.version == version and log.cuda
    assert log.ranks == 16 and log.node_count() == 2
    assert set(log.transports) == {"P2P/CUMEM", "NET/IB/GDRDMA"}
    assert log.between().keys() == {"IB"} and set(log.networks) == {"IB"}
    assert {device.name for device in log.adapters["node1"]} == {f"mlx5_{n}:1" for n in range(8)}
    assert log.bootstrap["node2"] == [LoggedDevice("eth0", "10.0.0.2")]
    assert log.counts["coll"] == 16 and log.counts["p2p"] == 16 and log.rings == 2 and log.trees
    assert "AllGather Ring Simple" in log.algorithms
    assert {edge.device for edge in log.edges} == set(range(8)) and sorted(log.channels) == list(range(8))
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


TOGETHER = "n1:1:2 [0] NCCL INFO Channel 11/0 : 0[0] ->n2:30:31 [3] NCCL INFO cudaDriverVersion 12040"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("n1:10:12 [3] NCCL INFO Using network IB", [Record("INFO", "Using network IB", "n1", "10", "3")]),
        ("<cluster_name>:924:1152 [5] NCCL INFO x", [Record("INFO", "x", "<cluster_name>", "924", "5")]),
        ("[3] include/shm.h:28 NCCL WARN full", [Record("WARN", "full", gpu="3", source="include/shm.h:28")]),
        ("misc/ibvwrap.cc:212 NCCL WARN bad", [Record("WARN", "bad", source="misc/ibvwrap.cc:212")]),
        ("NCCL INFO Using network Socket", [Record("INFO", "Using network Socket")]),
        (
            "[2026-04-22 21:34:20] n1:10:12 [0] misc/socket.cc:88 NCCL WARN refused",
            [Record("WARN", "refused", "n1", "10", "0", "misc/socket.cc:88")],
        ),
        (
            "[2026-04-22 21:34:20] n1:10:12 [0] os/linux.cc:88 (socketConnect) NCCL WARN refused",
            [Record("WARN", "refused", "n1", "10", "0", "os/linux.cc:88")],
        ),
        ("n1:10:12 [0] nccl_net_ofi_init:79 NCCL WARN x", [Record("WARN", "x", "n1", "10", "0", "nccl_net_ofi_init:79")]),
        ("n1:10:12 [0] 17.250 bootstrap:99 NCCL TRACE x", [Record("TRACE", "x", "n1", "10", "0", "bootstrap:99")]),
        ("n1:10:12 NCCL CALL ncclGetUniqueId(0x1)", [Record("CALL", "ncclGetUniqueId(0x1)", "n1", "10")]),
        ("n1:10:12 [0] include/socket.h:360 WARN old", [Record("WARN", "old", "n1", "10", "0")]),
        (
            "> n1:10:12 [0] transport/[net.cc:10](http://net.cc:10/) NCCL WARN linked",
            [Record("WARN", "linked", "n1", "10", "0")],
        ),
        (
            TOGETHER,
            [
                Record("INFO", "Channel 11/0 : 0[0] ->", "n1", "1", "0"),
                Record("INFO", "cudaDriverVersion 12040", "n2", "30", "3"),
            ],
        ),
        ("INFO:root: loss 0.3", []),
        ("", []),
    ],
)
def test_one_line(line: str, expected: list[Record]) -> None:
    """The forms of a line, and two that ranks wrote into each other."""
    assert list(records(line)) == expected


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


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("NCCL version 2.29.7+cuda13.1", "2.29.7"),
        ("NCCL version 2.12.12.MSCCL.0.7.3+cuda11.7", "2.12.12"),
        ("NCCL version 2.8.3+cudaCUDA_MAJOR.CUDA_MINOR", "2.8.3"),
        ("n1:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9", "2.27.3"),
        ("n1:1:1 [0] NCCL INFO RCCL version : 2.22.3-HEAD:271856d", "2.22.3"),
        ("RuntimeError: NCCL error in: x.cpp:7, unhandled system error, NCCL version 21.0.3", "2.10.3"),
    ],
)
def test_the_version_in_all_its_spellings(words: str, version: str) -> None:
    """It decides which faults are known."""
    assert read([words]).version == version


FAULTS = {
    "shm": "Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
    "shm-lost": "Error while attaching to shared memory segment /dev/shm/nccl-x (size 1), error: No such file or directory (2)",
    "memlock": "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "no-verbs": "NET/IB : Unable to open device mlx5_bond_0",
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
    "gpu-memory": "Cuda failure 2 'out of memory'",
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
    assert log_read.kind_of(words) == kind
    assert {fault.kind for fault in read([f"n1:1:2 [0] file.cc:3 NCCL WARN {words}"]).faults} == {kind}


def test_every_kind_of_fault_is_tried() -> None:
    """A kind without words here could match nothing."""
    assert set(FAULTS) == {*log_read.KINDS, log_read.OTHER}


def test_a_retry_is_no_fault() -> None:
    """Ranks that start first are refused until the others listen: NCCL says so with INFO and tries again."""
    assert not read(["n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying"]).faults


SAMPLE = text(Job(nodes=2, gpus=2, version="2.27.5")) + "".join(
    f"n1:1:2 [0] a.cc:1 NCCL WARN {words}\n" for words in FAULTS.values()
)


def test_a_log_cut_anywhere_is_read() -> None:
    """A node that lost power leaves half a line, a viewer the middle of a file."""
    for end in range(0, len(SAMPLE), 37):
        assert isinstance(read([SAMPLE[:end]]), Log)
        assert judge({}, {"cut": SAMPLE[end : end + 3000]}) is not None


PIECES = """
NCCL_|INFO_|WARN_|TRACE_|n1:1:2_|[0]_|a.cc:3_|_via_NET/|IB/0/GDRDMA|NET/IB_:_Using_[0]|mlx5_0:1/IB_|Channel_00/0_:_0[0]_->_1[0]_|[send]
@|ESC[0m|&gt;|NCCL_version_|2.28.|+cuda|comm_0x1_rank_|0_nranks_2|_set_by_environment_to_|NCCL~ALGO|Last_error:@|GPU/1_(1/2.0/NVL)_|<0>
](http|99999999999|Avg_bus_bandwidth_:_|Out_of_bounds_values_:_|P2P_is_disabled_between_GPUs_|Bootstrap_:_Using_|(f)_
"""
PIECES_LIST = [p.replace("_", " ").replace("@", "\n").replace("~", "_") for p in PIECES.replace("\n", "|").split("|") if p]
ODD = ["\r", "\x1b[1m", "\0", "\u2028", "\ud800"]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from([*PIECES_LIST, *ODD]), max_size=40).map("".join)))
def test_any_text_is_read(anything: str) -> None:
    """Files come from anybody: a reader that fails says nothing about the other ranks' logs either."""
    log = read([anything])
    assert headline({}, log, judge_log({}, log))


LONG = ["x", " ", "NCCL INFO ", "NCCL WARN a:1 ", "Channel ", "[0] ", ":1", "a" * 300 + "NCCL INFO ", "\x1b[0"]


@pytest.mark.parametrize("unit", [*LONG, "n1:1:2 [0] NCCL INFO Using [0]eth0:"])
def test_reading_is_linear(unit: str) -> None:
    """A log of a day has gigabytes: twice the text may take twice the time, also where one line never ends."""

    def seconds(size: int) -> float:
        data = (unit * (size // len(unit) + 1))[:size]
        begin = time.process_time()
        read([data])
        return time.process_time() - begin

    small = min(seconds(60_000) for _ in range(3))
    large = min(seconds(480_000) for _ in range(2))
    assert large < 24 * small + 0.05, "8 times the text"


def test_many_different_warnings_take_no_memory() -> None:
    """A rank in trouble may warn for hours, each time with another number; kinds that come late are kept."""
    warnings = "".join(f"n1:1:2 [0] a.cc:1 NCCL WARN odd thing {n} here {n * 7}\n" for n in range(5000))
    log = read([warnings + f"n1:1:2 [0] a.cc:1 NCCL WARN {FAULTS['duplicate-gpu']}\n"])
    assert len(log.faults) < 600 and any(fault.kind == "duplicate-gpu" for fault in log.faults)
