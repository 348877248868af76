"""torch's futures over Phalanx's.

A call's answer is turned into its value by the thread that waits for it, if there is one, which saves a change of
threads. Else a thread of the pool does it, never the one that receives messages, because the user's callbacks may wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import CallTimeout
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.handlers import Handlers

__all__ = ["CallFuture", "RpcTimeout", "wait_all"]


class RpcTimeout(CallTimeout):
    """A call took longer than it may; the text begins as torch's does, because programs look for it."""

    @classmethod
    def of(cls, error: CallTimeout) -> RpcTimeout:
        """The error with torch's words before it."""
        return cls(
            f"RPC ran for more than set timeout ({error.timeout_s * 1000:g} ms) and will now be marked with an error: "
            f"{error}",
            worker=error.worker,
            asked=error.asked,
            timeout_s=error.timeout_s,
        )


class CallFuture(torch.futures.Future):  # type: ignore[type-arg]
    """What ``rpc_async`` returns.

    Args:
        call: the call.
        finish: makes the value of the call's answer.
        failed: is told of the error if there is no answer.
        pool: the threads on which callbacks run.
    """

    def __init__(
        self,
        call: OwnFuture[Any],
        finish: Callable[[Any], Any],
        failed: Callable[[Exception], None],
        pool: Handlers,
    ) -> None:
        super().__init__()
        self._call, self._finish, self._failed = call, finish, failed
        self._pool = pool
        self._waiting = 0
        self._completing = threading.Lock()
        call.add_done_callback(self._on_answer, short=True)

    def wait(self) -> Any:
        """See :class:`torch.futures.Future`."""
        if not super().done():
            self._waiting += 1  # a hint: where it is missed, two threads come to _complete, and one of them does it
            try:
                self._call.wait()
            except Exception:
                pass
            except BaseException:  # such as Ctrl-C: this thread will not complete it
                self._waiting -= 1
                self._call.add_done_callback(self._on_answer)
                raise
            self._complete()
        return super().wait()

    def _on_answer(self, call: OwnFuture[Any]) -> None:
        if not self._waiting:
            self._pool.run(self._complete)

    def _complete(self) -> None:
        if not self._completing.acquire(blocking=False):
            return
        try:
            value = self._finish(self._call.wait(0))
        except CallTimeout as error:
            self.set_exception(RpcTimeout.of(error))
        except Exception as error:
            self._failed(error)
            self.set_exception(error)
        except BaseException as error:
            self.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.set_result(value)


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """Stands in for ``torch.futures.wait_all``, which waits for all where a future's error was set from Python.

    Returns:
        The values, in the order of the futures.

    Raises:
        Exception: that of the first future that fails, without waiting for the others.
    """
    left, changed = len(futures), threading.Condition()
    failed: list[BaseException] = []

    def done(future: Any) -> None:
        nonlocal left
        error = None
        try:
            future.value()
        except BaseException as raised:
            error = raised
        with changed:
            left -= 1
            if error is not None:
                failed.append(error)
            changed.notify_all()

    for future in futures:
        future.add_done_callback(done)
    with changed:
        changed.wait_for(lambda: failed or not left)
    if failed:
        raise failed[0]
    return [future.wait() for future in futures]
