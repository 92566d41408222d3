#!/bin/bash
# Tests on this machine's GPUs: kernels, whole models, self-checks, collectives, sanitizers. Run from the root of the source
# tree:
#
#     tools/gpu-test.sh [BUILD [STEP...]]
#
# BUILD (default build) holds what `make gpu` built, or only its gpu.tar.gz, which is unpacked where it is newer: nothing is
# compiled here. Steps are check, kcheck, attend, chain, fused, lanes, memcheck, racecheck, initcheck, synccheck, sanitize, gate, 27b and collectives,
# all by default. check is bound by the host and runs beside those that follow it, up to gate, 27b and collectives, which want the
# GPUs for themselves. With one GPU the tests of more lanes are skipped and counted as that. Logs go to $OUT or BUILD/gpu-logs.
#
#     GATE=FILTER         only those tests of gate, "*" stands for any text
#     REPEATS=N           how often 1,000 ids are generated (20)
#     CHECKPOINT=DIR      what step 27b runs; without it the synthetic 27B is written to /dev/shm/qlane-27b (23 GB) and removed
#     LOAD_FLOOR=GB/s     what a lane of one or two must load at in step 27b, set-up included (3)
#     CHECK=NAMES         only those cases of qlane check
#     COLLECTIVES=FILTER  only those groups of collectives
#     SANITIZE=FILTER     what of gate runs under compute-sanitizer memcheck (step sanitize)
#     CASES=NAMES         which kernel cases the steps called as compute-sanitizer's tools run
#     CASE_LIMIT=SECONDS  for each of those (90)
#     LIMIT=SECONDS       for each other step (900)
#
# The last lines are a table: step, exit code, seconds, counts, key numbers. The exit code is 0 when nothing failed and
# something passed.
set -u
cd "$(dirname "$0")/.." || exit 1
dir=${1:-build}
shift $(($# > 0))
steps=${*:-check kcheck attend chain fused lanes memcheck racecheck initcheck synccheck sanitize gate 27b collectives}
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

: >"$out/table.log" # a file: a step in the background has a row too
row() { # row NAME RC SECONDS PASSED FAILED SKIPPED TEXT
    local failed=$5
    (($2 != 0 && failed == 0)) && failed=1
    printf '%-12s rc %3d %7.1f s %5d passed %3d failed %3d skipped  %s\n' "$1" "$2" "$3" "$4" "$failed" "$6" "$7" >>"$out/table.log"
}
skip() { printf '%-12s skipped: %s\n' "$1" "$2" >>"$out/table.log"; }
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

# Generation by the synthetic 27B: one CRC at every lane count and chunk, with chains and without, and with slices read back and
# compared with the file. Then its speeds; that of loading from memory, which the runs before have brought the files to, has a floor.
run_27b() {
    local start=$EPOCHREALTIME log=$out/27b.log ckpt=${CHECKPOINT:-/dev/shm/qlane-27b} passed=0 failed=0 want='' crc speeds='' n json
    local -a run=("$dir/qlane" run --device cuda --ids-file "$out/27b.ids" --temp 0 --ctx 4096 --json)
    : >"$log"
    if [[ ! -e $ckpt/config.json ]]; then
        if [[ -n ${CHECKPOINT:-} || ! -x $dir/synth ]]; then
            skip 27b "no checkpoint in $ckpt"
            return
        fi
        if ! "$dir/synth" --shape 27b --scheme mixed "$ckpt" >"$log" 2>&1; then
            rm -rf "$ckpt"
            row 27b 1 "$(seconds "$start")" 0 1 0 "the checkpoint could not be written: $(tail -1 "$log")"
            return
        fi
    fi
    seq -s, 1 512 >"$out/27b.ids"
    same_crc() { # same_crc NAME OPTION...
        local name=$1
        shift
        crc=$(timeout -k 10 "$limit" "${run[@]}" -m "$ckpt" -n 32 --crc "$@" 2>>"$log" |
            sed -nE 's/.*"logits_crc32": *"([0-9a-f]+)".*/\1/p')
        want=${want:-$crc}
        if [[ -n $crc && $crc = "$want" ]]; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            echo "FAIL 27b.$name: CRC ${crc:-missing: $(tail -1 "$log")}, not ${want:-there}"
        fi
    }
    for ((n = 1; n <= n_gpu && n <= 8; n *= 2)); do
        same_crc "lanes$n" --lanes $n
        same_crc "lanes$n.chunk64" --lanes $n --chunk 64
        same_crc "lanes$n.chunk2048" --lanes $n --chunk 2048
        same_crc "lanes$n.one_by_one" --lanes $n --kernel chain=off
        ((n == 1)) || same_crc "lanes$n.between" --lanes $n --kernel chain=lane
        ((2 * n <= n_gpu && n < 8)) || same_crc "lanes$n.verify" --lanes $n --verify
        json=$(timeout -k 10 "$limit" "${run[@]}" -m "$ckpt" -n 128 --lanes $n 2>>"$log")
        speeds+="${speeds:+; }$n: $(sed -nE \
            's/.*"load_s": *([0-9.]+).*"prefill_tok_s": *([0-9]+).*"decode_tok_s": *([0-9]+\.[0-9]).*/load \1 s, prompt \2, generated \3 tok\/s/p' <<<"$json")"
        # More lanes share what memory and set-up give: the floor is that of one and two.
        if ((n > 2)); then
            continue
        elif load_reaches "${LOAD_FLOOR:-3}" $n <<<"$json" >/dev/null; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            echo "FAIL 27b.lanes$n.load: a lane's stored bytes came in at $(load_reaches 0 $n <<<"$json") GB/s, not ${LOAD_FLOOR:-3}"
        fi
    done
    [[ -n ${CHECKPOINT:-} ]] || rm -rf "$ckpt"
    row 27b 0 "$(seconds "$start")" $passed $failed 0 "$speeds"
}

# The stored bytes of a lane by the seconds that opening took, in GB/s; of a run's JSON. Succeeds where that is FLOOR or more.
load_reaches() { # load_reaches FLOOR LANES
    grep -oE '"(stored_weight_bytes|stored_scale_bytes|load_s)": *[0-9.]+' | tr -d ':"' | awk -v floor="$1" -v lanes="$2" '
        $1 == "load_s" {s = $2} $1 != "load_s" {bytes += $2}
        END {rate = s > 0 ? bytes / lanes / s / 1e9 : 0; printf "%.1f\n", rate; exit bytes == 0 || rate < floor}'
}

run_check() {
    local start=$EPOCHREALTIME log=$out/check.log
    # shellcheck disable=SC2086
    timeout -k 10 "$limit" "$dir/qlane" check --device cuda --long -m models/tiny \
        ${CHECK:-mlp_shard gdn_shard attention_shard lm_head_shard precision} >"$log" 2>&1
    local rc=$? passed failed skipped
    grep -E '^FAIL|^ok.*precision' "$log"
    read -r passed failed skipped < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/p' "$log")
    row check $rc "$(seconds "$start")" "${passed:-0}" "${failed:-1}" "${skipped:-0}" \
        "worst exact error $(sed -nE 's/^ok .*(exact|golden)\..*worst ([^ ]+) of.*/\2/p' "$log" | sort -g | tail -1)"
}

run_counted() { # run_counted PROGRAM, which ends in a line "PROGRAM: N passed, N failed, N skipped"
    local start=$EPOCHREALTIME name=$1 log=$out/$1.log
    timeout -k 10 "$limit" "$dir/gpu/$name" >"$log" 2>&1
    local rc=$? passed failed skipped
    grep -E '^FAIL' "$log" | head -20
    read -r passed failed skipped < <(sed -nE "s/^$name: ([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped/\1 \2 \3/p" "$log")
    row "$name" $rc "$(seconds "$start")" "${passed:-0}" "${failed:-1}" "${skipped:-0}" "$(sed -n 's/^# rows1: //p' "$log")"
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

# One small case of every path of each family.
small="linear.nvfp4.exact.gen.t3.n33.k256.s4.normal linear.nvfp4.bf16.prompt.t16.n33.k256.s4.normal
    linear.nvfp4.exact.gen.t2.n64.k480.s2.cut.normal linear.fp8-block.exact.gen.t3.n33.k256.s4.normal
    linear.fp8-block.exact.prompt.t16.n33.k256.s4.normal linear.fp8-channel.fp8.prompt.t16.n33.k256.s4.normal
    linear.fp8-channel.exact.gen.t3.n33.k256.s4.normal linear.fp8-tensor.exact.gen.t1.n7.k37.normal
    linear.bf16.bf16.prompt.t16.n33.k256.s4.normal linear.bf16.exact.gen.t3.n33.k256.s4.normal
    linear.nvfp4.q8.gen.t1.n67.k320.normal.dp4a linear.nvfp4.q8.gen.t1.n10.k640.s8.normal.dp4a
    linear.nvfp4.q8.gen.t1.n21.k4352.s2.normal.dp4a linear.nvfp4.q8.gen.t1.n37.k8704.s4.normal.dp4a
    linear.nvfp4.q8.prompt.t17.n10.k640.s8.normal.wmma linear.nvfp4.q8.prompt.t129.n67.k320.normal.wide
    linear.nvfp4.q8.prompt.t129.n130.k1024.s8.cut.normal.wide linear.nvfp4.q8.gen.t2.n67.k320.normal.reference
    linear.fp8-channel.fp8.prompt.t16.n33.k512.s4.normal linear.fp8-block.fp8.prompt.t16.n33.k512.s4.normal
    linear.fp8-channel.q8.prompt.t16.n33.k256.s4.normal linear.nvfp4.exact.gen.t2.n20.k5632.normal
    linear.f32.exact.gen.t1.n33.k256.s4.normal norm.rms.t65.n256.delta.ld256.normal norm.gated.t3.h6.alias.normal
    mlp.swiglu.t7.n1024.x1.alias embed.BF16.t1.h256.ids35-39 gdn.conv.gen.c16 gdn.conv.prompt.c384
    gdn.gen.typical.k2.v2 gdn.gen.slow.k4.v8.g2 gdn.prompt.typical.k2.v2.g1 gdn.prompt.slow.k1.v2.g2.v0_0.65at64
    gdn.prompt.typical.k2.v6.g3 attention.prep.fp8.h4 attention.f16.normal.h4at0 attention.fp8.normal.h2at0
    attention.f16.normal.h1at0.g1.1at999 attention.gen.f16.normal.h12at12 attention.gen.fp8.normal.h5at4
    attention.gen.bf16.normal.h70at0.g70 attention.prec-bf16.f16.normal.h5at4
    attention.prec-bf16.bf16.normal.h2at0.g2.130at0 attention.prec-bf16.fp8.normal.h5at4
    sample.topk.t3.v8.lane0of1.k5.cap8.ties sample.chain.t12.v9.lane0of1.k7.cap7.ties.one.f-1"

# Not for racecheck: products whose rings of stages go round, and a model whose generated rows are chains. It does not see that a
# warp's barrier orders its lanes when one of them arrives for all, nor an order that a polled word gives, as a few lines with
# either and nothing else show. Built so that all lanes arrive, three of these products are clean.
no_race="linear.fp8-channel.fp8.prompt.t65.n300.k1024.s8.normal linear.fp8-block.fp8.prompt.t65.n300.k1024.s8.normal
    linear.fp8-block.bf16.prompt.t16.n20.k5632.normal linear.fp8-channel.fp8.prompt.t16.n20.k5632.normal model.chains"

# Under compute-sanitizer: a kernel case by its name, or a model whose generated rows are chains, which its counters must show.
sanitized() { # sanitized TOOL CASE
    local under=(compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9)
    if [[ $2 != model.chains ]]; then
        timeout -k 5 "${CASE_LIMIT:-90}" "${under[@]}" "$dir/kcheck" --device cuda "$2"
        return
    fi
    timeout -k 5 "${CASE_LIMIT:-90}" "${under[@]}" "$dir/qlane" run -m tests/data/micro-mixed --device cuda --lanes 1 \
        --ids 1,2,3,4,5 -n 4 --temp 0 --json || return
    grep -q '"chain/[a-z0-9]*": [1-9]' "$out/$1.$2.log" || { echo "FAIL $2: no chain ran" && return 1; }
}

# One of compute-sanitizer's tools over small cases, each a process with a limit of its own, eight at a time.
run_tool() { # run_tool TOOL
    local start=$EPOCHREALTIME tool=$1 cases=${CASES:-$small} c rc passed=0 failed=0 late=0 pids=()
    [[ -n ${CASES:-} || $1 = racecheck ]] || cases+=" $no_race"
    if ! command -v compute-sanitizer >/dev/null || [[ ! -x $dir/kcheck ]]; then
        skip "$tool" "no compute-sanitizer, or $dir/kcheck was not built"
        return
    fi
    rm -f "$out/$tool".*.rc
    for c in $cases; do
        while (($(jobs -rp | wc -l) >= 8)); do
            wait -n
        done
        {
            sanitized "$tool" "$c" >"$out/$tool.$c.log" 2>&1
            echo $? >"$out/$tool.$c.rc"
        } &
        pids+=($!)
    done
    wait "${pids[@]}"
    for c in $cases; do
        rc=$(<"$out/$tool.$c.rc")
        case $rc in
        0) passed=$((passed + 1)) ;;
        124 | 137) late=$((late + 1)) && echo "$tool $c: not done in ${CASE_LIMIT:-90} s" ;;
        *)
            failed=$((failed + 1))
            echo "$tool $c: exit code $rc"
            grep -hE '^FAIL|========= .*(Race|Invalid|Uninitialized|Barrier|Error|ERROR)' "$out/$tool.$c.log" | head -4
            ;;
        esac
    done
    row "$tool" 0 "$(seconds "$start")" $passed $failed $late "cases; skipped are those not done in their time"
}

check=''
finish_check() {
    [[ -z $check ]] || wait "$check"
    check=''
}

for step in $steps; do
    case $step in
    check)
        run_check &
        check=$!
        ;;
    gate | 27b | collectives) finish_check && "run_$step" ;;
    attend | chain | fused | lanes) run_counted "$step" ;;
    kcheck | sanitize) "run_$step" ;;
    memcheck | racecheck | initcheck | synccheck) run_tool "$step" ;;
    *)
        echo "gpu-test: unknown step $step; there are check, kcheck, attend, chain, fused, lanes, memcheck, racecheck, initcheck, synccheck," \
            "sanitize, gate, 27b, collectives" >&2
        exit 2
        ;;
    esac
done
finish_check
echo "== $n_gpu GPU$( ((n_gpu > 1)) && echo s)$( ((n_gpu > 1)) || echo ': tests of more lanes were skipped')"
cat "$out/table.log"
awk '$2 == "rc" {good += $6; bad += $8} END {exit bad > 0 || good == 0}' "$out/table.log"
