"""TensorRT plans, made from the ONNX form of engines: Seko's functions become plugins, TensorRT compiles the rest."""
