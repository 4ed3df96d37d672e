# SPDX-License-Identifier: Apache-2.0
"""Word-level-with-byte-fallback tokenizer (BPE, no merges, ignore_merges)."""

import sys
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, Regex, processors
from words import KEYS, ADJ, NOUN, VERB, PREP, ADV, FUNC, CAP


def bytes_to_unicode():
    bs = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    cs, n = bs[:], 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return {b: chr(c) for b, c in zip(bs, cs)}


def build():
    b2u = bytes_to_unicode()
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for b in range(256):
        vocab[b2u[b]] = len(vocab)

    def add(s):
        s = "".join(b2u[x] for x in s.encode())
        if s not in vocab:
            vocab[s] = len(vocab)

    for w in KEYS + ADJ + NOUN + VERB + PREP + ADV + FUNC + CAP:
        add(" " + w)
    for w in CAP:
        add(w)
    for i in range(100):
        add(f" {i:02d}")
    for i in range(100):
        add(f"{i:02d}")
    t = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    t.add_special_tokens(["<pad>", "<s>", "</s>"])
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return t


def save_hf(path):
    from transformers import PreTrainedTokenizerFast

    f = PreTrainedTokenizerFast(
        tokenizer_object=build(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    f.save_pretrained(path)
    return f


if __name__ == "__main__":
    t = build()
    print(t.get_vocab_size())
    f = save_hf("tokenizer")
    s = " The code for tiger is 4837.\nWhat is the code for tiger?\nThe code for tiger is 0412. Héllo wörld"
    e = f(s)
    print(f.convert_ids_to_tokens(e.input_ids))
    print(repr(f.decode(e.input_ids[1:])))
    assert f.decode(e.input_ids[1:]) == s
