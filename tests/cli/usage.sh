#!/bin/bash
# Options: what is refused, with which line, before any model is opened.
. "$(dirname "$0")/lib.bash"

refuses "unknown option names the nearest" 2 "run has no option '--tmp'; the nearest is --temp (see qlane help run)" \
    run -p x --tmp 1
refuses "unknown option with a value" 2 "run has no option '--lane'; the nearest is --lanes (see qlane help run)" \
    run -p x --lane=2
refuses "option of another command" 2 \
    "plan has no option '--temp', another command has; the nearest is * (see qlane help plan)" plan --temp 1
refuses "unknown command lists the commands" 2 \
    "no command 'serve'; the commands are run, bench, plan, inspect, tokenize, detokenize and check" serve
refuses "stray argument" 2 "run takes no argument 'hello'; options begin with - (see qlane help run)" run hello
refuses "repeated option" 2 "--lanes is given twice" run -p x --lanes 1 --lanes=1
refuses "repeated flag" 2 "--json is given twice" run -p x --json --json
refuses "missing value" 2 "--lanes wants a value: an integer from 1 to 64" run -p x --lanes
refuses "missing model" 2 "-m wants a value: DIR" run -p x -m
refuses "flag with a value" 2 "--json takes no value" run -p x --json=yes
refuses "integer: text" 2 "--lanes wants an integer from 1 to 64, not 'two'" run -p x --lanes two
refuses "integer: below the range" 2 "--lanes wants an integer from 1 to 64, not '0'" run -p x --lanes 0
refuses "integer: above the range" 2 "--lanes wants an integer from 1 to 64, not '65'" run -p x --lanes 65
refuses "integer: trailing text" 2 "-n wants an integer from 1 to 2147483647, not '5x'" run -p x -n 5x
refuses "integer: blank" 2 "-n wants an integer from 1 to 2147483647, not ' 5'" run -p x -n ' 5'
refuses "integer: empty" 2 "-n wants an integer from 1 to 2147483647, not ''" run -p x -n ''
refuses "integer: overflow" 2 "--seed wants an integer from 0 to 9223372036854775807, not '99999999999999999999'" \
    run -p x --seed 99999999999999999999
refuses "number: text" 2 "--temp wants a number from 0 to 100, not 'hot'" run -p x --temp hot
refuses "number: nan" 2 "--temp wants a number from 0 to 100, not 'nan'" run -p x --temp nan
refuses "number: infinity" 2 "--temp wants a number from 0 to 100, not '1e999'" run -p x --temp 1e999
refuses "number: hexadecimal" 2 "--temp wants a number from 0 to 100, not '0x1'" run -p x --temp 0x1
refuses "number: negative" 2 "--temp wants a number from 0 to 100, not '-1'" run -p x --temp -1
refuses "number: open end" 2 "--top-p wants a number above 0, at most 1, not '0'" run -p x --top-p 0
refuses "number: range" 2 "--presence wants a number from -2 to 2, not '2.5'" run -p x --presence 2.5
refuses "choice" 2 "--kv wants f16, f32, bf16 or fp8, not 'f64'" run -p x --kv f64
refuses "choice: device" 2 "--device wants host or cuda, not 'tpu'" run -p x --device tpu
refuses "precision" 2 "--precision wants exact, bf16, fp8 or q8, or prompt=P,gen=P, not 'fp16'" run -p x --precision fp16
refuses "precision of a phase" 2 "--precision wants *, not 'prompt=bf16,prompt=exact'" \
    run -p x --precision prompt=bf16,prompt=exact
refuses "precision q8 of one phase" 2 "precision q8 is that of one phase alone; accepted is q8 for both*" \
    run -p x --device host --precision prompt=q8,gen=exact
refuses "precision of an unknown phase" 2 "--precision wants *, not 'verify=bf16'" run -p x --precision verify=bf16
refuses "chunk of 100" 2 "--chunk wants a multiple of 64, not '100'" run -p x --chunk 100
refuses "chunk of 0" 2 "--chunk wants an integer from 64 to 65536, not '0'" run -p x --chunk 0
refuses "chunk above the range" 2 "--chunk wants an integer from 64 to 65536, not '65600'" run -p x --chunk 65600
refuses "deadline above a day" 2 "--wait-ms wants an integer from 1 to 86400000, not '86400001'" run -p x --wait-ms 86400001
refuses "deadline of set-up above a day" 2 "--init-ms wants an integer from 1 to 86400000, not '86400001'" \
    run -p x --init-ms 86400001
