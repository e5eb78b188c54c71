"""A program for each figure of the paper; each number says whether it is live, simulated or from a trace."""
