"""The transport over several hosts: shared memory inside each host, TCP between them. Begin with ``communicator.py``.

Collectives: ``reductions.py`` and ``copies.py`` are their schedules, which read from top to bottom.
``frames.py`` compares the calls and carries small tensors, ``engine.py`` moves bytes, ``layout.py`` knows hosts.
Messages: ``messages.py``. Both use mailboxes of the core with connections (``connections.py``). What a rank raises when
the group breaks: ``reason.py``, in the words of ``wording.py``. ``gloo.py`` is for what Phalanx leaves to torch.
"""
