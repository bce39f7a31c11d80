"""Being asked to stop: signals set a flag, and all ranks agree on the step at which they act on it."""

from __future__ import annotations

import signal
from types import FrameType

from clustertune.process import stop_signals


class StopFlag:
    """Set by SIGUSR1 (Slurm's ``--signal``), SIGTERM, SIGINT or SIGHUP; read at step boundaries and during eval."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> None:
        """Handle the stop signals from now on. A second SIGINT ends the rank at once."""
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def ask(self, why: str) -> None:
        """Ask to stop without a signal; ``why`` stands in the place of its name."""
        self.signal_name = self.signal_name or why

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None
