#!/bin/bash
# bench/peer.py print: a peer's measurement beside qlane bench's, on host lanes. Measuring a peer needs its packages.
. "$(dirname "$0")/lib.bash"
if ! command -v python3 >/dev/null; then
    echo "ok 1 - bench/peer.py # SKIP no python3"
    echo "1..1"
    exit
fi
peer() { # peer NAME OTHER...: what another program would have measured at half of qlane's speeds, with OTHER set in it
    python3 - "$tmp/bench/bench.json" "$tmp/$1" "${@:2}" <<'END'
import json, sys
ours = json.load(open(sys.argv[1]))
half = [{"context": p["context"], **{k: p[k] / 2 for k in ("prefill_tok_s", "decode_tok_s")}} for p in ours["points"][:1]]
out = {"peer": "other 1.0", "torch": "2", "checkpoint": "tiny", "gpu": None, "weights": "BF16", "weight_bytes": 9,
       "attention": "sdpa", "generated": 4, "missing": [], "points": half}
out.update(v.split("=", 1) for v in sys.argv[3:])
json.dump(out, open(sys.argv[2], "w"))
END
    bench/peer.py print "$tmp/bench/bench.json" "$tmp/$1" >"$tmp/out" 2>"$tmp/err"
    rc=$?
}

q bench -m models/tiny --device host --contexts 64,100 -n 3 --runs 1 --out "$tmp/bench"
peer half.json
is "exit code" $rc 0
is "a ratio for each figure of both" "$(grep -cE '^ +64 +(prefill|decode) +[0-9.]+ +[0-9.]+ +2\.00x$' "$tmp/out")" 2
is "no other figure" "$(grep -cE 'x$' "$tmp/out")" 2
has "says in what they differ" out "  weights      qlane compressed-tensors (2 groups), 0.01 GB on 1 lane; peer BF16,"
has "says what the peer has not got" out "contexts     100: qlane alone"
peer checkpoint.json checkpoint=27b
is "another checkpoint" "$rc $(<"$tmp/out")$(<"$tmp/err")" "1 peer: refused: qlane ran tiny, the peer 27b"
peer gpu.json gpu=H200
is "another device" "$rc $(<"$tmp/out")$(<"$tmp/err")" "1 peer: refused: qlane ran on the host, the peer on H200"
finish
