#!/bin/bash
# bench/compare on host lanes: what it prints and writes, and what it refuses to compare.
. "$(dirname "$0")/lib.bash"
if ! command -v python3 >/dev/null; then
    echo "ok 1 - bench/compare # SKIP no python3"
    echo "1..1"
    exit
fi

# compare OPTION...: leaves stdout in $tmp/out, stderr in $tmp/err, the exit code in $rc. Small prompts, two repetitions.
binary=$qlane
compare() {
    timeout 300 bench/compare --qlane "$binary" --lengths 64 -n 6 --runs 2 "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    rc=$?
}
# stops NAME CODE MESSAGE OPTION...: exit code, nothing on stdout, and MESSAGE (* is any text) as the last line of stderr.
stops() {
    local name=$1 code=$2 message=$3 bad=0
    shift 3
    compare "$@"
    # shellcheck disable=SC2053
    [[ $rc -eq $code && ! -s $tmp/out && $(tail -n 1 "$tmp/err") == "compare: "$message ]] || bad=1
    report $bad "$name" "$(seen; echo "wanted: $code, compare: $message")"
}
# fake NAME SCRIPT: a program that is qlane, but whose run's output goes through the shell text SCRIPT, in which $* are the
# options and $count counts runs.
fake() {
    cat >"$tmp/$1" <<END
#!/bin/bash
[[ \$1 = run ]] || exec "$qlane" "\$@"
count=\$((\$(cat "$tmp/$1.count" 2>/dev/null || echo 0) + 1))
echo \$count >"$tmp/$1.count"
out=\$("$qlane" "\$@") || exit
$2
printf '%s\n' "\$out"
END
    chmod +x "$tmp/$1"
}
one="one: --device host" two="two: --device host --lanes 2"

# What is compared: a line for each configuration and length, a ratio behind each figure.
compare --lengths 64,130 --out "$tmp/results" "$one" "$two" "fp8: --device host --precision fp8"
is "exit code" $rc 0
is "a line for each configuration and length" "$(grep -cE '^(one|two|fp8) +[12] +(64|130)( +[0-9,.]+ +[0-9.]+x){4} +[0-6]/6 +2/2$' "$tmp/out")" 6
is "the first has ratios of 1" "$(grep -cE '^one( .* 1\.000x){4} +6/6' "$tmp/out")" 2
is "half the weights on each of two lanes" "$(grep -cE '^two .* 0\.501x +[0-9,]+ +0\.[0-9]+x +6/6' "$tmp/out")" 2
is "says each run" "$(grep -cE '^compare: (one|two|fp8) at (64|130), [12] of 2: prefill [0-9.]+ tok/s' "$tmp/err")" 12
is "the files" "$(ls "$tmp/results" | paste -sd' ')" "results.json results.svg"
is "a bar for each figure" "$(grep -c '<rect x=.*<text' "$tmp/results/results.svg")" $((12 + 3))
json() { python3 -c "import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))" "$1/results.json" "$2"; }
is "the plot is XML" "$(python3 -c 'import sys, xml.dom.minidom as x; print(x.parse(sys.argv[1]).documentElement.tagName)' \
    "$tmp/results/results.svg")" svg
is "results: lanes give the same logits" "$(json "$tmp/results" \
    'len({p["proof"]["logits_crc32"] for c in r["configurations"][:2] for p in c["points"]})')" 2
is "results: medians are of the runs" "$(json "$tmp/results" \
    'all(abs(sum(q[k] for q in p["runs"]) / 2 - p["median"][k]) <= 1e-9 * p["median"][k] for c in r["configurations"] for p in c["points"] for k in ("prefill_tok_s", "decode_tok_s", "load_s"))')" True
is "results: what was measured" "$(json "$tmp/results" \
    '[c["precision_used"] for c in r["configurations"]], r["refused"], r["fixture"]["file"], len(r["configurations"][0]["binary"]["crc32"])')" \
    "(['prompt=exact,gen=exact', 'prompt=exact,gen=exact', 'prompt=fp8,gen=fp8'], None, 'prompt.txt', 8)"

