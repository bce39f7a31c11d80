"""What is kept between processes is what would be read anew; whatever is wrong with the kept copy, it is read anew."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.config import accelerate_file, modeling, modules, native, remembered, source

FACTS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (native._fields, ("trl", "trainer/sft_config.py", "SFTConfig")),
    (native._fields, ("peft", "tuners/lora/config.py", "LoraConfig")),
    (native._reporters, ()),
    (accelerate_file._top_keys, ()),
    (accelerate_file._launch_arguments, ()),
    (accelerate_file._words, ("FSDP_STATE_DICT_TYPE",)),
    (modeling._config_fields, ("qwen3_moe",)),
    (modeling.config_types, ("deepseek_v3",)),
    (modeling.config_defaults, ("llama",)),
    (modeling.config_aliases, ("gpt2",)),
    (modeling._modeling_classes, ("llama",)),
    (modeling._layer_classes, ("llama4_text",)),
    (modeling.carries_state, ("mamba2",)),
    (modeling.has_sdpa, ("llama",)),
    (modules.module_names, ("llama", "LlamaForCausalLM")),
]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "clustertune"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package of one module."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "one.py").write_text("class A: ...\n")
    monkeypatch.setattr(source, "package_folder", lambda name: tmp_path / name)
    forget()
    yield folder
    forget()


def forget() -> None:
    """As in a new process."""
    for read in (source._content, source.content_digest, source._parse):
        read.cache_clear()


def names(relative: str = "one.py") -> list[str]:
    """A fact: the names of a module's classes."""
    return list(source.classes(source.parse_module("fake", relative)))


def again() -> Any:
    """The fact as a new process gets it."""
    forget()
    return remembered.remembered(names)()


@pytest.mark.parametrize(("fact", "words"), FACTS)
def test_a_hit_is_what_the_source_says_and_parses_nothing(
    kept: Path, monkeypatch: pytest.MonkeyPatch, fact: Any, words: tuple[str, ...]
) -> None:
    read = fact.__wrapped__
    cold = read(*words)
    assert remembered.remembered(read)(*words) == cold
    assert any(kept.iterdir())
    source._parse.cache_clear()
    monkeypatch.setattr(ast, "parse", lambda *_: pytest.fail("the source was parsed"))
    warm = remembered.remembered(read)(*words)
    assert warm == cold and json.dumps(warm) == json.dumps(cold)  # the order of keys too


def test_the_file_is_the_users_alone_and_no_other_is_left(kept: Path, package: Path) -> None:
    assert again() == ["A"]
    (file,) = kept.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and kept.stat().st_mode & 0o077 == 0


def test_a_source_of_the_same_size_and_time_is_read_anew(kept: Path, package: Path) -> None:
    # Container images give every file one time; two releases may differ in one digit.
    assert again() == ["A"]
    before = (package / "one.py").stat()
    (package / "one.py").write_text("class B: ...\n")
    os.utime(package / "one.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert again() == ["B"]


def test_a_file_that_appears_is_a_change(kept: Path, package: Path) -> None:
    def read() -> bool:
        return source.has_file("fake", "two.py")

    assert remembered.remembered(read)() is False
    forget()
    assert remembered.remembered(read)() is False
    (package / "two.py").touch()
    forget()
    assert remembered.remembered(read)() is True


def test_a_fact_made_of_kept_facts_rests_on_their_sources(kept: Path, package: Path) -> None:
    def outer() -> list[str]:
        return [*remembered.remembered(names)(), "more"]

    assert again() == ["A"]
    assert remembered.remembered(outer)() == ["A", "more"]
    (package / "one.py").write_text("class B: ...\n")
    forget()
    assert remembered.remembered(outer)() == ["B", "more"]


def test_other_code_reads_anew(kept: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert again() == ["A"]
    (file,) = kept.iterdir()
    before = file.read_bytes()
    monkeypatch.setattr(remembered, "_code_digest", lambda _: "of another release")
    assert again() == ["A"] and file.read_bytes() != before


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "text", "null", "folder", "link", "pipe", "open to others"])
def test_a_damaged_or_foreign_copy_is_not_used(kept: Path, package: Path, tmp_path: Path, damage: str) -> None:
    again()
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    if damage in {"folder", "link", "pipe"}:
        file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(forged(whole))
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(file)
        held = os.open(file, os.O_RDWR)  # somebody may write: a reader that waited would wait for ever
    elif damage == "open to others":
        file.write_bytes(forged(whole))
        file.chmod(0o622)
    else:
        flipped = whole.replace(b'"A"', b'"C"')
        bad = {"empty": b"", "cut": whole[:-9], "bit": flipped, "text": b"\xff\xfe\n\x00", "null": b"null\nnull"}
        file.write_bytes(bad[damage])
    assert again() == ["A"]
    if damage == "pipe":
        os.close(held)


def forged(whole: bytes) -> bytes:
    """A copy that holds another fact and is whole."""
    body = whole.partition(b"\n")[2].replace(b'"A"', b'"C"')
    return remembered._checksum(body).encode() + b"\n" + body


def test_a_forged_copy_would_be_believed(kept: Path, package: Path) -> None:
    # What keeps the copies above out is their kind and mode, not a mistake in the forgery.
    again()
    (file,) = kept.iterdir()
    file.write_bytes(forged(file.read_bytes()))
    assert again() == ["C"]


@pytest.mark.parametrize("place", ["a file", "a missing home", "no home", "a full disk"])
def test_where_nothing_can_be_kept_everything_works(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    if place == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif place == "no home":
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where the user has no entry in passwd
    elif place == "a full disk":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert again() == ["A"]
    assert again() == ["A"]
    assert not (tmp_path / "missing").exists()


def test_a_relative_cache_folder_is_none(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The XDG base directory specification: such a path is to be ignored.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert again() == ["A"]
    assert not (tmp_path / "here").exists() and any((tmp_path / ".cache" / "clustertune").iterdir())


def test_what_json_would_change_is_not_kept(kept: Path, package: Path) -> None:
    def read() -> dict[str, Any]:
        return {"sizes": (1, 2)}

    assert remembered.remembered(read)() == {"sizes": (1, 2)}
    assert remembered.remembered(read)() == {"sizes": (1, 2)}
    assert not kept.exists()


def test_words_of_a_recipe_make_no_path(kept: Path, package: Path) -> None:
    def read(word: str) -> str:
        return word

    remembered.remembered(read)("../../../outside")
    assert [path.parent for path in kept.iterdir()] == [kept]


VALUES = (
    *(True, False, 0, 1, 7, -1, 10**30, 0.5, 1.0, "linear", "steps", "no", "5e-5", "7", "true", "", "x", "\u00e9", "\ud800"),
    *(["x"], [], {"a": 1}, {}, {1: "a"}, [1], "gaussian", "pissa_niter_16"),
)


@pytest.mark.parametrize("fields", [native.train_fields, native.lora_fields])
def test_what_is_plainly_right_is_what_pydantic_gives_back(fields: Any) -> None:
    plain = 0
    for field in fields().values():
        for value in VALUES:
            if field.kinds is not None and native._is_plainly(field.kinds, value):
                plain += 1
                checked = native._adapter(json.dumps(field.kinds)).validate_python(value)
                assert checked == value and type(checked) is type(value), (field.name, value)
    assert plain > 100
