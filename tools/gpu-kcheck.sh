#!/bin/bash
# Kernels on this machine's GPU: kcheck over all cases, and times; the sanitizers are steps of gpu-test.sh. Arguments:
# the folder with the programs of gpu-build.sh, and what to do (check bench, both by default). Logs go to $OUT or the folder.
# The last lines are a short table; the exit code is 1 when anything failed.
dir=${1:-build/gpu}
shift
what=${*:-check bench}
out=${OUT:-$dir}
bad=0
chmod +x "$dir"/kcheck "$dir"/kbench 2>/dev/null
nvidia-smi --query-gpu=name,driver_version,memory.used,clocks.sm,power.limit --format=csv,noheader

if [[ $what == *check* ]]; then
    start=$SECONDS
    for f in linear. embed. norm. mlp. gdn. attention. sample.; do
        "$dir/kcheck" --device cuda $LONG "$f" >"$out/kcheck.$f.log" 2>&1 &
    done
    wait
    echo "== kcheck, $((SECONDS - start)) s"
    for f in linear. embed. norm. mlp. gdn. attention. sample.; do
        grep -h '^FAIL' "$out/kcheck.$f.log" | head -${FAILS:-12}
        grep -h ' cases, ' "$out/kcheck.$f.log" || tail -3 "$out/kcheck.$f.log"
        grep -q '^FAIL' "$out/kcheck.$f.log" && bad=1
        grep -q ' 0 failed' "$out/kcheck.$f.log" || bad=1
    done
fi
if [[ $what == *bench* ]]; then
    "$dir/kbench" $BENCH 2>&1 | tee "$out/kbench.log"
    [ "${PIPESTATUS[0]}" = 0 ] || bad=1
fi
exit $bad
