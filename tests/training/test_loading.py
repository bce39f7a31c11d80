"""Each rank reads only what it keeps: the same training as with whole copies, bit for bit, from a share of the bytes.

Rows under FSDP2; under ZeRO-3 the elements of a rank, which rank 0 sends without this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clustertune.resolve.resolve import resolve
from clustertune.training import loading
from clustertune.training.figures import Startup
from clustertune.training.loading import Loading
from tests.command import REPO
from tests.training.benches import (
    ATTENTION,
    CPU,
    FULL,
    SLICES,
    WHOLE,
    Bench,
    Benches,
    distributed,
    fsdp,
    lossless,
    output_of,
    problems,
    size_of,
    startup,
    weights_of,
)
from tests.training.deepspeed_breaks import BREAKS

pytestmark = pytest.mark.timeout(900)
BF16 = ["train.bf16=true", 'train.model_init_kwargs={"dtype": "bfloat16"}']
"""Read in bfloat16 and trained in it: accelerate keeps what is trained in float32."""
THREE = "train.global_batch_size=3"
"""On three ranks: parts of elements that end within a row, the last one padded."""
OFFLOAD = {"offload_optimizer": CPU, "offload_param": CPU}
HSDP, TP = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}


def notes(path: Path) -> list[str]:
    return list(distributed(path)["notes"])


def job(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.jobs)


def quantised(*, double: bool) -> list[str]:
    """A base in 4 bits whose packed weights FSDP can shard. Whole it would lie on every GPU: 215 GB for 405B parameters."""
    config = {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16",
        "bnb_4bit_compute_dtype": "float32", "bnb_4bit_use_double_quant": double,
    }  # fmt: skip
    kwargs = json.dumps({"dtype": "bfloat16", "quantization_config": config})
    return [f"train.model_init_kwargs={kwargs}", "train.optim=adamw_torch"]


@pytest.mark.parametrize(
    ("model", "ranks", "sizes", "more"),
    [
        ("llama", 2, {}, []),
        job("llama", 2, {}, FULL),
        job("llama", 4, HSDP, FULL),
        job("tied", 2, {}, FULL),
        job("mixtral", 2, {}, FULL),
        job("mixtral", 2, {}, ATTENTION),
        job("llama", 4, TP, []),
        job("llama", 4, TP, [*FULL, *BF16]),
        job("tied", 4, TP, FULL),
        job("mixtral4", 4, TP, FULL),
        job("llama", 2, {}, quantised(double=True)),
        job("llama", 4, HSDP, quantised(double=False)),
    ],
)
def test_rows_train_as_whole_copies_do(
    benches: Benches, model: str, ranks: int, sizes: dict[str, int], more: list[str]
) -> None:
    """A weight in the wrong row, a lost tie or a dtype rounded twice would show in the first bits of a loss."""
    bench = benches(model)
    rows, whole = (bench.train((ranks, fsdp(how, **sizes)), *more) for how in (SLICES, WHOLE))
    assert lossless(rows) == lossless(whole)
    assert (startup(rows)["loading"], startup(whole)["loading"]) == ("slices", "whole"), notes(rows)
    size, shards = size_of(bench.prepared), sizes.get("dp_shard", ranks) * sizes.get("tp", 1)
    assert max(startup(rows)["read_bytes"]) < 1.25 * size / shards, output_of(rows)
    assert min(startup(whole)["read_bytes"]) == size
    # What is trained is kept in float32, whatever it is computed in.
    in_float = set(distributed(rows)["dtypes"]) == set(distributed(whole)["dtypes"]) == {"float32"}
    assert in_float or more == ATTENTION or "quantization_config" in str(more)


def zero(bench: Bench, ranks: int, more: list[str], **settings: Any) -> Path:
    """A run folder whose next stage is the training under ZeRO-3."""
    pytest.importorskip("deepspeed")
    return bench.make((ranks, bench.zero({"stage": 3, **settings}, bf16={"enabled": "auto"})), *more)


def train_zero(bench: Bench, ranks: int, more: list[str], *, breaks: str = "", **settings: Any) -> Path:
    path = zero(bench, ranks, more, **settings)
    assert bench.go(path, ranks, breaks=breaks and BREAKS + breaks) == [0] * ranks, output_of(path)
    return path


@pytest.mark.parametrize(
    ("model", "ranks", "more", "settings", "padded"),
    [
        job("llama", 2, [], {}, False),
        job("llama", 3, [*FULL, *BF16, THREE], {}, False),
        job("llama", 2, FULL, OFFLOAD, False),
        job("tied", 2, FULL, {}, False),
        job("mixtral", 2, FULL, {}, False),
        job("mixtral", 3, [*ATTENTION, THREE], {}, True),
    ],
)
def test_parts_train_as_copies_do(
    benches: Benches, model: str, ranks: int, more: list[str], settings: dict[str, Any], padded: bool
) -> None:
    """An element in the wrong place, a lost tie or a matrix of LoRA that differs by rank would show in a loss's first bits."""
    bench = benches(model)
    parts, whole = (train_zero(bench, ranks, more, breaks=breaks, **settings) for breaks in ("", "whole_models"))
    found, expected = lossless(parts), lossless(whole)
    if padded:  # LoRA's matrices, which DeepSpeed splits, do not part in three: the last rank's padding is as its memory was
        assert [state.pop() for state in (*found[1], *expected[1])]
    assert found == expected
    assert (startup(parts)["loading"], startup(whole)["loading"]) == ("slices", "whole"), notes(parts)
    assert max(startup(parts)["read_bytes"]) < 1.05 * size_of(bench.prepared) / ranks
    assert any(note.endswith("read whole by rank 0, which sends it: taken away") for note in notes(whole))


