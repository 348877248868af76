"""Every exception that Phalanx raises on purpose, and the sentences that several modules print.

Each class says when it is raised and what to do about it. An instance carries, as attributes, the facts on which a
program can act, such as the lost rank or the elapsed seconds. All derive from :class:`PhalanxError`, so
``except phalanx.PhalanxError`` catches exactly what this package found wrong.

A sentence that several modules print is written here once: as a method of the exception that carries it, or as a hint
at the end of this file, which completes the errors of several classes. The exceptions about ranks and workers that are
lost stand in ``lost.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.exception import PhalanxError
from phalanx.lost import CallTimeout, CollectiveTimeout, ObjectLost, PeerFailed, PeerLost, WorkerLost, let_continue
from phalanx.words import format_limit, format_placed

__all__ = [
    "OUT_OF_MEMORY_HINT",
    "PROCESS_LIMIT_HINT",
    "ArgumentError",
    "BackendError",
    "CallTimeout",
    "CheckpointError",
    "ClosedError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DeviceError",
    "DeviceMismatch",
    "EncodingError",
    "InitializationError",
    "LaunchError",
    "LauncherEnvironmentError",
    "ObjectLost",
    "PeerFailed",
    "PeerLost",
    "PhalanxError",
    "RankError",
    "RankFailed",
    "ReentryError",
    "UnsupportedTensor",
    "UnusedParameters",
    "WorkerLost",
]

for _class in (PhalanxError, PeerLost, PeerFailed, CollectiveTimeout, WorkerLost, ObjectLost, CallTimeout):
    _class.__module__ = __name__  # tracebacks show the name under which users import it


class InitializationError(PhalanxError):
    """The world could not be joined, or was joined already.

    Raised by ``phalanx.init()`` when it is called twice, when the script has called
    ``torch.distributed.init_process_group`` itself, or when the ranks cannot meet. The message says which. Making a
    further group raises it as well, if the ranks cannot meet for that.

    Example:
        after 3 s ranks 1-2 of 3 had not come to rank 0 on vm; check whether they were started, and what they print

    What to do:
        1. Ranks are missing: see whether they were started, and read their output. All need the same WORLD_SIZE.
        2. The store cannot be reached: ``phalanx doctor -H h1:4,h2:4`` tests names, ports and ways between hosts.
        3. It was joined already: call ``phalanx.init()`` once, and not beside ``init_process_group``.

    Attributes:
        rank: the rank for which they cannot, in the world, or the first of several; -1 if that is not known, or is not
            why.
        pid, host: its process id and the name of its host; 0 and empty if they are not known.
        was_refused: rank 0 did not let this process join, so it may come again as another one.
    """

    rank, pid, host = -1, 0, ""
    was_refused = False

    @classmethod
    def ranks_missing(cls, missing: str, timeout_s: float, *, at: str = "", before: str = "") -> InitializationError:
        """Some ranks, as ``ranks 1-2 of 3``, did not come in time.

        ``at`` is the place at which they were expected, as ``rank 0 at h1 port 29500``, and ``before`` the last success
        of this rank, as ``rank 4 had joined, but``; either may be empty.
        """
        start = f"{before} after" if before else "after"
        to = f" to {at}" if at else ""
        advice = "check whether they were started, and what they print"
        return cls(f"{start} {format_limit(timeout_s)} {missing} had not come{to}; {advice}")

    @classmethod
    def ranks_ended(cls, hosts: Mapping[int, str], call: str = "phalanx.init()") -> InitializationError:
        """Ranks have ended in order, and had not met the others; each with its host, as for ``format_placed``.

        The first of them is the error's ``rank``. ``call`` is where ranks meet.
        """
        who = format_placed(hosts)
        have = "has" if len(hosts) == 1 else "have"
        text = (
            f"{who} {have} ended, without a failure, while the ranks were meeting. Every rank must come to "
            f"{call}, and get past it, before its script ends"
        )
        first = min(hosts)
        return cls.of_rank(text, first, 0, hosts[first])

    @classmethod
    def rank_gone(cls, rank: int, pid: int, host: str, how: str, remedy: str, group: str) -> InitializationError:
        """A rank has gone that is needed to make a group, which is ``group``, as ``ranks 0-2``; ``how`` says how."""
        text = f"rank {rank} (pid {pid} on {host}) {how} while a group of {group} was being made. {remedy}"
        return cls.of_rank(text, rank, pid, host)

    @classmethod
    def rank_stopped(cls, rank: int, pid: int, host: str, state: str, group: str) -> InitializationError:
        """A rank is stopped that is needed to make a group; ``state`` says how, as ``stopped (state T)``."""
        return cls.rank_gone(rank, pid, host, f"is {state}", let_continue(pid), group)

    @classmethod
    def rank_twice(cls, rank: int, earlier: str, own: str, pid: int, host: str) -> InitializationError:
        """Two processes claim one rank, in a store that lets anybody come; ``pid`` and ``host`` are of the earlier."""
        text = f"rank {rank} is there twice: {earlier} and {own}. Give each process its own RANK"
        return cls.of_rank(text, rank, pid, host)

    @classmethod
    def sizes_differ(cls, rank: int, pid: int, host: str, size: int, own: str, own_size: int) -> InitializationError:
        """Another process, which is described first, counts other ranks than this one, ``own``, does."""
        text = (
            f"rank {rank} (pid {pid} on {host}) came with WORLD_SIZE {size}, and {own} has {own_size}. "
            f"Give all processes the same"
        )
        return cls.of_rank(text, rank, pid, host)

    @classmethod
    def of_rank(cls, text: str, rank: int, pid: int, host: str) -> InitializationError:
        """An error with this text, and the rank that it is about."""
        error = cls(text)
        error.rank, error.pid, error.host = rank, pid, host
        return error

    @classmethod
    def store_lost(cls, who: str, error: BaseException) -> InitializationError:
        """A store cannot be asked any more; ``who`` does what there, as ``ranks 0-2 were meeting``."""
        return cls(
            f"the store in which {who} cannot be asked any more ({error}). The process that keeps it (the launcher, or "
            f"rank 0) has ended, or cannot be reached; look at its output"
        )

    @classmethod
    def rank_refused(cls, rank: int, reason: str) -> InitializationError:
        """Rank 0 refused a process that joined as this rank; the reason is rank 0's."""
        error = cls(f"rank {rank} was refused: {reason}. Start each rank once, with one world size")
        error.was_refused = True
        return error


