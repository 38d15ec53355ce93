"""DeltaKV: keys and values as small residuals against similar earlier tokens."""
