"""`python -m seko_export` runs the same program as the command `seko-export`."""

from seko_export.cli.commands import main

if __name__ == "__main__":
    main()