@pytest.mark.jobs
def test_a_run_goes_on_from_its_checkpoint(bench: Bench) -> None:
    """Values of the checkpoint come over those of the files: the digest of what was loaded is that of what was saved."""
    stopped, whole = bench.train("fsdp2-slices", *FULL, stop=True), bench.train("fsdp2", *FULL)
    assert lossless(stopped)[0] == lossless(whole)[0]


def pickled(path: Path) -> None:
    """Weights in torch's own format."""
    file = weights_of(path)
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()


@pytest.mark.parametrize(("ranks", "sizes"), [job(2, {}), job(4, TP)])
def test_what_cannot_be_read_by_rows_is_told(bench: Bench, ranks: int, sizes: dict[str, int]) -> None:
    """The old way, and a line that says why and what each rank reads.

    Under tp each rank must then have them itself: rank 0's are not sent to ranks that have split theirs already.
    """
    path = bench.make((ranks, fsdp(SLICES, **sizes)))
    pickled(path)
    assert bench.go(path, ranks) == [0] * ranks, output_of(path)
    assert startup(path)["loading"] == "whole"
    assert not sizes or lossless(path) == lossless(bench.train((ranks, fsdp(WHOLE, **sizes))))
    assert [note for note in notes(path) if note.endswith("read whole by each rank: its weights are not in safetensors files")]


@pytest.mark.jobs
def test_what_cannot_be_read_by_parts_is_sent_as_before(bench: Bench) -> None:
    """Rank 0 reads weights in torch's own format; and where one rank alone cannot follow, all leave it to transformers:
    otherwise it would wait in a broadcast while the others wait for its problems.
    """
    path = zero(bench, 2, [])
    pickled(path)
    assert bench.go(path) == [0, 0], output_of(path)
    alone, parts = train_zero(bench, 2, [], breaks="unfollowed_on_one_rank"), train_zero(bench, 2, [])
    for found, why in ((path, "not in safetensors files"), (alone, "sends it: not followed here")):
        assert startup(found)["loading"] == "whole" and lossless(found) == lossless(parts)
        assert any(note.endswith(why) for note in notes(found))


def test_whoever_starts_a_rank_may_say_otherwise_than_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would then leave the model without values, and FSDP end with a word about strides."""
    for value, wanted in (("true", True), ("0", False)):
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", value)
        stated = replace(resolve("tiny-oasst2"), accelerate=fsdp(SLICES)).distribution
        assert Loading(stated, Startup())._efficient is wanted


@pytest.mark.jobs
def test_a_key_that_is_left_out_is_true_for_accelerate(bench: Bench) -> None:
    """accelerate launch's default; rank 0 alone would hold the weights that every rank splits."""
    file = fsdp(WHOLE, **TP)
    whole = bench.train((4, file))
    file["fsdp_config"] = {key: value for key, value in file["fsdp_config"].items() if key not in WHOLE}
    left_out = bench.train((4, file))
    assert startup(left_out)["loading"] == "whole" and lossless(left_out) == lossless(whole)


def cut(path: Path) -> Path:
    file = weights_of(path)
    file.write_bytes(file.read_bytes()[:-100])
    return file


def fp8(path: Path) -> Path:
    """FSDP2 would cast its float8 and leave the scales out: every rank ends before it reads a weight, however it would."""
    weights_of(path).unlink()
    file = next((path / "model").glob("*/config.json"))
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return file


def without(path: Path) -> Path:
    """transformers draws random values for a tensor that is missing, with a warning."""
    file = weights_of(path)
    save_file({name: value for name, value in load_file(file).items() if name != GONE}, file, {"format": "pt"})
    return file


