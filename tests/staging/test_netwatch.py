"""Who asks for the network is named; who talks to this machine is left alone."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.staging import isolate, netwatch
from tests.command import REPO

ASKS = """
import socket, subprocess, sys
sys.path.insert(0, sys.argv[1])
import phonehome
"""
PLANTED = {
    "connect": "socket.create_connection(('198.51.100.7', 443), 1)",
    "name": "socket.getaddrinfo('telemetry.example.org', 443)",
    "urllib": "urllib.request.urlopen('http://telemetry.example.org:8080/x', timeout=1)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('198.51.100.8', 53))",
    "bytes": "socket.gethostbyname('telemetry.example.org')",
    "ipv6": "socket.socket(socket.AF_INET6).connect(('2001:db8::7', 443))",
}


def watched(folder: Path, code: str) -> list[dict[str, Any]]:
    """What a process that imports a planted library is seen to ask for."""
    site = folder / "site"
    site.mkdir()
    netwatch.write_site(site)
    library = f"import socket, subprocess, sys, urllib.request\ntry:\n    {code}\nexcept OSError as error:\n    print(error)\n"
    (folder / "phonehome.py").write_text(library)
    (folder / "sitecustomize.py").write_text("import os\nos.environ['BOTH_RAN'] = '1'\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{folder}",
        netwatch.LOG: str(folder / "log"),
        netwatch.STEP: "here",
    }
    code = ASKS + "import os\nprint(os.environ['BOTH_RAN'])\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("1\n"), "a sitecustomize of the user's own runs as well"
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()] if (folder / "log").exists() else []


@pytest.mark.parametrize("way", PLANTED)
def test_a_library_that_phones_home_is_named(tmp_path: Path, way: str) -> None:
    """With host, port and the line that asked; through whatever carries it."""
    found = watched(tmp_path, PLANTED[way])[0]
    assert found["library"] == "phonehome" and found["step"] == "here"
    assert found["host"] in ("198.51.100.7", "198.51.100.8", "telemetry.example.org", "2001:db8::7")
    assert any("phonehome.py:3" in line for line in found["stack"])
    assert found["port"] in (443, 8080, 53, None)


def test_a_child_process_is_watched_too(tmp_path: Path) -> None:
    """A library may leave the asking to a process of its own."""
    child = "import socket; socket.create_connection((chr(49) + '92.0.2.1', 80), 1)"
    found = watched(tmp_path, f'subprocess.run([sys.executable, "-c", "{child}"], stderr=subprocess.DEVNULL)')
    assert [(line["host"], line["port"]) for line in found] == [("192.0.2.1", 80)]


@pytest.mark.parametrize(
    "code",
    [
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
        "socket.getaddrinfo('localhost', 80)",
        "socket.getaddrinfo(None, 80)",
        "socket.gethostbyname(socket.gethostname())",
        "socket.socketpair()",
        "socket.socket(socket.AF_UNIX).connect_ex('/nowhere')",
        "socket.create_server(('::1', 0), family=socket.AF_INET6)",
    ],
)
def test_this_machine_is_no_network(tmp_path: Path, code: str) -> None:
    """Ranks meet over loopback: a rehearsal that forbade it would fail every run."""
    assert watched(tmp_path, code) == []


def test_the_hook_runs_on_every_python() -> None:
    """It is loaded into whatever interpreter a child starts: nothing newer than 3.8, nothing that is not its own."""
    source = (REPO / "clustertune/staging/netwatch.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.real_input
@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_the_hook_on_an_old_interpreter(tmp_path: Path, version: str) -> None:
    """The grammar alone does not show what is missing at run time."""
    places = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    python = str(places[0]) if places else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} here")
    netwatch.write_site(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path), netwatch.LOG: str(tmp_path / "log")}
    code = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError as e: print(e)"
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "no network in this rehearsal" in done.stdout and "192.0.2.1" in (tmp_path / "log").read_text()


def ip(target: str, protocol: int, body: bytes) -> bytes:
    """An IP packet to an address."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in target else socket.AF_INET, target)
    if ":" in target:
        return struct.pack("!IHBB16s16s", 6 << 28, len(body), protocol, 64, packed, packed) + body
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0, packed, packed) + body


def tcp(port: int, flags: int) -> bytes:
    return struct.pack("!HHIIBBHHH", 40000, port, 0, 0, 5 << 4, flags, 0, 0, 0)


QUESTION = struct.pack("!HHHHHH", 1, 256, 1, 0, 0, 0) + b"\x03hub\x07example\x00\x00\x01\x00\x01"


def udp(port: int, body: bytes) -> bytes:
    return struct.pack("!HHHH", 40000, port, 8 + len(body), 0) + body


@pytest.mark.parametrize(
    ("packet", "found"),
    [
        (ip("192.0.2.1", 6, tcp(443, 0x02)), ("192.0.2.1", 443, "")),
        (ip("192.0.2.1", 6, tcp(443, 0x12)), None),
        (ip("192.0.2.1", 6, tcp(443, 0x14)), None),
        (ip("127.0.0.1", 6, tcp(443, 0x02)), None),
        (ip("::1", 6, tcp(443, 0x02)), None),
        (ip("2001:db8::1", 6, tcp(443, 0x02)), ("2001:db8::1", 443, "")),
        (ip("192.0.2.1", 17, udp(53, QUESTION)), ("192.0.2.1", 53, "hub.example")),
        (ip("127.0.0.53", 17, udp(53, QUESTION)), ("127.0.0.53", 53, "hub.example")),
        (ip("127.0.0.1", 17, udp(9, b"x")), None),
        (ip("192.0.2.1", 17, udp(9, b"x")), ("192.0.2.1", 9, "")),
        (ip("192.0.2.1", 1, b"ping" * 4), None),
        (b"", None),
        (b"\x45", None),
        (ip("192.0.2.1", 17, b"\x00"), ("192.0.2.1", 0, "")),
    ],
)
def test_what_a_packet_asks_for(packet: bytes, found: tuple[str, int, str] | None) -> None:
    """Answers and loopback are no attempts; a question for a name is one even to a resolver of this machine."""
    assert isolate.parse_packet(packet) == found


def test_native_code_and_other_programs_are_heard(tmp_path: Path) -> None:
    """No hook of Python sees them: in a network of their own every address answers, with a refusal, at once."""
    if (refused := isolate.can_isolate()) is not None:
        pytest.skip(f"no network namespaces here: {refused}")
    code = "echo x > /dev/tcp/198.51.100.9/4433; getent hosts telemetry.example.org; sleep 2; true"
    done = subprocess.run(
        isolate.command(["bash", "-c", code], str(tmp_path / "log")), cwd=REPO, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert ("198.51.100.9", 4433) in [(line["host"], line["port"]) for line in found]
    assert any("bash" in program for line in found for program in line["programs"])
