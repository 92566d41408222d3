#!/bin/bash
# qlane plan, inspect, tokenize and detokenize.
. "$(dirname "$0")/lib.bash"

q plan --lanes 2
is "plan: exit code" $rc 0
for part in "slices       4: lane counts 1, 2, 4" "projections  9 NVFP4, 17 FP8, 6 plain" \
    "planned      2 lanes, 1 sequence of 4096 tokens, chunk 1536, f16 KV, without MTP" "weights as stored" \
    "query heads                         0-1              2-3" "vocabulary rows                   0-671         672-1343"; do
    has "plan has: $part" out "$part"
done
q plan --lanes 2 --json
for part in '"lane_counts": [1, 2, 4]' '"n_lanes": 2' '"q_heads": [2, 4]' '"max_ctx_that_fits": ' '"mtp": false' \
    '"contexts": [{"ctx": 4096'; do
    has "plan --json has $part" out "$part"
done
weight() { grep -oE '"weight_bytes": [0-9]+' "$tmp/out" | head -n 1 | grep -oE '[0-9]+'; }
without=$(weight)
q plan --lanes 2 --json --spec mtp:3
report "$(($(weight) > without ? 0 : 1))" "plan --spec mtp counts the layer" "$(seen)"
# What the plan says is what a run holds.
q plan --lanes 2 --json --ctx 512 --kv f32
fields='"(weight|scale|stored_weight|stored_scale|kv|state|workspace)_bytes": [0-9]+'
grep -oE "$fields" "$tmp/out" | sort >"$tmp/planned"
q run --device host --lanes 2 --json --ctx 512 --kv f32 -n 1 -p x
grep -oE "$fields" "$tmp/out" | sort >"$tmp/held"
is "a run holds what was planned" "$(<"$tmp/held")" "$(<"$tmp/planned")"
q plan --mem 58M
has "plan --mem: fits or not" out "does not fit"
has "plan --mem: largest context" out "largest context within 60,817,408 bytes: "
fits=$(sed -nE 's/^largest context .*: ([0-9]+) tokens/\1/p' "$tmp/out")
q run --device host --mem 58M --ctx "$fits" -n 1 -p x
is "the largest planned context opens" $rc 0
refuses "64 more tokens do not" 5 "a lane needs *" run --device host --mem 58M --ctx $((fits + 64)) -n 1 -p x
refuses "plan: lanes that do not divide" 2 "3 lanes do not divide this model's 4 slices *; it can run on 1, 2 or 4" \
    plan --lanes 3
refuses "plan: MTP where there is none" 2 "this checkpoint has no multi-token-prediction layer *" \
    plan -m tests/data/micro-nvfp4-modelopt --spec mtp

q inspect
is "inspect: exit code" $rc 0
has "inspect: scheme" out "scheme       compressed-tensors (2 groups)"
has "inspect: left out" out "left out     9 tensors, 36 bytes"
has "inspect: a decision and its reason" out 'group_0 "re:.*lm_head$" agrees'
is "inspect: every tensor has a row" "$(grep -cE '^(model|lm_head|mtp)' "$tmp/out")" \
    "$(sed -nE 's/^tensors      ([0-9]+) in .*/\1/p' "$tmp/out" | awk '{print $1 + 1}')" # and one line is "model  DIR"
q inspect --json --crc -m tests/data/micro-fp8-block
for part in '"scheme": "fp8 128x128' '"n_tensors": ' '"notes": [' '"role": "scale"' '"format": "fp8-block"' '"crc32": "'; do
    has "inspect --json --crc has $part" out "$part"
done
q inspect --json --crc -m tests/data/micro-bf16
name=$(grep -oE '"name": "[^"]*norm.weight", "file": "[^"]*", "dtype": "BF16", "shape": \[[0-9]+\], "offset": [0-9]+, "bytes": [0-9]+' \
    "$tmp/out" | head -n 1)
at=$(grep -oE '"offset": [0-9]+' <<<"$name" | grep -oE '[0-9]+') bytes=$(grep -oE '"bytes": [0-9]+' <<<"$name" | grep -oE '[0-9]+')
want=$(tail -c +$((at + 1)) tests/data/micro-bf16/model.safetensors | head -c "$bytes" | gzip -c | tail -c 8 | head -c 4 |
    od -An -tx4 | tr -d ' ')
is "inspect --crc is the CRC-32 of the bytes" \
    "$(grep -oE "\"offset\": $at, \"bytes\": $bytes, [^}]*\"crc32\": \"[0-9a-f]+\"" "$tmp/out" | grep -oE '[0-9a-f]{8}"' | tr -d '"')" "$want"

text=$'The capital of France is Paris.\n  tabs\t法国的首都 🚀🎉 e\u0301 <|im_start|>user\n'
printf '%s' "$text" >"$tmp/text"
prints "tokenize -p" "261,269,267,589,260" tokenize -p "The capital of France is"
prints "tokenize -f" "$("$qlane" tokenize -p "$text")" tokenize -f "$tmp/text"
is "tokenize from standard input" "$("$qlane" tokenize <"$tmp/text")" "$("$qlane" tokenize -p "$text")"
prints "tokenize nothing" "" tokenize -p ""
"$qlane" tokenize <"$tmp/text" | "$qlane" detokenize >"$tmp/back"
printf '%s' "$text" | sed $'s/e\u0301/\u00e9/' >"$tmp/nfc"
report "$(cmp -s "$tmp/back" "$tmp/nfc"; echo $?)" "detokenize gives the text back, normalised" "$(od -c "$tmp/back" | head)"
prints "detokenize --ids" "The capital of France is" detokenize --ids 261,269,267,589,260
prints "detokenize -p" "The capital" detokenize -p "261, 269"
refuses "detokenize: id outside the tokenizer" 2 "token id 99999 is not in the tokenizer; *" detokenize --ids 99999
refuses "tokenize: overlong UTF-8" 2 "text is not UTF-8: byte 0xC0 at offset 1" tokenize -p $'a\xc0\x80'
refuses "tokenize: no tokenizer" 3 "*tests/data/micro-bf16*tokenizer.json*" tokenize -m tests/data/micro-bf16 -p x
finish
