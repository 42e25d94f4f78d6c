"""A package, so that tests import shared helpers as `tests.x`: pytest's importlib mode puts no folder on the path."""
