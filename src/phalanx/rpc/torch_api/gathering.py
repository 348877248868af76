"""Workers that are lost, in torch's ``_all_gather``, by which ``init_rpc`` and ``shutdown`` wait for all workers.

There the worker of the first name waits for a message of each other worker, in ``shutdown`` without a limit, and so for
ever if one was killed. Here a lost worker counts as one that came with nothing. The first worker then tells the others,
and raises because the lost one cannot be told.
"""

from __future__ import annotations

from typing import Any

from phalanx.rpc.torch_api import current
from phalanx.rpc.torch_api.torch_names import api
from phalanx.words import tell

__all__ = ["count_lost", "lost"]


def count_lost() -> None:
    """Have torch's first worker count the workers that are lost by now, with each that comes."""
    own = api._gather_to_leader

    def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Any = None) -> None:
        own(sequence_id, worker_name, obj, worker_names)
        if current.is_set():
            _add_lost(own, sequence_id, worker_names or api._ALL_WORKER_NAMES)

    _gather_to_leader.__module__ = own.__module__  # by which it is found where a call of it arrives
    _gather_to_leader.__qualname__ = own.__qualname__
    api._gather_to_leader = _gather_to_leader


def _add_lost(gather: Any, sequence_id: str, names: set[str]) -> None:
    gone: set[str] = getattr(current.agent(), "lost", set())
    with api._all_gather_dict_lock:
        for name in sorted(gone & names):
            states = api._all_gather_sequence_id_to_states.get(sequence_id)
            if states is not None and not states.proceed_signal.is_set() and name not in states.gathered_objects:
                gather(sequence_id, name, None, names)


def lost(me: str, name: str) -> None:
    """A worker is lost: let those who wait for it go on.

    Args:
        me: this worker's name.
        name: the lost one's.
    """
    with api._all_gather_dict_lock:
        waiting = [
            (sequence_id, states, {each for each in api._ALL_WORKER_NAMES if each in sequence_id})
            for sequence_id, states in list(api._all_gather_sequence_id_to_states.items())
            if name in sequence_id and not states.proceed_signal.is_set()
        ]
        for _, states, names in waiting:
            states.gathered_objects.setdefault(name, None)
            first = min(names, default=name)
            if first == name:
                tell(f"warning: {name} is lost, for whose word {me} waited with the others; {me} goes on without it")
            if first == name or names <= states.gathered_objects.keys():
                states.proceed_signal.set()
