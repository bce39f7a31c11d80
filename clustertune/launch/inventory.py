"""What a Python has installed, as one line of JSON: ``python3 -m clustertune.launch.inventory``, run inside an image.

Standard library only, Python 3.8 or later: it has to answer in an image that lacks everything.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
from importlib import metadata
from typing import Any

MARK = "clustertune-inventory "
"""In front of the line: an image may print of its own when it starts."""


def inventory() -> dict[str, Any]:
    """The Python, and every package with its version; of a package that lies there twice the one that is imported."""
    packages = {}  # type: dict[str, str]
    for package in metadata.distributions():
        # What a broken installation left, a folder without METADATA, has neither: None, or from Python 3.12 on KeyError.
        with contextlib.suppress(KeyError, OSError, TypeError):
            name, version = package.metadata["Name"], package.version
            if not name or not version:
                continue
            packages.setdefault(re.sub(r"[-_.]+", "-", str(name)).lower(), str(version))
    return {"python": platform.python_version(), "executable": sys.executable, "packages": packages}


if __name__ == "__main__":
    sys.stdout.write(f"{MARK}{json.dumps(inventory(), sort_keys=True)}\n")
