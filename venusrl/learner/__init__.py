"""Batches of groups to new weights: objectives, packing, the sharded step, checkpoints."""
