#!/bin/bash
# Mistakes that users make, each one clear line and its exit code.
. "$(dirname "$0")/lib.bash"
m=$tmp/model

copy() { # copy MODEL: a fresh copy to damage
    rm -rf "$m"
    cp -r "$1" "$m"
    chmod -R u+w "$m"
}

# ---- missing, truncated, mismatched files ------------------------------------------------------------------------
refuses "no such directory" 3 "there is no directory $tmp/none" run -m "$tmp/none" -p x
refuses "Hub id that is not in the cache" 3 "foo/bar is neither a directory nor in the local Hub cache *" run -m foo/bar -p x
copy tests/data/micro-mixed
rm "$m/model-00002-of-00003.safetensors"
refuses "missing shard" 3 "the shard model-00002-of-00003.safetensors is missing from $m; *" run -m "$m" --ids 1
for cut in 1 4096; do
    copy tests/data/micro-bf16
    truncate -s -$cut "$m/model.safetensors"
    refuses "shard truncated by $cut" 3 "$m/model.safetensors is truncated or incomplete: *" run -m "$m" --ids 1
done
copy tests/data/micro-bf16
truncate -s 8 "$m/model.safetensors"
refuses "shard truncated to its length field" 3 "$m/model.safetensors is truncated or incomplete: *" run -m "$m" --ids 1
truncate -s 0 "$m/model.safetensors"
refuses "empty shard" 3 "$m/model.safetensors is truncated or incomplete: *" run -m "$m" --ids 1
copy tests/data/micro-mixed
sed -i 's/"weight_map": *{/&"extra.weight": "model-00001-of-00003.safetensors",/' "$m/model.safetensors.index.json"
refuses "index names a tensor that the shard lacks" 3 \
    "the index places \"extra.weight\" in model-00001-of-00003.safetensors, but that file's header lacks it" run -m "$m" --ids 1
sed -i 's/model-00001-of-00003/..\/other/' "$m/model.safetensors.index.json"
refuses "index leaves the directory" 3 "*..\/other*" run -m "$m" --ids 1
copy tests/data/micro-bf16
rm "$m/config.json"
refuses "no config.json" 3 "cannot open $m/config.json: No such file or directory" run -m "$m" --ids 1
echo '{"a": 1' >"$m/config.json"
refuses "config.json that is cut off" 3 "$m/config.json: not valid JSON at line *" run -m "$m" --ids 1
echo '{"a": 1, "a": 2}' >"$m/config.json"
refuses "config.json with a key twice" 3 "$m/config.json: *" run -m "$m" --ids 1

# ---- models that are not supported, formats that are broken --------------------------------------------------------
copy tests/data/micro-bf16
sed -i 's/Qwen3_5ForConditionalGeneration/LlamaForCausalLM/' "$m/config.json"
refuses "unsupported architecture" 3 "$m/config.json: the architecture \"LlamaForCausalLM\" is not supported; supported are *" \
    run -m "$m" --ids 1
copy models/tiny
LC_ALL=C sed -i 's/layers\.0\.mlp\.up_proj\.weight_global_scale/layers.0.mlp.up_proj.weight_global_scalX/' "$m/model.safetensors"
refuses "second-level scale missing" 3 "*layers.0.mlp.up_proj.weight_global_sca*" run -m "$m" -p x
copy models/tiny
LC_ALL=C sed -i 's/lm_head\.weight_scale/lm_head.weight_scalX/' "$m/model.safetensors"
refuses "row scales missing" 3 "*lm_head.weight_sca*" run -m "$m" -p x
copy models/tiny
LC_ALL=C sed -i 's/"re:\.\*lm_head\$"/"re:.*lm_hexd$"/' "$m/config.json"
refuses "quantized where the configuration says plain" 3 "*lm_head*" run -m "$m" -p x
copy models/tiny
at=$("$qlane" inspect -m "$m" --json | grep -oE '"name": "lm_head.weight", [^}]*' | grep -oE '"offset": [0-9]+' | grep -oE '[0-9]+')
printf '\x7f' | dd of="$m/model.safetensors" bs=1 seek=$((at + 300)) conv=notrunc status=none
refuses "NaN code in a weight" 3 "*lm_head*NaN*" run -m "$m" --device host --ctx 64 -p x
copy models/tiny
echo '{}' >"$m/tokenizer.json"
refuses "tokenizer.json without a model" 3 "*tokenizer.json*" run -m "$m" -p x

# ---- what was asked for cannot be done -------------------------------------------------------------------------------
refuses "lanes that do not divide" 2 "3 lanes do not divide this model's 4 slices *; it can run on 1, 2 or 4" \
    run --lanes 3 -p x
refuses "more lanes than slices" 2 "*1, 2 or 4*" run --lanes 8 -p x
if [[ $no_gpu == "this build has no CUDA" ]]; then
    refuses "CUDA lanes in a host-only build" 4 "this build has no CUDA lanes; accepted is the host device" \
        run --device cuda -p x
    refuses "GPUs in a host-only build" 4 "this build has no CUDA lanes; accepted is the host device" run --devices 0,1 -p x
elif ! nvidia-smi -L >/dev/null 2>&1; then
    refuses "CUDA lanes without a GPU" 4 "no usable GPU*" run --device cuda -p x
    refuses "GPUs that are not there" 4 "no usable GPU*" run --devices 0,1 -p x
fi
refuses "too little memory" 5 "a lane needs * and may use *: * MiB short; weights alone (*) do not fit; more lanes hold less each" \
    run --device host --mem 1M -p x
refuses "context above the model's" 2 "*5000*4096*" run --ctx 5000 -p x
refuses "prompt longer than the context" 2 "the prompt has 100 tokens and the context 64: *" \
    run --device host --ctx 64 --ids "$(seq -s, 1 100)"
refuses "prompt that is not UTF-8" 2 "text is not UTF-8: byte 0xFF at offset 3" \
    run --device host --ctx 64 -p $'abc\xff'
refuses "token id outside the vocabulary" 2 "token id 99999 at position 1 is not in the vocabulary; accepted are 0 to 1343" \
    run --device host --ctx 64 --ids 1,99999
refuses "text without a tokenizer" 2 "this checkpoint has no tokenizer.json: give the prompt as ids" \
    run --device host --ctx 64 -m tests/data/micro-bf16 -p x
refuses "stop string without a tokenizer" 2 "stop strings need a tokenizer and this checkpoint has none" \
    run --device host --ctx 64 -m tests/data/micro-bf16 --ids 1 --stop x
refuses "empty stop string" 2 "stop string 0 has 0 bytes; accepted are 1 to 1024" run --device host --ctx 64 -p x --stop ""
refuses "unknown kernel family" 2 "unknown kernel family 'foo'; families are *" run --device host -p x --kernel foo=bar
refuses "unknown kernel variant" 2 "no host variant 'bar' of kernel family 'linear' on this CPU; it has *" \
    run --device host -p x --kernel linear=bar

# ---- what runs, with a warning that nobody has to ask for -------------------------------------------------------------
copy tests/data/micro-bf16
sed -i '0,/{/s//{"quantization_config": {"quant_method": "fp8"},/' "$m/config.json"
q run --device host -m "$m" --ids 1,2 -n 2
is "plain where the configuration says quantized: exit code" $rc 0
has "plain where the configuration says quantized: warning" err "linears are stored plain where the configuration says quantized"
q run --device host -m tests/data/micro-fp8-block --ids 1,2 -n 2
is "no warning of what exports leave plain" "$(grep -c plain "$tmp/err")" 0
finish
