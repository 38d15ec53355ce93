"""The compressed-KV methods: one folder per method with its configuration, reference and graph body."""