GONE = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("strategy", "damage", "message"),
    [
        ("fsdp2-slices", cut, "truncated"),
        ("fsdp2-slices", fp8, "fp8 weights: FSDP"),
        job("fsdp2", fp8, "fp8 weights: FSDP"),
        job("zero3", without, "no weight file holds it"),
        ("alone", without, "no weight file holds it"),
        ("alone", cut, "truncated"),
        job("ddp", without, "no weight file holds it"),
        job("fsdp2", without, "no weight file holds it"),
    ],
)
def test_what_cannot_be_trained_on_ends_the_run_before_anything_is_read(
    bench: Bench, strategy: str, damage: Callable[[Path], Path], message: str
) -> None:
    """Every rank tells the same, with the file, and none waits for another in a collective."""
    path = bench.make(strategy) if strategy != "zero3" else zero(bench, 2, [])
    file = damage(path)
    ranks = 1 if strategy == "alone" else 2
    assert bench.go(path, ranks) == [2] * ranks, output_of(path)
    for rank in range(ranks):
        [found, *_] = problems(path, rank)
        assert found["file"] == str(file) and message in found["message"] and found["fix"]
        assert damage is not without or found["key"] == GONE


def in_4_bits(path: Path) -> None:
    without(path)


def pickled_without(path: Path) -> None:
    """Files that have no header to read before they are loaded."""
    without(path)
    pickled(path)


@pytest.mark.parametrize(
    ("damage", "more"), [(pickled_without, []), job(in_4_bits, quantised(double=False))], ids=["pickles", "4 bits"]
)
def test_what_transformers_would_draw_at_random_ends_the_run(
    bench: Bench, damage: Callable[[Path], None], more: list[str]
) -> None:
    """Where no header says it, transformers' own report of the loading does."""
    path = bench.make("alone", *more)
    damage(path)
    assert bench.go(path, 1) == [2], output_of(path)
    [found, *_] = problems(path, 0)
    assert GONE in found["message"] + str(found["key"]) and found["fix"]


@pytest.mark.jobs
def test_what_one_rank_alone_finds_wrong_ends_all_with_its_words(bench: Bench) -> None:
    """A node's own copy is torn: the others do not begin to read, and tell what it says."""
    path = zero(bench, 2, [])
    assert bench.go(path, breaks=BREAKS + "torn_on_one_rank") == [2, 2], output_of(path)
    assert problems(path, 0) == problems(path, 1) and problems(path, 0)[0]["message"] == "is torn here"


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
    made, given = Init(), Init()
    given.module = object()
    with loading.send_nothing_empty():
        for init in (made, given):
            init._zero_init_param(SimpleNamespace())
    made._zero_init_param(SimpleNamespace())
    assert (made.did, given.did) == (["split", "sent"], ["sent"])


def measured(gb: float, ranks: int, ways: str, folder: Path, *axes: str) -> dict[str, dict[str, Any]]:
    """What the loading bench says about each way."""
    program = [sys.executable, "-m", "tools.loading_bench", "--gb", str(gb), "--ranks", str(ranks)]
    done = subprocess.run(
        [*program, *axes, "--ways", ways, "--seconds", "300"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["way"]: line for line in lines}


@pytest.mark.parametrize(
    ("gb", "ranks", "other", "axes", "share", "total", "held", "apart"),
    [
        # HSDP of two replicas of two ranks: each rank half of the model, no byte twice in a replica.
        job(0.1, 4, "whole", ["--replicas", "2"], (0.45, 0.55), 2.1, 9, -9),
        # TP x FSDP2 of two and two: a quarter of most layers; of those that are split by columns, the shard's rows.
        job(0.3, 4, "whole", ["--tp", "2"], (0.25, 0.36), 1.44, 0.5, 0.1),
        # ZeRO-3: rank 0 alone maps and holds it where it sends it.
        job(0.3, 2, "stock", ["--zero"], (0.5, 0.53), 1.06, 9, 0.4),
        # With stock accelerate rank 0 holds all of it before it sends it; here each rank holds its half and little more.
        pytest.param(1.0, 2, "stock", [], (0.45, 0.55), 1.05, 0.9, 0.4, marks=pytest.mark.long),
    ],
)
def test_no_rank_reads_or_holds_the_whole(
    gb: float, ranks: int, other: str, axes: list[str], share: tuple[float, float], total: float, held: float, apart: float,
    tmp_path: Path,
) -> None:  # fmt: skip
    """By the kernel's count, in shares of the model's size: what a rank and all of them read, and hold at their peak.

    ``apart``: how much less that is than the most of a rank that loads in the ``other`` way, to the same loss.
    """
    if "--zero" in axes:
        pytest.importorskip("deepspeed")
    found = measured(gb, ranks, f"rows,{other}", tmp_path, *axes)
    size, ours, others = found["rows"]["model_bytes"], found["rows"]["ranks"], found[other]["ranks"]
    reads = [rank["read_bytes"] / size for rank in ours]
    assert all(share[0] < read < share[1] for read in reads) and sum(reads) < total
    peak, most = (max(rank["peak_bytes"] for rank in way) / size for way in (ours, others))
    assert peak < held and peak < most - apart
    assert len({rank["loss"] for rank in [*ours, *others]}) == 1
