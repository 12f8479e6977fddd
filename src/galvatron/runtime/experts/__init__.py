"""Expert parallelism: experts on some ranks each, and tokens that travel to them."""
