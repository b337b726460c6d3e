"""`python -m thdprof`."""

from thdprof.cli import main

main()
