"""Who is in the job: how ranks find each other, which of them have left or ended, and why a group over hosts broke.

**Meeting.** ``rendezvous.py`` is where to begin: rank 0 opens a store (``server.py``), the others find and join it
(``client.py``). ``registration.py`` watches the ranks until the world is made, and ``rendezvous_store.py`` is what new
groups meet in. The launcher serves the same store by another door (``torch_door.py``).

**Watching.** ``liveness.py`` is a rank's session to the registrar (``registrar.py``), which is in rank 0's process.
``abort.py`` is one rank's side of one group: its first cause of failure, and where its ranks are. ``protocol.py`` has
the messages, ``loop.py`` the one thread that reads and writes them. ``departures.py`` tells those who make a further
group which ranks of the world have gone.
"""
