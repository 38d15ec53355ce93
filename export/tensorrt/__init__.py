"""Plans of TensorRT and TensorRT for RTX, made from an engine's ONNX graph."""
