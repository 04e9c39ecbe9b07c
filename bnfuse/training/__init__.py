"""The training loop: shuffle, augment, step, evaluate, remember (docs/training.md).

    history = train_step(step, data_for(step, "digits"), epochs=10)
    history = train_step(step, data, epochs=90, schedule="step:30,60", augment="flip", save_to="run/", resume="auto")

The batch is the graph's; images that do not fill the last batch of an epoch wait for the next shuffle, or are a smaller
batch where `last_batch="train"` says so. Evaluation counts every held-out image once. Everything drawn follows from
the seed and the place in the run, so that a run which is resumed from a checkpoint goes on bit by bit as it would.

A file for each idea: `run` (from a graph to its history), `loop` (the epochs), `options` (what can be asked of it),
`loading` (batches, of memory or decoded by workers), `ahead` (what is made ahead by a thread), `augment`, `mixing`
(mixup and cutmix), `labelling` (smoothing, weights of classes), `schedules`, `feeding` (data of the step's size),
`scoring` (accuracies), `team` (what several ranks do together), `tracking` (TensorBoard), `checkpoints`, `metrics`,
`nonfinite` and `replay` (which tensor a loss of nan comes from), `history`, `plotting`.
"""

from bnfuse.data.augment import Augment, parse_augment
from bnfuse.graph.soft_labels import with_soft_labels

from .ahead import prefetched
from .feeding import (
    batch_of,
    data_for,
    evaluate_data,
    evaluate_step,
    image_shape,
    random_feeds,
    raw_data_for,
    run_steps,
)
from .history import Epoch, History
from .loading import Batch, Loader
from .loop import train_step
from .options import Options
from .schedules import Schedule, cosine, parse_schedule
from .scoring import Evaluation

__all__ = [
    "Augment",
    "Batch",
    "Epoch",
    "Evaluation",
    "History",
    "Loader",
    "Options",
    "Schedule",
    "batch_of",
    "cosine",
    "data_for",
    "evaluate_data",
    "evaluate_step",
    "image_shape",
    "parse_augment",
    "parse_schedule",
    "prefetched",
    "random_feeds",
    "raw_data_for",
    "run_steps",
    "train_step",
    "with_soft_labels",
]
