"""Live sessions: the thread that owns the device, and each viewer's stream."""
