"""What a person sees while the prompts are answered: one bar or a line now and then, and nothing of the libraries' own."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator

from clustertune import console

SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' bars, notes and download counts; their prints go to stderr: stdout is for one JSON document."""
    import lm_eval.api.task as contexts  # first: its extra is the one to name where it is missing
    import datasets  # isort: skip
    import transformers  # isort: skip

    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, contexts.tqdm
    verbosity = transformers.utils.logging.get_verbosity()
    bars, datasets_bars = transformers.utils.logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    # ERROR too: the scorer logs every answer without letters as one, at full length.
    logger.setLevel(logging.CRITICAL)
    contexts.tqdm = functools.partial(bar, disable=True)
    # load_dataset("json") reports itself to s3.amazonaws.com (datasets 5.2.0): 3 s lost behind a firewall that drops.
    counting, datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
        contexts.tqdm = bar
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counting
        transformers.utils.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()
        if datasets_bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A function ``report(done, total)``: a bar on a terminal; elsewhere a line every half minute."""
    with console.count_progress() as bar:
        task = bar.add_task("evaluation", total=None)
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total)
            if not console.stderr.is_terminal and time.monotonic() - last > SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                console.say(f"evaluation: {done} of {total} prompts answered")

        yield report