class LauncherEnvironmentError(InitializationError):
    """The environment describes a process that cannot exist.

    Raised when some of a launcher's variables are missing, hold something that is not a number, or contradict each
    other. The message names the variable and its value; correct the launcher's command, or unset the variable.

    Example:
        RANK=4 and WORLD_SIZE=4 is impossible: ranks and nodes count from 0 to 3

    What to do:
        1. ``phalanx env`` shows what the variables of this process say, and which launcher set them.
        2. Variables may be left over from an ``export``: unset them. Else correct the launcher's command.
    """


class DeviceError(InitializationError):
    """The device of a rank is missing, busy, or another rank's.

    Raised by ``phalanx.init()`` when a host has more ranks than devices, when two ranks took the same device, or when
    the device that was asked for does not exist or cannot be opened; and by the first call of a group of NCCL's whose
    ranks share a device. The message says which of these it is, and which variable hides a device if one does.

    Example:
        rank 0: the device cuda:4 was asked for, but this process sees no accelerator. This torch (2.13.0+cpu) was built
        without CUDA and ROCm; install a build that has it

    What to do:
        1. ``phalanx doctor --gpu`` lists the devices, and what hides or occupies them.
        2. Start as many ranks as the host has devices: ``phalanx run -n gpu``.
        3. ``--device cpu`` computes without them.
    """

    @staticmethod
    def not_a_device(given: str) -> str:
        """The text for a device that torch does not know; ``given`` is the user's own text, as ``--device 3``."""
        return f"{given} is not a device. Give cpu, cuda, cuda:1 or another of torch's names"


class ClosedError(PhalanxError):
    """A world, or one of its groups, was used after ``phalanx.close()``.

    Move the call before it.

    It cannot come back: a new world needs new processes, and a new group a new ``new_group()``.

    Example:
        this group was used after phalanx.close(); move the call before it

    What to do:
        1. Move the call before ``phalanx.close()``, or into the ``with phalanx.init() as world:`` block.
        2. In a forked child, as a worker of a DataLoader, use no group of the parent.
    """

    @classmethod
    def of_message(cls) -> ClosedError:
        """The group of a message was destroyed before the message was done."""
        return cls("a message of a process group was used after the group had been destroyed or reconfigured")

    @classmethod
    def given_up(cls, group: str) -> ClosedError:
        """The group of an operation was reconfigured, or aborted and dropped, before the operation was done."""
        return cls(
            f"process group {group!r} was reconfigured, or aborted, while this operation was under way. The operation "
            "was given up, and what its tensors hold is not defined; call it again, with the ranks that there are now"
        )

    @classmethod
    def of_parent(cls, what: str, pid: int) -> ClosedError:
        """A forked child, of this pid, used what belongs to its parent."""
        return cls(f"{what} belongs to the process that this one (pid {pid}) was forked from; only that one can use it")


