"""Connections that prove the job's key.

``proof.py`` is the handshake, ``door.py`` and ``dial.py`` its two sides, ``session.py`` what follows it. Begin with
``proof.py``.
"""
