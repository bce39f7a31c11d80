"""What the rules of the links between GPUs look at: a result of ``nccl-check`` and NCCL's logs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from clustertune.check.machine import RDMA_KINDS, Expects, Machine
from clustertune.check.rule import FAIL, Seen, listed
from clustertune.host.facts import HostFacts, RdmaPort, from_dict
from clustertune.host.gpus import has_nvlink
from clustertune.nccl_check.nccl_log import Log, LoggedDevice

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "p2p")
"""What is measured, in the order of what training needs most: sharded data parallelism gathers and scatters."""
PLUGIN_KINDS = ("efa", "slingshot")
"""Networks that NCCL reaches through a plugin only."""


def names(items: Iterable[str], most: int = 4) -> str:
    """``n1, n2 and 6 more``; names that are empty are left out."""
    return listed(sorted({item for item in items if item}), most)


def short(host: str) -> str:
    """The first part of a host's name, as NCCL writes it."""
    return host.partition(".")[0]


def gbit(value: float) -> str:
    """A speed for people."""
    return f"{value:g} Gbit/s"


class LinkContext:
    """One result and its logs, as the rules ask for them. What is absent, or not of the type that it must have, is empty."""

    def __init__(self, document: Mapping[str, Any], log: Log) -> None:
        self.document = document
        self.log = log

    # --- the document --------------------------------------------------------------------------------------------------

    def text(self, key: str) -> str:
        """A string of the document."""
        value = self.document.get(key)
        return value if isinstance(value, str) else ""

    def entries(self, key: str) -> list[dict[str, Any]]:
        """A list of objects of the document."""
        value = self.document.get(key)
        return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

    def section(self, *keys: str) -> dict[str, Any]:
        """An object in the document."""
        value: Any = self.document
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return dict(value) if isinstance(value, Mapping) else {}

    def stated(self, part: str, key: str) -> str:
        """A string of what the cluster file says; empty where it says nothing."""
        value = self.section("expected", part).get(key)
        return value if isinstance(value, str) else ""

    @cached_property
    def backend(self) -> str:
        """``nccl``, ``gloo``; empty where nothing says it."""
        return self.text("backend") or ("nccl" if self.log.lines else "")

    @cached_property
    def facts(self) -> list[HostFacts]:
        """Of each node that reported them."""
        found = []
        for item in self.entries("facts"):
            with contextlib.suppress(ValueError, TypeError):
                found.append(_typed(from_dict(item)))
        return found

    @cached_property
    def nodes(self) -> int:
        """Nodes that took part; 0: not known."""
        return int(number(self.document.get("nodes")) or self.log.node_count() or len(self.facts))

    @cached_property
    def ranks(self) -> int:
        """Ranks of each node that took part; 0: not known."""
        stated = number(self.document.get("gpus_per_node"))
        most = max((len(ranks) for ranks in self.log.local_ranks.values()), default=0)
        spread = -(-self.log.ranks // self.log.nodes) if self.log.nodes else 0
        return int(stated or self.log.local_count or max(most, spread))

    @cached_property
    def several(self) -> bool:
        """Whether ranks of more than one node talked over NCCL."""
        return self.nodes > 1 and self.backend == "nccl"

    def from_log(self, *kinds: str) -> list[Seen]:
        """What NCCL said first of these kinds of fault, a failure of all hosts that said it; nothing where it said nothing."""
        faults = [fault for fault in self.log.faults if fault.kind in kinds]
        return [Seen(FAIL, faults[0].text, where=names(fault.host for fault in faults))] if faults else []

    # --- the network ---------------------------------------------------------------------------------------------------

    @cached_property
    def kind(self) -> str:
        """The network's kind, as the cluster file says; empty where it does not."""
        kind = self.stated("network", "kind")
        return kind if kind not in ("unknown", "none") else ""

    @cached_property
    def configured_interface(self) -> str:
        """The interface that ranks of several nodes must use; empty: none is named."""
        return self.text("interface") or self.stated("network", "interface")

    @cached_property
    def over(self) -> set[str]:
        """How bytes went between nodes, as NCCL names it: ``Socket``, ``IB``, ``AWS Libfabric``; empty: not known."""
        if not self.several:
            return set()
        parts = [part.strip() for part in self.text("transport").split(",")]
        named = {part.split("/")[1] for part in parts if part.startswith("NET/")}
        return set(self.log.between()) or set(self.log.networks) or named

    @cached_property
    def by_socket(self) -> bool:
        """Whether TCP carried the traffic between nodes."""
        return "Socket" in self.over

    def used_interfaces(self, host: str) -> list[LoggedDevice]:
        """Interfaces that carried TCP on a host: by the log, or by what ranks were given."""
        log = self.log
        for known in (log.sockets, log.bootstrap):
            for name, devices in known.items():
                if name and short(name) == short(host):
                    return devices
        return [LoggedDevice(self.configured_interface, "")] if self.configured_interface else []

    def rdma_active(self, layer: str = "") -> list[tuple[HostFacts, RdmaPort]]:
        """Ports of RDMA adapters that are up, of a link layer or of all."""
        ports = [(facts, port) for facts in self.facts for port in facts.rdma if port.active]
        return [(facts, port) for facts, port in ports if not layer or port.link_layer == layer]

    @cached_property
    def machines(self) -> list[Machine]:
        """The nodes as the rules of a machine see them, with the interface and the variables that ranks had."""
        network, hca = self.section("expected", "network"), self.section("expected", "network").get("hca")
        tried = [(str(item.get("node")), str(item.get("status"))) for item in self.entries("p2p_probe")]
        variables = {name: value for name, value in self.section("environment").items() if isinstance(value, str)}
        if not self.rdma_active() and self.kind not in RDMA_KINDS:  # there is nothing that the variable could take away
            variables.pop("NCCL_IB_DISABLE", None)
        stated = {
            "kind": self.kind,
            "subnet": self.stated("network", "subnet") or None,
            "hca": [name for name in hca if isinstance(name, str)] if isinstance(hca, (list, tuple)) else [],
            "ports": int(number(network.get("ports"))),
            "environment": self.section("expected", "network", "environment"),
        }
        compute = {"interconnect": self.stated("compute", "interconnect") or None}
        gpus = (self.ranks or None) if self.backend == "nccl" else None
        found = []
        for facts in self.facts:
            used = [device.name for device in self.used_interfaces(facts.hostname)]
            named = self.configured_interface or (used[0] if len(used) == 1 else "")
            mine = {status for node, status in tried if node == facts.hostname}
            p2p = False if "hung" in mine else True if "ok" in mine else None
            cluster = {"network": {**stated, "interface": named}, "compute": compute}
            expects = Expects(gpus=gpus, nodes=self.nodes, ran=True, p2p=p2p)
            found.append(Machine(replace(facts, environment={**facts.environment, **variables}), cluster, expects))
        return found

    # --- settings ------------------------------------------------------------------------------------------------------

    def settings(self, name: str) -> dict[str, set[str]]:
        """The values of one of NCCL's variables, each with the hosts that had it ("" where that is not known)."""
        found = {value: set(hosts) for value, hosts in self.log.settings.get(name, {}).items()}
        stated = self.section("environment").get(name)
        if isinstance(stated, str):
            found.setdefault(stated, set())
        return found

    def setting(self, name: str) -> str:
        """The value of a variable, where it is set; the first of several."""
        return next(iter(sorted(value for value in self.settings(name) if value)), "")

    def is_on(self, name: str) -> bool:
        """Whether a variable is set to something else than 0, anywhere."""
        return any(value not in ("", "0") for value in self.settings(name))

    # --- the node ------------------------------------------------------------------------------------------------------

    @cached_property
    def interconnect(self) -> str:
        """``nvlink4``, ``pcie5``: of the GPUs of a node, by the cluster file or what a node says; empty: not known."""
        stated = self.section("expected", "compute").get("interconnect")
        if isinstance(stated, str) and stated != "none":
            return stated
        topology = next((facts.topology for facts in self.facts if facts.topology), "")
        if topology:
            return "nvlink" if has_nvlink(topology) else "pcie"
        return ("nvlink" if "NVL" in self.log.gpu_paths else "pcie") if self.log.gpu_paths else ""

    @property
    def nvlink(self) -> bool:
        """Whether NVLink joins the GPUs of a node."""
        return self.interconnect.startswith("nvlink")


def number(value: object) -> float:
    """A figure of the document; 0 where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if math.isfinite(value) else 0.0


_TYPES = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float), "list": (list,), "dict": (dict,)}


def _typed(item: Any) -> Any:
    """A record with an empty value wherever one is not of the type that it must have: a file may come from anywhere."""
    for part in fields(item):
        declared, value = str(part.type), getattr(item, part.name)
        kind = declared.partition("[")[0].partition(" ")[0]
        as_number = kind in ("int", "float") and isinstance(value, bool)
        if as_number or not isinstance(value, _TYPES.get(kind, (object,))):
            setattr(item, part.name, None if "None" in declared else {"str": "", "list": [], "dict": {}}.get(kind))
        elif isinstance(value, list):
            kept = [word for word in value if isinstance(word, str)] if "str" in declared else value
            setattr(item, part.name, kept)
            for inner in filter(is_dataclass, kept):
                _typed(inner)
    return item
