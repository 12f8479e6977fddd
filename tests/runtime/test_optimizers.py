"""The optimizer that a plan names trains its parts as it trains the whole model in a single process."""

from __future__ import annotations

from oracle import Case
from parity import check
from small_models import config

from galvatron.core.spec import Training


def test_sgd_with_momentum_under_sdp_and_tp() -> None:
    stages = [["sdp2-tp2", "sdp4", "tp4", "dp2-tp2"]]
    training = Training(dropout=False, optimizer="sgd")
    check(Case(config=config("bert"), stages=stages, micro_batches=2, training=training, learning_rate=0.05, clip=0.5))
