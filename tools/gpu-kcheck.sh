#!/bin/bash
# Kernels on this machine's GPU: kcheck over all cases, compute-sanitizer over small ones, times. Arguments: the folder with
# the programs of gpu-build.sh, and what to do (check sanitize bench, all by default). Logs go to $OUT or the folder.
# The last lines are a short table; the exit code is 1 when anything failed.
dir=${1:-build/gpu}
shift
what=${*:-check sanitize bench}
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
if [[ $what == *sanitize* ]]; then
    start=$SECONDS
    # One small case of each kernel: every path of each family once.
    small="linear.nvfp4.exact.gen.t3.n33.k256.s4.normal linear.nvfp4.bf16.prompt.t16.n33.k256.s4.normal
        linear.fp8-block.exact.gen.t3.n33.k256.s4.normal linear.fp8-block.exact.prompt.t65.n33.k256.s4.normal
        linear.fp8-channel.fp8.prompt.t65.n33.k256.s4.normal linear.bf16.bf16.prompt.t16.n33.k256.s4.normal
        linear.bf16.exact.gen.t3.n33.k256.s4.normal linear.f32.exact.gen.t1.n33.k256.s4.normal
        linear.fp8-tensor.exact.gen.t1.n7.k37.normal linear.nvfp4.exact.gen.t2.n64.k480.s2.cut.normal
        norm.rms.t65.n256.delta.ld256.normal norm.gated.t3.h6.alias.normal mlp.swiglu.t7.n1024.x1.alias
        embed.BF16.t1.h256.ids35-39 gdn.conv.gen.c16 gdn.conv.prompt.c384 gdn.gen.typical.k2.v2
        gdn.prompt.typical.k2.v2.g1 attention.prep.fp8.h4 attention.f16.normal.h4at0 attention.fp8.normal.h2at0
        attention.f16.normal.h1at0.g1.1at999 sample.topk.t3.v8.lane0of1.k5.cap8.ties"
    for tool in memcheck racecheck initcheck synccheck; do
        timeout ${LIMIT:-150} compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 "$dir/kcheck" --device cuda \
            ${SMALL:-$small} >"$out/$tool.log" 2>&1
        rc=$?
        echo "== $tool: exit code $rc; $(grep -h 'ERROR SUMMARY\|RACECHECK SUMMARY' "$out/$tool.log" | sort | uniq -c | tr '\n' ';')"
        [ $rc = 0 ] || bad=1
    done
    echo "== sanitizers, $((SECONDS - start)) s"
fi
if [[ $what == *bench* ]]; then
    "$dir/kbench" $BENCH 2>&1 | tee "$out/kbench.log"
    [ "${PIPESTATUS[0]}" = 0 ] || bad=1
fi
exit $bad
