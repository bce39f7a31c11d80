"""All threads along one line of pieces: file after file, each piece taken in order and made by whoever is free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from clustertune.errors import storage_error
from clustertune.merge.job import Job
from clustertune.merge.pieces import Converted, Merged, Piece, Worker, cut
from clustertune.merge.shards import Shard
from clustertune.merge.stage import Journal
from clustertune.merge.streams import BUFFERS, CHUNK, Output, Source


class _Line:
    """The pieces that are left, and the buffers for them.

    A buffer is taken before the piece, so the first piece that is not finished always has one, and nobody waits forever.
    """

    def __init__(self, job: Job, todo: list[Shard], workers: int) -> None:
        self._workers, self._guard, self._stopped = workers, threading.Lock(), False
        self._buffers: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(BUFFERS * workers):
            self._buffers.put(bytearray(CHUNK))
        self.outputs, self.journal_guard = list[Output](), threading.Lock()
        self._pieces = self._all(job, todo)

    def _all(self, job: Job, todo: list[Shard]) -> Iterator[tuple[Output, Piece]]:
        for shard in todo:
            path = job.staging / shard.name
            try:
                output = Output(path, shard.size)
            except OSError as error:
                raise storage_error(error, "writing", path) from error
            self.outputs.append(output)
            for piece in cut(shard, job.adapter):
                yield output, piece

    def take(self) -> tuple[Output, Piece, bytearray] | None:
        """The next piece, or None where there is none or the line was stopped."""
        buffer = self._buffers.get()
        with self._guard:
            taken = None if self._stopped else next(self._pieces, None)
        if taken is None:
            self._buffers.put(buffer)  # for the next who waits, and then finds the end as well
            return None
        if len(buffer) < taken[1].size:
            buffer = bytearray(taken[1].size)
        return (*taken, buffer)

    def give_back(self, buffer: bytearray) -> None:
        """A buffer is free again."""
        self._buffers.put(buffer)

    def stop(self) -> None:
        """Let nobody begin another piece, nor wait for a buffer that a failed piece holds."""
        with self._guard:
            self._stopped = True
        for _ in range(self._workers):
            self._buffers.put(bytearray())


def _load_torch() -> int:
    """Import torch with one thread per product: the workers are the parallelism, and the products' bits do not depend on it.

    Returns the threads that it had before.
    """
    import torch

    before: int = torch.get_num_threads()
    torch.set_num_threads(1)
    return before


@contextmanager
def _torch_beside() -> Iterator[Future[int]]:
    """Import torch, which takes as long as copying gigabytes, while the first pieces are copied."""
    pool = ThreadPoolExecutor(1)
    loading = pool.submit(_load_torch)
    pool.shutdown(wait=False)
    try:
        yield loading
    finally:
        if not loading.exception():
            import torch

            torch.set_num_threads(loading.result())


def _work(line: _Line, worker: Worker, journal: Journal, torch: Future[int], advance: Callable[[int], None]) -> None:
    while taken := line.take():
        output, piece, buffer = taken
        if isinstance(piece.content, Merged | Converted):
            torch.result()
        view = memoryview(buffer)[: piece.size]
        worker.make(piece, view, output)
        try:
            if output.add(view, piece.offset, partial(line.give_back, buffer)):
                record = output.finish()
                with line.journal_guard:
                    journal.add_shard(output.path.name, record)
        except OSError as error:
            raise storage_error(error, "writing", output.path) from error
        if not isinstance(piece.content, bytes):
            advance(piece.size)


def write_shards(job: Job, journal: Journal, todo: list[Shard], workers: int, advance: Callable[[int], None]) -> None:
    """Write output files into staging and note each in the journal when it is on the device.

    ``advance`` is told the bytes of weights that are written. Raises UserError (exit 73) where the storage fails.
    """
    if not todo:
        return
    line, source, failures = _Line(job, todo, workers), Source(), list[BaseException]()

    def run(torch: Future[int]) -> None:
        try:
            _work(line, Worker(source), journal, torch, advance)
        except BaseException as error:
            failures.append(error)
            line.stop()

    try:
        with _torch_beside() as torch, ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(run, torch) for _ in range(workers)]:
                    future.result()
            except BaseException:
                line.stop()
                raise
    finally:
        source.close()
        for output in line.outputs:
            output.abandon()
    if failures:
        raise failures[0]
