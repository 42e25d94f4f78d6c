"""Readers of untrusted files with pictures, sound and arrays: only listed formats are read, within limits of size."""
