"""Failures of the machine and its libraries, turned into errors of the runtime; signals that end a command; times of
parts; garbage collection."""
