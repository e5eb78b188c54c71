"""Sandboxes that are virtual machines of QEMU's: guests of the host's own programs, cloned from one that has booted."""
