"""Build configuration: frozen dataclasses that validate their fields. Contains no modules of a model."""
