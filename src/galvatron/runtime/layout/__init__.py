"""Which rows and tokens a rank holds, the groups that move them, and Slice-Gather."""
