"""The header reader against the safetensors library, and every way in which a header can lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

from clustertune.tensorfile import Tensor, build_header, byte_size, read_header

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64]
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")


@st.composite
def tensor_maps(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    return {n: torch.zeros(draw(st.lists(st.integers(0, 5), max_size=3)), dtype=draw(st.sampled_from(DTYPES))) for n in names}


@given(tensor_maps())
def test_reads_what_the_library_writes(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {t.name: t.shape for t in header.tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert header.metadata == {"format": "pt"}
    assert sum(t.size for t in header.tensors) == sum(t.numel() * t.element_size() for t in tensors.values())


@given(tensor_maps())
def test_the_library_reads_what_we_write(tensors: dict[str, torch.Tensor]) -> None:
    """And byte for byte the same file, for tensors in the library's own order."""
    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8"}
    kinds |= {torch.uint8: "U8", torch.bool: "BOOL", torch.int64: "I64"}
    reference = save(tensors, metadata={"format": "pt"})
    (length,) = struct.unpack("<Q", reference[:8])
    order = [n for n in json.loads(reference[8 : 8 + length]) if n != "__metadata__"]
    entries = []
    for name in order:
        dtype, shape = kinds[tensors[name].dtype], tuple(tensors[name].shape)
        entries.append(Tensor(name, dtype, shape, Path(), 0, byte_size(dtype, shape)))
    header = build_header(entries)
    assert header == reference[: len(header)]
    data = b"".join(tensors[n].reshape(-1).view(torch.uint8).numpy().tobytes() for n in order)
    assert set(load(header + data)) == set(tensors)


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": [(end - begin) // 2], "data_offsets": [begin, end], **changes}


GOOD = {"a": entry(0, 4), "b": entry(4, 8)}

LIES: dict[str, tuple[Any, bytes, str]] = {
    "hole": ({"a": entry(0, 4), "b": entry(6, 10)}, b"x" * 10, "hole"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6, "overlaps"),
    "long file": (GOOD, b"x" * 9, "truncated or damaged"),
    "unknown dtype": ({"a": entry(0, 4, dtype="BF17")}, b"x" * 4, "unknown dtype 'BF17'"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 4]}}, b"x" * 4, "not an entry"),
    "wrong bytes": ({"a": entry(0, 4, shape=[3])}, b"x" * 4, "takes 6"),
    "negative size": ({"a": entry(0, 4, shape=[-2])}, b"x" * 4, "shape"),
    "float offset": ({"a": entry(0, 4, data_offsets=[0.0, 4])}, b"x" * 4, "data_offsets"),
    "twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
              b"x", "twice"),
    "not json": (b"{nonsense", b"", "not JSON"),
    "not an object": (b"[1]", b"", "not a JSON object"),
    "not utf-8": (b'{"\xff\xff":1}', b"", "utf-8"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "nested"),
    "huge shape": ({"a": entry(0, 4, shape=[2**62, 2**62])}, b"x" * 4, "takes"),
    "metadata": ({"__metadata__": {"format": 1}}, b"", "__metadata__"),
    "half bytes": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"xx", "whole bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_lies_are_refused_in_words(tmp_path: Path, case: str) -> None:
    header, data, word = LIES[case]
    with pytest.raises(ValueError, match=word):
        read_header(write_raw(tmp_path / "x", header, data))


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 62), struct.pack("<Q", 9) + b"{}", b"\x80\x04pickle" * 9]
)
def test_what_is_no_safetensors_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError):
        read_header(tmp_path / "x")


@given(st.data())
def test_a_flipped_or_cut_header_is_read_as_the_library_reads_it_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Never an accepted file that the library refuses."""
    whole = bytearray(save({"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}, metadata={"format": "pt"}))
    (length,) = struct.unpack("<Q", whole[:8])
    if data.draw(st.booleans()):
        whole[data.draw(st.integers(0, 7 + length))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    path = tmp_path_factory.mktemp("flip") / "x"
    path.write_bytes(whole)
    try:
        ours = {t.name for t in read_header(path).tensors}
    except ValueError:
        return
    assert ours == set(load(bytes(whole)))
