"""What a training run reads: data sets, and a loader that resumes where it stopped.

May know the models and what is below them, nothing of ranks. Imports torch.
"""

from galvatron.data.dataset import Dataset, Sample, evaluation_batches, split
from galvatron.data.entropy import unigram_entropy
from galvatron.data.loader import Loader, Position
from galvatron.data.opening import Data, open_data
from galvatron.data.stories import stories
from galvatron.data.synthetic import synthetic

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
