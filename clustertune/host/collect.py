"""Everything that is known of one machine, in seconds, without changing it. Standard library only, Python 3.8 or later."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.host import gpus, mounts, network, packages, surroundings, system
from clustertune.host.facts import HostFacts, Package
from clustertune.host.probe import Probe, ask

if TYPE_CHECKING:  # 3.8 cannot subscript collections.abc
    from clustertune.host.probe import Ask

    Reader = Callable[[Probe], dict[str, Any]]

DIRECT: tuple[Reader, ...] = (
    system.processors,
    system.memory,
    system.limits,
    system.kernel,
    gpus.bridges,
    gpus.iommu,
    network.rdma,
    network.nccl_files,
    gpus.devices,
)
"""Readers of the kernel's files, which answer at once."""
ASKING: tuple[Reader, ...] = (gpus.driver, gpus.topology, gpus.cuda, gpus.kernel_log, network.interfaces, system.clock)
"""Readers that run commands: side by side."""
GRACE = 3.0
"""Seconds beyond the limit in which a reader whose command was killed says so."""


def collect(
    place: str | None = None,
    seconds: float = 20.0,
    root: str = "/",
    *,
    names: Sequence[str] = (),
    folders: Sequence[str] = (),
    python: str | None = None,
    command: Ask = ask,
) -> HostFacts:
    """The facts of this machine; of a recorded tree where ``root`` names one.

    ``place``: where this is, as ``HostFacts.place``; None: found by looking. ``seconds``: how long it may take in all; what
    did not answer by then is missing. ``names``: hosts to resolve. ``folders``: where locks, mappings and programs are tried,
    beside those that libraries use. ``python``: the ranks' interpreter; None: this one. ``command``: runs commands.
    Raises nothing for what a machine lacks.
    """
    probe = Probe(Path(root), command, time.monotonic() + seconds)
    environ = dict(os.environ) if probe.live else {}
    kind = surroundings.container(probe, environ)
    facts = HostFacts(hostname=_hostname(probe), user=surroundings.user_name() if probe.live else "", container=kind)
    facts.environment = surroundings.environment(environ)
    facts.place = place or surroundings.find_place(kind, environ, slurm=surroundings.has_slurm(probe, environ))
    asking: list[Reader] = [*ASKING, partial(_stack, python=python), partial(_storage, names=names, folders=folders)]
    if "step" not in facts.place and surroundings.has_slurm(probe, environ):
        asking.append(surroundings.slurm)
    pool = ThreadPoolExecutor(max_workers=len(asking))
    try:
        started = [(reader, pool.submit(reader, probe)) for reader in asking]
        for reader in DIRECT:
            _take(facts, reader, lambda reader=reader: reader(probe))  # type: ignore[misc]
        for reader, future in started:
            _take(facts, reader, partial(_result, future, probe))
    finally:
        pool.shutdown(wait=False)
    return facts


def _result(future: Future[dict[str, Any]], probe: Probe) -> dict[str, Any]:
    return future.result(timeout=max(0.0, probe.deadline - time.monotonic()) + GRACE)


def _take(facts: HostFacts, reader: Any, read: Callable[[], dict[str, Any]]) -> None:
    """Add what a reader found. One that fails on something unforeseen is named, and the others continue."""
    name = getattr(reader, "func", reader).__name__.strip("_")
    try:
        found = read()
    except Late:
        facts.unread.append(f"{name}: no answer in time")
        return
    except Exception as error:
        facts.unread.append(f"{name}: {type(error).__name__}: {error}"[:300])
        return
    for key, value in found.items():
        if value not in (None, "", [], {}) or getattr(facts, key) in (None, "", [], {}):
            setattr(facts, key, value)


def _hostname(probe: Probe) -> str:
    return (platform.node() if probe.live else probe.read("/proc/sys/kernel/hostname") or probe.read("/etc/hostname")) or "?"


def _storage(probe: Probe, *, names: Sequence[str], folders: Sequence[str]) -> dict[str, Any]:
    environ = dict(os.environ) if probe.live else {}
    wanted = mounts.MountQuery(
        folders=[*surroundings.probe_folders(environ), *(folder for folder in folders if folder.startswith("/"))],
        names=list(names),
        files=surroundings.files_that_matter(environ, os.getcwd()),  # noqa: PTH109 - a plain word
        libraries=surroundings.library_folders(environ),
    )
    return mounts.look(probe, wanted)


def _stack(probe: Probe, *, python: str | None) -> dict[str, Any]:
    """The packages of an interpreter: of this one by looking, of another one by asking it."""
    if not probe.live:
        return {}
    if python is None or Path(python) == Path(sys.executable):
        found = packages.look()
    else:
        answer = probe.call(python, str(Path(packages.__file__)), seconds=15.0)
        try:
            found = json.loads(answer.text)
        except ValueError:
            raise ValueError(f"{python}: {answer.fault or 'is not there' if not answer.present else 'no answer'}") from None
    found["packages"] = [Package(**item) for item in found["packages"]]
    return found
