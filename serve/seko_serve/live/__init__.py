"""Live sessions of the server: the thread that owns the device, and each viewer's stream."""
