"""Sessions that share calls of one artifact, whatever they make: the order of their calls."""
