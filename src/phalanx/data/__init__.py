"""Loaders that share a dataset (``sampler.py``) or a stream (``stream.py``) among ranks; begin with ``loader.py``."""
