"""Prompts to groups to batches: a pure state machine that owns no task, no worker and no clock."""
