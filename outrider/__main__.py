"""`python -m outrider`, for launchers that start a module."""

from .cli import main

main()
