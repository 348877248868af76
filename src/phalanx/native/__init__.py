"""The C core: ``csrc/`` by ctypes (``core.py``), and ``csrc_entry/`` as a Python module for the usual calls."""
