"""Build configuration: frozen dataclasses that validate their fields. No model's modules."""
