#!/bin/bash
# qlane check on host lanes: names, listing, counts, exit codes; and that the checks pass.
. "$(dirname "$0")/lib.bash"

q check --list
is "--list: exit code" $rc 0
has "--list names cases" out "collectives.sizes.reduce.4B.lanes1"
is "--list runs nothing" "$(grep -c passed "$tmp/out")" 0
q check --list --device host --lanes 2 collectives.abort
is "--list of a name" "$(paste -sd' ' "$tmp/out")" \
    "collectives.abort.20480B.lanes2 collectives.abort.reopened.lanes2"
q check --list --long --device host
has "--long has more" out "collectives.sizes.reduce.10485760B.lanes1"
refuses "an unknown name" 2 "no check is called 'colectives', nor begins so among the short ones" \
    check --device host collectives.sizes colectives
refuses "an unknown name with --long" 2 "no check is called 'x', nor begins so" check --device host --long x
refuses "a lane count that is none" 2 "lanes is 3; checks run on 1, 2, 4 or 8" check --device host --lanes 3
refuses "an option of another command" 2 "check has no option '--temp', another command has; *" check --temp 1
q check --help
has "help says what there is" out "  collectives "

# 2 and 4 lanes are tests/model/check's.
for lanes in 1 8; do
    q check --device host --lanes $lanes
    report "$(((rc == 0)) && tail -n 1 "$tmp/out" | grep -qE '^[0-9]{3} passed, 0 failed, [03] skipped$' && echo 0 || echo 1)" \
        "all checks on $lanes host lanes" "$(seen; grep FAIL "$tmp/out")"
    is "every case of $lanes lanes compared elements" \
        "$(grep '^ok' "$tmp/out" | grep -v guards | grep -cE ' 0 compared')" 0
    has "$lanes lanes: a wrong decode is noticed" out "ok   mlp_shard_nvfp4.group.broken-nibbles.lanes$lanes "
done
has "what does not fit the model is skipped and said" out "skip precision.fp8.lanes8"
q check --device host --lanes 1 -m tests/data/micro-mixed precision
is "a model with random weights has limits of its own" "$rc $(tail -n 1 "$tmp/out")" "0 3 passed, 0 failed, 0 skipped"
q check --device host --lanes 2 -m /no/such/model precision
is "a case that fails: exit code" $rc 1
has "a case that fails: its line" out "FAIL precision.bf16.lanes2"
has "a case that fails: the count" out "0 passed, 3 failed, 0 skipped"
q check --device host --lanes 8 precision
is "nothing but skipped cases: exit code" $rc 4
finish
