"""`python -m anechain` is `anechain`."""

from anechain.cli import main

main()
