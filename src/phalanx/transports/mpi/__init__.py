"""The transport of the backend ``mpi``: any MPI library, by way of mpi4py.

``runtime.py`` starts MPI and ends it with the process; begin there. ``communicator.py`` has a group's collectives and
``messages.py`` its messages. Before each collective ``agreement.py`` waits for the other ranks and compares the calls.
``peers.py`` has what ranks know of each other: their processes, and their notices.
"""
