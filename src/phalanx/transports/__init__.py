"""Transports: what moves bytes between the ranks of one group. Begin with ``contract.py``, which all of them implement.

``shm/`` is for one host, ``hierarchical/`` for several, ``mpi/`` for the backend of that name. ``operands.py`` knows
dtypes and operations; ``call_check.py`` turns calls into numbers that ranks compare.
"""
