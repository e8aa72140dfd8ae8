"""`python -m memfit` is the `memfit` command."""

from memfit.cli import main

if __name__ == "__main__":
    main()
