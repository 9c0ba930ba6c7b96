"""PyTorch as a peer of `cargo xtask bench`: one line of work in, milliseconds of one repetition out.

Plain modules of the same shapes as ours with random weights: a Llama or Qwen3 target over a preallocated
key-value cache, and an H-Spec drafter (fusion, Mamba-2, attention over the target's cache, SwiGLU, pruned head,
Markov head) with its training step. Nothing but torch is needed.
"""

import argparse
import contextlib
import json
import math
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:
    sys.exit(3)

STD = 0.02


class Norm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def linear(i, o):
    layer = nn.Linear(i, o, bias=False)
    nn.init.normal_(layer.weight, std=STD)
    return layer


class Mlp(nn.Module):
    def __init__(self, h, i):
        super().__init__()
        self.gate, self.up, self.down = linear(h, i), linear(h, i), linear(i, h)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def tables(positions, d, theta=1e5):
    angles = positions.float()[:, None] * theta ** (-torch.arange(0, d, 2).float() / d)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x, rope):
    """x: [..., t, d]"""
    cos, sin = (t.to(x.dtype) for t in rope)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        h, d = s["hidden"], s["head_dim"]
        self.heads, self.kv, self.d = s["heads"], s["kv_heads"], d
        self.q, self.o = linear(h, self.heads * d), linear(self.heads * d, h)
        self.k, self.v = linear(h, self.kv * d), linear(h, self.kv * d)
        self.norms = nn.ModuleList(Norm(d, s["eps"]) for _ in range(2)) if s["qk_norm"] else None

    def project(self, x, rope):
        """x: [b, t, h] -> q [b, heads, t, d], k and v [b, kv, t, d]"""
        b, t, _ = x.shape
        split = lambda y, n: y.view(b, t, n, self.d).transpose(1, 2)
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv), split(self.v(x), self.kv)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        return rotate(q, rope), rotate(k, rope), v

    def join(self, y):
        b, _, t, _ = y.shape
        return self.o(y.transpose(1, 2).reshape(b, t, self.heads * self.d))


def attend(q, k, v, mask=None, causal=False):
    """Grouped heads without copies: the queries that share a key head lie side by side where there are few."""
    b, n, t, d = q.shape
    kv = k.shape[1]
    if t <= 16 and not causal:
        rep = n // kv
        q = q.reshape(b, kv, rep * t, d)
        mask = None if mask is None else mask.repeat(rep, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(b, n, t, d)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        h = s["hidden"]
        self.n1, self.n2 = Norm(h, s["eps"]), Norm(h, s["eps"])
        self.attn, self.mlp = Attention(s), Mlp(h, s["intermediate"])

    def forward(self, x, cache, at, rope, mask):
        t = x.shape[1]
        q, k, v = self.attn.project(self.n1(x), rope)
        keys, values = cache
        keys[:, :, at : at + t], values[:, :, at : at + t] = k, v
        keys, values = keys[:, :, : at + t], values[:, :, : at + t]
        y = attend(q, keys, values, mask, causal=at == 0 and t > 1)
        x = x + self.attn.join(y)
        return x + self.mlp(self.n2(x))


class Target(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.embed = nn.Embedding(s["vocab"], s["hidden"])
        nn.init.normal_(self.embed.weight, std=STD)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s["layers"]))
        self.norm = Norm(s["hidden"], s["eps"])
        self.head = linear(s["hidden"], s["vocab"])
        if s["tied"]:
            self.head.weight = self.embed.weight

    def cache(self, capacity, dtype):
        shape = (1, self.s["kv_heads"], capacity, self.s["head_dim"])
        return [tuple(torch.randn(shape).to(dtype) for _ in range(2)) for _ in self.layers]

    def forward(self, ids, cache, at, last):
        t = ids.shape[1]
        rope = tables(torch.arange(at, at + t), self.s["head_dim"])
        mask = torch.ones(t, at + t, dtype=torch.bool).tril(at) if t > 1 and at > 0 else None
        x = self.embed(ids)
        for layer, entry in zip(self.layers, cache):
            x = layer(x, entry, at, rope, mask)
        return self.head(self.norm(x[:, -1:] if last else x))


