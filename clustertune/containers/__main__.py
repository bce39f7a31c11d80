"""``python -m clustertune.containers``: what ``make lock``, ``lock-check``, ``build-sif`` and ``build-image`` run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertune.containers import image_build, package_lock
from clustertune.errors import ExitCode, UserError, raise_if


def say(message: str) -> None:
    """A line for a person, on stderr."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _lock_check(args: argparse.Namespace) -> None:
    locks = package_lock.check_all(say, fresh=not args.offline)
    say(f"{len(locks)} locks: hashed, and what containers/versions.env gives")
    if args.offline:
        say("not done: resolving again, and known vulnerabilities (--offline)")
        return
    accepted = package_lock.accepted()
    try:
        problems = package_lock.audit(locks.values(), accepted, args.database)
    except package_lock.NotAudited as error:
        say(f"not done: known vulnerabilities ({error}); a mirror: make lock-check DATABASE=<address>")
        return
    raise_if(problems)
    say(f"known vulnerabilities: none but {len(accepted)} with a reason")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clustertune.containers", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(required=True)
    commands.add_parser("lock", help="resolve the pins into containers/*.lock").set_defaults(
        run=lambda _: package_lock.write_all(say)
    )
    check = commands.add_parser("lock-check", help="hashed, held to the pins, fresh, without known vulnerabilities")
    check.add_argument("--offline", action="store_true", help="only checks that need no package index")
    check.add_argument("--database", metavar="ADDRESS", default=package_lock.DATABASE, help="osv.dev, or a mirror of it")
    check.set_defaults(run=_lock_check)
    for name, what in (
        ("build-sif", "a SIF with apptainer or singularity"), ("build-image", "an OCI image with docker or podman"),
    ):  # fmt: skip
        command = commands.add_parser(name, help=what)
        image_build.arguments(command, name)
        command.set_defaults(run=lambda args: image_build.build(image_build.request(args), say))
    base = commands.add_parser("base", help="a stand-in for the base image, where no registry can be reached")
    base.add_argument("--python", default="3.12", choices=image_build.PYTHONS, help="machine whose Python it contains")
    base.add_argument("out", type=Path)
    base.set_defaults(run=lambda args: image_build.make_standin(args.python, args.out, say))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what it made is one JSON document on stdout. Errors of a user end without a traceback."""
    args = _parser().parse_args(argv)
    try:
        made = args.run(args)
    except UserError as error:
        for problem in error.problems:
            say(f"error: {problem}")
        return int(error.code)
    except KeyboardInterrupt:
        say("interrupted")
        return int(ExitCode.AGAIN)
    if made is not None:
        sys.stdout.write(json.dumps(made, indent=2) + "\n")
    return int(ExitCode.OK)


if __name__ == "__main__":
    # A build that is ended leaves no half image and no gigabytes behind, whichever way it is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
