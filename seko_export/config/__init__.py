"""Build configuration: frozen dataclasses that validate their fields. This package contains no modules of a model."""
