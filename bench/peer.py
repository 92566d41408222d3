#!/usr/bin/env python3
"""A peer beside qlane: Hugging Face transformers on the same shape, the same GPU, the same lengths.

    bench/peer.py measure -m CHECKPOINT [--contexts 512,8192] [-n 16] [--runs 3] [--device cuda] --out peer.json
    bench/peer.py print bench.json peer.json

`measure` builds the text decoder that CHECKPOINT's config.json describes, with random BF16 weights, and times prompts and greedy
generation behind them; it needs torch and transformers. `print` puts that beside what `qlane bench --out` wrote for the checkpoint,
with a ratio behind each pair, and says in what the two differ. It refuses other checkpoints and GPUs.
"""
import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time

OPTIONAL = {"fla": "linear attention's own kernels", "causal_conv1d": "the convolution's own kernel"}


def build(checkpoint, device):
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, initialization

    with open(os.path.join(checkpoint, "config.json"), encoding="utf-8") as f:
        root = json.load(f)
    config = Qwen3_5TextConfig(**root.get("text_config", root))
    config.dtype = torch.bfloat16
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device), initialization.no_init_weights():
        model = Qwen3_5ForCausalLM(config).eval()
    generator = torch.Generator(device).manual_seed(1)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() > 1:
                p.normal_(0, p[0].numel() ** -0.5, generator=generator)
            else:  # norms that add one, decay rates and their bias: small keeps activations of order one
                p.uniform_(-0.1, 0.1, generator=generator)
    return model, config


def measure_one(model, length, n, device):
    """Seconds to the first logits, and of each further id."""
    import torch

    def now():
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
    start = now()
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    chosen = out.logits[:, -1:].argmax(-1)
    first = now()
    for _ in range(n - 1):
        out = model(input_ids=chosen, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        chosen = out.logits[:, -1:].argmax(-1)
    return first - start, (now() - first) / (n - 1)


def measure(a):
    import torch
    import transformers

    with torch.inference_mode():
        started = time.perf_counter()
        model, config = build(a.model, a.device)
        result = {
            "peer": f"transformers {transformers.__version__}", "torch": torch.__version__,
            "checkpoint": os.path.basename(os.path.abspath(a.model)), "machine": platform.node(),
            "gpu": torch.cuda.get_device_name(0) if a.device == "cuda" else None,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "build_s": time.perf_counter() - started,
            "weights": "BF16", "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "attention": model.config._attn_implementation, "generated": a.n,
            "missing": [what for name, what in OPTIONAL.items() if not importlib.util.find_spec(name)], "points": []}
        measure_one(model, 64, 2, a.device)  # the first call loads code
        for length in a.contexts:
            runs = []
            for r in range(a.runs):
                first, each = measure_one(model, length, a.n, a.device)
                runs.append({"first_token_s": first, "prefill_tok_s": length / first, "decode_tok_s": 1 / each})
                print(f"peer: context {length}, run {r + 1} of {a.runs}: prefill {length / first:.1f} tok/s, decode "
                      f"{1 / each:.2f} tok/s", file=sys.stderr, flush=True)
            result["points"].append({"context": length, "runs": runs, **{k: statistics.median(r[k] for r in runs)
                                                                         for k in runs[0]}})
        if a.device == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
    with open(a.out, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)
        f.write("\n")
    return 0


def refuse(text):
    print(f"peer: refused: {text}", file=sys.stderr)
    return 1


def show(a):
    with open(a.bench, encoding="utf-8") as f:
        ours = json.load(f)
    with open(a.peer, encoding="utf-8") as f:
        peer = json.load(f)
    was = ours["provenance"]
    lanes = ours["points"][0]["runs"][0]["lanes"]
    gpu = lanes[0]["name"] if ours["points"][0]["runs"][0]["device_kind"] == "cuda" else None
    if os.path.basename(was["checkpoint"]) != peer["checkpoint"]:
        return refuse(f"qlane ran {os.path.basename(was['checkpoint'])}, the peer {peer['checkpoint']}")
    if gpu != peer["gpu"]:
        return refuse(f"qlane ran on {gpu or 'the host'}, the peer on {peer['gpu'] or 'the host'}")
    theirs = {p["context"]: p for p in peer["points"]}
    both = [p for p in ours["points"] if p["context"] in theirs]
    if not both:
        return refuse("no context was measured by both")
    print(f"{'context':>8} {'':>10} {'qlane':>12} {'peer':>12} {'ratio':>8}")
    for p in both:
        for key in ("prefill_tok_s", "decode_tok_s"):
            x, y = p[key], theirs[p["context"]][key]
            print(f"{p['context']:>8} {key.split('_')[0]:>10} {x:>12.1f} {y:>12.1f} {x / y:>7.2f}x")
    held = sum(l["weight_bytes"] + l["scale_bytes"] for l in lanes)
    alone = [p["context"] for p in ours["points"] if p["context"] not in theirs]
    print(f"\npeer: {peer['peer']}, torch {peer['torch']}, {gpu or 'host'}. In what the two differ:")
    print(f"  weights      qlane {was['scheme']}, {held / 1e9:.2f} GB on {len(lanes)} lane{'s' if len(lanes) > 1 else ''}; peer "
          f"{peer['weights']}, {peer['weight_bytes'] / 1e9:.2f} GB, random, of the same shape")
    print(f"  activations  qlane prompt {was['prompt_precision']}, generated {was['gen_precision']}, KV {was['kv']}; peer BF16, "
          "KV BF16")
    print(f"  prompt       qlane chunks of {was['chunk']}; peer whole")
    print(f"  steps        qlane {both[0]['generated']} ids, recorded once and replayed on a GPU; peer {peer['generated']} ids, eager, "
          f"{peer['attention']} attention, argmax without reading it back")
    print(f"  not there    {'; '.join(peer['missing']) or 'nothing'} (the peer then runs its own loops in torch)")
    if alone:
        print(f"  contexts     {', '.join(map(str, alone))}: qlane alone")
    return 0


def main():
    p = argparse.ArgumentParser(prog="peer.py")
    sub = p.add_subparsers(dest="command", required=True)
    m = sub.add_parser("measure")
    m.add_argument("-m", dest="model", required=True, help="checkpoint, of which config.json is read")
    m.add_argument("--contexts", default="512,8192", type=lambda s: [int(v) for v in s.split(",")])
    m.add_argument("-n", type=int, default=16, help="ids to generate, 2 or more")
    m.add_argument("--runs", type=int, default=3)
    m.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    m.add_argument("--out", required=True)
    s = sub.add_parser("print")
    s.add_argument("bench", help="bench.json of qlane bench --out")
    s.add_argument("peer", help="what measure wrote")
    a = p.parse_args()
    return measure(a) if a.command == "measure" else show(a)


if __name__ == "__main__":
    sys.exit(main())
