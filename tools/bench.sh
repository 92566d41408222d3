#!/bin/bash
# Speeds on this machine: the bundled model end to end, planning a 27B checkpoint from headers, the tokenizer, kernels.
# Usage: tools/bench.sh BUILD_FOLDER [TOKENIZER_JSON TEXT_FILE]; without, a tokenizer with as many entries as the 27B's is
# made up.
set -u
b=${1:?folder}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
tokenizer=${2:-$tmp/tokenizer.json} text=${3:-$tmp/text}
for ((i = 0; i < 40; i++)); do
    cat README.md docs/*.md runtime/qlane.h
done >"$tmp/text"
[[ -n ${2:-} ]] || "$b/bigvocab" models/tiny/tokenizer.json "$tmp/text" 248044 "$tmp/tokenizer.json" || exit 1

for lanes in 1 2; do
    echo "bundled model, $lanes host lane(s), 512 ids:"
    "$b/qlane" run -m models/tiny --device host --lanes $lanes --temp 0 -n 512 --stats -p "The capital of France is" 2>&1 >/dev/null |
        grep -E '^(load|prompt|first id|generated) ' || exit 1
done
"$b/synth" --shape 27b --scheme mixed --sparse "$tmp/27b" >/dev/null || exit 1
start=$EPOCHREALTIME
"$b/qlane" plan -m "$tmp/27b" --lanes 2 >/dev/null || exit 1
echo "plan of a 27B checkpoint, 2 lanes: $(awk "BEGIN {printf \"%.3f\", $EPOCHREALTIME - $start}") s"
echo "tokenizer $tokenizer:"
"$b/textbench" "$tokenizer" "$text" || exit 1
echo "kernels:"
"$b/kbench"
