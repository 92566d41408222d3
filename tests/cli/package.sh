#!/bin/bash
# What leaves the build folder: the copied command, the installed tree, the program in qlane.h, pkg-config, the manual.
. "$(dirname "$0")/lib.bash"
b=$(dirname "$qlane")
france="The capital of France is"

needed=$(readelf -d "$qlane" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' |
    grep -vE '^(libc\.so\.6|libm\.so\.6|libdl\.so\.2|librt\.so\.1|libpthread\.so\.0|ld-linux.*)$')
is "the command needs nothing but the C library" "$needed" ""
mkdir "$tmp/elsewhere"
cp "$qlane" "$tmp/elsewhere/qlane"
is "the copied command runs" "$("$tmp/elsewhere/qlane" run -m models/tiny --temp 0 -n 1 -p "$france" 2>/dev/null)" " Paris"
"$tmp/elsewhere/qlane" run -p x >"$tmp/out" 2>"$tmp/err"
is "without the bundled model: exit code" $? 3
has "without the bundled model: where it was looked for" err "no -m, and the bundled model is neither in ../models/tiny"

root=$tmp/root
unset MAKEFLAGS MFLAGS MAKELEVEL # of the make that runs the tests
make -s install-only B="${b#"$PWD"/}" DESTDIR="$root" PREFIX=/opt/q >"$tmp/out" 2>"$tmp/err"
is "install: exit code" $? 0
for f in bin/qlane lib/libqlane.a lib/libqlane.so include/qlane.h lib/pkgconfig/qlane.pc share/man/man1/qlane.1 \
    share/qlane/models/tiny/model.safetensors; do
    report "$([[ -e $root/opt/q/$f ]]; echo $?)" "install: $f"
done
is "the installed command finds its model" \
    "$("$root/opt/q/bin/qlane" run --temp 0 -n 1 -p "$france" 2>/dev/null)" " Paris"

# The program in the header's first comment, built as a user would.
sed -n '/#include <qlane.h>/,/^ \*     }$/s/^ \*     \{0,1\}//p' runtime/qlane.h >"$tmp/program.c"
report "$(grep -q 'int main' "$tmp/program.c"; echo $?)" "qlane.h carries a program"
export PKG_CONFIG_PATH=$root/opt/q/lib/pkgconfig
flags=$(pkg-config --define-variable=prefix="$root/opt/q" --cflags --libs qlane)
# shellcheck disable=SC2086
gcc -Wall -Wextra -Werror "$tmp/program.c" $flags -o "$tmp/program" 2>"$tmp/err"
is "it builds with pkg-config" $? 0
is "it prints the text" "$(LD_LIBRARY_PATH=$root/opt/q/lib "$tmp/program" | head -n 1)" " Paris."
flags=$(pkg-config --define-variable=prefix="$root/opt/q" --static --cflags --libs qlane | sed 's/-lqlane/-l:libqlane.a/')
# shellcheck disable=SC2086
gcc "$tmp/program.c" $flags -o "$tmp/static" 2>"$tmp/err"
is "it builds with the archive" $? 0
is "it prints the text again" "$("$tmp/static" | head -n 1)" " Paris."

make -s uninstall DESTDIR="$root" PREFIX=/opt/q >/dev/null 2>&1
is "uninstall leaves no file" "$(find "$root" -type f -o -type l)" ""
if command -v groff >/dev/null; then
    is "the manual is clean" "$(groff -man -Tutf8 -ww docs/qlane.1 2>&1 >/dev/null)" ""
fi
finish
