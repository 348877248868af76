"""The cells of a notebook that launches ranks, run by a real Jupyter kernel; what each cell gave is printed as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec

PATIENCE_S = 250.0

DEFINE = """
import os, sys, time, torch, phalanx
weights = torch.randn(300, 300, requires_grad=True)
(weights @ weights).sum().backward()              # torch has computed, with all its threads

class Result:
    def __init__(self, value): self.value = value

def train(scale):
    world = phalanx.init()
    model = world.data_parallel(torch.nn.Linear(4, 1))
    model(torch.randn(8, 4)).sum().backward()
    tensor = torch.ones(2) * scale * (world.rank + 1)
    world.all_reduce(tensor)
    print("trains", world.rank)
    return Result((tensor.tolist(), world.launcher))

def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("one")
    time.sleep(600)

def wait():
    print("waits")
    time.sleep(600)
"""


class _Notebook:
    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=command, display_name="Python", language="python")
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def run(self, cell: str, interrupt_at: tuple[str, int] | None = None) -> dict[str, Any]:
        """Run a cell; interrupt it when it has printed a word so many times."""
        asked = self._client.execute(cell)
        gave: dict[str, Any] = {"stdout": "", "stderr": "", "error": "", "result": ""}
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                gave[content["name"]] += content["text"]
                if interrupt_at and gave["stdout"].count(interrupt_at[0]) == interrupt_at[1]:
                    interrupt_at = None
                    self._manager.interrupt_kernel()
            elif kind == "error":
                gave["error"] = f"{content['ename']}: {content['evalue']}"
            elif kind == "execute_result":
                gave["result"] = content["data"]["text/plain"]
            elif kind == "status" and content["execution_state"] == "idle":
                return gave

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def main() -> None:
    notebook = _Notebook()
    try:
        cells = {
            "define": notebook.run(DEFINE),
            "train": notebook.run("[made.value for made in phalanx.launch(train, (2.0,), n=3)]"),
            "fail": notebook.run("phalanx.launch(fail, n=3)"),
            "interrupt": notebook.run("phalanx.launch(wait, n=2)", interrupt_at=("waits", 2)),
            "input": notebook.run("phalanx.launch(lambda: input(), n=1)"),
            "left": notebook.run("os.popen(f'ps -o comm= --ppid {os.getpid()}').read().split()"),
            "again": notebook.run("[made.value for made in phalanx.launch(train, (3.0,), n=2)]"),
            "spawn": notebook.run("[made.value for made in phalanx.launch(train, (3.0,), n=2, start_method='spawn')]"),
        }
        print(json.dumps(cells))
    finally:
        notebook.close()


if __name__ == "__main__":
    main()
