"""Pieces and passes as ONNX: functional, our ops as functions of standard ops."""
