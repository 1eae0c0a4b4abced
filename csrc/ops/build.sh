#!/bin/sh
# build.sh TARGET: compiles the CPU kernels into TARGET, once for each vector width that the compiler can make; the
# widest that the machine has is loaded at run time (swe_rl/ops/cpu_rows.py).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?usage: sh build.sh TARGET}
compiler=""
for candidate in ${CXX:-} g++ c++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then compiler="$candidate" && break; fi
done
[ -n "$compiler" ] || { echo "no C++ compiler (g++, c++ or clang++) was found" >&2 && exit 1; }

build() { # build NAME FLAG...; moved into place at the end, as a running process keeps its old file
    library="$target/libhead_rows-$1.so" && shift
    "$compiler" -O3 -std=c++17 -fPIC -shared -pthread -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wall -Wextra \
        -Wno-psabi "$@" "$here/head_rows.cpp" -o "$library.$$" && mv -f "$library.$$" "$library"
}

mkdir -p "$target"
build default
case "$(uname -m)" in
x86_64 | amd64)
    for level in v3 v4; do
        build "$level" "-march=x86-64-$level" || echo "x86-64-$level: left out, $compiler cannot build it"
    done
    ;;
esac
