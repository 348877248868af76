"""Distributed autograd: gradients follow calls from worker to worker.

``contexts.py`` has what a forward pass left on this worker, ``graph.py`` the edges between the graphs of workers, and
``requests.py`` makes the tensors of calls such edges. ``engine.py`` has ``backward`` and its messages; ``passes.py`` is
one worker's part of it, which runs once in torch's engine (``local_run.py``). Begin with the table in ``engine.py``.
"""
