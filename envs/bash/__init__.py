"""Bash: one simple shell task, one command, graded by what it did to the files or printed."""
