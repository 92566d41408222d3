#!/usr/bin/env python3
"""Writes runtime/check/golden.c: what the sharded blocks of `qlane check` compute at their small shapes.

    tools/make_check_golden.py > runtime/check/golden.c

Needs numpy. Independent of qlane's code: weights are made from the rules at the head of runtime/check/synth.c, codes are
decoded by the arithmetic of their formats, and blocks follow the model's equations in float64, one token after another,
without chunks, caches or lanes.
"""
import numpy as np

H, HEAD, GDN = 160, 256, 128  # hidden, attention head, GatedDeltaNet head
N_HEAD, N_KV, N_KEY, N_VALUE = 8, 2, 4, 8
T, EPS = 6, 1e-6
CLASS_EXPONENT = [7, -6, 0, 8]


# ---- numbers by place -------------------------------------------------------------------------------------------------

def fnv(path):
    h = 2166136261
    for b in path.encode():
        h = (h ^ b) * 16777619 & 0xFFFFFFFF
    return h


def hashes(seed, n):
    h = (np.arange(n, dtype=np.uint64) + (seed * 0x9E3779B1 & 0xFFFFFFFF)) & 0xFFFFFFFF
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def small(h):
    return ((h % 255).astype(np.int64) - 127) / 128


def byte_rows(path, n, row_bytes):
    return hashes(fnv(path), n * row_bytes // 4).astype("<u4").view(np.uint8).reshape(n, row_bytes)


def half_log2(k):
    h = 0
    while 4 ** h < k:
        h += 1
    return h


# ---- formats ----------------------------------------------------------------------------------------------------------

def e4m3(b):
    b = b.astype(np.int64)
    sign, e, m = np.where(b & 128, -1.0, 1.0), b >> 3 & 15, b & 7
    assert not np.any(b & 127 == 127)
    return sign * np.where(e == 0, m / 8 * 2.0 ** -6, (1 + m / 8) * 2.0 ** (e - 7.0))


def e2m1(code):
    return np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])[code]


def fp8_codes(path, n, k):
    b, cls = byte_rows(path, n, k).copy(), np.arange(n) % 4
    b[cls == 1] &= 0x8F
    b[cls == 2] = b[cls == 2] & 0x9F | 0x20
    b[cls == 3] |= 0x78
    b[b & 127 == 127] ^= 1
    return e4m3(b)


