"""``python -m galvatron``."""

from galvatron.cli import main

main()
