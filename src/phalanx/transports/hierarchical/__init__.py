"""The transport over several hosts: shared memory inside each host, Gloo between them. Begin with ``communicator.py``.

Collectives: ``reductions.py``, ``copies.py`` and ``exchanges.py`` are their schedules, which read from top to bottom.
``frames.py`` compares the calls and carries small tensors, ``gloo_engine.py`` moves bytes, ``layout.py`` knows hosts.
Messages: ``messages.py``. Why a group breaks: ``reason.py``.
"""