class ReentryError(PhalanxError):
    """A signal handler called a group whose operation it had interrupted.

    The group runs one operation at a time, and the interrupted one can only go on when the handler has returned. Let
    the handler raise an exception, or set a flag that the program checks. A handler may destroy the group: that ends
    the interrupted operation with an error.

    What to do:
        Let the handler set a flag, as ``stop = True``, and look at the flag in the loop.
    """


class RankError(PhalanxError, ValueError):
    """A rank outside the group was named as source, destination or member.

    Ranks given to a ``Group`` count within that group, from 0 to ``group.size - 1``.

    Example:
        rank 4 is not in the group: its ranks count from 0 to 3 (world ranks [4, 5, 6, 7])

    What to do:
        Count from 0 within the group. In a group of the world ranks 4 to 7, world rank 5 is rank 1.
    """

    @classmethod
    def not_in_group(cls, rank: int, size: int, members: tuple[int, ...] = ()) -> RankError:
        """A group of ``size`` ranks has no such rank. ``members`` are its world ranks, if they are known."""
        of_world = f" (world ranks {list(members)})" if members else ""
        return cls(f"rank {rank} is not in the group: its ranks count from 0 to {size - 1}{of_world}")


class DeviceMismatch(PhalanxError, ValueError):
    """A tensor lives on a device the group's backend does not serve.

    Move it, or choose another backend.

    The backend of shared memory serves tensors of the CPU, NCCL those of CUDA.

    Example:
        rank 0 of the group gave a tensor on meta, but the group's backend serves cpu. Move it with .to(...) first, or
        choose another backend in phalanx.init()

    What to do:
        1. Move the tensor: ``tensor.to(world.device)``, or ``tensor.cpu()``.
        2. Or give the group a backend for that device, as ``init_process_group("cpu:phalanx,cuda:nccl")``.
    """


class ArgumentError(PhalanxError, ValueError, TypeError):
    """A function was called with arguments that cannot be right, or with tensors that no backend here serves.

    Raised on the rank that made the call, before it sends anything to the others. The message says what was given and
    what is needed. Python raises a ``ValueError`` or a ``TypeError`` for the like.

    Example:
        10 items are left of epoch 3, too few for a step of 16 ranks. Resume with at most 10 ranks, or leave them out:
        loader.set_epoch(4)

    What to do:
        Change the argument as the message says. The other ranks have not been told, so this call can be made again.
    """

    @classmethod
    def too_few_left(cls, items: int, epoch: int, ranks: int) -> ArgumentError:
        """A loader was to resume an epoch of which so few items are left that some ranks would have no batch."""
        return cls(
            f"{items} items are left of epoch {epoch}, too few for a step of {ranks} ranks. Resume with at most "
            f"{items} ranks, or leave them out: loader.set_epoch({epoch + 1})"
        )


class UnsupportedTensor(ArgumentError, NotImplementedError):
    """A tensor whose elements do not lie in memory one by one: sparse, compressed, quantized, nested.

    A ``NotImplementedError``, because that is what torch's dispatcher raises for the same call over Gloo. Convert the
    tensor (``to_dense()``, ``dequantize()``), or move its parts, which are plain tensors.

    Example:
        sum takes strided tensors, neither nested nor quantized; got one of torch.float32, torch.sparse_coo. Convert it,
        as by .to_dense(), .dequantize() or torch.nested.to_padded_tensor()

    What to do:
        ``tensor.to_dense()`` or ``tensor.dequantize()`` makes a plain tensor. Of a nested one send ``tensor.unbind()``.
    """


