"""The family VoxCPM2: speech from text, generated in patches (short pieces of sound)."""
