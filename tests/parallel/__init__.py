"""An artifact of several ranks: split, processes, faults."""