class EncodingError(PhalanxError):
    """A value cannot be sent to another worker, or what has arrived is not a value.

    Raised on the sending side before anything is sent, with the part of the value that is to blame, and on the
    receiving side, where it says whether the message is damaged or this process lacks what the value is made of.

    Example:
        args[0] cannot be sent: it is a _thread.lock, and pickling it failed: cannot pickle '_thread.lock' object. It
        belongs to this process: leave it out, or make it on the worker that needs it

    What to do:
        1. Leave out the part that the message names, or send what it is made from.
        2. Functions of a notebook or of ``__main__`` need cloudpickle: ``pip install cloudpickle``.
        3. All workers need the same release of Phalanx and of torch.
    """

    @classmethod
    def cannot_send(cls, part: str, kind: str, why: str, remedy: str) -> EncodingError:
        """A part of a value, named by the path to it (``args[1].callback``), cannot be pickled; ``why`` is pickle's."""
        return cls(f"{part} cannot be sent: it is a {kind}, and pickling it failed: {why}. {remedy}")

    @classmethod
    def freed(cls, shape: tuple[int, ...]) -> EncodingError:
        """A tensor has a shape and no memory for it."""
        return cls(
            f"a tensor of the shape {shape} cannot be sent: its storage is smaller than that. Was it freed by "
            f"storage.resize_(0), as FSDP does between uses? Send it while it has its memory"
        )

    @classmethod
    def damaged(cls, what: str) -> EncodingError:
        """A message describes something that there cannot be."""
        return cls(
            f"a message is damaged: it holds {what}. Do all workers run the same release of Phalanx and of torch? If "
            f"they do, this is a fault of Phalanx"
        )

    @classmethod
    def no_such_device(cls, device: str, why: str) -> EncodingError:
        """A tensor of a device has arrived in a process that has no such device."""
        return cls(
            f"a tensor of the device {device} has arrived, and this process cannot use that device ({why}). Send "
            f"tensor.cpu(), or start this worker where it has the device"
        )

    @classmethod
    def not_rebuilt(cls, error: BaseException) -> EncodingError:
        """Unpickling failed; ``error`` says how."""
        return cls(
            f"a value that has arrived cannot be rebuilt: {type(error).__name__}: {error}. What it is made of must be "
            f"importable here under the same name, and what the script defines must be there before rpc.init()"
        )


class BackendError(PhalanxError):
    """The native core could not be loaded, or met something it cannot work with on this machine.

    Example:
        the C core of Phalanx could not be loaded (libphalanx.so: cannot open shared object file); build it with: pip
        install .

    What to do:
        1. Install again, with a C compiler: ``pip install .`` in the source folder.
        2. ``phalanx doctor`` says what else is missing on this machine.
    """


_SAME_CALLS = (
    "Every rank of a group must make the same calls in the same order, with the same shapes. Look for an `if` that "
    "depends on the rank, data of different sizes, or a thread beside another one (it needs a group of its own)"
)


class CollectiveMismatch(PhalanxError):
    """Two ranks of a group called different collectives, or the same one with different arguments.

    With PHALANX_CALL_SITES=error, as ``phalanx run --strict`` sets it, also if two ranks have called the same two lines
    in different orders. Raised on every rank that notices. The group cannot be used afterwards: the ranks are out of
    step.

    Example:
        the ranks of a group called different operations:
        rank 0: all_reduce(float32[2], sum) at train.py:6
        rank 1: broadcast(float32[2], src=0) at train.py:4
        Every rank of a group must make the same calls in the same order, with the same shapes.

    What to do:
        1. Compare the two lines that the message names. Every rank must make the same calls in the same order.
        2. Look for an ``if`` that depends on the rank, for data or loops of different lengths.
        3. A second thread that calls collectives needs a group of its own: ``torch.distributed.new_group()``.
        4. Shapes differ: pad the tensors to one shape, or send the shapes first.

    Attributes:
        calls: what each rank called, as far as that is known: by its rank in the group, in words, with the line. A rank
            that was in no call is not in it. If the two ends of a message differ, only its two ranks are in it.
        of_message: whether the two ends of a message differ.
        ends: these two, for Phalanx's own use.
        group, sequence, elapsed_s: in which operation of which group this rank was, and how long, as in
            :class:`PeerLost`. A rank that need not wait for others may find only in its next operation that the one
            before differs; one that leaves the group is in none.
    """

    group, sequence, elapsed_s = "", -1, 0.0
    ends: Sequence[tuple[int, int, int, str]] = ()

    def __init__(self, message: str, *, calls: dict[int, str] | None = None, of_message: bool = False) -> None:
        super().__init__(message)
        self.calls, self.of_message = calls or {}, of_message

    @classmethod
    def of_message_ends(cls, listed: str, calls: dict[int, str]) -> CollectiveMismatch:
        """A rank sends something else than the other one receives; as for :meth:`of_calls`, but of these two."""
        return cls(
            f"the two ends of a message differ:\n{listed}\nBoth ranks must give tensors of one size and dtype. "
            "Messages between two ranks meet in the order of the calls, for each tag: look as well for a send or a "
            "receive too many before these",
            calls=calls,
            of_message=True,
        )

    @classmethod
    def of_calls(cls, listed: str, calls: dict[int, str] | None = None) -> CollectiveMismatch:
        """The ranks' calls differ; ``listed`` has a line for each, and ``calls`` those of each rank."""
        return cls(f"the ranks of a group called different operations:\n{listed}\n{_SAME_CALLS}", calls=calls)

    @staticmethod
    def in_different_orders(low: int, high: int, listed: str) -> str:
        """That two ranks make equal calls in different orders; ``listed`` has a line for each call."""
        return (
            f"ranks {low} and {high} of a group make the same calls in different orders, or one has left out "
            f"a call, so tensors may meet that do not belong together:\n{listed}\n"
            "An `if` that depends on the rank, or loops of different lengths?"
        )


