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
    """The command that installs what an extra of the package has.

    It names the folder or address that the package came from: a public index may have another's package of this name.
    """
    if not IS_INSTALLED:
        return "run make setup"
    import json
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    distribution = next(iter(metadata.distributions(name="clustertune")), None)
    origin = json.loads(
        (distribution and distribution.read_text("direct_url.json")) or "{}"
    )  # PEP 610; what came from an index has none
    named, url, vcs = f"clustertune[{extra}]", origin.get("url", ""), origin.get("vcs_info")
    if url.startswith("file:") and not vcs:
        named = f"{url2pathname(urlsplit(url).path)}[{extra}]"
    elif url:
        named += f" @ {vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else f" @ {url}"
    return f"pip install {shlex.quote(named)}"
