#!/bin/bash
# A checkpoint beside its FP8 siblings, which hold the same weights: ids, bytes a lane and speeds, each with its ratio to the first
# sibling. Usage:
#
#     bench/siblings.sh CHECKPOINT [OPTION OF bench/compare]...
#
#     BUILD=DIR       where qlane and requant are (build)
#     SCRATCH=DIR     where the siblings are written and removed again (/tmp); each may be 1.4 times the checkpoint
#     FORMATS=LIST    which siblings (fp8-block fp8-channel)
#     OPTIONS=TEXT    options of qlane run for all of them, such as "--lanes 2"
set -eu
if (($# == 0)); then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
here=$(dirname "$0") build=${BUILD:-$(dirname "$0")/../build} checkpoint=$1
shift
scratch=$(mktemp -d -p "${SCRATCH:-/tmp}" qlane-siblings-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
configurations=()
for format in ${FORMATS:-fp8-block fp8-channel}; do
    "$build/requant" --to "$format" "$checkpoint" "$scratch/$format"
    configurations+=("$format: -m $scratch/$format ${OPTIONS:-}")
done
configurations+=("as it is: -m $checkpoint ${OPTIONS:-}")
"$here/compare" --qlane "$build/qlane" "$@" "${configurations[@]}"
