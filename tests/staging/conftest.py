"""Folders to copy, shelves to copy to, and a recipe whose model and dataset lie in a cache of the Hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from clustertune.cluster.schema import Staging
from clustertune.recipe.eval_tasks import first_task
from clustertune.staging import cache, needs
from clustertune.staging.cache import SourceFolder, Stager
from tests import command
from tests.command import Done
from tests.fake_hub import oid

REPO = Path(__file__).resolve().parents[2]
MIB = 1 << 20
REVISION = "0123456789abcdef0123456789abcdef01234567"
MODEL, DATASET = "example-org/tiny-llama", "example-org/talks"

CLUSTER = """\
name: staged
nodes: [{{name: {host}, address: 127.0.0.1, roles: [login, compute]}}]
compute: {{gpus: 0, cores: 2, threads: 2, memory_gb: 4}}
network: {{kind: none}}
storage: {{staging: {{path: {path}, gb: {gb}}}}}
"""


def fill(folder: Path, sizes: dict[str, int], seed: int = 0) -> Path:
    """A folder of files with bytes that no compression and no sparse file can hide."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate(sizes.items()):
        block = hashlib.sha256(f"{seed} {number}".encode()).digest() * 4096
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((block * (size // len(block) + 1))[:size])
    return folder


def write_cluster(path: Path, staging: Path, gb: float = 10) -> Path:
    """A cluster file of this machine with a staging folder."""
    path.write_text(CLUSTER.format(host=os.uname().nodename, path=staging, gb=gb))
    return path


class Bench:
    """A shelf, and what was said while something was put on it."""

    def __init__(self, path: Path, gb: float = 10, *, deep: bool = True, stall: float = 60) -> None:
        path.mkdir(exist_ok=True)
        self.messages: list[str] = []
        self.cache = cache.open_cache(Staging(path=str(path), gb=gb))
        self.stager = Stager(self.cache, stall, deep=deep, tell=self.messages.append)

    def stage(self, root: Path, what: str = "data") -> Path:
        """Stage a folder and let it go again; the copy's folder."""
        found = self.stager.stage(SourceFolder(what, root.name, root))
        found.release()
        return found.path

    @property
    def words(self) -> str:
        return "\n".join(self.messages)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "local")


def same(one: Path, other: Path) -> bool:
    """Two folders hold the same visible files with the same bytes."""

    def content(folder: Path) -> dict[str, bytes]:
        paths = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    return content(one) == content(other)


def flip(path: Path, at: int = 0) -> None:
    """Change one byte, and leave size and modification time as they were."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def into_hub_cache(cache: Path, kind: str, name: str, revision: str, files: Path) -> Path:
    """Put a folder into a cache of the Hub as huggingface_hub does: blobs under their digests, a snapshot of links to them."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    for path in sorted(p for p in files.rglob("*") if p.is_file() and p.name != "MANIFEST.json"):
        content = path.read_bytes()
        large = path.suffix in (".safetensors", ".parquet")
        blob = repository / "blobs" / (hashlib.sha256(content).hexdigest() if large else oid(content))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / path.relative_to(files)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def talks(question: str, count: int) -> str:
    """Conversations as JSON lines."""
    both = [[("user", f"{question} {n}"), ("assistant", f"answer {n}.")] for n in range(count)]
    rows = ({"messages": [{"role": role, "content": text} for role, text in turns]} for turns in both)
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_hub_recipe(parent: Path, model: Path) -> tuple[Path, Path]:
    """A recipe that names a model and a dataset of the Hub, and the cache (HF_HOME) in which both lie, with the benchmark."""
    home = parent / "hf"
    into_hub_cache(home / "hub", "models", MODEL, REVISION, model)
    rows = parent / "rows"
    rows.mkdir()
    for split, count in (("train", 12), ("validation", 3)):
        (rows / f"{split}.jsonl").write_text(talks(split, count))
    into_hub_cache(home / "hub", "datasets", DATASET, REVISION, rows)
    folder = parent / "recipes" / "hubby"
    shutil.copytree(REPO / "recipes/tiny-oasst2", folder)
    shutil.copytree(REPO / "recipes/_base", folder.parent / "_base")
    text = (folder / "recipe.yaml").read_text()
    text = text.replace("{name: tiny-llama, weights: random}", f"{{name: {MODEL}, revision: {REVISION}}}")
    text = text.replace(
        "{name: tiny-oasst2, input: conversations.jsonl, format: oasst-tree, language: en}",
        f"{{name: {DATASET}, revision: {REVISION}, format: messages}}",
    )
    (folder / "recipe.yaml").write_text(text.replace("base: sft-lora", "base: [sft-lora, calm]"))
    # The model is described by another recipe that trains it, and there are two bases: both must go along.
    (folder / "model.json").unlink()
    described = folder.parent / "described"
    described.mkdir()
    (described / "recipe.yaml").write_text(f"model: {{name: {MODEL}, revision: {REVISION}}}\n")
    shutil.copy(model / "config.json", described / "model.json")
    (folder.parent / "_base" / "calm.yaml").write_text("train: {adam_epsilon: 1.0e-7}\n")
    (folder / "conversations.jsonl").unlink()
    stand_in = first_task()
    assert stand_in.hub is not None and stand_in.fallback is not None
    file = needs.snapshot(home / "hub", "datasets", stand_in.hub.name, stand_in.hub.revision) / stand_in.hub.file
    file.parent.mkdir(parents=True)
    shutil.copy(stand_in.folder / stand_in.fallback.file, file)
    return folder, home


@pytest.fixture(scope="session")
def hub_recipe(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """A recipe on a cache of the Hub, and that cache. Read only."""
    return make_hub_recipe(tmp_path_factory.mktemp("hubby"), tiny_model)


@pytest.fixture(scope="session")
def parcel_of_all(hub_recipe: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the recipe needs in one folder, collected without a network. Read only."""
    recipe, home = hub_recipe
    out = tmp_path_factory.mktemp("parcel") / "out"
    done = run("stage", recipe, "--to", out, "--json", network=False, HF_HOME=str(home))
    assert done.code == 0, done.err
    assert {part["what"] for part in done.json["parts"]} == {"model", "data", "benchmark", "recipe"}
    return out


def run(*arguments: str | Path, network: bool = True, **environment: str) -> Done:
    """The real command with variables of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return command.run(*arguments, network=network)
