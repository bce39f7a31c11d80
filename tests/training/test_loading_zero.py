"""ZeRO-3: each rank reads the elements that it keeps, and trains to the same bits as when rank 0 sends them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.training import loading
from tests.training.benches import CPU, FULL, Bench, output_of, problems
from tests.training.test_deepspeed import BREAKS
from tests.training.test_loading import ATTENTION, BF16, Benches, benches, lossless, measured, notes, startup

__all__ = ["benches"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
THREE = "train.global_batch_size=3"
"""On three ranks: parts of elements that end within a row, the last one padded."""
OFFLOAD = {"offload_optimizer": CPU, "offload_param": CPU}


def make(bench: Bench, name: str, ranks: int, more: list[str], zero: dict[str, Any] | None = None) -> Path:
    """A run folder whose next stage is the training under ZeRO-3."""
    return bench.make(name, ranks, bench.zero({"stage": 3, **(zero or {})}, bf16={"enabled": "auto"}), *more)


def train(bench: Bench, name: str, ranks: int, more: list[str], *, breaks: str = "", **zero: Any) -> Path:
    path = make(bench, name, ranks, more, zero)
    assert bench.go(path, ranks, breaks=breaks and BREAKS + breaks) == [0] * ranks, output_of(path)
    return path


@pytest.mark.parametrize(
    ("model", "ranks", "more", "zero", "padded"),
    [
        pytest.param("llama", 2, [], {}, False, marks=pytest.mark.jobs),
        pytest.param("llama", 3, [*FULL, *BF16, THREE], {}, False, marks=pytest.mark.jobs),
        pytest.param("llama", 2, FULL, OFFLOAD, False, marks=pytest.mark.jobs),
        pytest.param("tied", 2, FULL, {}, False, marks=pytest.mark.jobs),
        pytest.param("mixtral", 2, FULL, {}, False, marks=pytest.mark.jobs),
        pytest.param("mixtral", 3, [*ATTENTION, THREE], {}, True, marks=pytest.mark.jobs),
    ],
)
def test_parts_train_as_copies_do(
    benches: Benches, model: str, ranks: int, more: list[str], zero: dict[str, Any], padded: bool
) -> None:
    """An element in the wrong place, a lost tie or a matrix of LoRA that differs by rank would show in a loss's first bits."""
    bench = benches(model)
    parts = train(bench, "parts", ranks, more, **zero)
    whole = train(bench, "whole", ranks, more, breaks="whole_models", **zero)
    found, expected = lossless(parts), lossless(whole)
    if padded:  # LoRA's matrices, which DeepSpeed splits, do not part in three: the last rank's padding is as its memory was
        assert [state.pop() for state in (*found[1], *expected[1])]
    assert found == expected
    assert (startup(parts)["loading"], startup(whole)["loading"]) == ("slices", "whole"), notes(parts)
    size = sum(file.stat().st_size for file in (bench.prepared / "model").glob("*/*.safetensors"))
    assert max(startup(parts)["read_bytes"]) < 1.05 * size / ranks
    assert any(note.endswith("read whole by rank 0, which sends it: taken away") for note in notes(whole))


@pytest.mark.jobs
def test_a_tensor_that_is_missing_ends_the_run_on_all_ranks(benches: Benches) -> None:
    """transformers draws random values for it, with a warning."""
    from safetensors.torch import load_file, save_file

    bench = benches("llama")
    path = make(bench, "missing", 2, [])
    file = next((path / "model").glob("*/*.safetensors"))
    tensors = load_file(file)
    gone = "model.layers.1.mlp.up_proj.weight"
    del tensors[gone]
    save_file(tensors, file, {"format": "pt"})
    (file.parent / "MANIFEST.json").unlink()  # a folder of one's own has no digests to compare
    assert bench.go(path) == [2, 2], output_of(path)
    for rank in (0, 1):
        found = problems(path, rank)
        assert (found[0]["key"], found[0]["file"]) == (gone, str(file)) and found[0]["fix"]


@pytest.mark.jobs
def test_what_one_rank_alone_finds_wrong_ends_all_with_its_words(benches: Benches) -> None:
    """A node's own copy is torn: the others do not begin to read, and tell what it says."""
    bench = benches("llama")
    path = make(bench, "torn", 2, [])
    assert bench.go(path, breaks=BREAKS + "torn_on_one_rank") == [2, 2], output_of(path)
    assert problems(path, 0) == problems(path, 1) and problems(path, 0)[0]["message"] == "is torn here"


@pytest.mark.jobs
def test_what_one_rank_alone_cannot_follow_all_leave_to_transformers(benches: Benches) -> None:
    """Otherwise it would wait in a broadcast while the others wait for its problems."""
    bench = benches("llama")
    path = train(bench, "alone", 2, [], breaks="unfollowed_on_one_rank")
    assert startup(path)["loading"] == "whole" and lossless(path) == lossless(train(bench, "parts", 2, []))
    assert any(note.endswith("sends it: not followed here") for note in notes(path))


@pytest.mark.jobs
def test_weights_in_torch_s_own_format_are_sent_as_before(benches: Benches) -> None:
    """Rank 0 reads them; a line says so, and what was made without a broadcast gets its values all the same."""
    import torch
    from safetensors.torch import load_file

    bench = benches("llama")
    path = make(bench, "pickled", 2, [])
    file = next((path / "model").glob("*/*.safetensors"))
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    (file.parent / "MANIFEST.json").unlink()  # a folder of one's own has no digests to compare
    assert bench.go(path) == [0, 0], output_of(path)
    assert startup(path)["loading"] == "whole" and lossless(path) == lossless(train(bench, "parts", 2, []))
    assert any("not in safetensors files" in note for note in notes(path))


def test_only_what_has_no_values_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's matrices have values: DeepSpeed sends them, by the object that split the model, from the end of its loading on."""

    class Init:
        module: Any = None

        def __init__(self) -> None:
            self.did: list[str] = []

        def _zero_init_param(self, parameter: Any) -> None:
            self.did.append("sent")

        def _convert_to_deepspeed_param(self, parameter: Any) -> None:
            parameter.partition = lambda: self.did.append("split")

    monkeypatch.setitem(sys.modules, loading._ZERO, SimpleNamespace(Init=Init))
    undo = loading.send_nothing_empty()
    made, given = Init(), Init()
    given.module = object()
    for init in (made, given):
        init._zero_init_param(SimpleNamespace())
    undo()
    made._zero_init_param(SimpleNamespace())
    assert (made.did, given.did) == (["split", "sent"], ["sent"])


@pytest.mark.jobs
def test_no_rank_reads_or_holds_the_whole(tmp_path: Path) -> None:
    """0.3 GB over two ranks: half of it each, by the kernel's count; rank 0 alone maps and holds it where it sends it."""
    found = measured(0.3, 2, "rows,stock", tmp_path, "--zero")
    size, rows, stock = found["rows"]["model_bytes"], found["rows"]["ranks"], found["stock"]["ranks"]
    assert all(0.5 * size < rank["read_bytes"] < 0.53 * size for rank in rows)
    assert max(rank["peak_bytes"] for rank in rows) < stock[0]["peak_bytes"] - 0.4 * size
    assert len({rank["loss"] for rank in [*rows, *stock]}) == 1
