"""Links to other workers: messages and what a link promises (``contract.py``, begin there), and two kinds of link.

Through shared memory (``shared.py``, over ``native/csrc/rpc``), and over TCP (``socket.py``): ``frames.py`` has the
bytes of its frames, and ``readers.py`` the threads that read for everybody.
"""
