"""Readers of untrusted files with pictures, sound and arrays: only listed formats, within bounds."""
