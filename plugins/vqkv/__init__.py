"""VQKV: residual and product vector quantisation of keys and values."""

from plugins.vqkv.config import VQKVConfig

__all__ = ["VQKVConfig"]
