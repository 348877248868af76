"""Methods of a world for training loops (``calls.py``), and their state as a file (``checkpoint.py``)."""
