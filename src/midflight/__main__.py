"""`python -m midflight` is the `midflight` command."""

from midflight.cli import main

if __name__ == "__main__":
    main()
