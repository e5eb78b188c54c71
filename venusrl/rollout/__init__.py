"""Generation: the service that drives trajectories, and the workers that it drives them on."""
