"""Each rank reads only what it keeps: the same training as with whole copies, bit for bit, from a share of the bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.resolve.resolve import resolve
from clustertune.training.loading import Loading
from clustertune.training.startup import Startup
from tests.command import REPO, events
from tests.training.benches import FULL, SAME, Bench, distributed, fsdp, make_bench, output_of, problems
from tests.training.forked import Forge

pytestmark = pytest.mark.timeout(900)

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "max_position_embeddings": 512, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
"""Three experts on two ranks: the files hold one tensor an expert, the model one for all, and the shares are not even."""


class Benches:
    """A bench for each kind of model, made when it is first asked for."""

    def __init__(self, forge: Forge, folder: Path, llama: Bench) -> None:
        self._forge, self._folder = forge, folder
        self._made = {"llama": llama}

    def __call__(self, name: str) -> Bench:
        if name not in self._made:
            changes, layer, more = MODELS[name]
            folder = self._folder / name
            self._made[name] = make_bench(self._forge, folder, [*SAME, *more], changes=changes, layer=layer)
        return self._made[name]


ATTENTION = ["lora.target_modules=[q_proj,v_proj]"]
MODELS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "tied": ({"tie_word_embeddings": True}, "LlamaDecoderLayer", []),
    "mixtral": (MIXTRAL, "MixtralDecoderLayer", ATTENTION),
    "mixtral4": ({**MIXTRAL, "num_local_experts": 4}, "MixtralDecoderLayer", ATTENTION),
}
"""What differs from the tiny recipe: keys of model.json, the layer that is sharded, what is trained."""


@pytest.fixture(scope="module")
def benches(forge: Forge, tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> Benches:
    return Benches(forge, tmp_path_factory.mktemp("loading"), bench)


def lossless(path: Path) -> list[Any]:
    """What must not differ in a single bit: losses, gradient norms and the trained state at the last save."""
    steps = [(e["step"], e["loss"], e["grad_norm"]) for e in events(path, "step")]
    saved = sorted((path / "checkpoints").glob("*/MANIFEST.json"))
    return [steps, [json.loads(file.read_text())["meta"]["state_digests"] for file in saved]]


def startup(path: Path) -> dict[str, Any]:
    return next(e for e in events(path, "startup") if e["part"] == "total")


def notes(path: Path) -> list[str]:
    return list(distributed(path)["notes"])


BF16 = ["train.bf16=true", 'train.model_init_kwargs={"dtype": "bfloat16"}']
"""Read in bfloat16 and trained in it: accelerate keeps what is trained in float32."""
SLICES, WHOLE = {"fsdp_cpu_ram_efficient_loading": True}, {"fsdp_cpu_ram_efficient_loading": False}


@pytest.mark.parametrize(
    ("model", "ranks", "sizes", "more"),
    [
        ("llama", 2, {}, []),
        pytest.param("llama", 2, {}, FULL, marks=pytest.mark.jobs),
        pytest.param("llama", 4, {"dp_replicate": 2, "dp_shard": 2}, FULL, marks=pytest.mark.jobs),
        pytest.param("tied", 2, {}, FULL, marks=pytest.mark.jobs),
        pytest.param("mixtral", 2, {}, FULL, marks=pytest.mark.jobs),
        pytest.param("mixtral", 2, {}, ATTENTION, marks=pytest.mark.jobs),
        pytest.param("llama", 4, {"dp_shard": 2, "tp": 2}, [], marks=pytest.mark.jobs),
        pytest.param("llama", 4, {"dp_shard": 2, "tp": 2}, [*FULL, *BF16], marks=pytest.mark.jobs),
        pytest.param("tied", 4, {"dp_shard": 2, "tp": 2}, FULL, marks=pytest.mark.jobs),
        pytest.param("mixtral4", 4, {"dp_shard": 2, "tp": 2}, FULL, marks=pytest.mark.jobs),
    ],
)
def test_rows_train_as_whole_copies_do(
    benches: Benches, model: str, ranks: int, sizes: dict[str, int], more: list[str]
) -> None:
    """A weight in the wrong row, a lost tie or a dtype rounded twice would show in the first bits of a loss."""
    bench = benches(model)
    rows = bench.train("rows", ranks, fsdp(SLICES, **sizes), *more)
    whole = bench.train("whole", ranks, fsdp(WHOLE, **sizes), *more)
    assert lossless(rows) == lossless(whole)
    assert (startup(rows)["loading"], startup(whole)["loading"]) == ("slices", "whole")
    size = sum(file.stat().st_size for file in (bench.prepared / "model").glob("*/*.safetensors"))
    shards = sizes.get("dp_shard", ranks) * sizes.get("tp", 1)
    assert max(startup(rows)["read_bytes"]) < 1.25 * size / shards, output_of(rows)
    assert min(startup(whole)["read_bytes"]) == size
    # What is trained is kept in float32, whatever it is computed in.
    assert more == ATTENTION or set(distributed(rows)["dtypes"]) == set(distributed(whole)["dtypes"]) == {"float32"}


def quantised(**changes: Any) -> list[str]:
    """A base in 4 bits whose packed weights FSDP can shard."""
    config = {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16",
        "bnb_4bit_compute_dtype": "float32", **changes,
    }  # fmt: skip
    return [
        f"train.model_init_kwargs={json.dumps({'dtype': 'bfloat16', 'quantization_config': config})}",
        "train.optim=adamw_torch",
    ]


@pytest.mark.parametrize(
    ("ranks", "sizes", "double"),
    [
        pytest.param(2, {}, True, marks=pytest.mark.jobs),
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, False, marks=pytest.mark.jobs),
    ],
)
def test_a_base_in_4_bits_is_quantised_by_rows(benches: Benches, ranks: int, sizes: dict[str, int], double: bool) -> None:
    """The whole would lie on every GPU before it is sharded: 215 GB of it for a model of 405B parameters."""
    bench, more = benches("llama"), quantised(bnb_4bit_use_double_quant=double)
    rows = bench.train("rows", ranks, fsdp(SLICES, **sizes), *more)
    whole = bench.train("whole", ranks, fsdp(WHOLE, **sizes), *more)
    assert lossless(rows) == lossless(whole)
    assert (startup(rows)["loading"], startup(whole)["loading"]) == ("slices", "whole"), notes(rows)
    size = sum(file.stat().st_size for file in (bench.prepared / "model").glob("*/*.safetensors"))
    assert max(startup(rows)["read_bytes"]) < 1.2 * size / sizes.get("dp_shard", ranks), output_of(rows)


@pytest.mark.jobs
def test_a_run_goes_on_from_its_checkpoint(benches: Benches) -> None:
    """Values of the checkpoint come over those of the files: the digest of what was loaded is that of what was saved."""
    bench = benches("llama")
    stopped = bench.train("resumed", 2, fsdp(SLICES), *FULL, stop=True)
    whole = bench.train("whole", 2, fsdp(WHOLE), *FULL)
    assert lossless(stopped)[0] == lossless(whole)[0]


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {}), pytest.param(4, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.jobs)])
def test_what_cannot_be_read_by_rows_is_told(benches: Benches, ranks: int, sizes: dict[str, int]) -> None:
    """Weights in torch's own format: the old way, and a line that says why and what each rank reads.

    Under tp each rank must then have them itself: rank 0's are not sent to ranks that have split theirs already.
    """
    import torch
    from safetensors.torch import load_file

    bench = benches("llama")
    path = bench.make("pickled", ranks, fsdp(SLICES, **sizes))
    file = next((path / "model").glob("*/*.safetensors"))
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    (file.parent / "MANIFEST.json").unlink()  # a folder of one's own has no digests to compare
    assert bench.go(path, ranks) == [0] * ranks, output_of(path)
    assert startup(path)["loading"] == "whole"
    assert not sizes or lossless(path) == lossless(bench.train("whole", ranks, fsdp(WHOLE, **sizes)))
    assert [note for note in notes(path) if note.endswith("read whole by each rank: its weights are not in safetensors files")]


def test_whoever_starts_a_rank_may_say_otherwise_than_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would then leave the model without values, and FSDP end with a word about strides."""
    for value, wanted in (("true", True), ("0", False)):
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", value)
        stated = replace(resolve("tiny-oasst2"), accelerate=fsdp(SLICES)).distribution
        assert Loading(stated, Startup())._wanted is wanted


