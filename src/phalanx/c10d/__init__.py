"""torch's side: process groups over a ``Communicator``.

Begin with ``process_group.py`` (what torch holds) and ``collectives.py`` (each call's front and body). ``quick.py`` has
the usual calls done in C, ``dispatcher.py`` takes the unusual ones through torch's dispatcher. ``progress.py`` keeps
the order, ``work.py`` and ``messages.py`` have the handles. ``create.py`` makes a group, ``leaving.py`` ends the open
ones at an exit. ``register.py`` and ``torch_versions.py`` know torch, ``torch_backends.py`` records groups of its own.
"""
