"""Who is in the job: how its ranks find each other, in which store, and which of them cannot come any more.

Begin with ``rendezvous.py``: rank 0 opens a store (``server.py``, ``proven_door.py``), the others find it and join
(``client.py``). ``registration.py`` watches the ranks until the world is made; new groups meet in a
``rendezvous_store.py``. The launcher's store has the same table and loop, and another door (``torch_door.py``).
"""
