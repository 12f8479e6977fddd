"""Several processes that start at once on the same text: one tokenizes it, and all read the same batches."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from ranks import ranks
from small_models import config

from galvatron.core.spec import Training
from galvatron.train.data import Loader, Position, open_data, stories


@dataclass(frozen=True)
class Read:
    """What one process has read."""

    batches: str
    """Digest of them."""
    position: Position
    built: list[str]
    """What it built, from its log."""


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().split()[0])


def read(data: Path, cache: Path) -> Read:
    """On a rank: two epochs; the ranks have different numbers of workers."""
    log = _Log()
    logger = logging.getLogger("galvatron.train.data")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    dist.barrier()
    bert = config("bert", vocab_size=400)
    opened = open_data(data, bert, Training(sequence_length=32), tokenizer="train", cache=cache, held_out=0.1)
    loader = Loader(opened.train, batch=32, seed=5, workers=2 * dist.get_rank())
    digest = hashlib.sha256()
    for _ in range(2 * len(opened.train) // 32):
        for name, tensor in next(loader).items():
            digest.update(name.encode() + tensor.numpy().tobytes())
    logger.removeHandler(log)
    loader.close()
    return Read(digest.hexdigest(), loader.position, log.lines)


def test_processes_agree_and_one_builds(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text("\n".join(stories(300)))
    one, other = ranks(2).run(read, data, tmp_path / "cache")
    assert one.position.samples_seen > 500
    assert (one.batches, one.position) == (other.batches, other.position)
    assert sorted(one.built + other.built) == ["tokenizing", "training"]
