#!/bin/sh
# Builds the static sandbox binary: sh build.sh TARGETDIR
# musl-gcc gives a smaller file; any cc with a static libc works. CFLAGS_EXTRA adds flags (sanitizers in tests).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?usage: sh build.sh TARGETDIR}
mkdir -p "$target"
flags="-std=gnu11 -D_GNU_SOURCE -O2 -static -Wall -Wextra -Werror -fno-strict-aliasing ${CFLAGS_EXTRA:-}"
temporary="$target/.swe-sandboxd.$$"
trap 'rm -f "$temporary"' EXIT
for compiler in musl-gcc cc gcc clang; do
    command -v "$compiler" >/dev/null 2>&1 || continue
    # shellcheck disable=SC2086
    if "$compiler" $flags -o "$temporary" "$here"/*.c; then
        mv -f "$temporary" "$target/swe-sandboxd"  # atomic: a running launcher keeps its old file
        exit 0
    fi
done
echo "build.sh: no compiler could link a static binary; install gcc with libc6-dev, or musl-tools" >&2
exit 1
