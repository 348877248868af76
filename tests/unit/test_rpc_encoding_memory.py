"""Values as RPC messages: tensors share memory as they did, and memory is not copied."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from tests.support.encoded import carried

from phalanx.rpc.encoding import decode, encode

MATRIX = torch.arange(24.0).view(4, 6)


# Sharing.


def test_one_tensor_twice_is_one_tensor() -> None:
    first, (second,) = carried((MATRIX, [MATRIX]))
    assert first is second


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_tensors_that_overlap_do_so_on_the_other_side(order: tuple[int, ...]) -> None:
    base = torch.arange(40.0)
    views = [base, base[10:20], base.view(4, 10)[:, 3], base[11:].view(torch.int32)]
    sent = [views[index] for index in order]
    _, buffers = encode(sent)
    assert sum(buffer.nbytes for buffer in buffers) == base.nbytes
    got = carried(sent)
    for one, other in zip(got, sent, strict=True):
        assert one.tolist() == other.tolist()
    by_number = dict(zip(order, got, strict=True))
    by_number[0].fill_(7)
    assert by_number[1].tolist() == [7] * 10
    assert by_number[2].tolist() == [7] * 4
    assert by_number[3].view(torch.float32).tolist() == [7] * 29


def test_a_module_and_its_parameters_are_one() -> None:
    model = torch.nn.Linear(2, 2)
    copy, parameters, state = carried((model, list(model.parameters()), model.state_dict()))
    assert parameters[0] is copy.weight
    with torch.no_grad():
        copy.weight.fill_(3)
    assert state["weight"].tolist() == [[3, 3], [3, 3]]


def test_a_storage_and_its_tensor_are_one() -> None:
    base = torch.zeros(4)
    tensor, untyped, part = carried((base, base.untyped_storage(), base[1:]))
    tensor.fill_(2)
    assert torch.empty(0).set_(untyped).tolist() == [2, 2, 2, 2]
    assert part.tolist() == [2, 2, 2]


def test_tensors_apart_in_one_storage_cost_only_themselves() -> None:
    base = torch.zeros(1_000_000)
    _, buffers = encode((base[:10], base[500:520], base.view(1000, 1000)[2:900, 7]))
    assert sum(buffer.nbytes for buffer in buffers) == 4 * (10 + 20 + 898)


# Memory.


def test_a_large_tensor_is_sent_and_received_where_it_lies() -> None:
    tensor = torch.zeros(16 * 1024 * 1024)
    for sent in (tensor, tensor[5:], tensor.view(4096, 4096).t(), torch.nn.Parameter(tensor), tensor.bfloat16()):
        _, (buffer,) = encode({"weights": sent})
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        assert 0 <= sent.data_ptr() - address < 16
    head, (buffer,) = encode(tensor)
    arrived = memoryview(bytearray(buffer.nbytes))
    got = decode(head, [arrived])
    assert got.data_ptr() == np.frombuffer(arrived, np.uint8).ctypes.data


def test_buffers_keep_their_tensor_and_received_tensors_their_buffer() -> None:
    class Held(np.ndarray):
        pass

    tensor = torch.arange(1000.0)
    kept = weakref.ref(tensor)
    head, (buffer,) = encode(tensor)
    part = buffer[4:8]
    del tensor, buffer
    assert kept() is not None
    assert bytes(part) == np.float32(1).tobytes()
    memory = Held((4000,), np.uint8)
    memory[:] = 0
    owner = weakref.ref(memory)
    got = decode(head, [memoryview(memory)])
    del memory
    view = got[10:]
    del got
    assert owner() is not None
    assert view[0] == 0
    del view, part
    assert kept() is None
    assert owner() is None


def test_a_tensor_that_was_sent_can_still_be_resized() -> None:
    tensor = torch.ones(3)
    encode(tensor)
    assert tensor.resize_(100).shape == (100,)


def test_received_memory_that_is_read_only_or_odd_is_copied() -> None:
    head, (buffer,) = encode(torch.arange(5.0))
    got = decode(head, [memoryview(bytes(buffer))])
    got += 1
    assert got.tolist() == [1, 2, 3, 4, 5]
    odd = memoryview(bytearray(b"x" + bytes(buffer)))[1:]
    got = decode(head, [odd])
    assert got.tolist() == [0, 1, 2, 3, 4]
    assert got.data_ptr() % 4 == 0
    head, (buffer,) = encode(MATRIX.t())
    got = decode(head, [memoryview(bytearray(b"x" + bytes(buffer)))[1:]])
    assert got.tolist() == MATRIX.t().tolist()
    assert got.data_ptr() % 4 == 0
