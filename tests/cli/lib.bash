# Shared by tests of the command: sourced with the command's path as $1. Every check prints one TAP line.
qlane=$(realpath "${1:?path of the qlane command}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
n_test=0 n_bad=0
case $("$qlane" --version) in
*"host only"*) no_gpu="this build has no CUDA" ;;
*) no_gpu="no usable GPU" ;;
esac

report() { # report 0|1 NAME [DETAIL]
    n_test=$((n_test + 1))
    if (($1 == 0)); then
        echo "ok $n_test - $2"
    else
        n_bad=$((n_bad + 1))
        echo "not ok $n_test - $2"
        [[ -z ${3-} ]] || sed 's/^/# /' <<<"$3"
    fi
}

# Runs the command; leaves stdout in $tmp/out, stderr in $tmp/err, the exit code in $rc.
q() {
    timeout 120 "$qlane" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    rc=$?
}

seen() { echo "exit code $rc"; echo "stdout: $(head -c 600 "$tmp/out")"; echo "stderr: $(head -c 1200 "$tmp/err")"; }

# refuses NAME CODE MESSAGE ARGS...: exit code, nothing on stdout, and exactly one line on stderr, which is
# "qlane: MESSAGE"; in MESSAGE * stands for any text.
refuses() {
    local name=$1 code=$2 message=$3 bad=0
    shift 3
    q "$@"
    # shellcheck disable=SC2053
    [[ $rc -eq $code && ! -s $tmp/out && $(wc -l <"$tmp/err") -eq 1 && $(<"$tmp/err") == "qlane: "$message ]] || bad=1
    report $bad "$name" "$(seen; echo "wanted: $code, qlane: $message")"
}

# prints NAME STDOUT ARGS...: exit code 0 and exactly this on stdout (a final newline is not compared).
prints() {
    local name=$1 want=$2 bad=0
    shift 2
    q "$@"
    [[ $rc -eq 0 && $(<"$tmp/out") == "$want" ]] || bad=1
    report $bad "$name" "$(seen; echo "wanted: $want")"
}

# has NAME FILE TEXT: the last run's out or err contains the text.
has() {
    local bad=0
    grep -qF -- "$3" "$tmp/$2" || bad=1
    report $bad "$1" "$(seen; echo "wanted in $2: $3")"
}

# is NAME GOT WANT
is() {
    local bad=0
    [[ $2 == "$3" ]] || bad=1
    report $bad "$1" "got $2, wanted $3"
}

finish() {
    echo "1..$n_test"
    ((n_bad == 0 && n_test > 0))
    exit
}
