"""Programs. Each is `python -m launchers.NAME --help`."""
