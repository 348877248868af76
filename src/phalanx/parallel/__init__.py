"""Data parallelism over torch's ``DistributedDataParallel``, and ways to send less of it.

Begin with ``data_parallel.py``, which makes a ``Replica``. An ``Exchange`` takes the mean of flat tensors:
``exchange.py`` (unchanged, narrower), ``integers.py``, ``low_rank.py``. ``gradients.py`` gives it DDP's gradients, and
``local_steps.py`` parameters every K steps.
"""
