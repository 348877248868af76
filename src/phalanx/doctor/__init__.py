"""``phalanx doctor``: what stands in the way of a job, found before one is lost to it.

``host.py`` looks at one host, in a process on it; ``hosts.py`` has that done on all hosts of a job, and looks at the
way between each two of them, which ``probe.py`` measures. ``accelerators.py`` is ``--gpu``. All of them return findings
(``finding.py``); begin there.
"""
