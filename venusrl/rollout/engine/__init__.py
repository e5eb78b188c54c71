"""The JAX engine: pages of KV in a radix tree, rows for what runs, prefill in length buckets, fused decode."""
