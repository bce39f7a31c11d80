"""DeepSpeed's stages train as one process does, continue with the same bytes, and export what was trained."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clustertune import manifest
from clustertune.checkpoint.store import verify
from clustertune.errors import UserError
from clustertune.export.export import export, export_model
from clustertune.training.deepspeed_engine import load_file as load_verified
from tests.command import events
from tests.damage import flip
from tests.training.benches import (
    FULL,
    STAGES,
    Bench,
    curve,
    digests,
    distributed,
    newest,
    output_of,
    problems,
    size_of,
    startup,
)
from tests.training.deepspeed_breaks import BREAKS

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
TOLERANCE = 2e-5
"""Of losses near 8.3 and norms near 1, in float32: the same sums in another order, over three steps of Adam."""


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Path:
    """A finished run under ZeRO-3, checkpoints at steps 1, 2 and 3."""
    path = bench.make("zero3", "train.save_steps=1")
    assert bench.go(path) == [0, 0], output_of(path)
    return path


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run's folder."""
    return shutil.copytree(trained, tmp_path / "run")


def refusal(path: Path, attempt: int, rank: int) -> str:
    """The problems that a rank left, as one text."""
    return json.dumps(problems(path, rank, attempt))


def oracle(checkpoint: Path) -> dict[str, Any]:
    """The trained weights as DeepSpeed's own script puts them together."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), exclude_frozen_parameters=True))


def test_zero3_is_what_it_says_and_trains_as_one_process(bench: Bench, trained: Path) -> None:
    """Losses, norms and evaluation of the single process; parts of parameters and of state on each rank."""
    assert curve(trained) == pytest.approx(curve(bench.alone()), abs=TOLERANCE)
    found = distributed(trained)
    zero = found["deepspeed"]
    settings = (found["type"], zero["stage"], zero["train_batch_size"], zero["gradient_accumulation_steps"])
    assert settings == ("DEEPSPEED", 3, 4, 2)
    assert found["sharded_share"] == pytest.approx(0.5, abs=0.01) and zero["state_share"] == pytest.approx(0.5, abs=0.01)
    assert set(found["placements"]) == {"zero: shard"} and found["trainable_parameters"] == 217_088
    # Each rank read its half of the base from the files.
    start, size = startup(trained), size_of(trained)
    assert start["loading"] == "slices" and all(0.49 * size < read < 0.52 * size for read in start["read_bytes"])
    files = manifest.read_manifest(newest(trained)).files
    assert sum("optim_states" in name for name in files) == 2 and not any("training_args" in name for name in files)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3-offload"])
def test_every_stage_trains_as_one_process(bench: Bench, name: str) -> None:
    """And is what its file says."""
    path = bench.train(name)
    assert curve(path) == pytest.approx(curve(bench.alone()), abs=TOLERANCE)
    found = distributed(path)["deepspeed"]
    assert found["stage"] == STAGES[name]["stage"]
    assert found["state_share"] == pytest.approx(0.5 if found["stage"] else 1, abs=0.01)
    assert found["offload_param"] == found["offload_optimizer"] == ("cpu" if name == "zero3-offload" else "none")


@pytest.mark.jobs
def test_a_damaged_part_is_passed_over_and_the_rest_goes_on_the_same(bench: Bench, trained: Path, copy: Path) -> None:
    """A byte of rank 1's part of the last checkpoint; the one before it leads to the same bytes."""
    [part] = newest(copy).glob("global_step3/*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    flip(part)
    assert "SHA-256" in str(verify(part.parent.parent)[0])
    bench.end(copy)
    assert events(copy, "start")[-1]["resumed_from"] == "step-000002"
    assert digests(copy) == digests(trained) and curve(copy)[:6] == curve(trained)[:6]


@pytest.mark.jobs
def test_a_part_that_changes_after_the_look_is_not_loaded(bench: Bench, copy: Path) -> None:
    """Each rank compares the hash of what it reads: DeepSpeed's loader would run what a file holds."""
    shutil.rmtree(copy / "checkpoints" / "step-000003")
    codes = bench.go(copy, attempt=2, breaks=BREAKS + "changed_before_it_is_loaded")
    assert codes[1] == 2 and "SHA-256" in refusal(copy, 2, 1)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("breaks", "every", "ends", "last"),
    [(BREAKS + "killed_in_a_save", 1, {-9}, 1), ("stop", 3, {75}, 2)],
    ids=["killed", "stopped"],
)
def test_a_run_that_is_broken_off_goes_on_to_the_same_bytes(
    breaks: str, every: int, ends: set[int], last: int, bench: Bench, trained: Path
) -> None:
    """Killed in a save, of which half a file and no manifest is left; one rank asked to stop, and all save at that step."""
    path = bench.make("zero3", f"train.save_steps={every}")
    assert ends <= set(bench.go(path, breaks=breaks, seconds=60)), output_of(path)
    assert [file.parent.name for file in path.glob(f"checkpoints/*/{manifest.MANIFEST}")] == [f"step-00000{last}"]
    bench.end(path)
    assert events(path, "start")[-1]["resumed_from"] == f"step-00000{last}" and digests(path) == digests(trained)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_loss_that_is_not_finite_stops_before_deepspeed_steps(bench: Bench, name: str) -> None:
    """Its gradients are finite, and the step is inside DeepSpeed, which the guard is asked before."""
    path = bench.make(name)
    assert set(bench.go(path, breaks=BREAKS + "infinite_loss")) != {0}
    assert "stopped before the optimizer step" in refusal(path, 1, 1)
    assert [(path / f"steps-{rank}").read_text() for rank in (0, 1)] == ["1", "1"], "the second step was not taken"
    assert not list(path.glob("checkpoints/*/MANIFEST.json"))


