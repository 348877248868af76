"""Decide a job before any process is started. No module here imports torch.

``options.py`` has what the user chose, ``job.py`` what follows from that: begin there. ``hosts.py``, ``binding.py``,
``memory.py``, ``mpi_launcher.py`` and ``target.py`` each read one kind of option. ``spellings.py`` and
``config_file.py`` put other launchers' options, and a file's, into those of ``phalanx run`` (``commands/run.py``).
"""
