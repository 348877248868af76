"""Find where this process and the other ranks are, and on which devices they compute.

``launchers.py`` is the table of launchers, made of the readers in ``readers.py``; ``environment.py`` reads a row and
makes a ``Place`` of it. ``topology.py`` gathers where all ranks are, ``device.py`` chooses devices. ``table.py`` and
``placement.py`` show where ranks run. Begin with ``environment.read_environment``.
"""
