"""How a node's facts come through srun: short lines, since srun passes on 1024 bytes of a line as one piece, not more.

Standard library only, Python 3.8 or later.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable
from typing import Any

from clustertune.host.facts import HostFacts, from_dict

_WIDTH = 600
"""Characters of a piece; with its head it stays below the 1024 bytes of which srun makes one message."""
_LINE = re.compile(r"clustertune-facts (\S+) (\d+)/(\d+) ([0-9a-f]{8}) (\S*)$")
MAX_BYTES = 8 << 20
"""A node's facts take some 20 kB; what is packed must not fill memory when it is unpacked."""


def encode(facts: HostFacts, name: str = "") -> list[str]:
    """The lines that carry the facts of one machine; ``name`` is what Slurm calls it."""
    text = json.dumps(facts.as_dict()).encode()
    packed = base64.b64encode(zlib.compress(text, 6)).decode()
    pieces = [packed[at : at + _WIDTH] for at in range(0, len(packed), _WIDTH)]
    check = f"{zlib.crc32(text):08x}"
    word = re.sub(r"\s+", "_", name or facts.hostname) or "?"
    return [f"clustertune-facts {word} {n}/{len(pieces)} {check} {piece}" for n, piece in enumerate(pieces, 1)]


def decode(lines: Iterable[str]) -> tuple[dict[str, HostFacts], dict[str, str], list[str]]:
    """Facts by node, what is wrong by node, and the lines that are not facts (warnings of srun, of a container)."""
    pieces: dict[str, dict[int, str]] = {}
    heads: dict[str, set[tuple[int, str]]] = {}
    others = []
    for line in lines:
        found = _LINE.search(line.rstrip())
        if found is None:
            if line.strip():
                others.append(line.rstrip())
            continue
        name, number, of, check, piece = found.groups()
        heads.setdefault(name, set()).add((int(of), check))
        pieces.setdefault(name, {})[int(number)] = piece
    facts, faults = {}, {}
    for name, seen in heads.items():
        try:
            if len(seen) > 1:
                raise ValueError("its lines do not belong together")
            facts[name] = _whole(pieces[name], *next(iter(seen)))
        except (ValueError, zlib.error) as error:
            faults[name] = f"its facts came damaged: {error}"
    return facts, faults, others


def _whole(pieces: dict[int, str], count: int, check: str) -> HostFacts:
    if set(pieces) != set(range(1, count + 1)):
        raise ValueError(f"{len(pieces)} of {count} lines")
    packed = base64.b64decode("".join(pieces[n] for n in range(1, count + 1)), validate=True)
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(packed, MAX_BYTES)
    if f"{zlib.crc32(text):08x}" != check:
        raise ValueError("its checksum differs")
    document: Any = json.loads(text)
    return from_dict(document)
