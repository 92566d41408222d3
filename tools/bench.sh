#!/bin/bash
# Speeds on this machine: kernels where build/kbench exists, the bundled model on 1 and 2 host lanes, planning and
# tokenizing. Usage: tools/bench.sh BUILD_FOLDER
set -u
b=${1:?folder}
if [[ -x $b/kbench ]]; then
    "$b/kbench" || exit 1
fi
if [[ -x $b/textbench ]]; then
    "$b/textbench" || exit 1
fi
for lanes in 1 2; do
    echo "bundled model, $lanes host lane(s), 256 ids after a prompt:"
    "$b/qlane" run --device host --lanes $lanes --temp 0 -n 256 --stats -p "The capital of France is" 2>&1 >/dev/null |
        grep -E '^(load|prompt|first id|generated) ' || exit 1
done
