"""What a warning of NCCL, or an error of torch about it, means: one word for each kind of fault.

Standard library only, Python 3.8 or later. Words are those of NCCL's sources from 2.10 on, of its OFI plugin, and of torch's
ProcessGroupNCCL; they are looked for without regard to case.
"""

from __future__ import annotations

import re

OTHER = "other"
"""A warning that no kind knows."""
FOLLOWS = "follows"
"""Said because of another fault: no kind of its own."""

_KINDS = (
    ("shm-lost", r"attaching to shared memory segment|shared memory segment.{0,200}no such file"),
    ("shm", r"shared memory segment|failed to extend|posix_fallocate|no space left on device"),
    # Before 2.14 NCCL tells no reason; that of queues is the limit of locked memory (https://github.com/NVIDIA/pyxis/issues/60).
    ("memlock", r"ibv_\w+ failed.{0,80}cannot allocate memory|call to ibv_create_(qp|cq) failed\s*$"),
    ("no-verbs", r"unable to open device|ibv_open_device failed|failed to open libibverbs|ibv_get_device_list"),
    ("rdma-timeout", r"got completion.{0,200}(error 12\b|status=12\b|\(12\)|retry_exc|vendor.err.129)"),
    ("rdma-error", r"got completion"),
    ("rdma-connect", r"ibv_modify_qp failed|ibv_query_gid|ibv_create_qp failed"),
    ("rdma-link", r"async event.{0,40}(port|lid|gid|sm change|client rereg)"),
    ("rdma-error", r"async event"),
    ("rdma-error", r"call to ibv_\w+ failed"),
    ("duplicate-gpu", r"duplicate gpu"),
    ("nccl-versions", r"mismatched nccl version|nccl library version is too old"),
    (
        "collectives-differ",
        r"mismatched collective|collective mismatch|net/socket.{0,80}message truncated|symmetric registration check",
    ),
    ("no-algorithm", r"no algorithm/protocol available"),
    ("net-plugin", r"any net plugin|net/ofi|fi_getinfo|libfabric"),
    (
        "no-interface",
        r"no socket interface|no usable listening interface|no interface found|no device found (matching|after)|no ip interface"
        r"|neither af_inet",
    ),
    (
        "p2p-refused",
        r"peer access is not supported|open cuda ipc handle|could not enable p2p|p2p not supported|ipc(get|open)memhandle",
    ),
    ("p2p-broken", r"p2p is disabled between nvlink"),
    ("imex", r"mnnvl|imex"),
    ("nvls", r"nvlink sharp|multicast|cannot be performed in the present state"),
    (
        "driver",
        r"driver version is insufficient|unsupported display driver|no kernel image|forward compatib|minor version mismatch"
        r"|not supported in the installed cuda driver",
    ),
    ("gpu-missing", r"invalid device ordinal|no cuda-capable device|busy or unavailable|devices are (busy|unavailable)"),
    ("gpu-memory", r"out of memory"),
    (
        "gpu-fault",
        r"uncorrectable|illegal memory|launch failure|system not yet initialized|hardware stack|nvlink error|fallen off",
    ),
    ("cuda", r"cuda failure|unhandled cuda error|unhandledcudaerror"),
    ("no-transport", r"no transport found"),
    ("peers-disagree", r"wrong type|magic mismatch|mismatch in |has already checked in|message truncated|mismatched response"),
    (
        "refused",
        r"connection refused|no route to host|connection timed out|network is unreachable|connection "
        r"abort|cannot assign requested",
    ),
    (
        "peer-lost",
        r"connection reset|connection closed|closed by remote|broken pipe|remote process exited|remoteerror|socket recv failed",
    ),
    ("hung", r"watchdog caught coll|watchdog got stuck|operations have failed or timed out"),
    ("descriptors", r"too many open files"),
    (FOLLOWS, r"\[proxy service|proxy call to rank|failed to cuda|\[service thread|failed to execute operation|proxyservice"),
    (
        "failed",
        r"systemerror|system error|internalerror|internal error|invalidusage|invalid usage|invalidargument|invalid argument",
    ),
)
_PATTERNS = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _KINDS)
KINDS = tuple(dict.fromkeys(kind for kind, _ in _KINDS))
"""Every kind, what is closest to a cause first."""


_BY_PLACE = (("nvls", "nvls.cc", ("cuda", "gpu-fault", "gpu-missing")), ("p2p-refused", "p2p.cc", ("cuda", "gpu-missing")))
"""A failure of CUDA whose words say little, in a source file that says what was tried."""


def kind_of(text: str, place: str = "") -> str:
    """The kind of fault that a message tells; :data:`OTHER` where none is known. ``place``: source file and line."""
    for kind, pattern in _PATTERNS:
        if pattern.search(text):
            return next((by for by, file, kinds in _BY_PLACE if file in place and kind in kinds), kind)
    return OTHER
