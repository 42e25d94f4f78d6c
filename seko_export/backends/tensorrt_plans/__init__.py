"""TensorRT plans, made from the ONNX form of engines. In a plan Seko's functions become plugins, and TensorRT compiles
the rest."""
