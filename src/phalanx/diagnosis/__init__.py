"""Diagnosis of a job: what its ranks do is recorded, read from outside, analysed and rendered.

Begin with ``snapshot.py`` (the data). ``recorder.py`` writes what ``reading.py`` reads; ``stacks.py`` and
``call_site.py`` find lines of the program. ``diagnose.py`` and ``divergence.py`` conclude who keeps a job, and
``report.py`` and ``render.py`` show that. Without ``phalanx run``, ``own_waits.py`` does the looking.
"""
