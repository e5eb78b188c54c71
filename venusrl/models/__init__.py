"""Decoder language models in Flax Linen, their tokenizers and weight formats."""
