"""The folder of ``recipes/``, ``ops/``, ``launch/``, ``eval/`` and ``containers/``: the checkout, or an installed copy.

setup.py puts the copy below the package when it builds a wheel; a checkout has none.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_SHIPPED = PACKAGE / "shipped"
IS_INSTALLED = _SHIPPED.is_dir()
"""Whether this is an installed package (pip, uv) and not a checkout."""
ROOT = _SHIPPED if IS_INSTALLED else PACKAGE.parent


def env_file() -> Path:
    """The ``.env`` with the user's tokens: in the checkout; of an installed package in the user's folder for configuration."""
    return Path("~/.config/clustertune/.env").expanduser() if IS_INSTALLED else ROOT / ".env"


def python_lines() -> str:
    """What a job script needs ahead of its body where there is no checkout with its .venv: the Python that has the package."""
    if not IS_INSTALLED:
        return ""
    return f"\n# the Python that clustertune is installed in\nclustertune_python={shlex.quote(sys.executable)}\n"


def how_to_install(extra: str) -> str:
    """The command that installs what an extra of the package has."""
    return f"pip install 'clustertune[{extra}]'" if IS_INSTALLED else "run make setup"
