#!/bin/bash
# Names: every global symbol of libqlane.a begins with ql_ (CUDA code may carry its types after that, as C++ does), and
# libqlane.so exports exactly what qlane.h marks QL_API.
# Usage: tools/symbols.sh BUILD_FOLDER
set -u
cd "$(dirname "$0")/.." || exit 1
b=${1:?folder}
pass=0 fail=0

check() { # check NAME FAULTS
    if [[ -n $2 ]]; then
        fail=$((fail + 1))
        echo "FAIL $1:"
        echo "$2"
    else
        pass=$((pass + 1))
    fi
}

archive=$(nm -g --defined-only "$b/libqlane.a" | awk 'NF == 3 {print $3}' | sort -u)
shared=$(nm -D --defined-only "$b/libqlane.so" | awk 'NF == 3 {print $3}' | sort -u)
public=$(grep -oE '^QL_API .*' runtime/qlane.h | grep -oE 'ql_[a-z_0-9]+ ?\(' | tr -d ' (' | sort -u)

check "libqlane.a is readable" "$([[ -n $archive ]] || echo "no symbols in $b/libqlane.a")"
check "global symbols of libqlane.a begin with ql_" "$(grep -vE '^(_Z[0-9]+)?ql_' <<<"$archive")"
check "every public function is exported by libqlane.so" "$(comm -23 <(echo "$public") <(echo "$shared"))"
check "libqlane.so exports nothing else" "$(comm -13 <(echo "$public") <(echo "$shared"))"
echo "$pass passed, $fail failed, 0 skipped"
((fail == 0))
