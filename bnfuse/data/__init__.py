"""Images to train on.

    data = load_data("digits", image=32)                       # embedded: 1,797 handwritten digits, 8x8
    data = load_data("fashion-mnist")                          # Debian's package dataset-fashion-mnist
    data = load_data("mine.npz"); data = load_data("folder/")  # your own
    for x, y in batches(data.train_x, data.train_y, 32, seed=0, epoch=1): ...

digits.npz holds the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine
Learning Repository, 1998, doi:10.24432/C50P49), licensed CC BY 4.0, as scikit-learn (BSD 3-Clause) distributes it:
`images` uint8 [1797, 8, 8] with values 0 to 16, `labels` uint8 [1797].
"""

from .dataset import Dataset, batches
from .sources import load_data

__all__ = ["Dataset", "batches", "load_data"]
