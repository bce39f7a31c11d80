"""How a node's facts come through srun: short lines, since srun passes on 1024 bytes of a line as one piece, not more.

As a program it prints the facts of one machine in such lines: what ``clustertune doctor`` has run on every node.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from clustertune.host.collect import collect
from clustertune.host.facts import HostFacts, from_dict

_WIDTH = 600
"""Characters of a piece; with its head it stays below the 1024 bytes of which srun makes one message."""
_LINE = re.compile(r"clustertune-facts (\S+) (\d+)/(\d+) (\S*)$")
MAX_BYTES = 8 << 20
"""A node's facts take some 20 kB; what is packed must not fill memory when it is unpacked."""


def command(place: str, seconds: float, **look: Sequence[str]) -> list[str]:
    """The command that prints the facts of a machine; its arguments as of :func:`clustertune.host.collect.collect`."""
    given: dict[str, Any] = {"place": place, "seconds": seconds, **look}
    return [sys.executable, "-m", "clustertune.doctor.node_facts", json.dumps(given)]


def encode(facts: HostFacts, name: str = "") -> list[str]:
    """The lines that carry the facts of one machine; ``name`` is what Slurm calls it."""
    packed = base64.b64encode(zlib.compress(json.dumps(facts.as_dict()).encode())).decode()
    pieces = [packed[at : at + _WIDTH] for at in range(0, len(packed), _WIDTH)]
    word = re.sub(r"\s+", "_", name or facts.hostname) or "?"
    return [f"clustertune-facts {word} {n}/{len(pieces)} {piece}" for n, piece in enumerate(pieces, 1)]


def decode(lines: Iterable[str]) -> tuple[dict[str, HostFacts], dict[str, str], list[str]]:
    """Facts by node, what is wrong by node, and the lines that are not facts (warnings of srun, of a container)."""
    pieces: dict[str, dict[tuple[int, int], str]] = {}
    facts, faults, others = {}, {}, []
    for line in lines:
        if found := _LINE.search(line.rstrip()):
            pieces.setdefault(found[1], {})[int(found[2]), int(found[3])] = found[4]
        elif line.strip():
            others.append(line.rstrip())
    for name, parts in pieces.items():
        try:
            if sorted(parts) != [(n, len(parts)) for n in range(1, len(parts) + 1)]:
                raise ValueError("lines are missing")
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(base64.b64decode("".join(parts[key] for key in sorted(parts)), validate=True), MAX_BYTES)
            if not unpacker.eof:  # zlib has compared its own checksum there
                raise ValueError("they end early")
            facts[name] = from_dict(json.loads(text))
        except (ValueError, zlib.error) as error:
            faults[name] = f"its facts came damaged: {error}"
    return facts, faults, others


if __name__ == "__main__":
    found = collect(**json.loads(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in encode(found, os.environ.get("SLURMD_NODENAME", ""))))
    sys.stdout.flush()
    # Threads that wait for a driver or a server which is gone would keep the interpreter from ending.
    os._exit(0)
