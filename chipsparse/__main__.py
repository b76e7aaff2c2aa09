"""`python -m chipsparse` is the `chipsparse` command."""

from chipsparse.cli.main import main

if __name__ == "__main__":
    main()
