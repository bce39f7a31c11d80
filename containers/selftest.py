"""The image's own test: what is installed is what was locked, it imports, two ranks add, a tiny model learns.

``python selftest.py`` runs it; ``--compile`` also compiles what recipes compile at run time (minutes).
It stands in the image beside its lock and uses nothing but what the image has: no network, no GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
IMPORTS = {
    "torch": "torch", "transformers": "transformers", "trl": "trl", "peft": "peft", "accelerate": "accelerate",
    "datasets": "datasets",
    "tokenizers": "tokenizers", "safetensors": "safetensors", "lm-eval": "lm_eval", "nltk": "nltk", "wandb": "wandb",
    "bitsandbytes": "bitsandbytes", "deepspeed": "deepspeed", "liger-kernel": "liger_kernel", "ray": "ray", "vllm": "vllm",
}  # fmt: skip
"""Package -> module, imported where the package is locked."""
RANK_SECONDS = 300


def tell(line: str) -> None:
    """A line on stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """What the image was built from."""
    pairs = re.findall(r"^([A-Za-z0-9][\w.-]*)==([\w.+!-]+)", (FOLDER / "requirements.txt").read_text(), re.MULTILINE)
    return {normal(name): version for name, version in pairs}


def installed() -> dict[str, str]:
    """What its Python finds."""
    return {normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}


def check_installed() -> None:
    """Nothing more, nothing less, nothing else than the lock, and what each package asks for is there."""
    want, have = locked(), installed()
    wrong = [
        f"{name}: {have.get(name)} is installed, {want.get(name)} is locked"
        for name in sorted({*want, *have})
        if want.get(name) != have.get(name)
    ]
    if wrong or not want:
        raise SystemExit("\n".join(["the image is not what was locked:", *wrong]))
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"pip check: {done.stdout}{done.stderr}")
    tell(f"packages: {len(want)}, as locked")


def check_imports() -> None:
    """The stack imports, with its versions."""
    want = locked()
    for package, module in IMPORTS.items():
        if package in want:
            importlib.import_module(module)
            tell(f"{package} {want[package]}")
    import torch

    tell(f"python {sys.version.split()[0]}")
    tell(f"torch's CUDA: {torch.version.cuda}")
    if torch.version.cuda and torch.distributed.is_nccl_available():
        tell(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    tell(f"GPUs seen: {torch.cuda.device_count()}")


def one_rank(rank: int, folder: str) -> None:
    """One of two: gloo over the loopback, met over a file, so that no port can be taken."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    if value.item() != 3.0:
        raise SystemExit(f"rank {rank}: 1 + 2 gave {value.item()}")


def check_ranks() -> None:
    """Two processes add their numbers."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), folder], env=environ) for rank in range(2)]
        try:
            codes = [rank.wait(RANK_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise SystemExit(f"2-rank gloo all_reduce: exit codes {codes}")
    tell("2-rank gloo all_reduce: 1 + 2 = 3")


def check_training() -> None:
    """LoRA on a random two-layer Llama lowers its loss, and touches the adapter only."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    tokens = torch.randint(0, 64, (2, 16))
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not losses[-1] < losses[0] < 20:
        raise SystemExit(f"a tiny model does not learn: {losses}")
    if moved := [name for name, value in frozen.items() if not torch.equal(value, model.state_dict()[name])]:
        raise SystemExit(f"frozen weights moved: {moved}")
    tell(f"5 training steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def check_compilers() -> None:
    """What recipes compile at run time: torch.compile's C++; where DeepSpeed is locked, its CPU optimizer and NVMe access.

    A CUDA build of torch compiles as on a machine with a GPU, so that nvcc and what async_io links are looked for too.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Ahead of the imports: both packages read them once.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}
        import torch

        values = torch.arange(64.0)
        if not torch.equal(torch.compile(lambda x: torch.relu(x - 8) * 2)(values), torch.relu(values - 8) * 2):
            raise SystemExit("torch.compile: the compiled function gives other values")
        tell("torch.compile: C++ compiled")
        if "deepspeed" not in locked():
            return
        if torch.version.cuda:
            # Without a GPU its builders would leave out nvcc and the CUDA libraries, which they ask for on a node.
            os.environ |= {"DS_ACCELERATOR": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0"}
            torch.cuda.is_available = lambda: True
        from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

        for builder in (CPUAdamBuilder(), AsyncIOBuilder()):
            began = time.monotonic()
            builder.load(verbose=False)
            tell(f"DeepSpeed's {builder.name}: compiled in {time.monotonic() - began:.0f} s")


def main() -> None:
    """All checks, in order of cost."""
    if sys.argv[1:2] == ["--rank"]:
        one_rank(int(sys.argv[2]), sys.argv[3])
        return
    started = time.monotonic()
    checks = [check_installed, check_imports, check_ranks, check_training]
    if sys.argv[1:] == ["--compile"]:
        checks.append(check_compilers)
    for check in checks:
        check()
    tell(f"the image works ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
