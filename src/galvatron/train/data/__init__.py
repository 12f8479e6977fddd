"""What a training run reads: data sets, and a loader that resumes where it stopped.

May know the models and what is below them, nothing of ranks. Imports torch.
"""

from galvatron.train.data.dataset import Dataset, Sample, evaluation_batches, split
from galvatron.train.data.loader import Loader, Position
from galvatron.train.data.opening import Data, open_data
from galvatron.train.data.stories import stories, unigram_entropy
from galvatron.train.data.synthetic import synthetic

__all__ = [
    "Data",
    "Dataset",
    "Loader",
    "Position",
    "Sample",
    "evaluation_batches",
    "open_data",
    "split",
    "stories",
    "synthetic",
    "unigram_entropy",
]
