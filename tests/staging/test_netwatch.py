"""Who asks for the network is named; who talks to this machine is left alone."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.staging import netwatch
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


def watched(folder: Path, *codes: str) -> list[dict[str, Any]]:
    """What a process that imports a planted library is seen to ask for."""
    site = folder / "site"
    site.mkdir()
    netwatch.write_site(site)
    library = "import socket, subprocess, sys, urllib.request\n"
    library += "".join(f"try:\n    {code}\nexcept OSError as error:\n    print(error)\n" for code in codes)
    (folder / "phonehome.py").write_text(library)
    (folder / "sitecustomize.py").write_text("import os\nos.environ['BOTH_RAN'] = '1'\n")
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{folder}"}
    environment |= {netwatch.LOG: str(folder / "log"), netwatch.STEP: "here"}
    code = ASKS + "import os\nprint(os.environ['BOTH_RAN'])\n"
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("1\n"), "a sitecustomize of the user's own runs as well"
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()] if (folder / "log").exists() else []


def test_a_library_that_phones_home_is_named(tmp_path: Path) -> None:
    """With host, port and the line that asked; through whatever carries it."""
    found = watched(tmp_path, *PLANTED.values())
    hosts = {line["host"] for line in found}
    assert hosts == {"198.51.100.7", "198.51.100.8", "telemetry.example.org", "2001:db8::7"}
    assert {line["library"] for line in found} == {"phonehome"} and {line["step"] for line in found} == {"here"}
    assert len({next(text for text in line["stack"] if "phonehome.py:" in text) for line in found}) == len(PLANTED)
    assert {line["port"] for line in found} == {443, 8080, 53, None}


def test_a_child_process_is_watched_too(tmp_path: Path) -> None:
    """A library may leave the asking to a process of its own."""
    child = "import socket; socket.create_connection((chr(49) + '92.0.2.1', 80), 1)"
    found = watched(tmp_path, f'subprocess.run([sys.executable, "-c", "{child}"], stderr=subprocess.DEVNULL)')
    assert [(line["host"], line["port"]) for line in found] == [("192.0.2.1", 80)]


def test_this_machine_is_no_network(tmp_path: Path) -> None:
    """Ranks meet over loopback: a rehearsal that forbade it would fail every run."""
    codes = (
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
        "socket.getaddrinfo('localhost', 80)",
        "socket.getaddrinfo(None, 80)",
        "socket.gethostbyname(socket.gethostname())",
        "socket.socketpair()",
        "socket.socket(socket.AF_UNIX).connect_ex('/nowhere')",
        "socket.create_server(('::1', 0), family=socket.AF_INET6)",
    )
    assert watched(tmp_path, *codes) == []


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
