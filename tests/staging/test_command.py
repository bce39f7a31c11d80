"""``clustertune stage`` as it is typed: on this node, and from a hub of one's own."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.cli.stage import documents
from clustertune.staging import needs
from tests.staging.conftest import DATASET, MODEL, REVISION, run, same, write_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster file whose staging folder is not made yet."""
    return write_cluster(tmp_path / "here.yaml", tmp_path / "local")


def test_on_this_node_and_away_again(tmp_path: Path, cluster: Path, hub_recipe: tuple[Path, Path]) -> None:
    """As the page tells it: shown, copied, verified, removed."""
    recipe, home = hub_recipe
    words = ["stage", recipe, "--node-local", "--cluster", cluster, "--run-dir", tmp_path / "run", "--json"]
    shown = run(*words, "--dry-run", HF_HOME=str(home))
    assert shown.code == 0 and shown.json["trees"][0]["there"] is False and not list((tmp_path / "local").rglob("*.json"))
    first = run(*words, HF_HOME=str(home))
    assert first.code == 0, first.err
    tree = first.json["trees"][0]
    assert tree["name"] == "tiny-llama" and tree["revision"] == REVISION and tree["copied"] == tree["bytes"] > 100_000
    assert same(Path(tree["path"]), needs.snapshot(home / "hub", "models", MODEL, REVISION))
    assert "GB/s" in first.err and "no prepared data" in first.err
    assert run(*words, HF_HOME=str(home)).json["trees"][0]["reused"] is True
    look = run("stage", "--clean", "--cluster", cluster, "--dry-run", "--json")
    assert len(look.json["kept"]) == 1 and Path(tree["path"]).is_dir()
    done = run("stage", "--clean", "--cluster", cluster, "--json")
    assert done.code == 0 and len(done.json["removed"]) == 1
    assert not Path(tree["path"]).exists() and not list((tmp_path / "local").rglob("*.lock"))[1:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes/tiny-oasst2", "--cluster", "rno-rtxpro6000"], "storage.staging"),
        (["recipes/tiny-oasst2", "--cluster", "{cluster}", "--run-dir", "{tmp}/none"], "nothing of this recipe is there"),
        (["--cluster", "{cluster}"], "a recipe is missing"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--clean"], "exclude each other"),
        (["recipes/tiny-oasst2", "--ifeval", "x.jsonl"], "--eval-data is for --to"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--ifeval", "{tmp}/none.jsonl"], "cannot be read"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--ifeval", "{cluster}"], "invalid-json"),
        (["--verify", "{tmp}"], "is not a folder of staged inputs"),
        (["--verify", "{tmp}/none"], "is not a folder of staged inputs"),
        (["recipes/tiny-oasst2", "model.path={tmp}/none", "model.weights=hub", "--cluster", "{cluster}"], "no such folder"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, cluster: Path, words: list[str], message: str) -> None:
    """With a remedy, and nothing is written."""
    done = run("stage", *(word.format(cluster=cluster, tmp=tmp_path) for word in words))
    assert done.code == 2 and message in done.err, done.err
    assert not (tmp_path / "o").exists()


def test_documents_of_nodes_that_speak_at_once() -> None:
    """srun labels each line with its task; blanks and line ends vary with the number of tasks."""
    mixed = '0: {\n1: {\n0:   "host": "a",\n1:   "host": "b"\n0:   "n": 1\n0: }\n1: }\n2: no JSON\n'
    assert documents(mixed) == {0: {"host": "a", "n": 1}, 1: {"host": "b"}, 2: {"unreadable": "no JSON"}}


# --- a hub on loopback -------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a download asks for: what a commit holds, and its files."""

    folders: dict[str, Path]
    spoil = ""
    """The name of a file that arrives with a changed byte."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_arguments: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        for name, folder in self.folders.items():
            prefix = "datasets/" if name == DATASET else ""
            if path in {f"/api/{prefix or 'models/'}{name}/revision/{REVISION}", f"/api/{prefix or 'models/'}{name}"}:
                names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
                document = {"id": name, "sha": REVISION, "siblings": [{"rfilename": n} for n in names], "private": False}
                self._send(json.dumps({**document, "tags": [], "downloads": 0, "likes": 0}).encode(), body=body)
                return
            if path.startswith(f"/api/{prefix or 'models/'}{name}/tree/{REVISION}"):
                self._send(
                    json.dumps([self._entry(folder, p) for p in sorted(folder.rglob("*")) if p.is_file()]).encode(), body=body
                )
                return
            start = f"/{prefix}{name}/resolve/{REVISION}/"
            if path.startswith(start) and (folder / path.removeprefix(start)).is_file():
                content = (folder / path.removeprefix(start)).read_bytes()
                self._send(content, body=body, etag=_etag(path, content), spoil=bool(self.spoil and path.endswith(self.spoil)))
                return
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": _git(content)}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _send(self, content: bytes, *, body: bool, etag: str = "", spoil: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if body:
            self.wfile.write(content[:-1] + bytes([content[-1] ^ 1]) if spoil else content)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _etag(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if path.endswith(".safetensors") else _git(content)


@pytest.fixture
def hub(hub_recipe: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    """The address of a hub on loopback that has the recipe's model and dataset."""
    folders = {}
    for kind, name in (("models", MODEL), ("datasets", DATASET)):
        source = needs.snapshot(hub_recipe[1] / "hub", kind, name, REVISION)
        folders[name] = Path(shutil.copytree(source, tmp_path / "served" / kind))
    (folders[MODEL] / "pytorch_model.bin").write_bytes(b"weights in another form")
    handler = type("Served", (Hub,), {"folders": folders})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.jobs
def test_downloaded_and_compared_with_the_hubs_own_digests(
    tmp_path: Path, hub_recipe: tuple[Path, Path], hub: tuple[str, type[Hub]]
) -> None:
    """What a proxy or a disk has spoilt on the way is not sealed; the next call continues."""
    address, handler = hub
    recipe, home = hub_recipe
    empty = tmp_path / "home"
    shutil.copytree(home / "hub", empty / "hub", ignore=shutil.ignore_patterns("*example-org*"), symlinks=True)
    words = ["stage", recipe, "--to", tmp_path / "out"]
    environment = {"HF_HOME": str(empty), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
    handler.spoil = "tokenizer.json"
    broken = run(*words, **environment)
    assert broken.code == 75 and "tokenizer.json: came from the network as" in broken.err, broken.err
    assert not (tmp_path / "out" / manifest.MANIFEST).exists()
    handler.spoil = ""
    done = run(*words, "--json", **environment)
    assert done.code == 0, done.err
    model = needs.snapshot(tmp_path / "out/hub", "models", MODEL, REVISION)
    assert same(model, needs.snapshot(home / "hub", "models", MODEL, REVISION)), "and no weights in another form"
    assert manifest.find_problems(tmp_path / "out") == []
    found = {part["what"]: part["from"] for part in done.json["parts"]}
    assert found["model"] == found["data"] == "the network"


def test_the_bench_measures_all_three_ways(tmp_path: Path) -> None:
    """The page's figures come from it: small here, the same code."""
    words = [sys.executable, "-m", "tools.staging_bench", "--gb", "0.02", "--rounds", "1", "--place", str(tmp_path), "--json"]
    done = subprocess.run([*words, "--digests"], capture_output=True, text=True, check=True, timeout=300)
    body = json.loads(done.stdout)
    assert set(body["median"]) == {"cp", "stage", "verify"} and body["bytes"] > 10_000_000
    assert list(tmp_path.iterdir()) == []
