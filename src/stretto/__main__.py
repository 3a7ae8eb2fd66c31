"""`python -m stretto`."""

from stretto.cli import main

main()
