"""A discrete-event simulator: the same coordinator and policies as the live service, on a virtual clock."""
