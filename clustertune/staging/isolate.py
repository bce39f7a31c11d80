"""A process in a network of its own that leads nowhere, and an ear on it for what no Python hook sees.

The process is started in a new user and network namespace in which every address is this machine's (a local route for all of
IPv4 and IPv6): a connection is refused at once in place of a minute of waiting, and the packet that asked for it, or for a
name, passes over loopback, where it is read. So native code and programs that are not Python are seen as well.

Run inside: ``python -m clustertune.staging.isolate LOG command ...``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREFIX = ("unshare", "--user", "--map-root-user", "--net")
_DNS = 53
_TRY_SECONDS = 20.0


def can_isolate() -> str | None:
    """None where this machine allows such a process; else why not."""
    if shutil.which("unshare") is None:
        return "unshare is not installed (util-linux)"
    try:
        done = subprocess.run([*PREFIX, "true"], capture_output=True, text=True, timeout=_TRY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or "unshare failed"


def command(words: Sequence[str], log: str) -> list[str]:
    """``words`` in such a network; what is heard goes to ``log``, one JSON object a line."""
    return [*PREFIX, sys.executable, "-m", "clustertune.staging.isolate", log, *words]


def _raise_loopback() -> None:
    """What ``ip link set lo up`` does: SIOCGIFFLAGS, then SIOCSIFFLAGS with IFF_UP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(asked, 0x8913, request))[1]
        fcntl.ioctl(asked, 0x8914, struct.pack("16sH14s", b"lo", flags | 1, b""))


def _everything_is_here() -> bool:
    """A local route for every address, by netlink (RTM_NEWROUTE of rtnetlink(7)); False where the kernel refuses."""
    done = False
    lo = socket.if_nametoindex("lo")
    for family in (socket.AF_INET, socket.AF_INET6):
        # rtmsg: family, lengths 0, tos 0, table local (255), protocol boot (3), scope host (254), type local (2), flags
        body = struct.pack("BBBBBBBBI", family, 0, 0, 0, 255, 3, 254, 2, 0) + struct.pack("HHI", 8, 4, lo)  # RTA_OIF
        header = struct.pack("IHHII", 16 + len(body), 24, 0x1 | 0x4 | 0x400, 1, 0)  # REQUEST, ACK, CREATE
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
                kernel.settimeout(2)
                kernel.sendto(header + body, (0, 0))
                answer = kernel.recv(4096)
                done |= struct.unpack("i", answer[16:20])[0] == 0
        except OSError:
            continue
    return done


def parse_packet(packet: bytes) -> tuple[str, int, str] | None:
    """Address, port and (of a question for a name) the name that an IP packet asks for; None where it asks for nothing.

    Asking is the first packet of a TCP connection, or a UDP packet. On loopback only a question for a name counts: a
    resolver of this machine (systemd-resolved) passes it on.
    """
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        start, protocol, target = (packet[0] & 15) * 4, packet[9], packet[16:20]
    elif len(packet) >= 40 and packet[0] >> 4 == 6:
        start, protocol, target = 40, packet[6], packet[24:40]
    else:
        return None
    body = packet[start:].ljust(14, b"\0")
    address, port = ipaddress.ip_address(target), int.from_bytes(body[2:4], "big")
    name = question(body[8:]) if (protocol, port) == (socket.IPPROTO_UDP, _DNS) else ""
    begins = protocol == socket.IPPROTO_UDP or (protocol == socket.IPPROTO_TCP and body[13] & 0x12 == 0x02)  # SYN, no ACK
    wanted = bool(name) if address.is_loopback else begins
    return (str(address), port, name) if wanted else None


def question(body: bytes) -> str:
    """The name in a DNS query (RFC 1035, 4.1.2); empty where it is none."""
    labels, at = [], 12
    while at < len(body) and body[at]:
        labels.append(body[at + 1 : at + 1 + body[at]].decode("ascii", "replace"))
        at += 1 + body[at]
    return ".".join(labels)


def _programs() -> list[str]:
    """The command lines of what runs in this network, without this process."""
    here, found = _network(os.getpid()), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _network(int(entry.name)) == here:
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes()[:500]
                found.append(text.replace(b"\0", b" ").decode(errors="replace").strip())
    return sorted(filter(None, found))


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _listen(log: str, ear: socket.socket) -> None:
    own = socket.gethostname().lower()
    seen: set[tuple[str, int, str]] = set()
    while True:
        packet, address = ear.recvfrom(65536)
        if address[2] != socket.PACKET_OUTGOING:
            continue
        found = parse_packet(packet)
        if found is None or found in seen or found[2].lower().split(".")[0] == own.split(".")[0]:
            continue
        seen.add(found)
        host, port, name = found
        line: dict[str, Any] = {"event": "packet", "host": name or host, "port": port, "time": time.time()}
        line["programs"] = _programs()
        with Path(log).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Set up the network, listen, run the command, and end with its exit code."""
    log, *words = arguments
    _raise_loopback()
    if _everything_is_here():
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.ntohs(0x0003))  # ETH_P_ALL, without link headers
        threading.Thread(target=_listen, args=(log, ear), daemon=True).start()
    code = subprocess.call(words)
    time.sleep(0.2)  # what was sent last is still on its way to the ear
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
