"""From a module to a checked graph and a clean package."""
