"""Plans in the words of other systems: written for them, and read from theirs."""
