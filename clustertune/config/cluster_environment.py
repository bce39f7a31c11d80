"""What ``network.environment`` of a cluster file may hold: variables of the libraries that carry the bytes between ranks.

They reach every rank, run.json and reports: nothing that a program would run by, or that nobody else may read, belongs there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from clustertune.config.cluster_words import Found
from clustertune.config.load import did_you_mean

PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_")
"""NCCL, gloo, UCX and libfabric."""
KEY = ("network", "environment")
MOST = 64
"""Variables."""
_NAME = re.compile(r"(NCCL|GLOO|UCX|FI)(_[A-Z0-9]+)+")
_VALUE = re.compile(r"[A-Za-z0-9_=^.,:;/%+*\[\]-]{1,256}")
"""What values of these libraries are made of: nothing that a shell between here and a rank would read otherwise."""
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY)(_|$)")
_OWN = {
    "NCCL_COMM_ID": "every job has one of its own",
    "NCCL_HOSTID": "every node has one of its own: with one for all NCCL takes them for one machine",
}
_KNOWN = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SL", "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_TC", "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_PLUGIN", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS", "NCCL_TOPO_FILE", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "UCX_NET_DEVICES", "UCX_TLS",
)  # fmt: skip
"""For a hint where a name is none."""


def check_environment(values: Mapping[str, object] | None) -> Iterator[Found]:
    """What is wrong with names and values."""
    for name, value in (values or {}).items():
        path = (*KEY, name)
        if name in _OWN:
            yield path, _OWN[name], "leave it out"
        elif not _NAME.fullmatch(name) or len(name) > 64:
            fix = did_you_mean(name, _KNOWN) or f"names that begin with {', '.join(PREFIXES)}"
            yield path, "no variable of NCCL, gloo, UCX or libfabric", fix
        elif _SECRET.search(name):
            yield path, "a secret: everybody reads this file", "leave it out"
        elif not isinstance(value, str):
            continue  # the schema has told that
        elif not _VALUE.fullmatch(value) or "://" in value:
            yield path, f"{value[:60]!r} is no value of such a variable", "letters, digits and _ = ^ . , : ; / % + * [ ] -"
    if len(values or {}) > MOST:
        yield KEY, f"{len(values or {})} variables", f"{MOST} at most"
