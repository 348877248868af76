"""torch's side: process groups over a ``Communicator``.

Begin with ``process_group.py`` (what torch holds) and ``collectives.py`` (what each call does). A call passes
``dispatcher.py``, or ``quick.py`` has it done in C; ``progress.py`` keeps the order, ``work.py`` and ``messages.py``
have the handles. ``create.py`` makes a group; ``leaving.py`` ends the open ones at an exit; ``register.py`` tells torch
of us; ``torch_versions.py`` knows releases; ``torch_backends.py`` records what Gloo and NCCL do in groups of theirs.
"""
