#!/bin/bash
# Each header compiles alone: as C17; as C++17 too where CUDA code includes it; the CUDA code's own, the op table and the
# public one as CUDA where nvcc is installed. kernels/host/*_simd.h are no headers but bodies that are compiled once for
# each instruction set.
set -u
cd "$(dirname "$0")/.." || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++}
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
pass=0 fail=0 skip=0
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

try() { # try LABEL COMMAND...
    local label=$1
    shift
    if "$@" >"$tmp/out" 2>&1; then
        pass=$((pass + 1))
    else
        fail=$((fail + 1))
        echo "FAIL $label"
        head -n 12 "$tmp/out"
    fi
}

simd="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c"
while read -r h; do
    flags="-D_GNU_SOURCE -I. -Wall -Wextra -Wno-unused-function -Werror -fsyntax-only"
    [[ $h == kernels/host/* ]] && flags+=" $simd"
    echo "#include \"$h\"" >"$tmp/one.c"
    # shellcheck disable=SC2086
    try "$h as C17" "$cc" -std=c17 $flags "$tmp/one.c"
    case $h in
    kernels/host/*) ;;
    runtime/qlane.h | runtime/base/* | kernels/*)
        cp "$tmp/one.c" "$tmp/one.cc"
        # shellcheck disable=SC2086
        try "$h as C++17" "$cxx" -std=c++17 $flags "$tmp/one.cc"
        ;;
    esac
done < <(find runtime loader kernels -name '*.h' ! -path 'kernels/host/*_simd.h' ! -path 'kernels/cuda/*' \
    ! -path runtime/lane/nccl_api.h | sort)

nccl=$(ls /usr/include/nccl.h /usr/local/include/nccl.h "${nvcc%/bin/nvcc}"/include/nccl.h 2>/dev/null | head -n 1)
if [[ -n $nvcc && -n $nccl ]]; then
    while read -r h; do
        echo "#include \"$h\"" >"$tmp/one.cu"
        try "$h as CUDA" "$nvcc" -std=c++17 -I. -I"${nccl%/nccl.h}" --cuda -arch=sm_90 "$tmp/one.cu" -o "$tmp/one.ii"
    done < <({ find kernels/cuda -name '*.h'; ls runtime/lane/nccl_api.h kernels/kernels.h runtime/qlane.h; } 2>/dev/null | sort)
else
    echo "no nvcc or no nccl.h: headers of CUDA code are not checked"
    skip=1
fi
echo "$pass passed, $fail failed, $skip skipped"
((fail == 0))
