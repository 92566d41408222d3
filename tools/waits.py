#!/usr/bin/env python3
"""Kernels that are started early wait for the one before them.

launch() (kernels/cuda/dev.cuh) lets a kernel's blocks begin while the kernel before it still runs. Such a kernel must say
after_previous(), or wait_previous(), before it reads anything that an earlier kernel wrote, or it reads what is not there yet,
now and then. A test rarely catches that, so the source is looked at: each kernel of kernels/*.cu

  - says so, in its body and outside of any block, so that no thread passes by;
  - before that declares, computes indices and prepares shared memory, but follows no pointer;
  - or lets the next kernel come with allow_next() and until wait_previous() fetches weights, which no kernel writes once they
    are loaded: what other arguments are called must not occur there.

And launch() is given only such kernels, by name or by a variable that chooses among them. Run from anywhere; prints what is wrong and a line of counts.
"""
import glob
import os
import re
import sys

# What arguments call things that other kernels write; x and y of threadIdx and its like are none.
DEPENDENT = re.compile(r"(?<!Idx\.)(?<!Dim\.)\b(x|xs|x8|xscale|xsum|y|out|stack|flag|residual|delta|cache|best|stat|counts?|"
                       r"qg|prep\.[kv]|attn\.[qo])\b")
# Names of these that a kernel may say nevertheless: what it reads before it waits was written before its step began, and every
# step begins behind a copy from the host, which waits for all before it. split_mma reads the cache there in the form with attn_prep,
# which leaves out this step's rows; in the other, attn_prep is the kernel before.
OF_EARLIER_STEPS = {"few_kernel": {"cache"}, "split_mma": {"cache"}}
# Declarations that follow no pointer but into shared memory.
HARMLESS = re.compile(
    r"^(?:#\w+.*|(?:extern )?__shared__ .*|typedef .*|using .*|constexpr .*|"
    r"(?:struct )?\w+(?:<[^>]*>)? &\w+ = \*\((?:struct )?\w+(?:<[^>]*>)? \*\)\(?\w*raw\b.*)$", re.S)
SHARED = re.compile(r"\*(\w+) = \((?:struct )?\w+ \*\)\(?\w*raw\b")
FOLLOWS = re.compile(r"\[|->|__ldg|\bload\w*\(|\bcopy\w*\(|\bld_\w+\(|(?:[=(,&|<>?:]|return)\s*\*\s*[\w(]|^\s*\*\s*[\w(]")


def bare(path):
    """A file's text, comments and the insides of strings replaced by blanks, so that places stay where they were."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group(0))
    with open(path) as f:
        return re.sub(r'/\*.*?\*/|//[^\n]*|(?<=")[^"\n]*(?=")', blank, f.read(), flags=re.S)


def close_of(text, at):
    """The place of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if depth == 0:
            return i
    return len(text)


def kernels_of(text):
    """(name, place, body) of each kernel that is defined."""
    for m in re.finditer(r"\b__global__\b", text):
        begin = text.find("{", m.end())
        head = re.sub(r"__launch_bounds__\([^)]*\)", "", text[m.end():begin])
        if ";" not in head:
            yield re.search(r"(\w+)\s*\(", head).group(1), m.start(), text[begin + 1:close_of(text, begin)]


def fault_of(name, body):
    """What is wrong with a kernel, or None."""
    wait = re.search(r"\b(?:after|wait)_previous\(\);", body)
    if not wait:
        return "neither after_previous() nor wait_previous()"
    before = body[:wait.start()]
    if before.count("{") != before.count("}"):
        return "waits inside a block, which a thread may pass by"
    early = re.search(r"\ballow_next\(\);", before)
    if early:
        named = [n for n in DEPENDENT.findall(before) if n not in OF_EARLIER_STEPS.get(name, ())]
        return f"names {named[0]} before it waits" if named else None
    for pointer in SHARED.findall(before):
        before = re.sub(rf"\b{pointer}->\w+(\[[^]]*\])?", "", before)
    for statement in re.split(r";|^(?=#)|(?<=\))\s*\{|\}", before, flags=re.M):
        statement = statement.strip()
        while statement.startswith("#"):  # a line of the preprocessor before a declaration
            statement = statement.partition("\n")[2].strip()
        if statement and not HARMLESS.match(statement) and FOLLOWS.search(statement):
            return "follows a pointer before it waits: " + " ".join(statement.split())[:80]
    return None


def launched_by(text):
    """(name, place) of each kernel that launch() is given by name; one of a table's entries has none."""
    for m in re.finditer(r"\blaunch\(dev,\s*\"[^\"]*\",", text):
        argument, depth = "", 0
        for c in text[m.end():]:
            depth += (c in "(<{") - (c in ")>}")
            if c == "," and depth == 0:
                break
            argument += c
        for part in re.split(r"[?:]", argument)[-2:]:
            name = re.match(r"\s*(\w+)\s*(?:<|$)", part)
            if name:
                yield name.group(1), m.start()


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    passed, failed, known = 0, 0, set()
    texts = {path: bare(path) for path in sorted(glob.glob("kernels/*.cu"))}
    say = lambda path, at, what: print(f"FAIL {path}:{texts[path].count(chr(10), 0, at) + 1}: {what}")
    for path, text in texts.items():
        for name, at, body in kernels_of(text):
            known.add(name)
            fault = fault_of(name, body)
            if fault:
                say(path, at, f"{name} {fault}")
            passed, failed = passed + (not fault), failed + bool(fault)
    for path, text in texts.items():
        for name, at in launched_by(text):
            if name not in known and not re.search(rf"\bauto {name} =|\(\*{name}\)\(", text):
                say(path, at, f"launch() of {name}, which is no kernel of kernels/*.cu")
                failed += 1
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed > 0 or passed == 0


if __name__ == "__main__":
    sys.exit(main())
