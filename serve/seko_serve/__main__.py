"""The command ``python -m seko_serve``, which is ``seko-serve``."""

from seko_serve.cli import main

raise SystemExit(main())
