#!/bin/bash
# Tests on this machine's GPUs: kernels, whole models, collectives, memory checker. Run from the root of the source tree:
#
#     tools/gpu-test.sh [BUILD [STEP...]]
#
# BUILD (default build) holds what `make gpu` built, or only its gpu.tar.gz, which is unpacked where it is newer: nothing is
# compiled here. Steps are kcheck, gate, collectives and sanitize, all by default. With one GPU the tests of more lanes are skipped
# and counted as that. Logs go to $OUT or BUILD/gpu-logs.
#
#     GATE=FILTER         only those tests of gate, "*" stands for any text
#     REPEATS=N           how often 1,000 ids are generated (20)
#     COLLECTIVES=FILTER  only those groups of collectives
#     SANITIZE=FILTER     what runs under compute-sanitizer memcheck
#     LIMIT=SECONDS       for each step (900)
#
# The last lines are a table: step, exit code, seconds, counts, key numbers. The exit code is 0 when nothing failed and
# something passed.
set -u
cd "$(dirname "$0")/.." || exit 1
dir=${1:-build}
shift $(($# > 0))
steps=${*:-kcheck gate collectives sanitize}
out=${OUT:-$dir/gpu-logs}
limit=${LIMIT:-900}
mkdir -p "$out" || exit 1
if [[ $dir/gpu.tar.gz -nt $dir/gpu/gate ]]; then
    tar -xzf "$dir/gpu.tar.gz" -C "$dir" || exit 1
fi

if ! nvidia-smi -L >"$out/gpus.log" 2>&1; then
    echo "gpu-test: no GPU: $(head -1 "$out/gpus.log")" >&2
    exit 1
fi
n_gpu=$(grep -c '^GPU ' "$out/gpus.log")
nvidia-smi --query-gpu=index,name,driver_version,memory.used,clocks.sm --format=csv,noheader

# NCCL where the loader does not look, as in a Python package.
if ((n_gpu > 1)) && [[ -z ${QLANE_NCCL:-} ]] && ! ldconfig -p | grep -q 'libnccl\.so\.2 '; then
    QLANE_NCCL=$(find / -xdev -name libnccl.so.2 -print -quit 2>/dev/null)
    export QLANE_NCCL
    echo "NCCL: ${QLANE_NCCL:-not found}"
fi
export CMOCKA_MESSAGE_OUTPUT=TAP

table=() bad=0 good=0
row() { # row NAME RC SECONDS PASSED FAILED SKIPPED TEXT
    local failed=$5
    (($2 != 0 && failed == 0)) && failed=1
    ((failed > 0)) && bad=$((bad + 1))
    good=$((good + $4))
    table+=("$(printf '%-12s rc %3d %7.1f s %5d passed %3d failed %3d skipped  %s' "$1" "$2" "$3" "$4" "$failed" "$6" "$7")")
}
skip() { table+=("$(printf '%-12s skipped: %s' "$1" "$2")"); }
seconds() { awk "BEGIN {print $EPOCHREALTIME - $1}"; }
lines() { grep -cE "$1" "$2"; }
trouble() { grep -hE '^(not ok|FAIL|ERROR|#.*error:)|watchdog' "$@" | grep -v '# SKIP' | head -40; }

tap() { # tap NAME RC START LOG TEXT
    local skipped
    skipped=$(lines '^(not )?ok .*# SKIP' "$4")
    trouble "$4"
    (($2 == 124 || $2 == 137)) && echo "$1 ran past $limit s"
    row "$1" "$2" "$(seconds "$3")" "$(lines '^ok ' "$4")" "$(($(lines '^not ok ' "$4") - skipped))" "$skipped" "$5"
}

run_kcheck() {
    local start=$EPOCHREALTIME rc=0 pids=() logs=() f p
    if [[ ! -x $dir/kcheck ]]; then
        skip kcheck "$dir/kcheck was not built"
        return
    fi
    for f in linear. embed. norm. mlp. gdn. attention. sample.; do
        logs+=("$out/kcheck.${f}log")
        timeout -k 10 "$limit" "$dir/kcheck" --device cuda "$f" >"$out/kcheck.${f}log" 2>&1 &
        pids+=($!)
    done
    for p in "${pids[@]}"; do
        wait "$p" || rc=$?
    done
    trouble "${logs[@]}"
    read -r passed failed < <(sed -nE 's/^kcheck: (-?[0-9]+) passed, ([0-9]+) failed.*/\1 \2/p' "${logs[@]}" |
        awk '{p += $1; f += $2} END {print p + 0, f + 0}')
    row kcheck $rc "$(seconds "$start")" "$passed" "$failed" 0 ""
}

# The worst row of logits of each mode over models and lanes, against the goldens.
worst() {
    sed -nE 's/^# measured [^ ]+ +lanes [0-9]+ (.*[^ ]) +relative L2:.* logits ([^ ]+) mtp.*/\1;\2/p' "$1" |
        awk -F';' '{if (!($1 in w)) order[++n] = $1; if ($2 + 0 > w[$1] + 0) w[$1] = $2}
                   END {for (i = 1; i <= n; i++) printf "%s%s %s", (i > 1 ? "; " : ""), order[i], w[order[i]]}'
}

run_gate() {
    local start=$EPOCHREALTIME log=$out/gate.log
    timeout -k 10 "$limit" "$dir/gpu/gate" "${GATE:-*}" "${REPEATS:-20}" >"$log" 2>&1
    local rc=$?
    grep '^# measured' "$log"
    tap gate $rc "$start" "$log" "logits: $(worst "$log")"
}

run_collectives() {
    local start=$EPOCHREALTIME log=$out/collectives.log
    timeout -k 10 "$limit" "$dir/gpu/collectives" "${COLLECTIVES:-}" >"$log" 2>&1
    local rc=$? passed failed skipped
    grep -E '^# [0-9]+ lanes|^(ok|FAIL)  *collectives\.(abort|deadline|two|steps)|^FAIL|^# log' "$log"
    read -r passed failed skipped < <(sed -nE 's/^collectives: ([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped/\1 \2 \3/p' "$log")
    row collectives $rc "$(seconds "$start")" "${passed:-0}" "${failed:-1}" "${skipped:-0}" \
        "$(awk '/^ok/ {for (i = 1; i < NF; i++) if ($(i + 1) == "elements") n += $i} END {print n + 0}' "$log") elements compared"
}

run_sanitize() {
    local start=$EPOCHREALTIME log=$out/memcheck.log
    if ! command -v compute-sanitizer >/dev/null; then
        skip sanitize "no compute-sanitizer"
        return
    fi
    timeout -k 10 "$limit" compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$dir/gpu/gate" "${SANITIZE:-golden micro-*lanes 1 *f16 kv}" 1 >"$log" 2>&1
    tap sanitize $? "$start" "$log" "$(grep -h 'ERROR SUMMARY' "$log" | tail -1)"
}

for step in $steps; do
    case $step in
    kcheck | gate | collectives | sanitize) run_$step ;;
    *)
        echo "gpu-test: unknown step $step; there are kcheck, gate, collectives, sanitize" >&2
        exit 2
        ;;
    esac
done
echo "== $n_gpu GPU$( ((n_gpu > 1)) && echo s)$( ((n_gpu > 1)) || echo ': tests of more lanes were skipped')"
printf '%s\n' "${table[@]}"
((bad == 0 && good > 0))
