"""DeepSpeed's stages train as one process does, continue with the same bytes, and export what was trained."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.checkpoint.store import newest_whole, verify
from clustertune.errors import UserError
from tests.command import events
from tests.training.benches import FULL, STAGES, Bench, curve, output_of, problems

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
BREAKS = "tests.training.deepspeed_breaks:"
TOLERANCE = 2e-5
"""Of losses near 8.3 and norms near 1, in float32: the same sums in another order, over three steps of Adam."""


def make(bench: Bench, name: str, *more: str, ranks: int = 2) -> Path:
    """A run folder whose next stage is the training under DeepSpeed."""
    return bench.make(name, ranks, bench.zero(name), *more)


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Path:
    """A finished run under ZeRO-3, checkpoints at steps 1, 2 and 3."""
    path = make(bench, "zero3", "train.save_steps=1")
    assert bench.go(path) == [0, 0], output_of(path)
    return path


def newest(path: Path) -> Path:
    found, _ = newest_whole(path / "checkpoints")
    assert found is not None
    return found.path


def digests(path: Path) -> Any:
    return manifest.read_manifest(newest(path)).meta["state_digests"]


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
    found = json.loads((trained / "run.json").read_text())["distributed"]
    zero = found["deepspeed"]
    assert (found["type"], zero["stage"], zero["train_batch_size"], zero["gradient_accumulation_steps"]) == (
        "DEEPSPEED",
        3,
        4,
        2,
    )
    assert found["sharded_share"] == pytest.approx(0.5, abs=0.01) and zero["state_share"] == pytest.approx(0.5, abs=0.01)
    assert set(found["placements"]) == {"zero: shard"} and found["trainable_parameters"] == 217_088
    # Each rank read its half of the base from the files.
    [start] = [event for event in events(trained, "startup") if event["part"] == "total"]
    size = sum(file.stat().st_size for file in (trained / "model").glob("*/*.safetensors"))
    assert start["loading"] == "slices" and all(0.49 * size < read < 0.52 * size for read in start["read_bytes"])
    files = manifest.read_manifest(newest(trained)).files
    assert sum("optim_states" in name for name in files) == 2 and not any("training_args" in name for name in files)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3-offload"])
def test_every_stage_trains_as_one_process(bench: Bench, name: str) -> None:
    """And is what its file says."""
    path = make(bench, name)
    assert bench.go(path) == [0, 0], output_of(path)
    assert curve(path) == pytest.approx(curve(bench.alone()), abs=TOLERANCE)
    found = json.loads((path / "run.json").read_text())["distributed"]["deepspeed"]
    assert found["stage"] == STAGES[name]["stage"]
    assert found["state_share"] == pytest.approx(0.5 if found["stage"] else 1, abs=0.01)
    assert found["offload_param"] == found["offload_optimizer"] == ("cpu" if name == "zero3-offload" else "none")


def test_a_damaged_part_is_passed_over_and_the_rest_goes_on_the_same(bench: Bench, trained: Path, tmp_path: Path) -> None:
    """A byte of rank 1's part of the last checkpoint; the one before it leads to the same bytes."""
    path = tmp_path / "run"
    shutil.copytree(trained, path)
    [part] = newest(path).glob("global_step3/*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert "SHA-256" in str(verify(part.parent.parent)[0])
    assert bench.go(path, attempt=2) == [0, 0], output_of(path)
    assert events(path, "start")[-1]["resumed_from"] == "step-000002"
    assert digests(path) == manifest.read_manifest(trained / "checkpoints/step-000003").meta["state_digests"]
    assert curve(path)[:6] == curve(trained)[:6]


@pytest.mark.jobs
def test_a_part_that_changes_after_the_look_is_not_loaded(bench: Bench, trained: Path, tmp_path: Path) -> None:
    """Each rank compares the hash of what it reads: DeepSpeed's loader would run what a file holds."""
    path = tmp_path / "run"
    shutil.copytree(trained, path)
    shutil.rmtree(path / "checkpoints" / "step-000003")
    codes = bench.go(path, attempt=2, breaks=BREAKS + "changed_before_it_is_loaded")
    assert codes[1] == 2 and "SHA-256" in refusal(path, 2, 1)


@pytest.mark.jobs
def test_a_kill_in_the_middle_of_a_save_loses_that_save_only(bench: Bench, trained: Path) -> None:
    """Half a file and no manifest: the next attempt resumes from the checkpoint before, to the same bytes."""
    path = make(bench, "zero3", "train.save_steps=1")
    assert -9 in bench.go(path, breaks=BREAKS + "killed_in_a_save", seconds=60)
    assert not (path / "checkpoints/step-000002" / manifest.MANIFEST).exists()
    assert bench.go(path, attempt=2) == [0, 0], output_of(path)
    assert events(path, "start")[-1]["resumed_from"] == "step-000001"
    assert digests(path) == digests(trained)


@pytest.mark.jobs
def test_an_agreed_stop_saves_and_the_next_attempt_ends_the_same(bench: Bench, trained: Path) -> None:
    """One rank is asked; all save at the same step."""
    path = make(bench, "zero3", "train.save_steps=3")
    assert bench.go(path, breaks="stop") == [75, 75], output_of(path)
    assert newest(path).name == "step-000002"
    assert bench.go(path, attempt=2) == [0, 0], output_of(path)
    assert digests(path) == digests(trained)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_loss_that_is_not_finite_stops_before_deepspeed_steps(bench: Bench, name: str) -> None:
    """Its gradients are finite, and the step is inside DeepSpeed: without the guard the second step has been taken."""
    steps = {}
    for breaks in ("infinite_loss", "infinite_loss_without_guard"):
        path = make(bench, name)
        assert set(bench.go(path, breaks=BREAKS + breaks)) != {0}
        assert "stopped before the optimizer step" in refusal(path, 1, 1)
        steps[breaks] = [(path / f"steps-{rank}").read_text() for rank in (0, 1)]
        assert not (path / "checkpoints").exists() or not list((path / "checkpoints").glob("*/MANIFEST.json"))
    assert steps == {"infinite_loss": ["1", "1"], "infinite_loss_without_guard": ["2", "2"]}


@pytest.mark.jobs
def test_other_ranks_and_another_stage_are_refused(bench: Bench, trained: Path, tmp_path: Path) -> None:
    """ZeRO's parts cannot be laid out again; an engine that is not what the file says trains nothing."""
    path = make(bench, "zero3", ranks=1)
    shutil.copytree(trained / "checkpoints", path / "checkpoints")
    shutil.rmtree(path / "checkpoints" / "step-000003")
    assert bench.go(path, ranks=1) != [0] and "is of 2 ranks, this attempt has 1" in refusal(path, 1, 0)
    path = make(bench, "zero3")
    bench.go(path, breaks=BREAKS + "another_stage")
    assert "runs with stage 1, the recipe says 3" in refusal(path, 1, 0) and not events(path, "step")


def test_the_adapter_is_what_deepspeed_s_own_script_finds(trained: Path, tmp_path: Path) -> None:
    """Bit for bit, by a reader of our own that maps the files; and nothing is taken from a file that was changed."""
    from safetensors.torch import load_file

    from clustertune.export.export import export

    checkpoint = newest(trained)
    summary = export(checkpoint, tmp_path / "adapter")
    assert summary["parameters"] == 217_088
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = {name.replace(".default.", "."): tensor for name, tensor in oracle(checkpoint).items()}
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    assert any(bool(tensor.any()) for name, tensor in found.items() if "lora_B" in name)
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    [part] = changed.glob("global_step3/*rank_1_*optim_states.pt")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="SHA-256"):
        export(changed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_masters_on_nvme_are_read_from_their_swap_files(trained: Path, tmp_path: Path) -> None:
    """The same checkpoint as DeepSpeed leaves it where the optimizer is offloaded to NVMe: empty groups, files beside them."""
    import torch
    from safetensors.torch import load_file

    from clustertune.export.export import export
    from clustertune.training.deepspeed import load_verified, own_names

    whole, moved = newest(trained), tmp_path / "step-000003"
    shutil.copytree(whole, moved)
    meta = manifest.read_manifest(moved).meta
    for rank, part in enumerate(sorted(moved.glob("global_step3/*optim_states.pt"))):
        state = load_verified(part, own_names())
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


def test_swap_files_are_noted_where_a_group_lies_on_nvme() -> None:
    """By the id that DeepSpeed gives the group; a group in memory has no note."""
    import torch

    from clustertune.training.deepspeed import swapped_masters

    class Info:
        def get_swap_paths(self) -> list[str]:
            return ["/disk/rank0/0_9.tensor.swp", "/disk/rank0/0_9_exp_avg.tensor.swp"]

    class Optimizer:
        fp32_partitioned_groups_flat = (torch.empty(0), torch.ones(2))
        optimizer_swapper = type("Swapper", (), {"swap_params_info": {"0_9": Info()}})()

    Optimizer.fp32_partitioned_groups_flat[0].ds_id = "0_9"
    assert swapped_masters(Optimizer()) == {"0": "0_9.tensor.swp"} and swapped_masters(None) == {}


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3"])
def test_a_model_that_was_trained_whole_is_exported_from_its_parts(bench: Bench, name: str, tmp_path: Path) -> None:
    """Every weight, bit for bit, tied ones once."""
    from safetensors.torch import load_file

    from clustertune.export.whole import export_model

    path = make(bench, name, *FULL)
    assert bench.go(path) == [0, 0], output_of(path)
    found, alone = curve(path), curve(bench.alone(*FULL))
    assert [*found[:6:2], found[6]] == pytest.approx([*alone[:6:2], alone[6]], abs=TOLERANCE)
    # DeepSpeed's norm of all gradients was 4e-5 off at most; its clip follows it, and Adam takes no notice of either.
    assert found[1:6:2] == pytest.approx(alone[1:6:2], rel=2e-4)
    export_model(newest(path), tmp_path / "model", None)
    model = load_file(tmp_path / "model" / "model.safetensors")
    if name == "zero0":
        import torch

        state = torch.load(next(newest(path).glob("global_step*/mp_rank_00_model_states.pt")), weights_only=True)["module"]
    else:
        state = oracle(newest(path))
    assert model.keys() <= state.keys() and len(model) > 30
    assert all(tensor.equal(state[key].to(tensor.dtype)) for key, tensor in model.items())
