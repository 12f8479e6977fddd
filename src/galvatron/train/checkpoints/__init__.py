"""The state of training on disk: saved aside and renamed when complete, checked when read, loaded under any plan.

``manifest``, ``folder`` and ``verify`` know files alone and import no torch; ``layout`` and ``optimizer`` know the
runtime; ``storage`` is what torch.distributed.checkpoint (DCP) writes and reads through; ``checkpoints`` puts them
together; ``export`` makes Hugging Face's format of one.
"""