def scan(x, dt, a, b, c, d, state):
    """The dual form over one chunk. x [n,l,h,p], dt [n,l,h], b and c [n,l,g,s], state [n,h,p,s]"""
    n, l, h, p = x.shape
    rep = h // b.shape[2]
    x, dt = x.transpose(1, 2), dt.transpose(1, 2)
    b, c = (t.transpose(1, 2).repeat_interleave(rep, 1) for t in (b, c))
    cum = (dt * a[:, None]).cumsum(-1)
    future = torch.ones(l, l, dtype=torch.bool).triu(1)
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(future, -math.inf).exp()
    mixing = (c @ b.transpose(-1, -2)) * decay * dt[:, :, None, :]
    y = mixing @ x + (c * cum.exp()[..., None]) @ state.transpose(-1, -2) + x * d[:, None, None]
    keys = b * (dt * (cum[..., -1:] - cum).exp())[..., None]
    return y.transpose(1, 2), state * cum[..., -1, None, None].exp() + x.transpose(-1, -2) @ keys


class Mamba(nn.Module):
    def __init__(self, h, s):
        super().__init__()
        self.heads, self.p, self.n, self.g, self.taps = s["heads"], s["head_dim"], s["state"], s["groups"], s["conv"]
        self.inner, gn = self.heads * self.p, self.g * self.n
        self.conv_dim = self.inner + 2 * gn
        self.in_proj, self.out_proj = linear(h, self.inner + self.conv_dim + self.heads), linear(self.inner, h)
        self.conv = nn.Parameter(torch.randn(self.conv_dim, self.taps) * STD)
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_dim))
        self.a_log = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.d, self.dt_bias = nn.Parameter(torch.ones(self.heads)), nn.Parameter(torch.zeros(self.heads))
        self.norm = Norm(self.inner, 1e-5)

    def forward(self, x, state):
        b, l, _ = x.shape
        gate, xbc, dt = self.in_proj(x).split([self.inner, self.conv_dim, self.heads], -1)
        # Shifted multiply-adds: a grouped convolution of so few steps is slower on a CPU.
        padded = F.pad(xbc, (0, 0, self.taps - 1, 0))
        xbc = self.conv_bias + sum(padded[:, i : i + l] * self.conv[:, i] for i in range(self.taps))
        gn = self.g * self.n
        x, keys, queries = F.silu(xbc).float().split([self.inner, gn, gn], -1)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        shape = (b, l, self.g, self.n)
        y, _ = scan(
            x.reshape(b, l, self.heads, self.p), dt, -self.a_log.float().exp(), keys.reshape(shape),
            queries.reshape(shape), self.d.float(), state.float(),
        )
        y = y.reshape(b, l, self.inner).to(gate.dtype)
        return self.out_proj(self.norm(y * F.silu(gate)))


