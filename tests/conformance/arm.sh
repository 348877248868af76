#!/bin/bash
# Run the core's tests and README's script as on an Arm server, by qemu-user: `make arm`, on Debian x86-64 with a C compiler.
#
#   arm.sh PYTHON FOLDER
#
# Takes qemu, a cross compiler and arm64's libraries from Debian and wheels from PyPI into the folder (1.6 GB); the system
# stays as it is. torch 2.10 is the last whose wheel for Arm does without CUDA's libraries.
#
# What qemu-user 7.2 does otherwise than Linux, and what is therefore left out or put right here:
# - it refuses PR_SET_CHILD_SUBREAPER: a library in front says yes;
# - madvise() claims to have done MADV_POPULATE_WRITE and MADV_REMOVE: without rpc_slab, and rpc_ring, whose end is that;
# - each thread that reads its own process in /proc finds a start time of its own, so that threads which stand for ranks
#   lose each other: their core takes every start time for the same.
set -euo pipefail
python=$(realpath -s "$1") here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$2" && cd "$2" && all=$PWD
core=$here/src/phalanx/native/csrc entry=$here/src/phalanx/native/csrc_entry

fetch() { # FOLDER ARCHITECTURE STATUS PACKAGE...: Debian packages, and what they need beyond those in the file STATUS
    mkdir -p apt/lists/partial "apt/$1/archives/partial"
    local apt=(apt-get -qq -o "Dir::State=$all/apt" -o "Dir::State::Status=$3" -o "Dir::Cache=$all/apt/$1"
        -o "APT::Architecture=$2" -o "APT::Architectures=$2" -o APT::Sandbox::User= -o APT::Install-Recommends=0)
    "${apt[@]}" update
    "${apt[@]}" --yes --download-only install "${@:4}" >/dev/null
    for package in "apt/$1/archives/"*.deb; do dpkg-deb -x "$package" "$1"; done
}

if [ ! -e .installed ]; then
    fetch tools amd64 /var/lib/dpkg/status qemu-user-static gcc-aarch64-linux-gnu
    fetch root arm64 /dev/null python3 libpython3-dev libc6-dev libstdc++6 libgomp1
    # By name, since pip would ask for what torch needs on this machine.
    grep -v '^torch==' "$here/requirements/constraints.txt" >constraints
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --target site -c constraints torch==2.10.0 \
        numpy click rich markdown-it-py mdurl pygments filelock typing-extensions sympy mpmath networkx jinja2 \
        markupsafe fsspec setuptools msgspec cloudpickle
    touch .installed
fi

cc() { # the cross compiler's own libraries and programs are not the system's
    PATH=$all/tools/usr/bin:$PATH LD_LIBRARY_PATH=$all/tools/usr/lib/x86_64-linux-gnu aarch64-linux-gnu-gcc \
        --sysroot="$all/root" -std=gnu11 -O3 -fPIC -ffp-contract=off -Wall -Wextra -pthread -I"$core" "$@"
}
export all core && export -f cc
qemu="$all/tools/usr/bin/qemu-aarch64-static -L $all/root"

rm -rf site/phalanx built && cp -r "$here/src/phalanx" site/ && rm -f site/phalanx/native/*.so && mkdir built
ls "$core"/*/*.c | xargs -P 2 -I{} bash -c 'cc -fvisibility=hidden -c {} -o built/$(basename {} .c).o'
cc -shared built/*.o -o site/phalanx/native/libphalanx.so
cc -shared -fvisibility=hidden -DPy_LIMITED_API=0x030A0000 -I"$entry" -Iroot/usr/include -Iroot/usr/include/python3.11 \
    "$entry"/*.c -o site/phalanx/native/entry.abi3.so

sed 's/->start_time = start_time;/->start_time = 1;/' "$core/system/process.c" >built/process.c && cc -c built/process.c -o built/process.o
for program in breaks "stress 3 100 1 512" "stress 2 400 1 4096" "stress 5 200 1 4096" \
    "stress 8 100 1 1024" "rpc_stress 3 40" "rpc_stress 2 60" "rpc_damage 1 10"; do
    name=${program%% *}
    [ -e "built/$name" ] || cc "$here/tests/native/$name.c" built/*.o -o "built/$name"
    echo "$program"
    $qemu built/$program
done

cc -shared -x c - -o built/subreaper.so <<'EOF'
#include <sys/syscall.h>
#include <unistd.h>
int prctl(int option, long a, long b, long c, long d)
{
    return option == 36 ? 0 : (int)syscall(SYS_prctl, option, a, b, c, d);
}
EOF
# A script, since Linux knows no qemu and ranks may start programs.
printf '#!/bin/sh\nexec %s -E LD_PRELOAD=%s -0 %s %s "$@"\n' "$qemu" "$all/built/subreaper.so" "$all/built/python" \
    "$all/root/usr/bin/python3.11" >built/python
chmod +x built/python
sed -n '/^```python/,/^```/{/^```/d;p}' "$here/README.md" >built/train.py
cd built && PYTHONPATH=$all/site ./python -m phalanx run -n 2 train.py
