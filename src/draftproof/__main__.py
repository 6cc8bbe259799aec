"""`python -m draftproof`, the form in which launchers start it."""

from draftproof.cli import main

main()
