"""Context parallelism: attention over sequences that are divided over ranks, by Ulysses, by a ring, or by both."""
