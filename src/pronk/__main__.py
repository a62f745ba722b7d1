"""`python -m pronk` is `pronk`."""

from pronk.cli import main

if __name__ == "__main__":
    main()
