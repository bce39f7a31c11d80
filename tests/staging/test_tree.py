"""Which files are copied, and copies on the node: never a wrong file, whatever happens to source, disk or process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.cluster.schema import Staging
from clustertune.errors import ExitCode, UserError
from clustertune.staging import cache, hashed_copy
from clustertune.staging.cache import SourceFolder
from clustertune.staging.hashed_copy import walk_source
from tests.command import REPO
from tests.slurm import wait_for
from tests.staging.conftest import MIB, MODEL, REVISION, Bench, fill, flip, into_hub_cache, same

SIZES = {"config.json": 300, "empty": 0, "sub/one.bin": 3 * MIB + 5, "two.safetensors": hashed_copy.BLOCK + 1}

PROGRAM = """
import sys
from pathlib import Path
from tests.staging.conftest import Bench
bench = Bench(Path(sys.argv[1]), float(sys.argv[3]))
try:
    print(bench.stage(Path(sys.argv[2])))
finally:
    print(bench.words, file=sys.stderr)
"""
"""Stage a folder in a process of its own."""


def start(
    local: Path, root: Path, gb: float = 10, *, prefix: tuple[str, ...] = (), program: str = PROGRAM
) -> subprocess.Popen[str]:
    words = [*prefix, sys.executable, "-c", program, str(local), str(root), str(gb)]
    return subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_copy_is_the_source_and_is_used_again(tmp_path: Path, bench: Bench) -> None:
    """By the next reader at once: a job of days holds its copy. A source that was made anew is another tree."""
    root = fill(tmp_path / "source", SIZES)
    first = bench.stager.stage(SourceFolder("data", "source", root))
    assert same(root, first.path) and first.copied == sum(SIZES.values())
    again = bench.stager.stage(SourceFolder("data", "source", root))
    assert again.copied == 0 and again.path == first.path
    for item in (first, again):
        item.release()
    time.sleep(0.01)
    fill(root, SIZES, seed=1)
    new = bench.stage(root)
    assert new != first.path and same(root, new)


SPOILT = {
    "written to": (lambda path: (path / "sub/one.bin").write_bytes(bytes(SIZES["sub/one.bin"])), SIZES["sub/one.bin"]),
    "missing": (lambda path: (path / "config.json").unlink(), SIZES["config.json"]),
    # transformers reads an adapter_config.json that it finds beside a model.
    "foreign": (lambda path: (path / "adapter_config.json").write_text("{}"), 0),
    # datasets writes its tables beside the data: that is no damage.
    "a library's own": (lambda path: fill(path / ".cache", {"table.arrow": 100}), 0),
}


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("what", SPOILT)
def test_only_what_is_damaged_in_the_copy_is_copied_again(tmp_path: Path, what: str, deep: bool) -> None:
    """In a job what was not written to since is not read."""
    bench, (spoil, copied) = Bench(tmp_path / "local", deep=deep), SPOILT[what]
    root = fill(tmp_path / "source", SIZES)
    path = bench.stage(root)
    spoil(path)
    found = bench.stager.stage(SourceFolder("data", "source", root))
    found.release()
    assert same(root, path) and found.copied == copied
    assert ("damaged, missing or foreign: source/" in bench.words) == (what != "a library's own")


def test_what_the_file_system_itself_lost_is_found_by_hashing(tmp_path: Path, bench: Bench) -> None:
    """A bad block changes neither size nor time: the command reads every byte."""
    root = fill(tmp_path / "source", SIZES)
    path = bench.stage(root)
    flip(path / "two.safetensors", 5)
    bench.stage(root)
    assert same(root, path)


@pytest.mark.parametrize("kind", ["hub", "small file of the hub", "model", "merged"])
def test_a_flipped_byte_in_the_source_is_refused(tmp_path: Path, bench: Bench, kind: str) -> None:
    """The folder itself says what it should hold: a damaged file on the shared storage must not spread.

    A chat template with one changed byte trains another model; git names small files by SHA-1.
    """
    root = fill(tmp_path / "source", {"config.json": 300, "model.safetensors": 9 * MIB})
    if "hub" in kind:
        root = into_hub_cache(tmp_path / "hub", "models", MODEL, REVISION, root)
        name, at = ("model.safetensors", 8 * MIB + 3) if kind == "hub" else ("config.json", 7)
        flip(Path(os.path.realpath(root / name)), at)
    else:
        fast = {name: manifest.hash_file(root / name, manifest.XXH3_128) for name in manifest.list_files(root)}
        manifest.seal(root, kind, {}, fast if kind == "merged" else None)
        flip(root / "model.safetensors", 8 * MIB + 3)
    with pytest.raises(UserError, match="its content differs from") as caught:
        bench.stage(root, "model")
    assert {"merged": "xxh3_128", "small file of the hub": "git_sha1"}.get(kind, "sha256") in str(caught.value)
    assert not any((tree / manifest.MANIFEST).exists() for tree in bench.cache.root.iterdir())


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody downloads the model once more while it is copied."""
    root = fill(tmp_path / "source", SIZES)
    real = hashed_copy.mirror

    def mirror(*args: object) -> object:
        (root / "late.bin").write_bytes(b"x")
        return real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(UserError, match="changed while it was copied") as caught:
        patch.setattr(hashed_copy, "mirror", mirror)
        bench.stage(root)
    assert caught.value.code is ExitCode.AGAIN
    assert same(root, bench.stage(root))


