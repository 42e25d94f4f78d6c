"""Tests of the ONNX form; a package so that they can share helpers, and none that shadows the package `onnx`."""
