"""Integer KV cache: keys and values rounded to 8, 4, 3 or 2 bits, the baselines that other methods are measured by."""