CHANGES = {
    "append": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "truncate": lambda path: os.truncate(path, MIB),
    "replace": lambda path: (path.unlink(), fill(path.parent, {path.name: 30 * MIB}, seed=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an old file and half of a new one have the right size."""
    root = fill(tmp_path / "source", {"a.bin": 30 * MIB})
    seen, copy = walk_source(root, "data"), shutil.copyfileobj

    def changed(*given: Any) -> None:
        CHANGES[change](root / "a.bin")
        copy(*given)

    monkeypatch.setattr(shutil, "copyfileobj", changed)
    with pytest.raises(UserError, match="changed while it was copied"):
        hashed_copy.copy_files(root, tmp_path / "out", seen, manifest.XXH3_128)
    assert not (tmp_path / "out/a.bin").exists()


@pytest.mark.parametrize("flipped", [True, False])
def test_killed_in_the_middle_it_goes_on(tmp_path: Path, flipped: bool) -> None:
    """kill -9: files that were done are kept, unless the source's manifest says that one was damaged since."""
    root = fill(tmp_path / "source", {f"{n:02}.bin": 8 * MIB for n in range(40)})
    manifest.seal(root, "dataset", {})
    local = tmp_path / "local"
    child = start(local, root)
    wait_for(lambda: len(list(local.rglob("??.bin"))) > 3, "three files", pause=0.002)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    done = list(local.rglob("??.bin"))
    assert not list(local.rglob(manifest.MANIFEST)) or len(done) < 40, "the copy was done before it could be killed"
    if flipped:
        flip(done[0])
    bench = Bench(local)
    made = bench.stager.stage(SourceFolder("data", "source", root))
    made.release()
    assert same(root, made.path)
    assert (40 - len(done)) * 8 * MIB <= made.copied - flipped * 8 * MIB < 40 * 8 * MIB


def test_two_side_by_side_copy_once(tmp_path: Path) -> None:
    """Two jobs on one node: one copies, the other waits and uses it."""
    root = fill(tmp_path / "source", {f"{n:02}.bin": 8 * MIB for n in range(12)})
    children = [start(tmp_path / "local", root) for _ in range(2)]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    words = "".join(err for _, err in outputs)
    assert words.count("copies source: 12 files") == 1
    assert outputs[0][0] == outputs[1][0] and same(root, Path(outputs[0][0].strip()))


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    """Never a tree that is read from, and it is reported before; for more than may be kept at all nothing is removed."""
    bench = Bench(tmp_path / "local", gb=0.03)
    roots = [fill(tmp_path / f"source{n}", {"a.bin": 9 * MIB}, seed=n) for n in range(4)]
    first, second, third = (bench.stager.stage(SourceFolder("data", root.name, root)) for root in roots[:3])
    for number, item in enumerate((first, second, third)):
        assert item.lease is not None
        os.utime(item.lease.path, (1000 + number, 1000 + number))
    with pytest.raises(UserError, match="3 trees there are in use") as caught:
        bench.stage(roots[3])
    assert caught.value.code is ExitCode.STORAGE
    second.release()
    third.release()
    with pytest.raises(UserError, match=r"31.46 MB do not fit into the 30.00 MB"):
        bench.stage(fill(tmp_path / "large", {"a": 30 * MIB}))
    fourth = bench.stager.stage(SourceFolder("data", "source3", roots[3]))
    assert fourth.removed == [str(second.path.parent)]
    assert first.path.is_dir() and third.path.is_dir() and not second.path.exists()
    assert bench.words.index("removes") < bench.words.rindex("copies source3")
    for item in (first, fourth):
        item.release()


MOUNT = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT += ('mount -t tmpfs -o size=$0 tmpfs "$1" && shift && exec "$@"',)


@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk_is_told_and_left_as_it_was(tmp_path: Path, checked: bool) -> None:
    """Exit 73: told before where it can be known, and where something else fills it meanwhile, nothing half is left."""
    root = fill(tmp_path / "source", {f"{n:02}.bin": 8 * MIB for n in range(8)})
    local = tmp_path / "local"
    local.mkdir()
    guard = "" if checked else "from clustertune.staging import cache; cache.SPARE = -(1 << 40)\n"
    program = guard + PROGRAM.replace("finally:", "except Exception as error:\n    print(int(error.code), error)\nfinally:")
    program += "    print('left:', [str(p) for p in Path(sys.argv[1]).rglob('*') if p.is_file() and p.stat().st_size > 100])"
    child = start(local, root, prefix=(*MOUNT, "40m", str(local)), program=program)
    out, err = child.communicate(timeout=300)
    if "Operation not permitted" in err:
        pytest.skip("no mount namespaces here")
    assert out.startswith("73 ") and "left: []" in out, (out, err)
    assert ("no room for" if checked else "No space left on device") in out


def test_a_mount_that_hangs_is_given_up(tmp_path: Path) -> None:
    """A file server that answers no more holds every process that reads from it: the copy is given up, with words."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed (apt-get install bindfs)")
    root = fill(tmp_path / "source", {"a.bin": 64 * MIB})
    mount = tmp_path / "mount"
    mount.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(root), str(mount)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (mount / "a.bin").exists() or server.poll() is not None, "FUSE", 30)
        server.send_signal(signal.SIGSTOP)
        bench = Bench(tmp_path / "local", stall=2)
        began = time.monotonic()
        with pytest.raises(UserError, match="nothing was read or written for 2 s") as caught:
            bench.stage(mount)
        assert time.monotonic() - began < 60 and caught.value.code is ExitCode.STORAGE
        server.send_signal(signal.SIGCONT)
        assert same(root, bench.stage(mount))
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount", "-u", "-z", str(mount)], check=False, capture_output=True)
        server.terminate()
        server.wait(30)


def test_a_damaged_tree_in_use_is_not_touched(tmp_path: Path, bench: Bench) -> None:
    """Its reader would see files vanish; whoever comes reads the shared storage."""
    root = fill(tmp_path / "source", SIZES)
    first = bench.stager.stage(SourceFolder("data", "source", root))
    flip(first.path / "config.json")
    with pytest.raises(UserError, match="is damaged, and another job reads from it"):
        bench.stage(root)
    first.release()
    assert same(root, bench.stage(root))


@pytest.mark.parametrize("wrong", ["absent parent", "others may write", "a link"])
def test_a_staging_folder_that_cannot_be_trusted_is_refused(tmp_path: Path, wrong: str) -> None:
    """An unmounted disk would fill the system's; a folder that others write to would feed them to the ranks."""
    folder = tmp_path / ("not/there" if wrong == "absent parent" else "local")
    own = tmp_path / "local" / f"clustertune-{os.getuid()}"
    own.mkdir(parents=True)
    own.chmod(0o777)
    if wrong == "a link":
        own.rename(tmp_path / "elsewhere").chmod(0o700)
        own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"has no such folder|belongs to another user"):
        cache.open_cache(Staging(path=str(folder), gb=1))


# --- which files are copied --------------------------------------------------------------------------------------------


def test_a_folder_that_contradicts_its_manifest_is_not_whole(tmp_path: Path) -> None:
    """Sizes and missing files are seen before anything is copied; all of them at once."""
    fill(tmp_path / "m", {"a": 10, "b": 20})
    manifest.seal(tmp_path / "m", "dataset", {})
    (tmp_path / "m/a").write_bytes(b"short")
    (tmp_path / "m/b").unlink()
    with pytest.raises(UserError) as caught:
        walk_source(tmp_path / "m", "data")
    expected = ["5 bytes, the folder's manifest says 10", "missing", "is incomplete or damaged"]
    assert [p.message for p in caught.value.problems] == expected