@pytest.mark.jobs
def test_other_ranks_and_another_stage_are_refused(bench: Bench, trained: Path) -> None:
    """ZeRO's parts cannot be laid out again; an engine that is not what the file says trains nothing."""
    path = bench.make((1, bench.of("zero3")[1]))
    shutil.copytree(trained / "checkpoints", path / "checkpoints")
    shutil.rmtree(path / "checkpoints" / "step-000003")
    assert bench.go(path, ranks=1) != [0] and "is of 2 ranks, this attempt has 1" in refusal(path, 1, 0)
    path = bench.make("zero3")
    bench.go(path, breaks=BREAKS + "another_stage")
    assert "runs with stage 1, the recipe says 3" in refusal(path, 1, 0) and not events(path, "step")


def test_the_adapter_is_what_deepspeed_s_own_script_finds(trained: Path, tmp_path: Path) -> None:
    """Bit for bit, by a reader of our own that maps the files; and nothing is taken from a file that was changed."""
    checkpoint = newest(trained)
    summary = export(checkpoint, tmp_path / "adapter")
    assert summary["parameters"] == 217_088
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = {name.replace(".default.", "."): tensor for name, tensor in oracle(checkpoint).items()}
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    assert any(bool(tensor.any()) for name, tensor in found.items() if "lora_B" in name)
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    [part] = changed.glob("global_step3/*rank_1_*optim_states.pt")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="SHA-256"):
        export(changed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_masters_on_nvme_are_read_from_their_swap_files(trained: Path, tmp_path: Path) -> None:
    """The same checkpoint as DeepSpeed leaves it where the optimizer is offloaded to NVMe: empty groups, files beside them."""
    whole = newest(trained)
    moved = shutil.copytree(whole, tmp_path / "step-000003")
    meta = manifest.read_manifest(moved).meta
    for rank, part in enumerate(sorted(moved.glob("global_step3/*optim_states.pt"))):
        state = load_verified(part)
        [group] = state["optimizer_state_dict"]["fp32_flat_groups"]
        file = part.parent / "offloaded_tensors" / f"rank{rank:02d}" / "0_55.tensor.swp"
        file.parent.mkdir(parents=True)
        file.write_bytes(group.detach().numpy().tobytes() + b"\xff" * 4096)
        part.with_suffix(".nvme.json").write_text('{"0": "0_55.tensor.swp"}')
        state["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0)]
        torch.save(state, part)
    (moved / manifest.MANIFEST).unlink()
    manifest.seal(moved, "checkpoint", meta)
    for name, checkpoint in (("plain", whole), ("nvme", moved)):
        export(checkpoint, tmp_path / name)
    plain, nvme = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "nvme"))
    assert plain.keys() == nvme.keys() and all(plain[key].equal(nvme[key]) for key in plain)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3"])
def test_a_model_that_was_trained_whole_is_exported_from_its_parts(bench: Bench, name: str, tmp_path: Path) -> None:
    """Every weight, bit for bit, tied ones once."""
    path = bench.train(name, *FULL)
    found, alone = curve(path), curve(bench.alone(*FULL))
    assert [*found[:6:2], found[6]] == pytest.approx([*alone[:6:2], alone[6]], abs=TOLERANCE)
    # DeepSpeed's norm of all gradients was 4e-5 off at most; its clip follows it, and Adam takes no notice of either.
    assert found[1:6:2] == pytest.approx(alone[1:6:2], rel=2e-4)
    export_model(newest(path), tmp_path / "model", None)
    model = load_file(tmp_path / "model" / "model.safetensors")
    if name == "zero0":
        state = torch.load(next(newest(path).glob("global_step*/mp_rank_00_model_states.pt")), weights_only=True)["module"]
    else:
        state = oracle(newest(path))
    assert model.keys() <= state.keys() and len(model) > 30
    assert all(tensor.equal(state[key].to(tensor.dtype)) for key, tensor in model.items())
