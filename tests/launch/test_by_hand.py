"""A recipe's distribution file without this project: accelerate's parser takes it, a stock TRL script trains with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clustertune.data.local_model import make_local_model
from clustertune.recipe.architecture import scale_down
from clustertune.resolve.resolve import resolve
from clustertune.training.build import accelerate_environment
from tests.command import REPO

FILES = sorted(path.relative_to(REPO).as_posix() for path in (REPO / "recipes").glob("*/accelerate*.yaml"))
SCRIPT = """
import json, sys
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

model, out = sys.argv[1:]
rows = [{"messages": [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": "good"}]} for n in range(16)]
keep = {"report_to": "none", "save_strategy": "no"}
args = SFTConfig(out, max_steps=2, per_device_train_batch_size=1, use_cpu=True, bf16=False, **keep)
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows))
trainer.train()
state = trainer.accelerator.state
found = {"type": state.distributed_type, "world": state.num_processes, "loss": trainer.state.log_history[-1]["train_loss"]}
if state.is_main_process:
    print("FOUND " + json.dumps(found))
"""


@pytest.mark.parametrize("file", FILES)
def test_accelerate_takes_the_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own launch command reads every file without complaint, and what the file says is what ranks would be told."""
    monkeypatch.chdir((REPO / file).parent)  # DeepSpeed's file is named from the working folder
    body = yaml.safe_load(Path(Path(file).name).read_text())
    found = accelerate_environment(Path(Path(file).name), 16)
    fsdp, kind = body.get("fsdp_config", {}), body["distributed_type"]
    for name in ("FSDP", "DEEPSPEED"):
        assert (found.get(f"ACCELERATE_USE_{name}") == "true") is (kind == name)
    renamed = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    expected = {renamed.get(key.upper(), key.upper()): str(value).lower() for key, value in fsdp.items()}
    assert {key: str(found.get(key)).lower() for key in expected} == expected
    for key, value in body.get("parallelism_config", {}).items():
        assert found[key.upper()] == str(value)
    if name := body.get("deepspeed_config", {}).get("deepspeed_config_file"):
        assert found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == name and json.loads(Path(name).read_text())["zero_optimization"]
    if "dynamo_config" in body:
        assert found["ACCELERATE_DYNAMO_BACKEND"].upper() == "INDUCTOR"
        assert found["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"].lower() == "true"


@pytest.mark.jobs
def test_a_stock_script_trains_with_the_file(tmp_path: Path) -> None:
    """``accelerate launch --config_file`` with nothing of ours but the file: two processes, data parallel."""
    small = scale_down(resolve("llama1b-oasst2").architecture)
    model = make_local_model(small, ["number and words that are good", "say the number"] * 50, tmp_path / "model", 0)
    script = tmp_path / "stock.py"
    script.write_text(SCRIPT)
    words = ["accelerate.commands.launch", "--config_file", "recipes/llama1b-oasst2/accelerate.yaml", "--num_processes", "2"]
    words += ["--num_machines", "1", "--main_process_port", "0", str(script), str(model), str(tmp_path / "out")]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=REPO, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["type"] in ("MULTI_CPU", "MULTI_GPU") and found["world"] == 2 and 4 < found["loss"] < 12
