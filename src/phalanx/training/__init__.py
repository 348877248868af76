"""What a training loop asks of its world (``calls.py``), and its state as a file (``checkpoint.py``)."""
