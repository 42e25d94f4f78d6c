"""Encoders of video frames and sound for clients."""
