"""The native library: CUDA kernels behind the C functions of kvpack.h, and the ONNX Runtime operators made of them."""
