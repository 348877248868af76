"""Start the agents of a job (``launch/agent.py``): begin with ``contract.py``.

``local.py`` forks the agent of this host; ``hosts.py`` has ssh, or a program of the user's, start one on each host;
``mpi.py`` has an MPI launcher start one for each rank. ``start_agent.py`` and ``shim.py`` are what those programs run,
``host_agent.py`` and ``mpi_agent.py`` what becomes of them.
"""