class Drafter(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, d, h = s, s["draft"], s["hidden"]
        self.draft = d
        self.embed = nn.Embedding(s["vocab"], h)
        self.fc, self.fc_norm = linear(d["fusion"] * h, h), Norm(h, s["eps"])
        self.seed = linear(h, d["heads"] * d["head_dim"] * d["state"])
        kinds = {"mamba": lambda: Mamba(h, d), "attention": lambda: Attention(s), "mlp": lambda: Mlp(h, d["intermediate"])}
        self.layers = nn.ModuleList(kinds[kind]() for kind in d["pattern"])
        self.norms = nn.ModuleList(Norm(h, s["eps"]) for _ in d["pattern"])
        self.norm = Norm(h, s["eps"])
        self.head = linear(h, d["vocab"])
        self.w1, self.w2 = nn.Embedding(s["vocab"], d["rank"]), linear(d["rank"], d["vocab"])
        self.confidence = nn.Linear(h + d["rank"], 1)
        for table in (self.embed, self.w1):
            nn.init.normal_(table.weight, std=STD)
        self.embed.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, anchors, positions, seeds, prefixes, groups):
        """anchors [n]; seeds [n, F h]; groups: (blocks, keys, mask) slices whose anchors share their keys"""
        d, k = self.draft, self.draft["block"]
        n = anchors.shape[0]
        ids = torch.full((n, k), d["mask"])
        ids[:, 0] = anchors
        x = self.embed(ids)
        state = self.seed(self.fc_norm(self.fc(seeds))).view(n, d["heads"], d["head_dim"], d["state"])
        rope = tables((positions[:, None] + torch.arange(k)).view(-1), self.s["head_dim"])
        rope = tuple(t.view(n, 1, k, -1) for t in rope)
        prefixes = iter(prefixes)
        for kind, norm, layer in zip(d["pattern"], self.norms, self.layers):
            y = norm(x)
            if kind == "mamba":
                y = layer(y, state)
            elif kind == "attention":
                y = self.attention(layer, y, rope, next(prefixes), groups)
            else:
                y = layer(y)
            x = x + y
        return self.norm(x)

    def attention(self, layer, x, rope, prefix, groups):
        q, k, v = layer.project(x, rope)
        slots, out = x.shape[1], []
        for blocks, keys, mask in groups:
            g = blocks.stop - blocks.start
            if g == 1:
                ks = torch.cat([prefix[0][:, :, keys], k[blocks]], 2)
                vs = torch.cat([prefix[1][:, :, keys], v[blocks]], 2)
                out.append(attend(q[blocks], ks, vs, mask))
                continue
            # Scores over the shared keys in one product, over the block's own in another.
            heads, kv, dim = layer.heads, layer.kv, layer.d
            rep = heads // kv
            queries = q[blocks] * dim**-0.5
            shared = queries.reshape(g, kv, rep, slots, dim).permute(1, 2, 0, 3, 4).reshape(kv, rep * g * slots, dim)
            pk, pv = prefix[0][0][:, keys], prefix[1][0][:, keys]
            outer = (shared @ pk.transpose(1, 2)).view(kv * rep, g, slots, -1)
            inner = queries.reshape(g, kv, rep * slots, dim) @ k[blocks].transpose(2, 3)
            inner = inner.view(g, kv * rep, slots, slots).transpose(0, 1)
            scores = torch.cat([outer, inner], 3) + mask
            weights = scores.float().softmax(-1).to(scores.dtype)
            span = outer.shape[3]
            y = (weights[..., :span].reshape(kv, rep * g * slots, span) @ pv).view(kv * rep, g, slots, dim)
            own = weights[..., span:].transpose(0, 1).reshape(g, kv, rep * slots, slots) @ v[blocks]
            out.append(y.transpose(0, 1) + own.view(g, heads, slots, dim))
        return layer.join(torch.cat(out))


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Training:
    """Forward, 0.5 CE + 0.5 TV and a confidence loss, backward, clip, Muon for matrices, AdamW for the rest."""

    def __init__(self, s, drafter, target, autocast):
        self.s, self.t, self.drafter, self.target, self.autocast = s, s["train"], drafter, target, autocast
        tokens, document, n = self.t["tokens"], self.t["document"], self.t["anchors"]
        h, kv, d, k = s["hidden"], s["kv_heads"], s["head_dim"], s["draft"]["block"]
        picks = torch.randperm(tokens - k - 1)[:n] + 1
        self.anchors = picks.sort().values
        n = self.anchors.shape[0]
        self.ids = torch.randint(0, s["vocab"], (tokens,))
        self.features, self.last = torch.randn(tokens, s["draft"]["fusion"] * h), torch.randn(tokens, h)
        count = s["draft"]["pattern"].count("attention")
        self.prefixes = [tuple(torch.randn(1, kv, tokens, d) for _ in range(2)) for _ in range(count)]
        self.positions = self.anchors % document
        self.groups = []
        causal = torch.zeros(k, k).masked_fill(torch.ones(k, k, dtype=torch.bool).triu(1), -math.inf)
        for start in range(0, tokens, document):
            inside = ((self.anchors >= start) & (self.anchors < start + document)).nonzero().view(-1)
            if len(inside) == 0:
                continue
            blocks = slice(int(inside[0]), int(inside[-1]) + 1)
            keys = torch.arange(start, start + document)
            hidden = keys[None, :] >= self.anchors[blocks, None]
            hidden |= keys[None, :] < self.anchors[blocks, None] - s["draft"]["window"]
            prefix = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
            prefix = prefix[:, None, :].expand(-1, k, -1)
            own = causal[None].expand(len(prefix), -1, -1)
            self.groups.append((blocks, slice(start, start + document), torch.cat([prefix, own], 2)))
        slots = self.anchors[:, None] + torch.arange(k)
        self.previous = self.ids[(self.anchors[:, None] + (torch.arange(k) - 1).clamp(min=0)).clamp(max=tokens - 1)]
        self.wanted, self.rows = (slots - 1).unique(return_inverse=True)
        self.mask = (torch.arange(k) > 0).float().expand(n, k)
        self.weights = torch.exp(-(torch.arange(k) - 1).clamp(min=0) / self.t["gamma"])
        named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        matrix = lambda name, p: p.dim() == 2 and not name.startswith(("w1", "confidence")) and not name.endswith("conv")
        self.matrices = [p for name, p in named if matrix(name, p)]
        rest = [p for name, p in named if not matrix(name, p)]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.parameters = [p for _, p in named]
        self.adam = torch.optim.AdamW(rest, lr=self.t["lr"], weight_decay=self.t["weight_decay"])

    def step(self):
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.t["clip"])
        with torch.no_grad():
            lr, decay = self.t["muon_lr"], self.t["muon_weight_decay"]
            for p, m in zip(self.matrices, self.momenta):
                m.mul_(0.95).add_(p.grad)
                update = newton_schulz(p.grad + 0.95 * m)
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - lr * decay).add_(update, alpha=-lr * scale)
        self.adam.step()
        for p in self.parameters:
            p.grad = None

    def loss(self):
        d = self.drafter
        seeds = self.features[self.anchors - 1]
        hidden = d(self.ids[self.anchors], self.positions, seeds, self.prefixes, self.groups)
        features = d.w1(self.previous)
        logits = (d.head(hidden) + d.w2(features)).float()
        with torch.no_grad():
            table = F.linear(self.target.norm(self.last[self.wanted]), d.head.weight).float()
            q = table.softmax(-1)[self.rows]
            label = table.argmax(-1)[self.rows]
        log_p = logits.log_softmax(-1)
        ce = -log_p.gather(-1, label[..., None])[..., 0]
        tv = 0.5 * (log_p.exp() - q).abs().sum(-1)
        confidence = d.confidence(torch.cat([hidden.detach(), features.detach()], -1))[..., 0].float()
        bce = F.binary_cross_entropy_with_logits(confidence, (1 - tv).clamp(0, 1).detach(), reduction="none")
        weights = self.mask * self.weights
        return ((self.t["ce"] * ce + self.t["tv"] * tv + bce) * weights).sum() / self.mask.sum()


