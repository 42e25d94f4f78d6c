"""`python -m seko_runtime` does the same as `seko-run`. The current directory must have no modules with the names of
modules that the runtime uses.
"""

if __name__ == "__main__":  # before any other import, which the current directory could answer
    from seko_runtime.cli.console import leave_current_directory

    leave_current_directory(as_module=True)

import sys

from seko_runtime.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
