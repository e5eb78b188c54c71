"""A worker in a process of its own: an HTTP server around it, and a client that keeps the Worker contract."""
