"""The machine: what Python's standard library does not know of Linux, or does not do safely enough.

``processes.py`` looks at processes and ends them; ``threads.py`` has threads, a clock that stands still while the
process does, and waits with a limit; ``interfaces.py`` is the network, ``limits.py`` what is left of cores and memory.
"""
