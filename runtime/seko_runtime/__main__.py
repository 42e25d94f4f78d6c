"""`python -m seko_runtime`: the same as `seko-run`, from a directory that plants no module."""

if __name__ == "__main__":  # before any other import, which the current directory could answer
    from seko_runtime.cli.console import leave_current_directory

    leave_current_directory(as_module=True)

import sys

from seko_runtime.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
