"""Tensors of accelerators in calls between processes; what needs no accelerator is tested without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from phalanx.errors import ArgumentError
from phalanx.rpc.torch_api.agent import check_device_maps
from phalanx.topology.device_files import count_devices

PROGRAM = """
    import torch
    import phalanx
    from phalanx import rpc

    device = torch.accelerator.current_accelerator()
    world = phalanx.init(device=f"{device.type}:0", backend="phalanx")  # which all ranks share
    last = f"{device.type}:{torch.accelerator.device_count() - 1}"

    def where(tensor):
        return str(tensor.device), float(tensor.sum()), tensor

    def product(left, right):
        return left @ right

    rpc.init()
    if world.rank == 0:
        for name in (f"{device.type}:0", last):  # also one that is not the current device
            for nbytes in (40, 4 << 20):
                sent = torch.ones(nbytes // 4, device=name)
                assert where(sent)[:2] == rpc.call(1, where, sent)[:2]
                back = rpc.call(1, where, sent)[2]
                assert str(back.device) == name and torch.equal(back, sent)
            mixed = {"there": torch.ones(3, device=name), "here": torch.ones(3)}
            got = rpc.call(1, dict, mixed)
            assert [str(got[key].device) for key in mixed] == [name, "cpu"]

        stream = torch.Stream(last)  # what another stream is still computing is sent when it is done
        with stream:
            big = torch.ones(2048, 2048, device=last)
            for _ in range(20):
                big = big @ torch.full_like(big, 1 / 2048)
            _, total, back = rpc.call(1, where, big)
        assert abs(total - 2048**2) < 1 and torch.equal(back, big)

        both = [each.wait()[:2] for each in rpc.each(None, where, torch.ones(1 << 18, device=last))]
        assert both == [(last, float(1 << 18))] * (world.world_size - 1)

        with rpc.context() as context_id:
            left = torch.ones(4, 4, device=last, requires_grad=True)
            rpc.backward(context_id, [rpc.call(1, product, left, torch.ones(4, 4, device=last)).sum()])
            gradient = rpc.get_gradients(context_id)[left]
            assert str(gradient.device) == last and torch.equal(gradient.cpu(), torch.full((4, 4), 4.0))
        print("all right")
    rpc.shutdown()
    phalanx.close()
"""


def test_a_device_map_to_another_device_is_refused() -> None:
    cuda = torch.device("cuda:0"), torch.device("cuda:1")
    check_device_maps({})
    check_device_maps({"worker1": {cuda[0]: cuda[0], cuda[1]: cuda[1]}, "worker2": {}})
    with pytest.raises(ArgumentError, match=r"to worker1 leads from cuda:0 to cuda:1"):
        check_device_maps({"worker1": {cuda[0]: cuda[1]}})


@pytest.mark.gpu
@pytest.mark.skipif(not count_devices(), reason="no accelerator here")
def test_calls_with_tensors_of_an_accelerator(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(dedent(PROGRAM))
    command = [sys.executable, "-m", "phalanx", "run", "--no-prefix", "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
