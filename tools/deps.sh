#!/bin/bash
# Installs the distribution packages that build and tests need and this machine lacks: at once when allowed to (root, or
# sudo without a password), else prints the one line to run and fails.
set -u

cc=${CC:-gcc} cxx=${CXX:-g++}
missing=()

need() { # need PACKAGE COMMAND...: the package, unless the command succeeds
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

header() { echo "#include <$1>" | "$cc" -DPCRE2_CODE_UNIT_WIDTH=8 -E -x c -; }
cmocka() { printf '#include <%s>\n' stdarg.h stddef.h setjmp.h stdint.h cmocka.h | "$cc" -E -x c -; }

need gcc command -v "$cc"
need g++ command -v "$cxx"
need binutils command -v ar
need libc6-dev header stdlib.h
need libjansson-dev header jansson.h
need libpcre2-dev header pcre2.h
need libutf8proc-dev header utf8proc.h
need zlib1g-dev header zlib.h
need libcmocka-dev cmocka
need pkg-config command -v pkg-config
need clang-format command -v clang-format
need python3 command -v python3

if ((${#missing[@]} == 0)); then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "deps: this machine lacks what Debian calls: ${missing[*]}" >&2
    exit 1
fi
install="apt-get install -y --no-install-recommends ${missing[*]}"
if (($(id -u) == 0)); then
    sudo=()
elif sudo -n true 2>/dev/null; then
    sudo=(sudo -n)
else
    echo "deps: run this once: sudo $install" >&2
    exit 1
fi
echo "deps: $install"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
"${sudo[@]}" $install || { "${sudo[@]}" apt-get update && "${sudo[@]}" $install; }
