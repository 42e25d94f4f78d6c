"""`python -m seko_export`: the same as the `seko-export` command."""

from seko_export.cli.commands import main

if __name__ == "__main__":
    main()
