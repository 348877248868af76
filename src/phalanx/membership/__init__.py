"""Who of a job's ranks is there, has left or has ended, and why a group over several hosts broke.

Begin with ``liveness.py``: a rank's session to the registrar (``registrar.py``), which is in rank 0's process.
``abort.py`` is one rank's side of one group: its first cause of failure, and where its ranks are.
``protocol.py`` has the messages, ``loop.py`` the one thread that reads and writes them.
``departures.py`` tells those who make a further group which ranks of the world have gone.
"""
