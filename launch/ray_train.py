"""The whole chain with its training on Ray Train: ``.venv/bin/python launch/ray_train.py RECIPE [section.key=value ...]``.

Joins the cluster of RAY_ADDRESS, or starts Ray on this machine. Resume: the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """The command line, as of ``clustertune``."""
    # The checkout: it works where clustertune is not installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import typer

    from clustertune.cli.app import run_command
    from clustertune.experimental.ray_command import ray_train

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(ray_train)
    return run_command(app)


if __name__ == "__main__":
    sys.exit(main())
