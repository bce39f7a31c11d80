"""The Python of the ranks and its packages, by their metadata alone: nothing of them is imported.

Run as a program by another interpreter it prints the same as JSON. Standard library, Python 3.8.
"""

from __future__ import annotations

import json
import os
import platform
import re
import site
import sys
from importlib import metadata
from typing import Any

STACK = """
accelerate apex bitsandbytes datasets deepspeed fbgemm-gpu flash-attn gptqmodel huggingface-hub kernels liger-kernel lm-eval
megatron-core nltk numpy
nvidia-cublas nvidia-cublas-cu12 nvidia-cuda-runtime nvidia-cuda-runtime-cu12 nvidia-cudnn-cu11 nvidia-cudnn-cu12
nvidia-cudnn-cu13 nvidia-ml-py nvidia-nccl-cu11 nvidia-nccl-cu12 nvidia-nccl-cu13 peft pydantic pynvml ray safetensors
sentencepiece tokenizers torch torchao transformer-engine transformers triton trl vllm wandb xformers
""".split()  # noqa: SIM905 (one word a package is what a person can read and extend)


def look() -> dict[str, Any]:
    """Version and place of each package of the stack, and where this interpreter looks for packages."""
    packages = []
    for name in STACK:
        try:
            package = metadata.distribution(name)
            version, location = package.version, str(package.locate_file(""))
        except Exception:  # noqa: S112 - a broken installation has any fault; what has no metadata is not there
            continue
        packages.append({"name": name, "version": version or "", "location": os.path.realpath(location)})
    torch = next((item["location"] for item in packages if item["name"] == "torch"), None)
    return {
        "packages": packages,
        "python": platform.python_version(),
        "executable": sys.executable or "",
        "torch_cuda": cuda_of(torch) if torch else "",
        "user_site": site.getusersitepackages(),
        "user_site_used": bool(site.ENABLE_USER_SITE),
    }


def cuda_of(location: str) -> str:
    """The CUDA that the torch of a folder was built for; empty for a CPU build."""
    try:
        with open(f"{location}/torch/version.py", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return parse_torch_version(file.read(65536))
    except OSError:
        return ""


def parse_torch_version(text: str) -> str:
    """The CUDA in the text of ``torch/version.py``; empty where it says None."""
    match = re.search(r"^cuda(?:\s*:[^=\n]*)?\s*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()) + "\n")
