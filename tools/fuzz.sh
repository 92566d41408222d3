#!/bin/bash
# Runs each fuzz target for a while from its checked-in corpus; new inputs stay in the build folder, findings stop the
# target and are printed. Usage: tools/fuzz.sh SECONDS JOBS BUILD_FOLDER TARGET...
set -u
seconds=$1 jobs=$2 b=$3
shift 3
one() {
    local name=${1##*/} work=$2/corpus/${1##*/}
    mkdir -p "$work" "$2/findings"
    local seeds=()
    [[ -d tests/fuzz/corpus/$name ]] && seeds=("tests/fuzz/corpus/$name")
    if "$1" -max_total_time="$3" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix="$2/findings/$name-" "$work" "${seeds[@]}" >"$2/$name.log" 2>&1; then
        echo "ok   $name: $(awk '/number_of_executed_units/ {print $2}' "$2/$name.log") inputs in $3 s"
    else
        echo "FAIL $name:"
        tail -n 40 "$2/$name.log"
        return 1
    fi
}
export -f one
printf '%s\0' "$@" | xargs -0 -P "$jobs" -I{} bash -c 'one {} '"$b $seconds"
