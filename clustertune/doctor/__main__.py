"""Prints the facts of one machine in lines that srun keeps whole: what ``clustertune doctor`` has run on every node."""

from __future__ import annotations

import argparse
import os
import sys

from clustertune.check.machine_context import PLACES
from clustertune.doctor import wire
from clustertune.host.collect import collect


def main() -> None:
    """Look, and print what was seen."""
    parser = argparse.ArgumentParser(prog="python3 -m clustertune.doctor", description=__doc__)
    parser.add_argument("--place", choices=PLACES, help="where this is (default: detected)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit in seconds for the whole look (default: 30)")
    parser.add_argument("--name", action="append", default=[], help="a host whose name must resolve")
    parser.add_argument("--folder", action="append", default=[], help="a folder to test file locks and mmap in")
    given = parser.parse_args()
    facts = collect(given.place, given.seconds, names=given.name, folders=given.folder)
    sys.stdout.write("".join(line + "\n" for line in wire.encode(facts, os.environ.get("SLURMD_NODENAME", ""))))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    # Threads that wait for a driver or a server which is gone would keep the interpreter from ending.
    os._exit(0)
