"""The model server: a paged KV cache with verified prefix reuse. Imports nothing from gateway."""

__version__ = "0.1.0"
