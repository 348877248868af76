"""Who is in the job: how its ranks find each other, in which store, and which of them cannot come any more.

``rendezvous.py`` is where to begin: rank 0 opens a store (``server.py``), the others find and join it (``client.py``).
``registration.py`` watches the ranks until the world is made, and ``rendezvous_store.py`` is what new groups meet in.
The launcher serves the same store by another door (``torch_door.py``).
"""
