"""The JAX engine: static rows of KV, prefill in length buckets, several decode steps a host turn."""
