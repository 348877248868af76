"""``phalanx doctor``: find what stands in the way of a job.

All functions return findings (``finding.py``). ``host.py`` examines one host from a process on it, ``hosts.py`` all
hosts of a job and each pair of them (``probe.py``); ``accelerators.py`` is ``--gpu``.
"""
