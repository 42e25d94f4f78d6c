"""TensorRT plans out of the ONNX form: our functions become plugins, the rest is TensorRT's."""
