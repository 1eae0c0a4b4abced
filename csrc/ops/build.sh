#!/bin/sh
# build.sh TARGET: compiles the CPU kernels into TARGET. The row kernels once for each vector width that the compiler can
# make; the widest that the machine has is loaded at run time (swe_rl/ops/cpu_rows.py).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?usage: sh build.sh TARGET}
compiler=""
for candidate in ${CXX:-} g++ c++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then compiler="$candidate" && break; fi
done
[ -n "$compiler" ] || { echo "no C++ compiler (g++, c++ or clang++) was found" >&2 && exit 1; }

build() { # build SOURCE NAME FLAG...; moved into place at the end, as a running process keeps its old file
    source="$here/$1.cpp" && library="$target/lib$2.so" && shift 2
    "$compiler" -O3 -std=c++17 -fPIC -shared -pthread -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wall -Wextra \
        -Wno-psabi "$@" "$source" -o "$library.$$" && mv -f "$library.$$" "$library"
}

build_cuda() { # build_cuda NVCC: code for Ampere and Hopper, and PTX for what comes later
    library="$target/libweight_delta-cuda.so"
    "$1" -O3 -std=c++17 -shared -Xcompiler -fPIC -gencode arch=compute_80,code=sm_80 \
        -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90 "$here/weight_delta.cu" \
        -o "$library.$$" && mv -f "$library.$$" "$library"
}

mkdir -p "$target"
build trie trie
build head_rows head_rows-default
build weight_delta weight_delta-default
case "$(uname -m)" in
x86_64 | amd64)
    for level in v3 v4; do
        for part in head_rows weight_delta; do
            build "$part" "$part-$level" "-march=x86-64-$level" ||
                echo "x86-64-$level: left out, $compiler cannot build it"
        done
    done
    ;;
esac

if [ -n "${CUDA_HOME:-}" ] || [ "${SWE_RL_CUDA:-0}" = 1 ]; then
    nvcc=nvcc
    [ -z "${CUDA_HOME:-}" ] || nvcc="$CUDA_HOME/bin/nvcc"
    build_cuda "$nvcc"
fi
