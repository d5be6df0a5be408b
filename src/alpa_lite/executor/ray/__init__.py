"""Runs a plan on actors of a Ray cluster: one per submesh and host. Ray starts, places and watches them; JAX moves the data."""
