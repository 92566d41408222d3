#!/bin/bash
# Builds the GPU test programs into $1 for the architectures in ARCH (default 90a): kcheck and kbench, static but for libc.
# They need the CUDA driver of the machine they run on and nothing else.
set -e
out=${1:-build/gpu}
obj=$out/obj
cuda=${CUDA_HOME:-/usr/local/cuda}
mkdir -p "$obj"
gencode=
for a in ${ARCH:-90a}; do
    gencode="$gencode -gencode arch=compute_$a,code=sm_$a"
done
nv="$cuda/bin/nvcc -std=c++17 -O3 -lineinfo -I. -DQL_CUDA=1 $gencode -Xcompiler -fPIC,-fno-exceptions,-Wall,-Wextra"
cc="gcc -std=c17 -D_GNU_SOURCE -O2 -ffp-contract=off -I. -DQL_CUDA=1 -Wall -Wextra"
newer() { # newer OBJECT SOURCE: whether SOURCE or any header is newer
    [ ! -e "$1" ] || [ "$2" -nt "$1" ] || [ -n "$(find kernels runtime/base tests loader -name '*.h' -newer "$1" -o -name '*.cuh' -newer "$1" | head -1)" ]
}
list=
for f in kernels/*.cu kernels/cuda/*.cu; do
    o=$obj/${f//\//_}.o
    if newer "$o" "$f"; then
        echo "NVCC $f"
        $nv -c "$f" -o "$o"
    fi
    list="$list $o"
done
for f in kernels/*.c kernels/cuda/*.c kernels/host/*.c runtime/base/*.c tests/kcase.c tests/cases/*.c tests/gpu/rig.c; do
    o=$obj/${f//\//_}.o
    extra=
    case $f in
        *_avx2.c) extra="-mavx2 -mf16c" ;;
        *_avx512.c) extra="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c" ;;
    esac
    if newer "$o" "$f"; then
        $cc $extra -c "$f" -o "$o"
    fi
    list="$list $o"
done
archive() { local f; f=$(gcc -print-file-name=lib$1.a); [ "$f" != "lib$1.a" ] && echo "$f" || echo "-l$1"; }
libs="$cuda/lib64/libcudart_static.a $(gcc -print-file-name=libstdc++.a) $(archive jansson) $(archive z) -lm -pthread -ldl -lrt"
for p in tests/kcheck tests/gpu/kbench; do
    $cc -c $p.c -o "$obj/${p//\//_}.o"
    gcc "$obj/${p//\//_}.o" $list $libs -o "$out/${p##*/}"
    strip "$out/${p##*/}"
done
ls -la "$out"/kcheck "$out"/kbench