def weight(path, fmt, n, k, output=False):
    exponent, seed = -half_log2(k), fnv(path) + 1
    if fmt == "bf16":
        return small(hashes(fnv(path), n * k)).reshape(n, k) * 2.0 ** exponent
    if fmt == "channel":
        e = np.array([exponent - CLASS_EXPONENT[r % 4] for r in range(n)])
        for r in range(15, n, 16):
            if path in ("mlp.gate_proj", "mlp.up_proj"):
                e[r] += 100 if (path == "mlp.gate_proj") == (r // 16 % 2 == 0) else -100
            elif output:
                e[r] -= 108
        scale = (128 + (hashes(seed, n) % 128).astype(np.int64)) / 128 * 2.0 ** e
        return fp8_codes(path, n, k) * scale[:, None]
    if fmt == "tensor":
        return fp8_codes(path, n, k) * 2.0 ** (exponent - 7)
    if fmt == "block":
        rows, cols = -(-n // 128), -(-k // 128)
        i = np.arange(rows * cols)
        scale = (128 + (hashes(seed, rows * cols) % 128).astype(np.int64)) / 128 * 2.0 ** (exponent - 7 - i % 3)
        return fp8_codes(path, n, k) * np.kron(scale.reshape(rows, cols), np.ones((128, 128)))[:n, :k]
    assert fmt == "group"
    b = byte_rows(path, n, k // 2)
    code = np.stack([b & 15, b >> 4], -1).reshape(n, k)
    h, cls = hashes(seed, n * k // 16).reshape(n, k // 16), np.arange(n)[:, None] % 4
    s = np.select([cls == 0, cls == 1, cls == 2], [h % 127, h % 16, 0x20 + h % 32], 0x78 + h % 7)
    return e2m1(code) * np.repeat(e4m3(s), 16, 1) * 2.0 ** (exponent - 8)


# ---- the model's equations --------------------------------------------------------------------------------------------

def norm_weight(path, n):
    return 1 + small(hashes(fnv(path), n)) / 8


def rms_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def inputs():
    x = small(hashes(fnv("embed_tokens.weight"), T * H)).reshape(T, H) / 4
    c = np.arange(H)
    x[:, (c % 4 == 1) | (c % 16 == 15)] = 0
    return x


def mlp(x, fmt):
    n = 384
    gate, up = x @ weight("mlp.gate_proj", fmt, n, H).T, x @ weight("mlp.up_proj", fmt, n, H).T
    return silu(gate) * up @ weight("mlp.down_proj", fmt, H, n, output=True).T


def rotate(v, pos):
    y = v.copy()
    for i in range(32):
        a = pos * 1e7 ** (-2 * i / 64)
        y[..., i] = v[..., i] * np.cos(a) - v[..., i + 32] * np.sin(a)
        y[..., i + 32] = v[..., i + 32] * np.cos(a) + v[..., i] * np.sin(a)
    return y


def attention(x, fmt):
    p = "self_attn."
    qg = (x @ weight(p + "q_proj", fmt, 2 * HEAD * N_HEAD, H).T).reshape(T, N_HEAD, 2 * HEAD)
    k = (x @ weight(p + "k_proj", fmt, HEAD * N_KV, H).T).reshape(T, N_KV, HEAD)
    v = (x @ weight(p + "v_proj", fmt, HEAD * N_KV, H).T).reshape(T, N_KV, HEAD)
    q = rms_norm(qg[..., :HEAD], norm_weight(p + "q_norm.weight", HEAD))
    k = rms_norm(k, norm_weight(p + "k_norm.weight", HEAD))
    q = np.stack([rotate(q[t], t) for t in range(T)])
    k = np.stack([rotate(k[t], t) for t in range(T)])
    y = np.zeros((T, N_HEAD, HEAD))
    for t in range(T):
        for h in range(N_HEAD):
            kv = h // (N_HEAD // N_KV)
            s = k[:t + 1, kv] @ q[t, h] / 16
            e = np.exp(s - s.max())
            y[t, h] = e / e.sum() @ v[:t + 1, kv] * sigmoid(qg[t, h, HEAD:])
    return y.reshape(T, -1) @ weight(p + "o_proj", fmt, H, HEAD * N_HEAD, output=True).T


def gdn(x, fmt):
    p, keys, channels = "linear_attn.", GDN * N_KEY, GDN * (2 * N_KEY + N_VALUE)
    m = x @ weight(p + "in_proj_qkv", fmt, channels, H).T
    z = (x @ weight(p + "in_proj_z", fmt, GDN * N_VALUE, H).T).reshape(T, N_VALUE, GDN)
    b, a = x @ weight(p + "in_proj_b", "bf16", N_VALUE, H).T, x @ weight(p + "in_proj_a", "bf16", N_VALUE, H).T
    taps = small(hashes(fnv(p + "conv1d.weight"), channels * 4)).reshape(channels, 4)
    a_log = -3 + (hashes(fnv(p + "A_log"), N_VALUE) % 256).astype(np.int64) / 64
    dt = 2 * small(hashes(fnv(p + "dt_bias"), N_VALUE))
    w = norm_weight(p + "norm.weight", GDN)
    past = np.concatenate([np.zeros((3, channels)), m])
    u = silu(sum(taps[:, j] * past[j:j + T] for j in range(4)))
    l2 = lambda v: v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-6)
    q = l2(u[:, :keys].reshape(T, N_KEY, GDN)) / np.sqrt(GDN)
    k = l2(u[:, keys:2 * keys].reshape(T, N_KEY, GDN))
    v = u[:, 2 * keys:].reshape(T, N_VALUE, GDN)
    beta, g = sigmoid(b), -np.exp(a_log) * np.log1p(np.exp(a + dt))
    o = np.zeros((T, N_VALUE, GDN))
    for j in range(N_VALUE):
        s, key = np.zeros((GDN, GDN)), j // (N_VALUE // N_KEY)
        for t in range(T):
            s = s * np.exp(g[t, j])
            s = s + np.outer(k[t, key], beta[t, j] * (v[t, j] - s.T @ k[t, key]))
            o[t, j] = s.T @ q[t, key]
    return (rms_norm(o, w) * silu(z)).reshape(T, -1) @ weight(p + "out_proj", fmt, H, GDN * N_VALUE, output=True).T


def block(check, fmt):
    """Logits: of the identity on the final norm, or of the head that is checked."""
    x = inputs()
    final = norm_weight("norm.weight", H)
    if check == "lm_head_shard":
        return rms_norm(x, final) @ weight("lm_head", fmt, 200, H, output=True).T
    kind = {"mlp": mlp, "gdn": gdn, "att": attention}[check[:3]]
    before = "post_attention_layernorm.weight" if kind is mlp else "input_layernorm.weight"
    return rms_norm(x + kind(rms_norm(x, norm_weight(before, H)), fmt), final)


BLOCKS = [("mlp_shard_fp8", "channel"), ("mlp_shard_fp8", "tensor"), ("mlp_shard_fp8", "block"),
          ("mlp_shard_nvfp4", "group"), ("gdn_shard", "channel"), ("gdn_shard", "block"),
          ("attention_shard", "channel"), ("attention_shard", "block"), ("lm_head_shard", "channel"),
          ("lm_head_shard", "group")]


def main():
    print("/* Written by tools/make_check_golden.py, which says how; not edited by hand. */")
    print('#include "runtime/check/check_impl.h"\n\n#include <string.h>\n\n/* clang-format off */')
    table = []
    for check, fmt in BLOCKS:
        y = block(check, fmt).astype(np.float32)
        assert np.isfinite(y).all()
        name = f"{check}_{fmt}"
        print(f"static const float {name}[] = {{")
        text = [f"{v:.6e}".replace("e-0", "e-").replace("e+0", "e+").replace("e+0", "") + "f" for v in y.ravel()]
        for i in range(0, len(text), 8):
            print(", ".join(text[i:i + 8]) + ",")
        print("};")
        table.append(f'    {{"{check}", "{fmt}", {y.shape[0]}, {y.shape[1]}, {name}}},')
    print("\nstatic const ql_check_golden golden[] = {")
    print("\n".join(table))
    print("};\n/* clang-format on */\n")
    print("""const ql_check_golden *ql_check_golden_of(const char *check, const char *variant) {
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        if (strcmp(golden[i].check, check) == 0 && strcmp(golden[i].variant, variant) == 0) {
            return &golden[i];
        }
    }
    return NULL;
}""")


main()
