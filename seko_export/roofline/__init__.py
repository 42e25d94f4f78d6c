"""Prediction of memory and time of a build on any GPU, for `seko-export plan`."""
