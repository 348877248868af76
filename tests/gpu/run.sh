#!/usr/bin/env bash
# What only a machine with exactly one NVIDIA GPU can show: a row for each check, and 0 if all are right.
# PYTHON=/path/of/python tests/gpu/run.sh takes an installed wheel; the default is the environment of make.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

# check NAME CODE TEXT COMMAND...: the command ends with this exit code, and has printed the text, before the time is up.
check() {
    local name=$1 code=$2 text=$3 left=$((350 - SECONDS)) began=$SECONDS got
    shift 3
    timeout -k 5 $((left < 5 ? 5 : left < 90 ? left : 90)) "$@" >"$logs/out" 2>&1
    got=$?
    if [ "$got" = "$code" ] && grep -qF -- "$text" "$logs/out"; then
        printf '%-6s  %3d s  %s\n' ok $((SECONDS - began)) "$name"
    else
        failed=1
        printf '%-6s  %3d s  %s (exit code %s in place of %s, or no line with "%s")\n' \
            FAILED $((SECONDS - began)) "$name" "$got" "$code" "$text"
        tail -n 25 "$logs/out" | sed 's/^/        | /'
    fi
}

devices=$("$python" -c 'from phalanx.topology.device_files import count_devices; print(count_devices())') || exit 2
[ "$devices" = 0 ] && echo "no accelerator here" && exit 2
model=$(sed -n 's/^Model:[[:space:]]*\(NVIDIA \)\{0,1\}//p' /proc/driver/nvidia/gpus/*/information | head -n 1)
here=tests/gpu
phalanx() { check "$1" "$2" "$3" "$python" -m phalanx "${@:4}"; }

check "exactly one device" 0 1 echo "$devices"
# Without conftest.py, which needs packages that such a machine may lack.
mapfile -t files < <(grep -rl --include='test_*.py' '^@pytest.mark.gpu' tests)
check "tests marked gpu" 0 " passed" "$python" -m pytest -q --noconftest -m gpu "${files[@]}"
phalanx "rank table: cuda:0 ${model:=MODEL}" 0 "cuda:0 $model" run -n 1 $here/share_device.py
phalanx "two ranks share cuda:0, CPU tensors over phalanx" 0 "all right" run -n 2 --device cuda:0 $here/share_device.py
phalanx "two ranks on one GPU over NCCL: refused" 1 "Duplicate GPU detected" run -n 2 $here/nccl_calls.py
phalanx "NCCL with a world of one" 0 "all right" run -n 1 $here/nccl_calls.py
phalanx "DDP of two ranks on cuda:0" 0 "all right" run -n 2 --device cuda:0 $here/ddp_steps.py
phalanx "RPC with CUDA tensors" 0 "all right" run -n 2 --device cuda:0 $here/rpc_tensors.py
phalanx "bench all_reduce --quick" 0 "all_reduce" bench all_reduce --quick
phalanx "doctor" 0 "accelerators" doctor
phalanx "doctor --gpu" 0 "product TFLOP/s" doctor --gpu
phalanx "--bind core: cores next to the device" 0 "all right" run -n 1 --bind core $here/near_cores.py
exit $failed
