"""TorchScript that uses RPC: functions, and modules that hold remote references, run as the Python they came from."""
