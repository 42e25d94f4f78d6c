"""`python -m seko_runtime`: the same as `seko-run`, started from a folder without modules that shadow the
runtime's.
"""

if __name__ == "__main__":  # before any other import, which the current directory could answer
    from seko_runtime.cli.console import leave_current_directory

    leave_current_directory(as_module=True)

import sys

from seko_runtime.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
