"""The ranks' output (``streams.py``, ``logs.py``), and the block on the rank that failed first (``failure.py``)."""
