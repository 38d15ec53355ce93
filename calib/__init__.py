"""Fit and measure the codecs of compressed KV caches."""
