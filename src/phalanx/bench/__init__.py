"""``phalanx bench``: how long collectives take here, on Phalanx, on Gloo and on each MPI that is installed.

Prior art: the OSU micro-benchmarks and Intel's IMB time MPI, nccl-tests times NCCL, each in a program of its own, so
that a machine that changes between two runs shows as a difference between two libraries. Here all of them live in the
same processes, work on the same buffers, and take turns. Begin with ``measurement.py`` (starts the ranks, collects),
then ``rank.py`` (measures) and ``operations.py`` (what is measured).
"""
