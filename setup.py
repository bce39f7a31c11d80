"""What pyproject.toml cannot say: dependencies at the versions of containers/versions.env, and the files beside the package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = ("recipes", "ops", "launch", "eval", "containers", "pyproject.toml")
"""What commands read outside of the package. clustertune/tree.py finds it."""
LEFT_OUT = ("__pycache__", "*.sif", "*.sif.*", "*.cdx.json", ".env", ".*")

BASE = ("jinja2", "packaging", "psutil", "pydantic", "pyyaml", "rich", "typer")
"""plan, show, doctor, submit, the lint of job scripts: no torch and no transformers."""
EVAL_ONLY = ("aiohttp", "immutabledict", "langdetect", "lm-eval", "nltk", "tenacity")
TRAIN_ONLY = ("bitsandbytes", "peft", "trl", "wandb")


def pins(group: str) -> dict[str, str]:
    """Package -> version of the keys ``<group>_<NAME>`` of containers/versions.env."""
    lines = re.findall(rf"^{group}_([A-Z0-9_]+)=(\S+)$", (ROOT / "containers" / "versions.env").read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def requirements(found: dict[str, str]) -> list[str]:
    """The lines by which pip takes exactly these."""
    return [f"{name}=={version}" for name, version in found.items()]


class BuildWithFiles(build_py):
    """Puts the files beside the package into it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the checkout has them
        target = Path(self.build_lib, "clustertune", "shipped")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in SHIPPED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
            else:
                shutil.copy(ROOT / name, target)


every = pins("PY")
extras = {name: version for name, version in every.items() if name not in BASE}
setup(
    install_requires=requirements({name: every[name] for name in BASE}),
    extras_require={
        "train": requirements({name: version for name, version in extras.items() if name not in EVAL_ONLY}),
        "eval": requirements({name: version for name, version in extras.items() if name not in TRAIN_ONLY}),
        "all": requirements(extras),
        "dev": requirements(pins("DEV")),
    },
    cmdclass={"build_py": BuildWithFiles},
)