refuses "kernel without a name" 2 "--kernel wants FAMILY=NAME, not 'linear'" run -p x --kernel linear
refuses "an order that is none" 2 "--order wants tree or fast, not 'ring'" run -p x --order ring
refuses "speculation" 2 "--spec mtp:2: speculation is not part of this version; accepted is no --spec, and plan takes it to count the layer" \
    run -p x --spec mtp:2
refuses "speculation: unknown kind" 2 "--spec wants mtp or mtp:K with K from 1 to 8, not 'eagle'" run -p x --spec eagle
refuses "memory: unknown unit" 2 "--mem wants a number of bytes such as 80000000000, 512M or 80G, not '10Q'" \
    plan --mem 10Q
refuses "memory: overflow" 2 "--mem wants a number of bytes such as *, not '9999999999T'" plan --mem 9999999999T
refuses "no prompt" 2 "no prompt: give -p TEXT, -f FILE (- is standard input), --ids or --ids-file" run
refuses "two prompts" 2 "-p, -f, --ids and --ids-file exclude each other" run -p x --ids 1
refuses "empty file of ids" 2 "the prompt is empty" run --ids-file /dev/null
refuses "file of no ids" 3 "docs/design.md: token ids are integers such as 1,2,3; it is something else at byte 0" \
    run --ids-file docs/design.md
refuses "bench: a context that the model does not have" 2 \
    "--contexts: 8192 and 128 generated ids; the model's context is 4096" bench --contexts 64,8192
refuses "bench: one id" 2 "-n wants 2 or more here: decode is timed from the first id to the last" bench -n 1
refuses "bench: no contexts" 2 "--contexts wants 1 to 32 lengths, not 0" bench --contexts ""
refuses "bench: what does not fit" 5 "a lane needs * MiB short; weights alone (*) do not fit; more lanes hold less each" \
    bench --device host --contexts 64 -n 2 --mem 1M
refuses "empty prompt" 2 "the prompt is empty" run -p ""
refuses "empty prompt file" 2 "the prompt is empty" run -f /dev/null
refuses "empty standard input" 2 "the prompt is empty" run -f -
refuses "empty ids" 2 "the prompt is empty" run --ids ""
refuses "ids: hole" 2 "--ids wants integers such as 1,2,3, not '1,,2'" run --ids 1,,2
refuses "ids: trailing comma" 2 "--ids wants integers such as 1,2,3, not '1,'" run --ids 1,
refuses "ids: negative" 2 "--ids wants integers such as 1,2,3, not '-1'" run --ids -1
refuses "ids: overflow" 2 "--ids wants integers such as 1,2,3, not '2147483648'" run --ids 2147483648
refuses "prompt file that is missing" 3 "cannot open $tmp/none: No such file or directory" run -f "$tmp/none"
refuses "lanes and devices" 2 "--lanes and --devices exclude each other" run -p x --lanes 2 --devices 0,1
refuses "devices on host" 2 "--devices names GPUs and cannot go with --device host" run -p x --devices 0 --device host
refuses "dump over a file" 2 "--dump $tmp/err: not a folder" run -p x --dump "$tmp/err"
refuses "dump into a missing parent" 3 "cannot make $tmp/a/b: No such file or directory" run -p x --dump "$tmp/a/b"
refuses "detokenize: not ids" 2 "token ids are integers such as 1,2,3; found 'x' at byte 2" detokenize -p 1,x
refuses "tokenize: two inputs" 2 "-p and -f exclude each other" tokenize -p a -f b

q
is "no arguments: exit code" $rc 2
has "no arguments: overview on stderr" err "qlane help COMMAND"
is "no arguments: nothing on stdout" "$(wc -c <"$tmp/out")" 0
q --help
is "--help: exit code" $rc 0
has "--help: overview on stdout" out "qlane run"
q --version
is "--version: exit code" $rc 0
report "$(grep -qE '^qlane [0-9]+\.[0-9]+\.[0-9]+ \(.+, (host only|CUDA .*, NCCL .*)\)$' "$tmp/out"; echo $?)" \
    "--version names version, commit and what it was built with" "$(seen)"
refuses "--version takes nothing" 2 "no command '--version'*" --version x

# Help and manual know the same options.
for command in run bench plan inspect tokenize detokenize; do
    q help $command
    is "help $command: exit code" $rc 0
    cp "$tmp/out" "$tmp/help"
    q $command --help
    is "$command --help is help $command" "$(<"$tmp/out")" "$(<"$tmp/help")"
    for option in $(sed -nE 's/^  (--?[a-z-]+).*/\1/p' "$tmp/help"); do
        manual=$(printf '%s' "$option" | sed 's/-/\\-/g')
        has_it=1
        grep -qF -- "$manual" docs/qlane.1 && has_it=0
        report $has_it "the manual has $option of $command"
    done
done
finish
