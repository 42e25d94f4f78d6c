"""TensorRT plans from the ONNX form: Seko's functions become plugins, TensorRT does the rest."""
