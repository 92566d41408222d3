#!/bin/bash
# qlane run on the bundled and the small models: text, ids, JSON, dumps, checksums, stops, signals, closed pipes.
. "$(dirname "$0")/lib.bash"

france="The capital of France is"
if nvidia-smi -L >/dev/null 2>&1; then
    no_gpu="usable GPUs were found"
fi
prints "text of two lanes" " Paris.
The capital of Germany is Berlin." run --lanes 2 --temp 0 -n 9 -p "$france"
has "says which lanes and why" err " lanes ($no_gpu)"
has "says which context and why" err "qlane: context 4096 tokens (the model's limit)"
q run --device host --ctx 128 --temp 0 -n 2 -p "$france"
is "nothing on stderr where all was said" "$(<"$tmp/err")" ""
prints "the bundled model is the default" "$("$qlane" run -m models/tiny --temp 0 -n 9 -p "$france" 2>/dev/null)" \
    run --temp 0 -n 9 -p "$france"

echo -n "$france" >"$tmp/prompt"
prints "prompt from a file" " Paris" run --temp 0 -n 1 -f "$tmp/prompt"
"$qlane" run --temp 0 -n 1 -f - <"$tmp/prompt" >"$tmp/out" 2>/dev/null
is "prompt from standard input" "$(<"$tmp/out")" " Paris"
prints "prompt as ids" " Paris" run --temp 0 -n 1 --ids "261, 269,267,589,260"
echo "261, 269,267," >"$tmp/ids"
echo "589,260" >>"$tmp/ids"
prints "prompt as a file of ids" " Paris" run --temp 0 -n 1 --ids-file "$tmp/ids"
prints "ids where there is no tokenizer" "$(sed -n '/greedy_ids/,/\]/p' tests/data/micro-bf16/golden.json |
    grep -oE '[0-9]+' | head -n 8 | paste -sd,)" run -m tests/data/micro-bf16 --temp 0 -n 8 \
    --ids "$(sed -n '/prompt_ids/,/\]/p' tests/data/micro-bf16/golden.json | sed '/\]/q' | grep -oE '[0-9]+' | paste -sd,)"
prints "stop string" " Paris.
The capital of Germany is" run --temp 0 -n 20 --stop " Berlin" -p "$france"
prints "a stop string longer than the output" " Paris" run --temp 0 -n 1 --stop " Paris and much more" -p "$france"

# An end-of-sequence id ends the text, unless told otherwise.
q run --device host --temp 0 -n 30 -p "The days go Monday, Tuesday," --json
has "an end-of-sequence id ends it" out '"finish": "eos"'
has "the ids up to it" out '"decode_tokens": 23,'
q run --device host --temp 0 -n 30 -p "The days go Monday, Tuesday," --json --ignore-eos
has "--ignore-eos goes on" out '"finish": "length"'
has "--ignore-eos gives as many ids as asked for" out '"decode_tokens": 29,'

# JSON: one object, every field, the same text.
q run --device host --lanes 2 --temp 0 -n 9 -p "$france" --json --crc --seed 7
is "--json: exit code" $rc 0
is "--json: one line" "$(wc -l <"$tmp/out")" 1
for part in '"prompt_ids": [261, 269, 267, 589, 260]' '"ids": [794, 259, 261, 269, 267, 595, 260, 806, 259]' \
    '"text": " Paris.\nThe capital of Germany is Berlin.\n"' '"finish": "length"' '"logprobs": [-' '"seed": 7' \
    '"load_ms": {"files": ' '"lanes": [{"device": "host", "weight_bytes": ' '"scale_bytes": ' '"stored_weight_bytes": ' \
    '"stored_scale_bytes": ' '"kv_bytes": ' '"state_bytes": ' '"workspace_bytes": ' '"context_bytes": ' \
    '"h2d_bytes": ' '"d2h_bytes": ' '"paths": {"linear.' '"timing": {"load_s": ' '"prefill_tokens": 5' \
    '"prefill_tok_s": ' '"first_token_s": ' '"decode_tokens": 8' '"decode_tok_s": ' '"phase_ms": {' '"spec": {}' \
    '"prefix": {}' '"logits_crc32": "'; do
    has "--json has $part" out "$part"
done
crc=$(grep -oE '"logits_crc32": "[0-9a-f]{8}"' "$tmp/out" | grep -oE '[0-9a-f]{8}')
for p in q8 prompt=q8 gen=q8; do
    q run --device host --temp 0 -n 2 -p "$france" --precision $p --json
    has "--json: $p is that of both phases" out '"precision": {"prompt": "q8", "gen": "q8"}'
done
q run --device host --temp 0 -n 2 -p "$france" --precision gen=bf16 --json
has "--json: precisions of phases" out '"precision": {"prompt": "exact", "gen": "bf16"}'
q run -m tests/data/micro-bf16 --ids 1,2 --temp 0 -n 2 --json
has "--json: text is null without a tokenizer" out '"text": null'
for lanes in 1 4; do
    q run --device host --lanes $lanes --temp 0 -n 9 -p "$france" --crc
    has "--crc is the same with $lanes lanes" err "qlane: logits_crc32 $crc"
