"""The command `python -m seko_serve` is the same as `seko-serve`."""

from seko_serve.cli import main

raise SystemExit(main())
