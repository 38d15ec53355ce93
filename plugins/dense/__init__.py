"""The uncompressed cache as a method (`--method none`): the baseline, and the layers that other methods keep full."""