@pytest.mark.jobs
def test_a_key_that_is_left_out_is_true_for_accelerate(benches: Benches) -> None:
    """accelerate launch's default; rank 0 alone would hold the weights that every rank splits."""
    bench, file = benches("llama"), fsdp(WHOLE, dp_shard=2, tp=2)
    whole = bench.train("whole", 4, file)
    file["fsdp_config"] = {key: value for key, value in file["fsdp_config"].items() if key not in WHOLE}
    left_out = bench.train("left-out", 4, file)
    assert startup(left_out)["loading"] == "whole" and lossless(left_out) == lossless(whole)


def test_a_file_that_was_cut_ends_the_run_before_anything_is_read(benches: Benches) -> None:
    """Every rank tells the same, and none waits for another in a collective."""
    bench = benches("llama")
    path = bench.make("cut", 2, fsdp(SLICES))
    file = next((path / "model").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    (file.parent / "MANIFEST.json").unlink()  # a folder of one's own has no digests to compare
    assert bench.go(path, 2) == [2, 2]
    for rank in (0, 1):
        [found, *_] = problems(path, rank)
        assert found["file"] == str(file) and "truncated" in found["message"] and found["fix"]


@pytest.mark.parametrize("config", [SLICES, WHOLE])
def test_a_base_that_is_quantised_already_is_refused_at_the_start(benches: Benches, config: dict[str, Any]) -> None:
    """FSDP2 would cast its float8 and leave the scales out: every rank ends before it reads a weight, however it would."""
    bench = benches("llama")
    path = bench.make("fp8", 2, fsdp(config))
    file = next((path / "model").glob("*/config.json"))
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": fp8}))
    next((path / "model").glob("*/*.safetensors")).unlink()
    (file.parent / "MANIFEST.json").unlink()  # a folder of one's own has no digests to compare
    assert bench.go(path, 2) == [2, 2], output_of(path)
    for rank in (0, 1):
        [found, *_] = problems(path, rank)
        assert found["file"] == str(file) and found["message"].startswith("fp8 weights: FSDP")


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


def test_a_rank_of_the_bench_that_fails_ends_the_others_and_one_that_hangs_says_where() -> None:
    """Otherwise they wait for it in a collective, for half an hour and without a word."""
    begin = "import time; from tools import loading_bench as bench; "
    for work, words in (("1 / 0 if number else time.sleep(100)", "ZeroDivisionError"), ("time.sleep(100)", "<lambda>")):
        program = f"{begin}bench._forked(lambda number: {work}, 2, 3)"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1 and words in done.stderr, done.stderr


@pytest.mark.jobs
def test_replicas_read_the_model_once_each(tmp_path: Path) -> None:
    """HSDP of two replicas of two ranks, by the kernel's count: each rank half of the model, no byte twice in a replica."""
    found = measured(0.1, 4, "rows,whole", tmp_path, "--replicas", "2")
    size, reads = found["rows"]["model_bytes"], [rank["read_bytes"] for rank in found["rows"]["ranks"]]
    assert all(0.45 * size < read < 0.55 * size for read in reads) and 1.95 * size < sum(reads) < 2.1 * size
    assert len({rank["loss"] for way in found.values() for rank in way["ranks"]}) == 1


@pytest.mark.jobs
def test_split_over_tp_no_rank_holds_the_whole(tmp_path: Path) -> None:
    """TP x FSDP2 of two and two: a quarter of most layers; of those that are split by columns, the shard's rows."""
    found = measured(0.3, 4, "rows,whole", tmp_path, "--tp", "2")
    size, rows, whole = found["rows"]["model_bytes"], found["rows"]["ranks"], found["whole"]["ranks"]
    assert all(0.25 * size < rank["read_bytes"] < 0.36 * size for rank in rows)
    assert max(rank["peak_bytes"] for rank in rows) < 0.5 * size < min(rank["peak_bytes"] for rank in whole)
    assert len({rank["loss"] for rank in [*rows, *whole]}) == 1


@pytest.mark.long
def test_a_rank_s_memory_and_bytes_are_its_share(tmp_path: Path) -> None:
    """1 GB: with stock accelerate rank 0 holds all of it before it sends it; here each rank holds its half and little more."""
    found = measured(1.0, 2, "rows,stock", tmp_path)
    size, rows, stock = found["rows"]["model_bytes"], found["rows"]["ranks"], found["stock"]["ranks"]
    assert sum(rank["read_bytes"] for rank in rows) < 1.05 * size
    assert max(rank["read_bytes"] for rank in rows) < 0.55 * size
    assert max(rank["peak_bytes"] for rank in rows) < 0.9 * size
    assert max(rank["peak_bytes"] for rank in rows) < max(rank["peak_bytes"] for rank in stock) - 0.4 * size
    assert len({rank["loss"] for rank in [*rows, *stock]}) == 1
