"""clustertune: from a bare Slurm GPU cluster to an evaluated fine-tuned LLM."""

import os
import sys

__version__ = "0.1.0"


def close_working_folder() -> None:
    """Import nothing from the working folder: not here, where ``python -m`` puts it first in ``sys.path``, and in no Python
    that this process starts (PYTHONSAFEPATH). The folder of a cloned model may hold a ``numpy.py``.

    A package that lies in the working folder and nowhere else (a checkout in a container) is named by PYTHONPATH.
    """
    if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later have it
        own = sys.path.pop(0)
        if not any(finder.find_spec(__name__, None) for finder in sys.meta_path):
            sys.path.append(own)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONSAFEPATH"] = "1"


if sys.argv[:1] == ["-m"]:  # ``python -m clustertune...``, whose module is still looked for
    close_working_folder()
