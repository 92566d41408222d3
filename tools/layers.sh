#!/bin/bash
# Include direction: a folder includes only what lies below it. Every #include "..." is written from the root, so the
# edges can be listed; one that points up or sideways is a failure.
#
#     runtime/base                      nothing of ours but qlane.h
#     kernels, loader                   runtime/base          (never each other)
#     runtime/text                      base, loader          (it finds its files in model directories)
#     runtime/lane                      base, kernels
#     runtime/model                     base, kernels, loader, lane
#     runtime/engine                    everything below
#     runtime/check                     everything below
#     runtime/cli                       qlane.h
#
# CUDA and NCCL headers appear only in kernels/*.cu, kernels/cuda and runtime/lane's comm and device files.
set -u
cd "$(dirname "$0")/.." || exit 1

find runtime loader kernels \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z |
    xargs -0 grep -nHE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<]' | awk '
    function folder(path) {
        if (path ~ /^runtime\/qlane\.h$/) return "api"
        if (match(path, /^runtime\/[a-z]+/)) return substr(path, 9, RLENGTH - 8)
        if (match(path, /^[a-z]+\//)) return substr(path, 1, RLENGTH - 1)
        return "?"
    }
    BEGIN {
        may["api"] = " "
        may["base"] = " api base "
        may["kernels"] = " api base kernels "
        may["loader"] = " api base loader "
        may["text"] = " api base loader text "
        may["lane"] = " api base kernels lane "
        may["model"] = " api base kernels loader lane model "
        may["engine"] = " api base kernels loader text lane model engine "
        may["check"] = " api base kernels loader text lane model engine check "
        may["cli"] = " api cli "
    }
    {
        split($0, part, ":")
        file = part[1]
        from = folder(file)
        edges++
        if (match($0, /include[[:space:]]*"[^"]+"/)) {
            target = substr($0, RSTART, RLENGTH)
            sub(/^include[[:space:]]*"/, "", target)
            sub(/"$/, "", target)
            to = folder(target)
            if (index(may[from], " " to " ") == 0) {
                print "FAIL " file ":" part[2] ": " from " may not include " target
                bad++
            }
        } else if ($0 ~ /<(cuda|nccl|cublas|cooperative_groups|mma)/ &&
                   file !~ /^kernels\/[a-z_]+\.cu$|^kernels\/cuda\/|^runtime\/lane\/(comm_|nccl)/) {
            print "FAIL " file ":" part[2] ": CUDA and NCCL headers belong into .cu files and the comm files"
            bad++
        }
    }
    END {
        print edges - bad " passed, " bad + 0 " failed, 0 skipped"
        exit bad > 0 || edges == 0
    }'