class Peer:
    def __init__(self, s, dtype):
        self.s, self.dtype = s, dtype
        self.target, self.drafter = Target(s).to(dtype).eval(), None
        self.steps = {}

    def prepare(self, work):
        s = self.s
        if work.startswith(("decode@", "verify8@", "prefill")):
            kind, number = work.split("@") if "@" in work else ("prefill", work[len("prefill") :])
            number = int(number)
            rows = {"decode": 1, "verify8": 8, "prefill": number}[kind]
            at = 0 if kind == "prefill" else number
            cache = self.target.cache(at + rows, self.dtype)
            ids = torch.randint(0, s["vocab"], (1, rows))
            return lambda: self.inference(lambda: self.target(ids, cache, at, kind != "verify8").argmax(-1).tolist())
        if work == "draft_step":
            drafter, context, k = Drafter(s).to(self.dtype).eval(), 256, s["draft"]["block"]
            shape = (1, s["kv_heads"], context, s["head_dim"])
            count = s["draft"]["pattern"].count("attention")
            prefixes = [tuple(torch.randn(shape).to(self.dtype) for _ in range(2)) for _ in range(count)]
            seed = torch.randn(1, s["draft"]["fusion"] * s["hidden"]).to(self.dtype)
            mask = torch.cat([torch.ones(k, context), torch.ones(k, k).tril()], 1).bool()
            anchor, position = torch.tensor([1]), torch.tensor([context])

            def draft():
                hidden = drafter(anchor, position, seed, prefixes, [(slice(0, 1), slice(0, context), mask)])[:, 1:]
                base, token, path = drafter.head(hidden)[0], anchor, []
                for slot in range(k - 1):
                    token = (base[slot] + drafter.w2(drafter.w1(token))).argmax(-1)
                    path.append(token)
                drafter.confidence(torch.cat([hidden, drafter.w1(torch.cat([anchor, *path[:-1]]))[None]], -1))
                torch.cat(path).tolist()

            return lambda: self.inference(draft)
        if work == "train_step":
            # Mixed precision in the usual way: parameters in f32.
            return Training(s, Drafter(s), Target({**s, "layers": 0}), self.dtype == torch.bfloat16).step
        if work == "ssd_scan":
            d, n, l = s["draft"], 512, s["draft"]["block"]
            h, p, g, size = d["heads"], d["head_dim"], d["groups"], d["state"]
            inputs = (
                torch.randn(n, l, h, p), torch.rand(n, l, h) + 0.1, -torch.rand(h) * 3 - 1,
                torch.randn(n, l, g, size), torch.randn(n, l, g, size), torch.randn(h), torch.randn(n, h, p, size),
            )
            inputs = tuple(t.to(self.dtype) for t in inputs)
            return lambda: self.inference(lambda: scan(*inputs))
        raise ValueError(f"unknown work {work!r}")

    @staticmethod
    def inference(step):
        with torch.inference_mode():
            return step()

    def run(self, work):
        if work not in self.steps:
            # What was measured before gives its memory back.
            self.steps = {work: self.prepare(work)}
        start = time.perf_counter()
        self.steps[work]()
        return (time.perf_counter() - start) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["f32", "bf16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--shape", type=json.loads, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    peer = Peer(args.shape, torch.float32 if args.dtype == "f32" else torch.bfloat16)
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        print(peer.run(line.strip()), flush=True)


main()