class UnusedParameters(PhalanxError):
    """``DistributedDataParallel``: parameters had no gradient when the next forward began.

    Raised by that forward, on each rank where it is so, with torch's own explanation behind the names. The other ranks
    wait for these gradients and raise :class:`PeerLost`, which names this rank and the parameters. Under ``phalanx
    run`` it is raised on torch's own backends too, whose other ranks raise errors of theirs. Use the parameters on all
    ranks, or give ``find_unused_parameters=True``.

    Example:
        rank 1 of the group: no gradient came in the last backward pass for head.weight, head.bias

    What to do:
        1. Use these parameters in the loss on every rank, or take them out of the model.
        2. ``find_unused_parameters=True`` allows it, and costs a walk over the graph in every step.

    Attributes:
        names: the parameters, as in ``model.named_parameters()``.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names

    @classmethod
    def without_gradient(cls, rank: int, names: list[str], explanation: str) -> UnusedParameters:
        """``explanation`` is torch's."""
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return cls(
            f"rank {rank} of the group: no gradient came in the last backward pass for {shown}\n{explanation}",
            names=tuple(names),
        )


class CheckpointError(PhalanxError):
    """A checkpoint cannot be written, or cannot be read.

    Raised by ``world.save()`` and ``world.check_writable()`` on rank 0 (on the others as :class:`PeerFailed`), and by
    ``world.load()`` on every rank. The message says which file, and why: it is missing, cut short, of another program,
    or in a directory that cannot be written to.

    Example:
        cut.pt is not a whole checkpoint: it was cut short, or another program wrote it (Weights only load failed)

    What to do:
        1. It cannot be written: free the disk, or choose another folder. ``world.check_writable(path)`` tests it before
           the first epoch.
        2. It cannot be read: take an older checkpoint. ``world.save()`` never leaves half a file under the name.
    """


class LaunchError(PhalanxError):
    """``phalanx run``, or ``phalanx.launch()``, cannot start what it was asked for.

    The message says what to change.

    Example:
        train.py: no such file in /home/user, and no program of that name on PATH

    What to do:
        Change what the message names; ``phalanx run --help`` has every option. No rank was started.
    """


class RankFailed(PhalanxError):
    """A rank of ``phalanx.launch()`` failed before any other did. The message has its traceback; mend what it shows.

    Example:
        rank 1 of 4 failed: ValueError: bad batch

    What to do:
        Mend what the traceback in the message shows. All other ranks have been ended.

    Attributes:
        rank: its number in the world.
        exit_code: that of its process, or 128 + the signal that killed it.
    """

    def __init__(self, message: str, *, rank: int = -1, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank, self.exit_code = rank, exit_code


# The next step after an error about a process that vanished.
OUT_OF_MEMORY_HINT = "look for an out-of-memory kill with: dmesg | grep -i oom"
# The remedy when the system refuses a process or a thread.
PROCESS_LIMIT_HINT = "raise the limit on processes (ulimit -u, or pids.max of the cgroup)"
