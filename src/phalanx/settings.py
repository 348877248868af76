"""The variables that Phalanx reads or sets, its version, and the name of its backend.

Every ``PHALANX_`` variable is named here, with its meaning, and nowhere else in the package's code, which writes
``settings.DEVICE`` for ``PHALANX_DEVICE``. All are also in docs/reference/variables.md, in the same order;
``tests/unit/test_settings.py`` compares. This module imports nothing, because ``import torch`` loads it
(``c10d/register.py``).
"""

from __future__ import annotations

VERSION = "0.1.0"
BACKEND = "phalanx"  # the name under which torch knows the backend

# Set by users.
CALL_SITES = "PHALANX_CALL_SITES"  # lines called in another order on another rank: warn, error or ignore
DEVICE = "PHALANX_DEVICE"  # where ranks compute: cpu, cuda, cuda:1, xpu, npu, …
HOST = "PHALANX_HOST"  # the name this process reports for its host, in place of the machine's own
INTERFACE = "PHALANX_INTERFACE"  # the network interface that ranks talk over
KEY_FILE = "PHALANX_KEY_FILE"  # a file with the job's key, readable by its owner alone
MPI_CHECK = "PHALANX_MPI_CHECK"  # 0: do not compare collectives over MPI before they run
REPLACE = "PHALANX_REPLACE"  # what Phalanx stands in for: the backends gloo and mpi, and torch's rpc
RPC_ENCRYPT = "PHALANX_RPC_ENCRYPT"  # 1: workers encrypt what goes between them over TCP
TUNING = "PHALANX_TUNING"  # the file of switch points that `phalanx bench --tune` writes
WARN_AFTER = "PHALANX_WARN_AFTER"  # seconds after which a rank without `phalanx run` says for whom it waits; 0: never

# Set by the launcher for its ranks.
ATTEMPT = "PHALANX_ATTEMPT"  # how often the ranks have been started again after a failure: --restarts
DIRECTORY = "PHALANX_DIRECTORY"  # where `phalanx run` was called: files below it are named without it
KEY = "PHALANX_KEY"  # the job's key
MPI_JOIN = "PHALANX_MPI_JOIN"  # where a shim finds `phalanx run`, and the key; removed before the script runs
REHEARSAL = "PHALANX_REHEARSAL"  # the rehearsed hosts: 2x4, or 1,3,2
RUN_ID = "PHALANX_RUN_ID"  # a name that no other job has
STORE_PORT = "PHALANX_STORE_PORT"  # the port of the launcher's store; scripts may open others beside it
TABLE_SHOWN = "PHALANX_TABLE_SHOWN"  # 1: the launcher has printed the rank table, so phalanx.init() does not
