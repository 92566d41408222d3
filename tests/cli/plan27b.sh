#!/bin/bash
# The published bytes of the 27B checkpoints, planned from sparse, header-only files of that shape.
. "$(dirname "$0")/lib.bash"
synth=$(dirname "$qlane")/synth

row() { sed -nE "s/^ *$1 +([0-9,]+) .*/\1/p" "$tmp/out" | head -n 1; }

"$synth" --shape 27b --scheme mixed --sparse "$tmp/mixed" >/dev/null 2>&1
is "synth writes the mixed checkpoint" $? 0
start=$EPOCHREALTIME
q plan -m "$tmp/mixed" --lanes 2
seconds=$(awk "BEGIN {print $EPOCHREALTIME - $start}")
is "mixed NVFP4 at 2 lanes: weight bytes" "$(row 'weights as stored')" 10,354,076,160
is "mixed NVFP4 at 2 lanes: scale bytes" "$(row 'scales as stored')" 470,206,976
has "mixed NVFP4: projections" out "projections  168 NVFP4, 233 FP8, 96 plain"
has "mixed NVFP4: lane counts" out "slices       8: lane counts 1, 2, 4, 8"
report "$(awk "BEGIN {exit !($seconds < 10)}"; echo $?)" "planned at once" "$seconds s"
q plan -m "$tmp/mixed" --lanes 2 --mem 16G
has "mixed NVFP4: a context that does not fit" out "262144             19"
has "mixed NVFP4: says so" out "does not fit"
q inspect -m "$tmp/mixed" --json
has "mixed NVFP4: inspect" out '"n_nvfp4": 168, "n_fp8": 233, "n_plain": 96'

"$synth" --shape 27b --scheme fp8-block --sparse "$tmp/block" >/dev/null 2>&1
is "synth writes the block FP8 checkpoint" $? 0
q plan -m "$tmp/block" --lanes 4
is "block FP8 at 4 lanes: weight bytes" "$(row 'weights as stored')" 7,367,270,656
is "block FP8 at 4 lanes: scale bytes" "$(row 'scales as stored')" 742,400
finish
