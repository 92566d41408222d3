#!/bin/bash
# Runs test programs, several at a time, and adds up what they report. Usage:
#
#     tools/runtests.sh [-j JOBS] [-d LOGDIR] COMMAND...
#
# Each COMMAND is one shell command line. Its output goes to a file in LOGDIR; counts are read from TAP lines (cmocka
# prints them when asked by its environment variable) or, where there are none, from a line "N passed, N failed,
# N skipped". A command that fails without a counted failure counts as one failure, and so does one that ran no test or
# did not end in TIMEOUT seconds. The last line printed is the sum; the exit code is 0 when nothing failed.
set -u

jobs=1 dir=build/test-logs limit=${TIMEOUT:-1200}
while getopts j:d: flag; do
    case $flag in
    j) jobs=$OPTARG ;;
    d) dir=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
mkdir -p "$dir" || exit 1
export CMOCKA_MESSAGE_OUTPUT=TAP

run_one() { # run_one INDEX COMMAND
    local log=$dir/$1.log start=$EPOCHREALTIME
    timeout -k 10 "$limit" bash -c "$2" >"$log" 2>&1 </dev/null
    echo "$? $(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $start}")" >"$dir/$1.rc.part"
    mv "$dir/$1.rc.part" "$dir/$1.rc"
}

count() { # count LOG -> "passed failed skipped"
    awk '
        /^(not )?ok [0-9]+.*# SKIP/ {skip++; tap = 1; next}
        /^ok [0-9]+/ {pass++; tap = 1; next}
        /^not ok [0-9]+/ {fail++; tap = 1; next}
        match($0, /[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/) {
            split(substr($0, RSTART), part, /[^0-9]+/)
            p = part[1]; f = part[2]; s = part[3] + 0
        }
        END {if (tap) print pass + 0, fail + 0, skip + 0; else print p + 0, f + 0, s + 0}' "$1"
}

passed=0 failed=0 skipped=0 broken=()
finish() { # finish INDEX COMMAND: add the counts, print one line
    local log=$dir/$1.log rc seconds p f s note=
    read -r rc seconds <"$dir/$1.rc"
    read -r p f s < <(count "$log")
    if ((rc == 124 || rc == 137)); then
        f=$((f + 1)) note=" (ran past $limit s)"
    elif ((rc != 0 && f == 0)); then
        f=1 note=" (exit code $rc)"
    elif ((rc == 0 && p + f + s == 0)); then
        f=1 note=" (ran no test)"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '%-4s %5d passed %4d failed %4d skipped %7s s  %s%s\n' "$( ((f)) && echo FAIL || echo ok)" "$p" "$f" "$s" \
        "$seconds" "$2" "$note"
    if ((f)); then
        broken+=("$1")
        grep -A4 -E '^not ok|^FAIL|ERROR: |runtime error:|WARNING: ThreadSanitizer' "$log" | head -60 | sed 's/^/     /'
        echo "     ... the end of $log:"
        tail -n 15 "$log" | sed 's/^/     /'
    fi
}

commands=("$@")
rm -f "$dir"/*.rc "$dir"/*.log
declare -A live=()
next=0 done=0
while ((done < ${#commands[@]})); do
    while ((next < ${#commands[@]} && ${#live[@]} < jobs)); do
        run_one $next "${commands[next]}" &
        live[$next]=1
        next=$((next + 1))
    done
    wait -n
    for i in "${!live[@]}"; do
        if [[ -f $dir/$i.rc ]]; then
            unset "live[$i]"
            done=$((done + 1))
            finish "$i" "${commands[i]}"
        fi
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0 && passed > 0))
