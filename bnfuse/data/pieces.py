"""Batches of images made by several workers, each a few at a time, some batches ahead, in the order asked for."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from .augment import Augment
from .making import Maker
from .processes import makers
from .streamed import StreamedImages
from .workers import threads

K = TypeVar("K")
PIECE = 8  # images that a worker makes at a time, at most
IN_HAND = 2  # batches that workers are at, or wait for them
EACH = 64  # images for each worker, of fewer no processes are started


def batches_made(
    maker: Maker, workers: int, batch: int, wanted: Iterable[tuple[K, np.ndarray, int]]
) -> Iterator[tuple[K, np.ndarray, np.ndarray]]:
    """Make batches of up to `batch` images: of each that is wanted, a key, the places in the data set and the epoch.
    Gives the key, the places and the images float32 [n, C, H, W], in that order. What is in hand is dropped where the
    caller stops."""
    piece = max(1, min(PIECE, batch // workers))
    made, close = makers(maker, workers, piece)
    pool = threads(workers)
    waiting: collections.deque[tuple[K, np.ndarray, list[Future[np.ndarray]]]] = collections.deque()
    try:
        for key, chosen, epoch in wanted:
            starts = range(0, len(chosen), piece)
            waiting.append((key, chosen, [pool.submit(made, chosen[s : s + piece], epoch) for s in starts]))
            if len(waiting) >= IN_HAND:
                yield gathered(maker, *waiting[0])
                waiting.popleft()
        while waiting:
            yield gathered(maker, *waiting[0])
            waiting.popleft()
    finally:
        for _, _, pieces in waiting:
            for future in pieces:
                future.cancel()
        close()


def gathered(
    maker: Maker, key: K, chosen: np.ndarray, pieces: list[Future[np.ndarray]]
) -> tuple[K, np.ndarray, np.ndarray]:
    """Wait for the pieces of a batch, and put them together."""
    found = np.empty((len(chosen), *maker.images.shape[1:]), np.float32)
    start = 0
    for piece in pieces:
        rows = piece.result()
        found[start : start + len(rows)] = rows
        start += len(rows)
    return key, chosen, found


def in_order(images: StreamedImages, batch: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Decode all images in order, `batch` at a time: as images[start : start + batch] does, with workers ahead."""
    workers = min(images.workers, max(1, len(images) // EACH))
    parts = (slice(start, min(start + batch, len(images))) for start in range(0, len(images), batch))
    wanted = ((part, np.arange(part.start, part.stop), 0) for part in parts)
    for part, _, x in batches_made(Maker(images, Augment(), 0), workers, batch, wanted):
        yield part, x
