"""The names of Ray Train that docs/coming_from/ray.md calls, for where it is not installed."""
