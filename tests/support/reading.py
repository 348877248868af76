"""Every module that makes values of bytes: which parser attacks it, or why nobody else's bytes come there.

``tests/unit/test_every_parser.py`` finds the modules, so a new one has to be put down here.
"""

from __future__ import annotations

__all__ = ["ATTACKED", "TRUSTED"]

# By module, names of parsers in ``parsers.py``, or other tests that give it changed bytes.
ATTACKED: dict[str, tuple[str, ...]] = {
    "c10d/one_sided_memory.py": ("the description of memory",),
    "launch/job/config_file.py": ("a configuration file",),
    "launch/output/report.py": ("the report of a rank that failed",),
    "launch/rank/trace.py": ("the trace of a rank",),
    "launch/running/jobs.py": ("the description of a job",),
    "rpc/codecs.py": ("facts of a worker", "the number of a call"),
    "rpc/failure.py": ("the failure of a call",),
    "rpc/large_heads.py": ("the head of a large call",),
    "rpc/links/assembling.py": ("tests/rpc/test_mutated_frames.py",),
    "rpc/links/image.py": ("tests/rpc/test_mutated_frames.py",),
    "rpc/links/shared.py": ("the offer of shared memory",),
    "rpc/links/wire_format.py": ("the layout of a call", "tests/rpc/test_mutated_frames.py"),
    "rpc/members.py": ("the claim of a worker",),
    "rpc/network.py": ("the answer of a worker",),
    "rpc/services.py": ("a call of a service",),
    "store/claim.py": ("the claim of a rank", "the verdict on a claim"),
    "store/requests.py": ("a request to the store",),
    "store/server.py": ("tests/unit/test_bytes_from_outside.py",),
    "store/torch_requests.py": ("a request of torch's store client",),
    "system/foreign_values.py": ("the claim of a lookout", "a message between lookouts", "the answer of a worker"),
    "transports/hosts/contact.py": ("a message between lookouts",),
    "transports/hosts/inquiry.py": ("what the ranks of another host do",),
    "transports/hosts/lookout.py": ("the claim of a lookout",),
    "transports/seat.py": ("who claims a rank",),
    "transports/shm/tuning.py": ("measured sizes",),
    "watch/hang_report.py": ("the report on a job that hangs",),
    "watch/records.py": ("a flight recorder",),
    "wire/encryption.py": ("a key for encryption",),
    "wire/framing.py": ("the lengths of frames",),
}
_STORE = (
    "values that ranks write into the job's store. Only they reach Phalanx's own; what is open in torch's is said in "
    "docs/security.md"
)
_RANKS = "ranks of the job, after the proof of the key; they trust each other (docs/security.md)"
_PROCESSES = "a process of the same job on this host, over a pipe, a socket pair or memory that only it can reach"
_AGENTS = "an agent or a keeper of the same job, after the proof of the key, or over the way that started it"
_KERNEL = "the kernel"
_ENGINES = "another rank, over Gloo, MPI or UCX, which ask nobody for a key; docs/security.md says what follows"
_OWN = "this process's own bytes"
TRUSTED: dict[str, str] = {
    "bench/measurement.py": "a file that this user names",
    "bench/mpi_worker.py": _PROCESSES,
    "bench/processes.py": _PROCESSES,
    "c10d/create_mpi.py": _STORE,
    "c10d/quick.py": _OWN,
    "c10d/stalled_calls.py": "torch, in this process",
    "data/sampler.py": _OWN,
    "doctor/probe.py": "the length of what follows, which is read and forgotten, after a random word",
    "groups/values.py": _OWN,
    "launch/function/call.py": _PROCESSES,
    "launch/function/spawning.py": _PROCESSES,
    "launch/function/start.py": _PROCESSES,
    "launch/mpi/child.py": _PROCESSES,
    "launch/mpi/leftover_records.py": "a file of this user's, which is refused if it is another's",
    "launch/rank/descriptors.py": _PROCESSES,
    "launch/rank/other_ends.py": _PROCESSES,
    "launch/relay/channel.py": _AGENTS,
    "launch/relay/exchange.py": _AGENTS,
    "launch/relay/services.py": _AGENTS,
    "launch/remote/agent.py": _AGENTS,
    "launch/remote/helpers.py": _AGENTS,
    "launch/remote/helping.py": _AGENTS,
    "launch/remote/local_ranks.py": _PROCESSES,
    "launch/remote/protocol.py": _AGENTS,
    "launch/remote/start_agent.py": _AGENTS,
    "place/readers.py": "an environment variable of SageMaker",
    "rendezvous/meet.py": _RANKS,
    "rendezvous/meeting_point.py": _OWN,
    "rpc/connections.py": "what it reads is given to Member.from_claim and SharedHub.accept, which are attacked; "
    "whatever else is wrong with a claim ends its connection",
    "rpc/encoding.py": _RANKS,
    "rpc/torch_api/torch_agent.py": _STORE,
    "store/client.py": _RANKS,
    "store/ended.py": _STORE,
    "system/connection_owner.py": _KERNEL,
    "system/interfaces.py": _KERNEL,
    "topology/topology.py": _STORE,
    "training/checkpoint.py": "a file that this user names, and torch reads only weights of it",
    "transports/attendance.py": _STORE,
    "transports/hosts/breaking.py": _STORE,
    "transports/hosts/choosing.py": _STORE,
    "transports/hosts/frames.py": _ENGINES,
    "transports/hosts/guard.py": _STORE,
    "transports/hosts/islands.py": _STORE,
    "transports/hosts/measuring.py": _STORE,
    "transports/hosts/message_way.py": _ENGINES,
    "transports/hosts/ucx_lane.py": _STORE,
    "transports/hosts/watcher.py": _STORE,
    "transports/hosts/whereabouts.py": _STORE,
    "transports/mpi/crossing.py": _OWN,
    "transports/mpi/notices.py": _ENGINES,
    "transports/shm/explanation.py": _PROCESSES,
    "transports/shm/segment.py": _STORE,
    "watch/done_calls.py": _PROCESSES,
    "watch/glance.py": _PROCESSES,
    "wire/acknowledged.py": _KERNEL,
}
