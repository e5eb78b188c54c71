"""The nouns of the system: trajectories, groups, batches, clocks and errors. Imports nothing of VenusRL."""
