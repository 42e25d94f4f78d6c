"""The ONNX form of engines and passes: nothing is written in place, and Seko's ops are functions of standard ops."""
