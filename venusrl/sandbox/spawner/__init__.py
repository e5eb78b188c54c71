"""The small process that forks, confines, saves, restores and ends a host's sandboxes."""
