"""Times `thdprof analyze` of conversations beside `datasets.map` with the same tokenizer, and prints a Markdown table.

    python benchmarks/text.py [--conversations 1000000]

Both sides use one worker a core. `datasets.map` is timed inside its process, without imports and without reading the
JSON lines: once in the batches of 1,000 that `thdprof` counts, and once row by row, as TRL calls it. thdprof's time is
that of the whole process. A second analysis of the same file reads the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from analyze import best, print_page

MAP = """
import os, sys, time
import datasets
from transformers import AutoTokenizer
path, tokenizer, processes, batched, cache = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
def tokenize(rows):
    return {"input_ids": tokenizer.apply_chat_template(rows["messages"], tokenize=True, return_dict=True)["input_ids"]}
began = time.perf_counter()
done = data.map(tokenize, batched=batched == "1", batch_size=1000, num_proc=int(processes), load_from_cache_file=False)
print(time.perf_counter() - began)
"""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def read_paragraphs(most: int = 40_000) -> list[str]:
    """Paragraphs of the sources that are installed with Python."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            found += [part for part in path.read_text(errors="replace").split("\n\n") if len(part) > 40]
    rng = np.random.default_rng(0)
    return [found[int(at)] for at in rng.permutation(len(found))[:most]]


def write_tokenizer(directory: Path, paragraphs: list[str]) -> None:
    """A byte-level BPE tokenizer of 32,000 tokens, with a chat template."""
    from tokenizers import ByteLevelBPETokenizer, Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split, byte_level = pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.train_from_iterator(paragraphs, 32_000, 0, show_progress=False, special_tokens=SPECIAL)
    tokenizer.save(f"{directory}.json")
    made = PreTrainedTokenizerFast(tokenizer_file=f"{directory}.json", eos_token=SPECIAL[0], chat_template=TEMPLATE)
    made.save_pretrained(directory)


def write_conversations(path: Path, paragraphs: list[str], count: int) -> None:
    """Conversations of two to six messages, each of one paragraph."""
    rng = np.random.default_rng(1)
    with path.open("w") as file:
        for _ in range(count):
            chosen = rng.integers(0, len(paragraphs), 2 * int(rng.integers(1, 4)))
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": role, "content": paragraphs[at]} for role, at in zip(roles, chosen, strict=False)]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Write data, time both sides, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args()
    processes = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        data, tokenizer, cache = (Path(directory) / name for name in ("chat.jsonl", "tokenizer", "cache"))
        paragraphs = read_paragraphs()
        write_tokenizer(tokenizer, paragraphs)
        write_conversations(data, paragraphs, given.conversations)
        words = ["--tokenizer", str(tokenizer), "--packer", "bfd", "--seq-length", "4096", "--json"]
        rows, ours = [("what", "thdprof", "beside it")], []
        for _ in range(given.repeat):
            for kept in (data.parent / ".thdprof").glob("*"):
                kept.unlink()
            ours.append(best([sys.executable, "-m", "thdprof", "analyze", str(data), *words], 1))
        first = min(ours, key=lambda timed: timed.wall_s)
        tokens = json.loads(first.stdout)["dataset"]["tokens"]
        what = f"`analyze`, {given.conversations:,} conversations, {tokens:,} tokens"
        for batched, name in (("1", "in batches of 1,000"), ("0", "row by row")):
            command = [sys.executable, "-c", MAP, str(data), str(tokenizer), str(processes), batched, str(cache)]
            other = min(float(best(command, 1).stdout) for _ in range(given.repeat))
            beside = f"{other:.1f} s `datasets.map` {name}: {first.wall_s / other:.2f} of it"
            rows.append((what, f"{first.wall_s:.1f} s", beside))
        again = best([sys.executable, "-m", "thdprof", "analyze", str(data), *words], 1)
        rows.append(("the same again, from the cache", f"{again.wall_s:.1f} s", ""))
    note = f"best of {given.repeat}; {processes} workers on both sides"
    print_page(("transformers", "tokenizers", "datasets", "pyarrow"), note, rows)


if __name__ == "__main__":
    main()
