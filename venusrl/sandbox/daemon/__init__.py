"""A node's sandboxes over HTTP: the service, and its client, which gives the same Sandbox as a pool in the process."""
