"""Membership of the job: how ranks find each other, which have left or ended, and why a group over hosts broke.

**Meeting.** Begin with ``rendezvous.py``: rank 0 opens a store (``store_server.py``), the others find it and join
(``client.py``). ``registration.py`` watches the ranks until the world is made; new groups meet in a
``rendezvous_store.py``. The launcher's store (``launcher_store.py``) has the same table (``table.py``).

**Watching.** ``liveness.py`` is a rank's session to the registrar (``registrar.py``), which is in rank 0's process.
``abort.py`` is one rank's side of one group: its first cause of failure, and where its ranks are. ``protocol.py`` has
their messages. All of these and both stores run on the loop of ``loop.py``.
"""
