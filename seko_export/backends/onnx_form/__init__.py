"""The ONNX form of engines and passes: engines write nothing in place, and Seko's ops are ONNX functions made of
standard ops."""
