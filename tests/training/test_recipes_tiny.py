"""Every recipe of the tree really trains, ``--tiny``: its model class, its adapters, its distribution file."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.chain import Chain, open_run
from clustertune.export.whole import export_either, find_base, read_types
from clustertune.recipe import quantization
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.recipe_runs import RUNS, WORDS, judge
from tests.training.forked import Forge

pytestmark = [pytest.mark.timeout(900), pytest.mark.jobs]


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_trains_tiny(name: str, forge: Forge, tmp_path: Path) -> None:
    """Finished, over the mesh and the placements that the recipe names, with a finite loss at each step.

    A trained model is then published in the types of its base, tensor by tensor; an adapter in the type in which it is trained:
    float32, and bfloat16 beside a quantised base (trl/trainer/sft_trainer.py:911).
    """
    recipe, more = RUNS[name].recipe, RUNS[name].overrides
    ranks = RUNS[name].ranks
    resolved = resolve(REPO / "recipes" / recipe, [*WORDS, *more], tiny=True, ranks=ranks)
    path = tmp_path / "run"
    run = open_run(resolved, path, ["test"])
    run.write_own_files(resolved)
    Chain(run, resolved).prepare()
    codes = forge.run(path, ranks)
    logs = "".join(log.read_text()[-3000:] for log in sorted(path.glob("attempts/*/rank-*.log")))
    assert codes == [0] * ranks, logs
    judge(name, path)
    base = find_base(path)
    assert base is not None
    named, stored = read_types(base)
    out = Path(export_either(path)["out"])
    published = read_types(out)
    assert named == "bfloat16" and set(stored.values()) == {named}
    if resolved.recipe.lora is not None:  # also those of experts, which PEFT trains otherwise than modules
        from safetensors.torch import load_file

        factors = load_file(out / "adapter_model.safetensors")
        assert [name for name, value in factors.items() if ".lora_B" in name and not value.any()] == []
        assert any(".experts." in name for name in factors) == bool(resolved.recipe.lora.get("target_parameters"))
    trained = "bfloat16" if quantization.of(resolved.train_args) is not None else "float32"
    adapter = (trained, dict.fromkeys(published[1], trained))
    assert published == ((named, stored) if resolved.recipe.lora is None else adapter)
