"""VoxCPM2: speech from text, decoded patch by patch."""
