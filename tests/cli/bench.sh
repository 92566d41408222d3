#!/bin/bash
# qlane bench on host lanes: what it measures, and what it writes.
. "$(dirname "$0")/lib.bash"

q bench --device host --lanes 2 --contexts 64,192 -n 4 --runs 2 --kv bf16 --out "$tmp/bench"
is "exit code" $rc 0
is "a table with a line for each context" "$(grep -cE '^ +(64|192) +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+%$' "$tmp/out")" 2
is "phases of each context" "$(grep -cE '^  (prefill|an id) +[0-9.]+ ms: .*mlp [0-9.]+%' "$tmp/out")" 4
is "says each run" "$(grep -cE '^qlane: context (64|192), run [12] of 2: prefill [0-9.]+ tok/s' "$tmp/err")" 4
is "the files" "$(ls "$tmp/bench" | paste -sd' ')" "bench.csv bench.json bench.svg"
is "CSV: a row for each run" "$(wc -l <"$tmp/bench/bench.csv")" 5
is "CSV: as many fields in each row" "$(sed 's/"[^"]*"//g' "$tmp/bench/bench.csv" | awk -F, '{print NF}' | sort -u | wc -l)" 1
is "SVG: a point for each context in each panel" "$(grep -c '<circle' "$tmp/bench/bench.svg")" 4

q bench --device host --contexts 64,100 -n 2 --runs 2,1 --out "$tmp/runs"
is "--runs for each context" "$rc $(grep -cE '^qlane: context 64, run [12] of 2:|^qlane: context 100, run 1 of 1:' "$tmp/err")" "0 3"
has "--runs for each context: the plot says so" runs/bench.svg "median of 1 to 2"
refuses "--runs of another number" 2 "--runs wants one number, or one for each of 2 contexts, not 3" \
    bench --device host --contexts 64,100 --runs 1,2,3
refuses "--runs of none" 2 "--runs wants numbers from 1 to 99, not 0" bench --device host --contexts 64 --runs 0
q bench --device host --contexts 64 -n 6 --runs 1 --chunk 64 --together 1,3 --out "$tmp/together"
is "--together: exit code" $rc 0
is "--together: a line for each number" "$(grep -cE '^ +(1 sequence |3 sequences) +[0-9.]+ ms a step, +[0-9.]+ tok/s, +[0-9.]+ of the first$' "$tmp/out")" 2
has "--together: the first beside itself" out " 1.000 of the first"
is "--together: tokens a second are those of all" "$(python3 -c "
import json
t = json.load(open('$tmp/together/bench.json'))['points'][0]['together']
print(all(abs(s['tok_s'] * s['step_ms'] - 1000 * s['sequences']) < 1e-2 for s in t), abs(t[1]['of_first'] - t[1]['step_ms'] / t[0]['step_ms']) < 1e-6)")" "True True"
refuses "--together of none" 2 "--together wants numbers from 1 to 64, not 0" bench --device host --contexts 64 --together 0
refuses "--together, too long" 2 "--contexts: 4086 and 11 generated ids; the model's context is 4096" \
    bench --device host --contexts 4086 -n 5 --together 3 --chunk 2048
q bench --device host --contexts 64 -n 6 --runs 1 --chunk 64 --rows 1,4 --out "$tmp/rows"
is "--rows: exit code" $rc 0
is "--rows: a line for each number" "$(grep -cE '^ +(1 row |4 rows) +[0-9.]+ ms a step, +[0-9.]+ tok/s, +[0-9.]+ of the first$' "$tmp/out")" 2
is "--rows: in the file" "$(python3 -c "
import json
t = json.load(open('$tmp/rows/bench.json'))['points'][0]['rows']
print([s['rows'] for s in t], all(abs(s['tok_s'] * s['step_ms'] - 1000 * s['rows']) < 1e-2 for s in t), abs(t[1]['of_first'] - t[1]['step_ms'] / t[0]['step_ms']) < 1e-6)")" "[1, 4] True True"
refuses "--rows of none" 2 "--rows wants numbers from 1 to 64, not 0" bench --device host --contexts 64 --rows 0
refuses "--rows of more ids than 32 bits count" 2 "--contexts: 64 and 128000000001 generated ids; the model's context is 4096" \
    bench --device host --contexts 64 -n 2000000000 --rows 64
refuses "--rows of too many" 2 "--rows wants numbers from 1 to 64, not 65" bench --device host --rows 1,65
refuses "--rows, too long" 2 "--contexts: 4086 and 21 generated ids; the model's context is 4096" \
    bench --device host --contexts 4086 -n 5 --rows 1,4
q bench --device host --contexts 64 -n 4 --runs 1 --json
is "--json: exit code" $rc 0
is "--json: one line" "$(wc -l <"$tmp/out")" 1
for part in '"version": "' '"binary_crc32": "' '"checkpoint_crc32": "' '"chunk": 1536' '"kv": "f16"' \
    '"prompt_precision": "exact"' '"context": 64' '"generated": 4' '"first_token_cold_s": ' '"first_token_warm_s": ' \
    '"prefill_tok_s": ' '"decode_tok_s": ' '"decode_bytes_per_s": ' '"decode_share_of_stream": ' '"phases": {"prefill_ms": {' \
    '"load_ms": {"files": ' '"name": "' '"link": "host"' '"driver": null' '"power_limit_w": null' '"weight_bytes": ' \
    '"stream_bytes_per_s": '; do
    has "--json has $part" out "$part"
done

q bench --device host --contexts 64 -n 4 --runs 1 --precision gen=q8 --json
for part in '"prompt_precision": "q8"' '"gen_precision": "q8"'; do
    has "a precision that is that of both phases: $part" out "$part"
done
q bench --device host --contexts 64 -n 4 --runs 1 --json

# The checksum is that of the tensors: another model's is another one, the same model's is the same.
crc() { grep -oE '"checkpoint_crc32": "[0-9a-f]{8}"' "$tmp/out"; }
first=$(crc)
q bench --device host --contexts 64 -n 2 --runs 1 --json
is "the checkpoint's checksum repeats" "$(crc)" "$first"
q bench -m tests/data/micro-bf16 --device host --contexts 64 -n 2 --runs 1 --json
report "$([[ $(crc) != "$first" && -n $(crc) ]]; echo $?)" "another checkpoint has another" "$(crc)"
q bench -m tests/data/micro-bf16 --device host --runs 1 -n 2 --contexts 64 --out /dev/null
is "--out that is no folder" "$rc $(<"$tmp/err")" "2 qlane: --out /dev/null: not a folder"
finish
