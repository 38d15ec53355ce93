"""Rewrites a model's attention into compressed-KV ops, hands the graph to a backend and proves the result."""
