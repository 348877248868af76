"""A forked rank until the user's first line (``start.py``), and what its agent can see of it (``trace.py``)."""
