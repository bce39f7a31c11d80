"""Work in a child with a limit of time."""

from __future__ import annotations

import time

import psutil

from clustertune import bounded


def test_an_answer_that_came_in_time_counts_when_it_is_read_late() -> None:
    """The facts of a node are asked for before its ranks run, and read after them: longer than the limit of the facts."""
    text = "x" * 200_000  # more than a pipe holds by itself
    with bounded.Pending(lambda: {"text": text}, 60.0) as pending:
        pid = pending._child[0]
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        pending._deadline = time.monotonic() - 1.0
        assert pending.answer().found == {"text": text}
