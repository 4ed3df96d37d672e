# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama-format long-context retrieval LM on CPU, on synthetic RULER-like tasks made on the fly.

    OMP_NUM_THREADS=2 python train.py --out runs/a --seed 0
Model code here is a lean re-implementation whose parameter names equal those of HF LlamaForCausalLM /
Qwen3ForCausalLM (--qk_norm 1), so `export` is a plain state-dict copy.
"""

import argparse, json, math, os, random, time
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from tok import build, save_hf
from words import KEYS, ADJ, NOUN, VERB, PREP, ADV, ATTR

# ------------------------------------------------------------------ data
TOK = build()
V = TOK.get_vocab()
E = lambda s: TOK.encode(s, add_special_tokens=False).ids
W = lambda w: V["Ġ" + w]
BOS, EOS, DOT, NL = 1, 2, E(".")[0], E("\n")[0]
KEY = [W(k) for k in KEYS]
N1 = [V[f"Ġ{i:02d}"] for i in range(100)]
N2 = [V[f"{i:02d}"] for i in range(100)]
AT = [W(a) for a in ATTR]
ATS = [W(a + "s") for a in ("code", "number")]  # plural forms for multi-value
THE, FOR, IS, ARE, AND, LET, BE = [W("The"), W("for"), W("is"), W("are"), W("and"), W("Let"), W("be")][:7]
the = W("the")
C_THE, C_LET, C_WHAT = V["The"], V["Let"], V["What"]
QM = E("?")[0]
A_, NN_, VB_, PP_, AV_ = ([W(x) for x in l] for l in (ADJ, NOUN, VERB, PREP, ADV))
Q_WHATIS = [NL, C_WHAT, IS, the]
Q_VALUE = E("\nWhat is the value of")
A_VALUE = [NL] + E("The value of")
Q_TRACE = E("\nTrace")
Q_COMMON = E("\nWhat is the most common word?\nThe most common word is")
Q_ARE = E("\nWhat are all the")
LIST = E(" List:")
Q_REPEAT = E("\nRepeat the text starting with:")


class Gen:
    """Generates (ids, weight) rows. weight 1 on answer tokens, 0 elsewhere."""

    def __init__(self, seed):
        self.r = random.Random(seed)
        r = self.r
        self.pool = []
        for _ in range(20000):
            n = lambda: r.choice(KEY) if r.random() < 0.1 else r.choice(NN_)
            k = r.random()
            if k < 0.35:
                s = [THE, r.choice(A_), n(), r.choice(VB_), r.choice(PP_), the, n(), DOT]
            elif k < 0.6:
                s = [THE, n(), r.choice(VB_), r.choice(PP_), the, r.choice(A_), n(), DOT]
            elif k < 0.8:
                s = [W("A"), n(), AND, W("a"), n(), r.choice(VB_), r.choice(AV_), DOT]
            elif k < 0.9:
                s = [W("In"), the, n(), the, n(), r.choice(VB_), DOT]
            else:
                s = [THE, n(), r.choice(VB_), r.choice(AV_), DOT]
            self.pool.append(s)

    def val(self):
        return [self.r.choice(N1), self.r.choice(N2)]

    def context(self, needles, n, ordered=False):
        """needles (list of id lists) spread among filler so that the whole is <= n tokens (close to n)."""
        r = self.r
        left = n - 1 - sum(map(len, needles))
        fill = []
        while left >= 5:
            s = r.choice(self.pool)
            if len(s) > left:
                s = next((x for x in r.choices(self.pool, k=30) if len(x) <= left), None)
                if s is None:
                    break
            fill.append(s)
            left -= len(s)
        tot = len(fill) + len(needles)
        pos = set(r.sample(range(tot), len(needles)))
        if not ordered:
            r.shuffle(needles)
        a, b = iter(needles), iter(fill)
        out = [BOS]
        for i in range(tot):
            out += next(a) if i in pos else next(b)
        return out

    # every task: (length of context, max number of questions) -> context ids, list of (question ids, answer ids)
    def t_niah(self, n, nq, k=None):
        r = self.r
        kmax = max(1, min(len(KEY), (n - 1) // 8))
        if k is None:
            k = kmax if r.random() < 0.3 else max(1, round(kmax * r.random() ** (1 if n < 128 else 2)))
        k = min(k, kmax)
        ks = r.sample(KEY, k)
        items = [(r.choice(AT), x, self.val()) for x in ks]
        ctx = self.context([[THE, a, FOR, x, IS] + v + [DOT] for a, x, v in items], n)
        qs = r.sample(items, min(nq, k))
        return ctx, [(Q_WHATIS + [a, FOR, x, QM, NL, C_THE, a, FOR, x, IS], v + [DOT, EOS]) for a, x, v in qs]

    def t_attr(self, n, nq, k=None):
        """the same key has several attributes: key and attribute both have to match"""
        r = self.r
        kmax = max(1, min(len(KEY), (n - 1) // 8 // 3))
        k = min(k or max(1, int(kmax * r.random() ** 2)), kmax)
        items = []
        for x in r.sample(KEY, k):
            for a in r.sample(AT, r.choice((2, 3))):
                items.append((a, x, self.val()))
        ctx = self.context([[THE, a, FOR, x, IS] + v + [DOT] for a, x, v in items], n)
        qs = r.sample(items, min(nq, len(items)))
        return ctx, [(Q_WHATIS + [a, FOR, x, QM, NL, C_THE, a, FOR, x, IS], v + [DOT, EOS]) for a, x, v in qs]

    def t_mq(self, n, nq, k=None, m=None):
        r = self.r
        kmax = max(2, min(len(KEY), (n - 1) // 8))
        k = max(2, min(k or int(kmax * r.random() ** 2), kmax))
        items = [(r.choice(AT), x, self.val()) for x in r.sample(KEY, k)]
        ctx = self.context([[THE, a, FOR, x, IS] + v + [DOT] for a, x, v in items], n)
        out = []
        r.shuffle(items)
        while items and len(out) < max(1, nq // 2):
            mm = min(len(items), m or r.choice((2, 3)))
            g, items = items[:mm], items[mm:]
            q = Q_WHATIS + [g[0][0], FOR, g[0][1]]
            for a, x, v in g[1:]:
                q = q + [AND, the, a, FOR, x]
            a, x, v = g[0]
            q = q + [QM, NL, C_THE, a, FOR, x, IS]
            ans = v + [DOT]
            for a, x, v in g[1:]:
                ans = ans + [THE, a, FOR, x, IS] + v + [DOT]
            out.append((q, ans + [EOS]))
        return ctx, out

    def t_mv(self, n, nq, k=None, m=2):
        """multi-value: the same key and attribute stated m times; all values, in order of appearance"""
        r = self.r
        kmax = max(1, min(len(KEY), (n - 1) // 8 // m))
        k = min(k or max(1, int(kmax * r.random() ** 2)), kmax)
        ks = r.sample(KEY, k)
        at = {x: r.randrange(2) for x in ks}
        vals = {x: [] for x in ks}
        seq = [x for x in ks for _ in range(m)]
        r.shuffle(seq)
        nd = []
        for x in seq:
            v = self.val()
            vals[x].append(v)
            nd.append([THE, AT[at[x]], FOR, x, IS] + v + [DOT])
        ctx = self.context(nd, n, ordered=True)
        out = []
        for x in r.sample(ks, min(k, nq)):
            a = ATS[at[x]]
            ans = []
            for i, v in enumerate(vals[x]):
                ans += ([AND] if i else []) + v
            out.append((Q_ARE + [a, FOR, x, QM, NL, C_THE, a, FOR, x, ARE], ans + [DOT, EOS]))
        return ctx, out

    def t_vt(self, n, nq, k=None, hops=None, direct=None):
        """variable tracking: chains of assignments; answer is the trace (or the value itself if direct)"""
        r = self.r
        H = hops or r.choice((1, 2, 3))
        kmax = max(1, min(len(KEY) // (H + 1), (n - 1) // (6 * (H + 1))))
        k = min(k or max(1, int(kmax * r.random() ** 2)), kmax)
        names = r.sample(KEY, k * (H + 1))
        chains = [(names[i * (H + 1) : (i + 1) * (H + 1)], self.val()) for i in range(k)]
        order = [i for i in range(k) for _ in range(H + 1)]
        r.shuffle(order)
        at = [0] * k
        nd = []
        for i in order:
            c, v = chains[i]
            j = at[i]
            at[i] += 1
            nd.append([LET, c[j], BE] + (v if j == 0 else [c[j - 1]]) + [DOT])
        ctx = self.context(nd, n, ordered=True)
        out = []
        for i in r.sample(range(k), min(k, nq)):
            c, v = chains[i]
            h = H if hops else r.randint(1, H)
            if direct if direct is not None else r.random() < 0.25:
                out.append((Q_VALUE + [c[h], QM] + A_VALUE + [c[h], IS], v + [DOT, EOS]))
            else:
                ans = []
                for j in range(h - 1, -1, -1):
                    ans += [c[j], BE]
                out.append((Q_TRACE + [c[h], DOT, NL, C_LET, c[h], BE], ans + v + [DOT, EOS]))
        return ctx, out

    def t_cwe(self, n, nq, k=None):
        r = self.r
        m = n - 4
        top = r.choice(KEY)
        f = r.uniform(0.2, 0.4)
        nt = max(3, int(m * f))
        cap = max(1, nt // 3)
        rest = []
        others = r.sample([x for x in KEY if x != top], len(KEY) - 1)
        i = 0
        while len(rest) < m - nt:
            rest += [others[i % len(others)]] * r.randint(1, cap)
            i += 1
        w = rest[: m - nt] + [top] * nt
        r.shuffle(w)
        return [BOS] + LIST + w + [DOT], [(Q_COMMON, [top, DOT, EOS])]

    def t_copy(self, n, nq, k=None):
        r = self.r
        if r.random() < 0.5:
            base = r.choice((KEY, KEY, N1 + N2, KEY + NN_ + VB_ + N1))
            ctx = [BOS] + [r.choice(base) for _ in range(n - 1)]
        else:
            ctx = self.t_niah(n, 1)[0]
        return ctx, None  # row() fills the rest with one long copy

    def turns_row(self, T):
        """several turns: facts, questions, more facts, questions about any of the facts so far, ...; facts restated in
        passing.  Lookups thus happen all along the context, as they do in natural text."""
        r = self.r
        m = r.choice((2, 3))
        ids, w, known = [BOS], [0.0], []
        keys = r.sample(KEY, len(KEY))
        while len(ids) < T - 20:
            n = min(T // m, T - len(ids)) * 0.7
            k = max(1, int(n / 8 * r.random() ** 1.5))
            new = [(r.choice(AT), keys.pop(), self.val()) for _ in range(min(k, len(keys)))]
            if not new:
                break
            nd = [[THE, a, FOR, x, IS] + v + [DOT] for a, x, v in new]
            old = r.sample(known, min(len(known), r.randint(0, max(1, k // 2))))
            mark = {}
            for a, x, v in old:
                nd.append([THE, a, FOR, x, IS] + v + [DOT])
                mark[(a, x)] = 1
            c = self.context(nd, int(n) + 1)[1:]
            cw = [0.0] * len(c)
            for i in range(5, len(c) - 1):  # restated facts are predictable: supervise them
                if c[i - 1] == IS and c[i - 3] == FOR and (c[i - 4], c[i - 2]) in mark:
                    cw[i] = cw[i + 1] = 1.0
            ids += c
            w += cw
            known += new
            for a, x, v in r.sample(known, min(len(known), r.randint(1, 3 + T // 128))):
                q = Q_WHATIS + [a, FOR, x, QM, NL, C_THE, a, FOR, x, IS]
                ids += q + v + [DOT, EOS]
                w += [0.0] * len(q) + [1.0] * 4
            ids.append(NL)
            w.append(0.0)
        return ids, w

    def row(self, task, T, frac):
        """one training row of exactly T tokens: context, then as many questions as fit"""
        r = self.r
        n = int(T * (1 - frac * r.uniform(0.7, 1.3)))
        if task == "turns":
            ids, w = self.turns_row(T)
        elif task == "copy":
            n = int(T * r.uniform(0.4, 0.6)) if T <= 256 else int(T * r.uniform(0.6, 0.9))
            ctx, _ = self.t_copy(n, 0)
            s = 1 if T <= 256 else r.randint(1, max(1, len(ctx) - (T - n) + 10))
            ids, w = ctx + Q_REPEAT, [0.0] * (len(ctx) + len(Q_REPEAT))
            c = ctx[s:]
            ids = ids + c
            w = w + [0.0] * 4 + [1.0] * (len(c) - 4)
        else:
            if task == "cwe":
                n = T - len(Q_COMMON) - 4
            ctx, qs = getattr(self, "t_" + task)(n, max(1, (T - n) // 17 + 1))
            ids, w = list(ctx), [0.0] * len(ctx)
            for q, a in qs:
                if len(ids) + len(q) + len(a) > T and len(ids) > len(ctx):
                    break
                ids += q + a
                w += [0.0] * len(q) + ([6.0] if task == "cwe" else [1.0]) + [1.0] * (len(a) - 1)
        ids, w = ids[:T], w[:T]
        ids += [0] * (T - len(ids))
        w += [-1.0] * (T - len(w))
        return ids, w

    def batch(self, B, T, mix, frac):
        ts = self.r.choices(list(mix), list(mix.values()), k=B)
        rows = [self.row(t, T, frac) for t in ts]
        return torch.tensor([a for a, _ in rows]), torch.tensor([b for _, b in rows]), ts


EVAL = {  # name -> (task, kwargs by length)
    "single": ("niah", lambda L: dict(k=1)),
    "mk4": ("niah", lambda L: dict(k=4)),
    "mk16": ("niah", lambda L: dict(k=16)),
    "mkfull": ("niah", lambda L: dict(k=10**6)),
    "attr": ("attr", lambda L: dict(k=4)),
    "mq": ("mq", lambda L: dict(k=8, m=2)),
    "mv": ("mv", lambda L: dict(k=2)),
    "vt1": ("vt", lambda L: dict(k=3, hops=1, direct=False)),
    "vt2": ("vt", lambda L: dict(k=2, hops=2, direct=False)),
    "vt3": ("vt", lambda L: dict(k=2, hops=3, direct=False)),
    "vd1": ("vt", lambda L: dict(k=3, hops=1, direct=True)),
    "vd2": ("vt", lambda L: dict(k=2, hops=2, direct=True)),
    "cwe": ("cwe", lambda L: {}),
}


def eval_rows(gen, name, L, B):
    """one question per context; row = context(L tokens minus question) + question + answer, all padded right"""
    task, kw = EVAL[name]
    rows = []
    for _ in range(B):
        n = L - 30
        ctx, qs = getattr(gen, "t_" + task)(n, 1, **kw(L))
        q, a = qs[0]
        rows.append((ctx, q, a))
    return rows


# ------------------------------------------------------------------ model
class RMS(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(d))

    def forward(s, x):
        return F.rms_norm(x, (x.shape[-1],), s.weight.to(x.dtype), 1e-6)


class Attn(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        D, h, g, d = c.hidden, c.heads, c.kv_heads, c.head_dim
        s.q_proj, s.k_proj, s.v_proj = (
            nn.Linear(D, h * d, False),
            nn.Linear(D, g * d, False),
            nn.Linear(D, g * d, False),
        )
        s.o_proj = nn.Linear(h * d, D, False)
        if c.qk_norm:
            s.q_norm, s.k_norm = RMS(d), RMS(d)

    def forward(s, x, cos, sin):
        c = s.c
        B, T, D = x.shape
        q = s.q_proj(x).view(B, T, c.heads, c.head_dim)
        k = s.k_proj(x).view(B, T, c.kv_heads, c.head_dim)
        v = s.v_proj(x).view(B, T, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = s.q_norm(q), s.k_norm(k)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        n = c.heads // c.kv_heads
        if n > 1:
            k = k[:, :, :, None].expand(-1, -1, -1, n, -1).reshape(B, T, c.heads, c.head_dim)
            v = v[:, :, :, None].expand(-1, -1, -1, n, -1).reshape(B, T, c.heads, c.head_dim)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return s.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def rope(x, cos, sin):  # HF half-rotation convention
    h = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin


class MLP(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.gate_proj, s.up_proj, s.down_proj = (
            nn.Linear(c.hidden, c.inter, False),
            nn.Linear(c.hidden, c.inter, False),
            nn.Linear(c.inter, c.hidden, False),
        )

    def forward(s, x):
        return s.down_proj(F.silu(s.gate_proj(x)) * s.up_proj(x))


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.self_attn, s.mlp = Attn(c), MLP(c)
        s.input_layernorm, s.post_attention_layernorm = RMS(c.hidden), RMS(c.hidden)

    def forward(s, x, cos, sin):
        x = x + s.self_attn(s.input_layernorm(x), cos, sin)
        return x + s.mlp(s.post_attention_layernorm(x))


class LM(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        s.model = nn.Module()
        s.model.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        s.model.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        s.model.norm = RMS(c.hidden)
        for n, p in s.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.05 if "embed" in n else c.hidden**-0.5)
                if "down_proj" in n or "o_proj" in n:
                    p.data.mul_(0.02 if "down" in n else 0.1)
        if c.seeded:
            seed_circuits(s, c)
        inv = 1.0 / c.theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        f = torch.outer(torch.arange(4096).float(), inv)
        f = torch.cat((f, f), -1)
        s.register_buffer("cos", f.cos(), persistent=False)
        s.register_buffer("sin", f.sin(), persistent=False)

    def hidden(s, ids, f=lambda l, *a: l(*a)):
        T = ids.shape[1]
        x = s.model.embed_tokens(ids).to(torch.bfloat16)
        cos, sin = s.cos[:T, None].to(x.dtype), s.sin[:T, None].to(x.dtype)
        for l in s.model.layers:
            x = f(l, x, cos, sin)
        return s.model.norm(x)

    def logits(s, h):
        return h @ s.model.embed_tokens.weight.to(h.dtype).t()


@torch.no_grad()
def seed_circuits(m, c):
    """Start from previous-token heads (layer 0) feeding induction heads (layer 1) instead of waiting for
    them to emerge: on a CPU budget the phase transition is most of the cost.  All weights stay trainable."""
    D, d, n = c.hidden, c.head_dim, c.heads // c.kv_heads
    inv = 1.0 / c.theta ** (torch.arange(0, d, 2).float() / d)

    def orth(r, k):  # r x k with orthonormal rows (r < k) or columns
        q = torch.linalg.qr(torch.randn(max(r, k), min(r, k)))[0]
        return q.t() if r < k else q

    m.model.embed_tokens.weight[:, 0] = 0.35  # a constant feature, for purely positional attention
    L0, L1 = m.model.layers[0].self_attn, m.model.layers[1].self_attn
    if c.qk_norm:
        for A in (L0, L1):
            A.q_norm.weight.fill_(2.2)
            A.k_norm.weight.fill_(2.2)
    u = torch.zeros(d)
    u[: d // 4] = 1.0  # the high frequencies localise
    for p in (L0.q_proj, L0.k_proj):
        p.weight.mul_(0.3)
    P, R = orth(d, D), []
    P[:, 0] = 0
    for g in range(c.kv_heads):
        L0.k_proj.weight[g * d : (g + 1) * d, 0] = u
        L0.v_proj.weight[g * d : (g + 1) * d] = P
    for h in range(c.heads):  # head h copies the token at offset h + 1
        f = torch.cat((inv, inv)) * -(h + 1)
        q = u * f.cos() + torch.cat((-u[d // 2 :], u[: d // 2])) * f.sin()
        L0.q_proj.weight[h * d : (h + 1) * d, 0] = 2.0 * q
        r = orth(D, d)
        r[0] = 0
        R.append(r)
        L0.o_proj.weight[:, h * d : (h + 1) * d] = r * 0.05
    nl = max(4, int((inv < 6e-4).sum()))  # low frequencies: position-free content matching
    idx = torch.cat((torch.arange(d // 2 - nl, d // 2), torch.arange(d - nl, d)))

    def put(proj, h, M, a=4.0):  # rows of M -> the position-free rotary dimensions of head h
        w = proj.weight[h * d : (h + 1) * d]
        w.mul_(0.3)
        w[idx] = M[: len(idx)] * a

    put(L1.k_proj, 0, R[0].t())
    put(L1.q_proj, 0, P)  # key's previous token == this token
    g1 = c.kv_heads - 1
    put(L1.k_proj, g1, R[1].t())
    put(L1.q_proj, g1 * n, R[0].t())  # key's token at -2 == token at -1 here
    for g in range(c.kv_heads):
        Q = orth(d, D)
        Q[:, 0] = 0
        L1.v_proj.weight[g * d : (g + 1) * d] = Q
        L1.o_proj.weight[:, g * n * d : (g * n + 1) * d] = Q.t() * 0.3


def export(m, c, path):
    os.makedirs(path, exist_ok=True)
    if c.qk_norm:
        from transformers import Qwen3Config as Cf, Qwen3ForCausalLM as M
    else:
        from transformers import LlamaConfig as Cf, LlamaForCausalLM as M
    cfg = Cf(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.inter,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": c.theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    hf = M(cfg)
    miss = hf.load_state_dict({k: v.float() for k, v in m.state_dict().items()}, strict=False)
    assert set(miss.missing_keys) <= {"lm_head.weight"} and not miss.unexpected_keys, miss
    hf.tie_weights()
    hf.to(torch.bfloat16).save_pretrained(path)
    save_hf(path)


# ------------------------------------------------------------------ train
@torch.no_grad()
def evaluate(m, L, names, nb, seed=12345):
    res = {}
    for name in names:
        gen = Gen.__new__(Gen)
        gen.r = random.Random(seed + L)
        gen.pool = EVPOOL
        rows = eval_rows(gen, name, L, nb)
        ok = 0
        for i in range(0, nb, 16):
            rs = rows[i : i + 16]
            M_ = max(len(c) + len(q) + len(a) for c, q, a in rs)
            ids = torch.tensor([c + q + a + [0] * (M_ - len(c) - len(q) - len(a)) for c, q, a in rs])
            with torch.autocast("cpu", torch.bfloat16):
                h = m.hidden(ids)
            for j, (c, q, a) in enumerate(rs):
                s = len(c) + len(q)
                with torch.autocast("cpu", torch.bfloat16):
                    p = m.logits(h[j, s - 1 : s - 1 + len(a)]).argmax(-1)
                ok += int((p == ids[j, s : s + len(a)]).all())
        res[name] = round(ok / nb, 3)
    return res


EVPOOL = Gen(999).pool


def main():
    ap = argparse.ArgumentParser()
    for k, v in dict(
        out="runs/a",
        seed=0,
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        inter=512,
        theta=500000.0,
        qk_norm=0,
        seeded=1,
        lr=1e-3,
        emb_lr=1e-3,
        wd=0.01,
        lmw=0.05,
        plan="plan.json",
        share=1.0,  # of the steps of the plan
        compile=1,
        init="",
        eval_s=300.0,
        minutes=0.0,
        world=1,
        rank=0,
    ).items():
        ap.add_argument("--" + k, type=type(v), default=v)
    c = ap.parse_args()
    c.vocab = TOK.get_vocab_size()
    torch.set_num_threads(1)  # one thread per rank: data parallelism over processes beats threads inside ops
    torch.manual_seed(c.seed)
    os.makedirs(c.out, exist_ok=True)
    if c.world > 1:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{os.path.abspath(c.out)}/rdzv", rank=c.rank, world_size=c.world
        )
    m = LM(c)  # same seed, hence same weights, on every rank
    if c.init:
        m.load_state_dict(torch.load(c.init)["m"])
    main_rank = c.rank == 0
    if main_rank:
        json.dump(vars(c), open(c.out + "/args.json", "w"))
        print("params", sum(p.numel() for p in m.parameters()), flush=True)
    params = list(m.parameters())
    mats = [p for n, p in m.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in m.named_parameters() if p.dim() != 2 or "embed" in n]
    opts = [
        torch.optim.Muon(mats, lr=c.lr, weight_decay=c.wd, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=c.emb_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    for o in opts:
        for g in o.param_groups:
            g["lr0"] = g["lr"]
    gen = Gen(1000 * c.seed + 1 + c.rank)
    shared = random.Random(c.seed + 77)  # choices that all ranks make alike
    plan = json.load(open(c.plan))  # stages: {frac of the run or steps, T:{len:prob}, tok per rank, mix:{task:w}, q}
    plan = [{**s, "steps": int(s["steps"] * c.share)} if "steps" in s else s for s in plan]
    total = sum(s.get("steps", 0) for s in plan)
    ends = np.cumsum([s["steps"] / total if total else s["frac"] for s in plan])
    ends[-1] = 9
    hid = m.hidden
    if c.compile:  # regional: one compiled block serves all layers
        torch._dynamo.config.cache_size_limit = 64
        blk = torch.compile(Block.forward, dynamic=False)
        hid = lambda ids: m.hidden(ids, blk)
    step, si, t0, ntok, fr, last_eval, acc, bounds = 0, 0, time.time(), 0, 0.0, time.time(), {}, []

    def save(name):
        torch.save(dict(m=m.state_dict(), step=step, args=vars(c)), f"{c.out}/{name}.pt")

    def ev(Ls, n):
        for L in Ls:
            r = evaluate(m, L, list(EVAL), n)
            print("   EVAL", L, r, flush=True)
            open(c.out + "/log.jsonl", "a").write(
                json.dumps(dict(step=step, L=L, res=r, t=time.time() - t0, ntok=ntok)) + "\n"
            )

    while fr < 1:
        if fr >= ends[si]:
            bounds.append(step)
            si += 1
            acc = {}
            if main_rank:
                save(f"stage{si - 1}")
                json.dump(bounds, open(c.out + "/bounds.json", "w"))
        st = plan[si]
        lr = min(1, (step + 1) / (100 if not c.init else 20)) * max(
            0.01, min(1, (1 - fr) / 0.6)
        )  # warm up, constant, linear decay
        for o in opts:
            for g in o.param_groups:
                g["lr"] = g["lr0"] * lr
        T = int(shared.choices(list(st["T"]), list(st["T"].values()))[0])
        ids, w, ts = gen.batch(max(1, st["tok"] // T), T, st["mix"], st["q"])
        tgt, w = ids[:, 1:], w[:, 1:]
        ma = w > 0
        with torch.autocast("cpu", torch.bfloat16):
            h = hid(ids)[:, :-1]
            la = m.logits(h[ma])
        loss_a = (F.cross_entropy(la.float(), tgt[ma], reduction="none") * w[ma]).sum() / w[ma].sum()
        loss = loss_a
        if c.lmw > 0 and step % 4 == 0:  # language-modelling loss on context and questions, a quarter of the steps
            ml = w == 0
            with torch.autocast("cpu", torch.bfloat16):
                ll = m.logits(h[ml])
            loss = loss + c.lmw * F.cross_entropy(ll.float(), tgt[ml])
        loss.backward()
        now = (time.time() - t0) / 60 / c.minutes if c.minutes else (step + 1) / total
        if c.world > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in params] + [torch.tensor([now])])
            dist.all_reduce(flat)
            flat /= c.world
            i = 0
            for p in params:
                p.grad.copy_(flat[i : i + p.numel()].view_as(p))
                i += p.numel()
            now = float(flat[-1])
        fr = now
        gn = torch.nn.utils.clip_grad_norm_(params, 1.0)
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        ntok += ids.numel() * c.world
        with torch.no_grad():
            good = torch.zeros_like(ma, dtype=torch.float)
            good[ma] = (la.argmax(-1) == tgt[ma]).float() * w[ma]
            for i, t in enumerate(ts):
                a = acc.setdefault((t, T), [0.0, 0.0])
                a[0] = a[0] * 0.98 + float(good[i].sum())
                a[1] = a[1] * 0.98 + float(w[i].clamp_min(0).sum())
        step += 1
        if main_rank and step % 25 == 0:
            e = time.time() - t0
            print(
                f"{step} s{si} {e:.0f}s {fr:.2f} {ntok / e:.0f}t/s loss {loss_a.item():.3f} gn {gn:.2f} lr {lr:.2f} | "
                + " ".join(f"{t}{T}:{a / max(b, 1e-9):.2f}" for (t, T), (a, b) in sorted(acc.items())),
                flush=True,
            )
        if main_rank and time.time() - last_eval > c.eval_s:
            save("ckpt")
            ev([max(map(int, st["T"]))], 16)
            last_eval = time.time()
    if main_rank:
        bounds.append(step)
        json.dump(bounds, open(c.out + "/bounds.json", "w"))
        save("final")
        export(m, c, c.out + "/hf")
        ev([512, 1024], 32)
    if c.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
