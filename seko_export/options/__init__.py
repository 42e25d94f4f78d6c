"""Resolving of the user's options to a build's configuration and the files that the build reads."""
