"""The kernels' bench: one layer's steps through the native library, beside the 16-bit attention that is installed."""