done
q run --device host --temp 0 -n 9 -p "$france" --crc --chunk 64 --stats
has "--stats has speeds" err "tok/s after the first"
has "--stats has lanes" err "lane 0     host: weights "
has "--stats has the parts of the load" err "devices 0."
has "--stats has paths" err "path       linear.nvfp4.gen/"
has "--crc is the same in chunks of 64" err "qlane: logits_crc32 $crc"
has "--stats has precisions" err "precision  prompt exact, generated exact"
is "--stats has no phases" "$(grep -c '^phase' "$tmp/err")" 0
q run --temp 0 -n 2 -p "$france" --profile
has "--profile has phases" err "phase      mlp"
q run --temp 0 -n 30 -p "<|im_start|>user
What is the capital of Italy?<|im_end|>
<|im_start|>assistant
<think>

</think>

" --json
has "end of sequence: its id is in ids, not in text" out '"text": "The capital of Italy is Rome."'
has "end of sequence: finish" out '"finish": "eos"'
prints "--verify" " Paris" run --verify --temp 0 -n 1 -p "$france"
prints "a forced kernel" " Paris" run --device host --kernel linear=twin --temp 0 -n 1 -p "$france"

# Sampling: the same seed gives the same text, the model's settings fill what is left open.
q run -n 30 --seed 5 -p "$france" --temp 1.5 --top-k 0 --top-p 1
cp "$tmp/out" "$tmp/first"
prints "a seed repeats" "$(<"$tmp/first")" run -n 30 --seed 5 -p "$france" --temp 1.5 --top-k 0 --top-p 1
prints "a seed repeats at another lane count" "$(<"$tmp/first")" \
    run -n 30 --seed 5 -p "$france" --temp 1.5 --top-k 0 --top-p 1 --lanes 2
q run -n 30 --seed 6 -p "$france" --temp 1.5 --top-k 0 --top-p 1
report "$(cmp -s "$tmp/out" "$tmp/first" && echo 1 || echo 0)" "another seed differs" "$(seen)"
q run -n 30 --seed 5 -p "$france" --temp 1.5
cp "$tmp/out" "$tmp/first"
prints "top-k and top-p are the model's where only --temp is given" "$(<"$tmp/first")" \
    run -n 30 --seed 5 -p "$france" --temp 1.5 --top-k 20 --top-p 0.95
prints "the model's temperature is the default" "$("$qlane" run -n 30 --seed 5 -p "$france" --temp 0.6 2>/dev/null)" \
    run -n 30 --seed 5 -p "$france"

# Dumps: NumPy headers and sizes; the test of the values is the model's.
shape() { head -c 128 "$tmp/dump/$1" | tr -d '\0' | grep -aoE "\('?[0-9, ]+\)"; }
q run --temp 0 -n 2 -p "$france" --dump "$tmp/dump"
is "--dump: exit code" $rc 0
is "--dump: logits" "$(shape logits.npy) $(stat -c %s "$tmp/dump/logits.npy")" "(5, 1344) $((128 + 4 * 5 * 1344))"
is "--dump: hidden" "$(shape hidden.npy) $(stat -c %s "$tmp/dump/hidden.npy")" "(5, 5, 256) $((128 + 4 * 25 * 256))"
is "--dump: final hidden" "$(shape final_hidden.npy)" "(5, 256)"
is "--dump: MTP logits" "$(shape mtp_logits.npy)" "(4, 1344)"
q run -m tests/data/micro-nvfp4-modelopt --ids "$(seq -s, 1 130)" --temp 0 -n 1 --chunk 64 --dump "$tmp/dump2"
is "--dump: a prompt of several chunks" "$(head -c 128 "$tmp/dump2/hidden.npy" | grep -aoE '\([0-9, ]+\)')" "(5, 130, 128)"
is "--dump: no MTP file without the layer" "$(ls "$tmp/dump2" | paste -sd' ')" "final_hidden.npy hidden.npy logits.npy"

# A reader that goes away stops the run; a full device is an error.
timeout 60 "$qlane" run --temp 0 -p "$france" 2>"$tmp/err" | head -c 3 >"$tmp/out"
is "closed pipe: exit codes" "${PIPESTATUS[*]}" "0 0"
timeout 60 "$qlane" run --temp 0 -n 4 -p "$france" >/dev/full 2>"$tmp/err"
is "full device: exit code" $? 1
has "full device: message" err "qlane: cannot write to standard output: No space left on device"
timeout 60 "$qlane" plan >/dev/full 2>"$tmp/err"
is "full device, plan: exit code" $? 1

# Ctrl-C: text so far, statistics, 130. Bash starts background jobs with the signal ignored, hence env.
interrupt() { # interrupt ARGS...: once text has appeared
    rm -f "$tmp/out"
    env --default-signal=INT "$qlane" run --temp 0 "$@" >"$tmp/out" 2>"$tmp/err" </dev/null &
    local pid=$! i
    for ((i = 0; i < 500; i++)); do
        [[ -s $tmp/out ]] && break
        sleep 0.01
    done
    kill -INT $pid
    wait $pid
    rc=$?
}
interrupt -m tests/data/micro-lanes8 --lanes 8 --ids 1,2,3
is "Ctrl-C: exit code" $rc 130
has "Ctrl-C: statistics" err "finish         cancel"
has "Ctrl-C: text so far" out ","
finish
