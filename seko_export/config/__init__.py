"""Build configuration: frozen dataclasses that validate their fields. The package `seko_export.config` contains no
modules of a model."""
