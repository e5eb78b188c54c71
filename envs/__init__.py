"""Tasks and their agent loops."""
