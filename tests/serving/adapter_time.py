"""``python -m tests.serving.adapter_time MODEL [RUNS]``: seconds from an adapter on disk to its first answer, by cpu_server.py.

Each run is another adapter: the model's LoRA of rank 16 with other weights, written as a training's rank writes it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from clustertune.launch.guard import vllm_guard
from clustertune.launch.node import free_port
from clustertune.launch.server_requests import ask, load_adapter, request, unload_adapter
from clustertune.training.rollouts import ServerRing
from tests.slurm import wait_for

KEY = "key"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ONE_TOKEN = {"prompt": [[1]], "max_tokens": 1, "temperature": 0, "seed": 0}


def measure(model: Path, runs: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds of each run: until the server has the adapter, and until its first answer of one token."""
    port = free_port(23_000)
    url, paths = f"http://127.0.0.1:{port}", str(Path(vllm_guard.__file__).parent)
    environment = {**os.environ, vllm_guard.KEY: KEY, vllm_guard.ADDRESS: f"127.0.0.1:{port}", "PYTHONPATH": paths}
    words = [sys.executable, str(Path(__file__).with_name("cpu_server.py")), "serve", str(model), "--dtype", "float32"]
    words += ["--middleware", "vllm_guard.KeyGuard", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(words, env=environment)
    (folder / "ring.json").write_text(json.dumps({"urls": [url], "key": KEY}))
    ring = ServerRing(folder / "ring.json", lambda: None, vocabulary=1 << 30)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=16, lora_alpha=32, target_modules=MODULES))
    trained = {name: value for name, value in tuned.named_parameters() if value.requires_grad}
    found, before = [], ""
    try:
        wait_for(lambda: ask(url, "/health", KEY) is not None, "the server", 120)
        for number in range(runs):
            for value in trained.values():
                torch.nn.init.normal_(value, std=0.01)
            name = f"adapter-1-{number}"
            ring.publish(tuned, trained, name)
            began = time.perf_counter()
            assert load_adapter(url, KEY, name, folder / name) is None
            loaded = time.perf_counter()
            request(url, "/v1/completions", KEY, {**ONE_TOKEN, "model": name}, seconds=60)
            found.append((loaded - began, time.perf_counter() - began))
            unload_adapter(url, KEY, before)  # as the trainer: the one before goes when the next one is loaded
            before = name
        size = (folder / name / "adapter_model.safetensors").stat().st_size
        sys.stdout.write(f"adapter of {size / 1e6:.1f} MB, {runs} runs\n")
    finally:
        server.kill()
        server.wait()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        seconds = measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10, Path(made))
    for what, column in zip(("loaded", "first answer"), zip(*seconds, strict=True), strict=True):
        sys.stdout.write(f"{what}: median {statistics.median(column):.2f} s, {min(column):.2f} to {max(column):.2f}\n")
