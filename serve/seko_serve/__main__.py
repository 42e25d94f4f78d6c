"""`python -m seko_serve`."""

from seko_serve.cli import main

raise SystemExit(main())
