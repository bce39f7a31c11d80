"""The program beside the first node's agent: keeps ``live.html``, the metrics file and the list of alerts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clustertune.monitor.sampler import append, is_over, listen_to_parent
from clustertune.report.metrics import TELEMETRY

if TYPE_CHECKING:
    from clustertune.cluster.schema import Monitor
    from clustertune.monitor.status import Alert, RunStatus, Watcher

FIRST_SECONDS = 10.0
"""A training that ends sooner has its page from its launcher alone: what draws it takes seconds to load."""
EVERY_SECONDS = 3.0
PAUSE = 20.0
"""Between two pages lie 20 times as long as the last one took: at most 5 % of one core."""


class Alerts:
    """Each alert once, by its kind: into ``telemetry/alerts.jsonl``, and the log of the first node."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._announced: set[str] = set()

    def take(self, alerts: tuple[Alert, ...]) -> None:
        """Record what is new; an alert that has ended and comes again is new. Raises OSError where the run's storage fails."""
        for alert in alerts:
            if alert.kind not in self._announced:
                self._record(alert)
        self._announced = {alert.kind for alert in alerts}

    def _record(self, alert: Alert) -> None:
        from clustertune.console import say

        body = {"time": round(time.time(), 3), "run": str(self.run), **vars(alert)}
        say(f"alert: {alert.kind}: {alert.text}")
        (self.run / TELEMETRY).mkdir(exist_ok=True)
        append(self.run / TELEMETRY / "alerts.jsonl", json.dumps(body) + "\n")


def write(run: Path, status: RunStatus, site: Monitor) -> None:
    """Write the page, and the metrics file where the site wants one. Raises OSError."""
    from clustertune.manifest import write_durably
    from clustertune.monitor.openmetrics import write_openmetrics
    from clustertune.monitor.status_page import FILE, draw

    write_durably(run / FILE, draw(status))
    if site.openmetrics:
        write_openmetrics(Path(site.openmetrics) / f"clustertune-{status.title}.prom", status)


def refresh(run: Path) -> None:
    """Write the page of a run once, as its launcher does behind an attempt. Raises OSError and UserError."""
    from clustertune.monitor.status import Watcher

    watcher = Watcher(run)
    status = watcher.look()
    site = site_of(watcher)
    write(run, status, site)
    if status.state != "trained":
        Alerts(run).take(tuple(alert for alert in status.alerts if alert.kind in ("not_finite", "no_gradient", "stalled")))


def site_of(watcher: Watcher) -> Monitor:
    """The ``monitor`` section of the cluster file that the run was submitted with."""
    from clustertune.cluster.schema import Monitor
    from clustertune.report.content import get

    return Monitor.model_validate(get(watcher.run.read(), "cluster", "monitor") or {})


def main(parent: int, run: Path) -> None:
    """Until the parent, whose pid this is, ends or sends SIGTERM."""
    listen_to_parent(parent)
    if is_over(FIRST_SECONDS):
        return
    from clustertune.console import say
    from clustertune.errors import UserError
    from clustertune.monitor.status import Watcher

    watcher = Watcher(run)
    site = site_of(watcher)
    alerts, pause = Alerts(run), 0.0
    while not is_over(pause):
        began = time.process_time()
        try:
            status = watcher.look()
            write(run, status, site)
            alerts.take(status.alerts)
        except (OSError, UserError) as error:
            say(f"note: the live page could not be written: {error}")
        pause = max(EVERY_SECONDS, PAUSE * (time.process_time() - began))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
