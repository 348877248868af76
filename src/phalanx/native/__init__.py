"""The C core: collectives, messages, RPC and the flight recorder between processes of one host.

``csrc/`` is the core, a folder for each idea, and knows nothing of Python: begin with ``csrc/phalanx.h``. ``core.py``
loads it by ctypes and alone knows its signatures. ``csrc_entry/`` is a module in C for the usual calls of a process
group, so that they need no ctypes. ``signals.py`` runs Python's handlers while the core waits.
"""
