"""``phalanx bench``: time collectives on Phalanx, on Gloo and on each MPI that is installed.

All of them live in the same processes, work on the same buffers, and take turns, so that a machine that changes
meanwhile slows all alike. Begin with ``measurement.py`` (starts the ranks, collects), then ``rank.py`` (measures) and
``operations.py`` (what is measured).
"""