# A binary far from the bundled model, a checkpoint without a tokenizer.
cp "$qlane" "$tmp/qlane"
mkdir "$tmp/mute"
ln -s "$PWD"/models/tiny/* "$tmp/mute" && rm "$tmp"/mute/tokenizer*
binary=$tmp/qlane
compare "one: -m $tmp/mute --device host" "two: -m $tmp/mute --device host --lanes 2"
binary=$qlane
is "the bundled tokenizer serves wherever the binary lies" "$rc $(grep -cE '^(one|two) ' "$tmp/out")" "0 2"

# What differs without being meant to, and what may not differ at all.
stops "another cache type" 1 "refused: two cannot be compared with one: KV cache fp8, not f16" "$one" "$two --kv fp8"
is "nothing ran for that" "$(grep -c ' of 2: ' "$tmp/err")" 0
stops "another chunk" 1 "refused: two cannot be compared with one: chunk 128, not 1536" "$one" "$two --chunk 128"
compare --vary chunk "$one" "$two --chunk 128"
is "another chunk on purpose: exit code" $rc 0
is "another chunk on purpose: the same ids" "$(grep -cE ' 6/6 +2/2$' "$tmp/out")" 2
(cat "$qlane"; echo) >"$tmp/other"
chmod +x "$tmp/other"
stops "another binary" 1 "refused: two cannot be compared with one: binary *, not *" "$one -m models/tiny" \
    "$two -m models/tiny --qlane $tmp/other"
compare --vary binary "$one -m models/tiny" "$two -m models/tiny --qlane $tmp/other"
is "another binary on purpose" $rc 0

# An earlier result: the same prompt is compared, another is not.
compare --lengths 64,130 --with "$tmp/results/results.json" "four: --device host --lanes 4"
is "with an earlier result: exit code" $rc 0
is "with an earlier result: its configurations" "$(grep -cE '^(one|two|fp8|four) ' "$tmp/out")" 8
sed 's/canal/river/' bench/prompt.txt >"$tmp/river.txt"
stops "another prompt" 1 "refused: four cannot be compared with one: prompt of 64 ids, checksum *" --lengths 64,130 \
    --fixture "$tmp/river.txt" --with "$tmp/results/results.json" "four: --device host --lanes 4"
stops "other lengths" 1 "refused: four cannot be compared with one: lengths \[64\], not \[64, 130\]" \
    --with "$tmp/results/results.json" "four: --device host --lanes 4"
stops "another number of ids" 1 "refused: four cannot be compared with one: \[5\] ids generated at 64, not \[6\]" \
    --lengths 64,130 -n 5 --with "$tmp/results/results.json" "four: --device host --lanes 4"

# What only the output shows.
fake ids '[[ "$*" != *"--lanes 2"* ]] || out=$(sed -E "s/\"ids\": \[[0-9]+/\"ids\": [7/" <<<"$out")'
binary=$tmp/ids
stops "lanes with other ids" 1 "refused: two has not the ids of one at 64: generated id 0 is 7, not *" "$one -m models/tiny" \
    "$two -m models/tiny"
fake logits '[[ "$*" != *"--lanes 2"* ]] || out=$(sed -E "s/\"logits_crc32\": \"[^\"]*\"/\"logits_crc32\": \"0\"/" <<<"$out")'
binary=$tmp/logits
stops "lanes with other logits" 1 "refused: two has not the logits of one at 64: CRC-32 0, not *" --out "$tmp/refused" \
    "$one -m models/tiny" "$two -m models/tiny"
is "a refused result has no ratio and no plot" "$(json "$tmp/refused" 'r["ratios"], bool(r["refused"])') $(ls "$tmp/refused")" \
    "([], True) results.json"
stops "a refused result as the earlier one" 1 "refused: *results.json was refused itself: two has not the logits *" \
    --with "$tmp/refused/results.json" "$one -m models/tiny"
compare "$one -m models/tiny" "$two -m models/tiny --precision bf16"
is "other precisions promise no equal logits" $rc 0
compare --out "$tmp/q8" "$one -m models/tiny" "q8: --device host -m models/tiny --precision prompt=q8"
is "results: the precision that ran" "$(json "$tmp/q8" '[c["precision_used"] for c in r["configurations"]]')" \
    "['prompt=exact,gen=exact', 'prompt=q8,gen=q8']"
compare "$one -m models/tiny --order fast" "$two -m models/tiny --order fast"
is "nor does the fast order over lanes" $rc 0
fake fewer '[[ "$*" != *"--lanes 2"* ]] || out=$(sed -E "s/(\"ids\": \[[0-9]+), [0-9]+/\1/" <<<"$out")'
binary=$tmp/fewer
stops "another number of generated ids" 1 "refused: two cannot be compared with one: \[5\] ids generated at 64, not \[6\]" \
    "$one -m models/tiny" "$two -m models/tiny"
fake unsteady '((count != 3)) || out=$(sed -E "s/\"ids\": \[[0-9]+/\"ids\": [7/" <<<"$out")'
binary=$tmp/unsteady
stops "other ids in another repetition" 1 "refused: one, repetition 2 has not the ids of one, repetition 1 at 64: *" \
    "$one -m models/tiny"

# Memory of another program: 40 MB more in the second of the repetitions, which come after one run with a checksum.
fake shared '((count != 3)) || out=${out//\"context_bytes\": 0/\"context_bytes\": 40000000}'
binary=$tmp/shared
compare --runs 3 --out "$tmp/shared.results" "$one -m models/tiny"
is "a repetition beside another program: exit code" $rc 0
has "it is said" err "one at 64: repetition 2 is dropped (+40,000,000 bytes of device memory)"
is "it is not counted" "$(grep -cE ' 2/3$' "$tmp/out")" 1
is "nor part of the median" "$(json "$tmp/shared.results" \
    '[p["median"]["device_bytes"] == p["runs"][0]["device_bytes"] for p in r["configurations"][0]["points"]]')" "[True]"
rm "$tmp/shared.count"
stops "too few repetitions are left" 1 "refused: one at 64 kept 1 of 2 repetitions (repetition 2: +40,000,000 *)" \
    "$one -m models/tiny"

# Without a tokenizer the bundled one's ids; ids that the model has not got are no prompt.
binary=$qlane
mkdir "$tmp/plain"
cp models/tiny/{config.json,generation_config.json,model.safetensors} "$tmp/plain"
compare --with "$tmp/results/results.json" --lengths 64,130 "plain: --device host -m $tmp/plain"
is "a checkpoint without a tokenizer" "$rc $(grep -cE '^plain .* 6/6 +2/2$' "$tmp/out")" "0 2"
stops "a vocabulary too small for the bundled tokenizer" 3 "one: the prompt has id *, the model *" \
    "$one -m tests/data/micro-bf16"

# The bundled model beside its FP8 siblings.
BUILD=$(dirname "$qlane") SCRATCH=$tmp OPTIONS="--device host --lanes 2" bench/siblings.sh models/tiny --lengths 64 -n 6 --runs 1 \
    >"$tmp/out" 2>"$tmp/err"
is "siblings: exit code" $? 0
is "siblings: a line each" "$(grep -cE '^(as it is|fp8-channel|fp8-block) +2 +64 ' "$tmp/out")" 3
is "siblings: bytes of weights a lane, of those in blocks" "$(awk '/^fp8-channel/ {print $9} /^as it is/ {print $11}' "$tmp/out" |
    paste -sd' ')" "0.973x 0.853x"
is "siblings: nothing is left" "$(ls "$tmp" | grep -c siblings)" 0

# Mistakes.
stops "no configuration" 2 "wants a configuration"
stops "a name twice" 2 "wants configurations, each of another name" "$one" "$one"
stops "no name" 2 "'--lanes 2' is not NAME: OPTIONS" "--lanes 2"
stops "an option whose effect is not known" 2 "one: --top-k is none of *" "one: --top-k 5"
stops "an option twice" 2 "one: --kv is given twice" "one: --kv f16 --kv f32"
stops "--vary of what must not differ" 2 "--vary knows binary, chunk, kv, device, not 'prompt'" --vary prompt "$one"
stops "a prompt beyond the context" 2 "one: 5000 and 6 ids; the model's context is 4096" --lengths 5000 "$one"
stops "a run that fails" 3 "three at 64: exit code 2: qlane: *" "three: --device host --lanes 3"
stops "no such checkpoint" 3 "one: exit code 3: qlane: *" "one: -m /no/such/model"
finish
