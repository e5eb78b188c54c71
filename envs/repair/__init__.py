"""Repair: a small Python project with one bug; the agent reads, edits, may check, and submits."""
