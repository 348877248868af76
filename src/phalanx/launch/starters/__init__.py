"""Start the agents of a job (``launch/agent.py``): begin with ``contract.py``.

``local.py`` forks the agent of this host. ``joining.py`` is for agents that dial the supervisor: ``hosts.py`` has ssh,
or a program of the user's, start one on each host; ``mpi.py`` has an MPI launcher start one for each rank. These
programs run ``start_agent.py``, which becomes ``host_agent.py`` or ``mpi_agent.py``.
"""
