"""The eager model while goldens are recorded: its engines, their rounding, and where its buffers lie."""
