"""The simulator once more, in plain Python: a slow event loop over OrderedDicts, the oracle of the compiled one.

Written for reading. It shares no code with predmoe.simulator but the settings, and works on sets, dicts and lists where that
works on arrays. The cache is an OrderedDict per group, the next to leave first; the disk is a list of running reads.
"""

import math
from collections import Counter, OrderedDict, deque

import numpy as np

from predmoe.simulator import Cache, Compute, Disk, Prefetch
from predmoe.traces import ABSENT, DECODE

NEVER = math.inf


class Reference:
    """Replays one trace; `run` returns what the tests compare."""

    def __init__(self, trace, cache: Cache, disk: Disk, compute: Compute = Compute(), prefetch: Prefetch | None = None, warmup=0, cold="trace"):
        self.trace, self.cache, self.disk, self.compute, self.prefetch, self.warmup, self.cold = trace, cache, disk, compute, prefetch, warmup, cold
        self.layers, self.experts, self.k = trace.num_layers, trace.meta.num_experts, trace.meta.top_k
        self.groups = {g: OrderedDict() for g in (range(self.layers) if cache.scope == "layer" else [None])}
        self.room = {g: cache.slots if cache.slots is not None else cache.bytes for g in self.groups}
        self.used = Counter()
        self.uses, self.last_pass, self.cursor = Counter(), {}, Counter()
        self.passes = [range(int(a), int(b)) for a, b in zip(trace.starts, trace.starts[1:])]
        self.sets = [[self.chosen(s, l) for l in range(self.layers)] for s in range(len(self.passes))]
        self.future = {}
        count = Counter()
        for now, (s, l, e) in enumerate((s, l, e) for s, row in enumerate(self.sets) for l, (members, _) in enumerate(row) for e in members):
            self.future.setdefault((l, e), []).append(now)
            count[l, e] += 1
        self.pinned = self.pin(count)
        self.now, self.current, self.s = 0.0, set(), 0
        self.running, self.demands, self.guesses = [], deque(), OrderedDict()   # guesses: key -> (pass, layer)
        self.guessed = {}                                                   # key -> counted
        self.reads = 0
        self.factors = np.exp(disk.noise * np.random.default_rng(disk.seed).standard_normal(1 << 16)) if disk.noise else [1.0]
        self.ledger = Counter()
        self.counts = [Counter() for _ in self.passes]
        self.timeline = []

    # --- the trace -----------------------------------------------------------------------------------------------

    def chosen(self, s, layer):
        """Distinct experts of a pass in the order of their last appearance, and the number of (token, expert) pairs."""
        order, pairs = OrderedDict(), 0
        for n in self.passes[s]:
            for e in self.trace.experts_NLK[n, layer].tolist():
                if e != ABSENT:
                    pairs += 1
                    order.pop(e, None)
                    order[e] = True
        return list(order), pairs

    def begins(self, s):
        """Do all tokens of the pass belong to sequences that were never seen before?"""
        earlier = set(self.trace.sequence[: self.passes[s].start].tolist())
        return not earlier & {int(self.trace.sequence[n]) for n in self.passes[s]}

    def continues(self, s):
        before, now = ({int(self.trace.sequence[n]) for n in self.passes[q]} for q in (s - 1, s))
        return self.trace.phase[s] == DECODE and now <= before

    # --- the cache -----------------------------------------------------------------------------------------------

    def group(self, key):
        return key[0] if self.cache.scope == "layer" else None

    def size(self, key):
        return int(self.trace.meta.expert_bytes[key[0]])

    def cost(self, key):
        return 1 if self.cache.slots is not None else self.size(key)

    def pin(self, count):
        pinned = set()
        for g in self.groups:
            keys = [(l, e) for l in range(self.layers) if g in (None, l) for e in range(self.experts)]
            for key in sorted(keys, key=lambda key: (-count[key], key))[: len(keys) if self.cache.policy == "static" else self.cache.pinned]:
                if self.cost(key) > self.room[g]:
                    break
                pinned.add(key)
                self.room[g] -= self.cost(key)
            if self.cache.policy == "static":
                self.room[g] = 0
        return pinned

    def resident(self, key):
        return key in self.pinned or key in self.groups[self.group(key)]

    def badness(self, key, layer):
        policy = self.cache.policy
        if policy == "belady":
            times = self.future.get(key, [])
            return -(times[self.cursor[key]] if self.cursor[key] < len(times) else NEVER)
        if policy == "least-stale":
            if key[0] > layer:
                return 2 + self.layers - key[0]
            return 1 if self.last_pass.get(key) == self.s else 0
        return self.uses[key]

    def evict_one(self, g, layer, members):
        """Evict the worst outside the current set (or within it); False where there is none."""
        candidates = (key for key in self.groups[g] if (key in self.current) == members)
        if self.cache.policy in ("lru", "fifo"):
            key = next(candidates, None)
        else:
            key = min(candidates, key=lambda key: self.badness(key, layer), default=None)   # the first of equals
        if key is not None:
            self.evict(key)
        return key is not None

    def admit(self, key):
        self.groups[self.group(key)][key] = True
        self.used[self.group(key)] += self.cost(key)

    def evict(self, key):
        del self.groups[self.group(key)][key]
        self.used[self.group(key)] -= self.cost(key)
        if self.cache.policy == "lfu":
            self.uses[key] = 0
        if self.guessed.pop(key, False):
            self.ledger["wasted"] += 1
            self.ledger["wasted_bytes"] += self.size(key)

    def full(self, g, more=0):
        return self.used[g] + more > self.room[g]

    # --- the disk ------------------------------------------------------------------------------------------------

    def rate(self, depth):
        """Bytes per ms of each of `depth` reads."""
        table = self.disk.table
        return table[min(depth, len(table)) - 1] * 1e6 / depth

    def begin(self):
        while len(self.running) < self.disk.lanes and (self.demands or self.guesses):
            speculative = not self.demands
            key = self.guesses.popitem(last=False)[0] if speculative else self.demands.popleft()
            factor = self.factors[self.reads % len(self.factors)]
            self.reads += 1
            left = 0.0 if math.isinf(self.disk.table[0]) else self.size(key) * factor
            self.running.append(dict(key=key, latency=self.disk.latency_ms * factor, left=left, began=self.now, speculative=speculative))

    def advance(self, until):
        """Move to the next end of a read (and return its key) or to `until` (None)."""
        if self.running:
            speed = self.rate(len(self.running))
            speed = 1.0 if math.isinf(speed) else speed
            remaining = [read["latency"] + read["left"] / speed for read in self.running]
            least = min(remaining)
            if self.now + least <= until:
                ended = self.running.pop(remaining.index(least))
                for read in self.running:
                    self.progress(read, least, speed)
                self.now += least
                return self.arrive(ended)
            for read in self.running:
                self.progress(read, until - self.now, speed)
        self.now = until
        return None

    @staticmethod
    def progress(read, passed, speed):
        if passed <= read["latency"]:
            read["latency"] -= passed
        else:
            read["left"] = max(read["left"] - (passed - read["latency"]) * speed, 0.0)
            read["latency"] = 0.0

    def arrive(self, read):
        key, kind = read["key"], "prefetch" if read["speculative"] else "demand"
        self.note(f"{kind} read", read["began"], self.now, key[0] * self.experts + key[1])
        self.counts[self.s][f"{kind}_reads"] += 1
        self.counts[self.s][f"{kind}_bytes"] += self.size(key)
        if key in self.guessed:
            g = self.group(key)
            while self.full(g, self.cost(key)) and self.evict_one(g, self.layer, members=False):
                pass
            if self.full(g, self.cost(key)):
                if self.guessed.pop(key):
                    self.ledger["wasted"] += 1
                    self.ledger["wasted_bytes"] += self.size(key)
            else:
                self.admit(key)
                self.uses[key] += 1
        self.begin()
        return key

    # --- the loop ------------------------------------------------------------------------------------------------

    def note(self, kind, start, end, what):
        if end > start:
            self.timeline.append((kind, start, end, self.s, what))

    def work(self, kind, duration, layer):
        began, until = self.now, self.now + duration
        while self.advance(until) is not None:
            pass
        self.note(kind, began, self.now, layer)

    def run(self):
        c = self.compute
        attention, expert, shared = (c.per_layer(name, self.layers) for name in ("attention_ms", "expert_ms", "shared_ms"))
        spans = []
        self.layer = self.layers - 1
        for s, tokens in enumerate(self.passes):
            self.s, began, stall = s, self.now, 0.0
            extra = 1.0 + c.extra_token * (len(tokens) - 1)
            if self.cold == "sequence" and s and self.begins(s):
                self.empty()
            for layer in range(self.layers):
                self.work("attention", attention[layer] * extra, layer)
                self.layer = layer
                members, pairs = self.sets[s][layer]
                early = c.fresh_ms * sum(self.resident((layer, e)) and (layer, e) in self.guessed for e in members)
                waiting, begun = self.ask(layer, members), self.reads
                if self.prefetch:
                    self.foretell(layer, attention, expert, shared)
                self.begin()
                work = expert[layer] * (len(members) + c.extra_token * (pairs - len(members)))
                asked, issue, late = self.now, self.disk.issue_ms * (self.reads > begun), c.fresh_ms * len(waiting)
                free = asked + issue + early
                if c.overlap and members:
                    each = work / len(members)
                    free += each * (len(members) - len(waiting))
                    self.note("experts", asked, free, layer)
                while waiting:
                    key = self.advance(math.inf)
                    if key not in waiting:
                        continue
                    waiting.remove(key)
                    if c.overlap:
                        self.note("stall", free, self.now, layer)
                        stall += max(self.now - free, 0.0)
                        free = max(free, self.now)
                        self.note("experts", free, free + each + c.fresh_ms, layer)
                        free += each + c.fresh_ms
                if c.overlap and members:
                    self.note("experts", free, free + shared[layer] * extra, layer)
                    while self.advance(free + shared[layer] * extra) is not None:
                        pass
                else:
                    stall += max(self.now - asked - issue, 0.0)
                    self.note("stall", asked + issue, self.now, layer)
                    self.work("experts", max(asked + issue - self.now, 0.0) + work + shared[layer] * extra + late + early, layer)
            self.work("head", c.head_ms * extra, self.layers - 1)
            spans.append((began, self.now, stall))
        left = [key for key, counted in self.guessed.items() if counted]
        self.ledger["resident"] = sum(self.resident(key) for key in left)
        self.ledger["in_flight"] = len(left) - self.ledger["resident"]
        return np.array(spans), self.counts, self.ledger, sorted(self.timeline, key=lambda row: row[1:3])

    def ask(self, layer, experts):
        keys = [(layer, e) for e in experts]
        self.current = set(keys)
        g, counts, waiting = self.group((layer, 0)), self.counts[self.s], set()
        for key in keys:
            self.cursor[key] += 1
            counts["accesses"] += 1
            counted = self.guessed.pop(key, False)
            if self.resident(key):
                counts["resident"] += 1
                self.ledger["useful"] += counted
            else:
                waiting.add(key)
                self.ledger["late"] += counted
                if any(read["key"] == key for read in self.running):
                    counts["in_flight"] += 1
                else:
                    counts["missing"] += 1
                    if key not in self.guesses:
                        self.demands.append(key)
                    elif self.prefetch.promote:
                        del self.guesses[key]
                        counts["promoted"] += 1
                        self.demands.append(key)
                self.admit(key)
            self.uses[key] += 1
            self.last_pass[key] = self.s
            if self.cache.policy != "fifo" and key in self.groups[g]:
                self.groups[g].move_to_end(key)
        while self.full(g) and (self.evict_one(g, layer, members=False) or self.evict_one(g, layer, members=True)):
            pass
        return waiting

    def drop(self, unwanted):
        """Take the guesses for which `unwanted(key, target)` holds out of the queue, but none that the router waits for there."""
        for key in [key for key, target in self.guesses.items() if key in self.guessed and unwanted(key, target)]:
            del self.guesses[key]
            self.ledger["cancelled"] += self.guessed.pop(key)

    def foretell(self, layer, attention, expert, shared):
        f, L, s = self.prefetch, self.layers, self.s
        if f.expire:
            self.drop(lambda key, target: target <= (s, layer))
        idle = not (self.running or self.demands or self.guesses)
        for h in f.horizons:
            target = (s, layer + h) if layer + h < L else (s + 1, layer + h - L)
            if target[0] > s and not (f.cross_token and s + 1 < len(self.passes) and self.continues(s + 1)):
                continue
            keys = [(target[1], e) for e in self.predicted(h, layer, target)]
            if f.cancel:
                self.drop(lambda key, meant: meant == target and key not in keys)  # noqa: B023
            window = sum(expert[i % L] * self.k + shared[i % L] + attention[(i + 1) % L] for i in range(layer, layer + h))
            window += self.compute.head_ms if layer + h >= L else 0.0
            for key in keys:
                if self.resident(key) or key in self.guesses or key in self.demands or any(read["key"] == key for read in self.running):
                    continue
                counted = s >= self.warmup
                if (f.guard == "idle" and not idle) or (f.guard == "window" and self.time_of([*self.ahead(), key]) > window):
                    self.ledger["held_back"] += counted
                    continue
                self.guesses[key] = target
                self.guessed[key] = counted
                self.ledger["issued"] += counted

    def ahead(self):
        """Prefetches that are queued or being read and that nobody waits for."""
        return [key for key in (*self.guesses, *(read["key"] for read in self.running)) if key in self.guessed]

    def time_of(self, keys):
        """How long reads take on an otherwise free disk, as a guard estimates it: in rounds of as many as there are lanes."""
        depth = min(len(keys), self.disk.lanes)
        return self.disk.latency_ms * math.ceil(len(keys) / self.disk.lanes) + sum(map(self.size, keys)) / (self.rate(depth) * depth)

    def predicted(self, h, layer, target):
        f = self.prefetch
        if f.source == "oracle":
            return self.sets[target[0]][target[1]][0]
        p = self.trace.prediction(f.source, h)
        last = {int(self.trace.sequence[n]): n for n in self.passes[self.s]}
        asked = [n for n in self.passes[self.s] if target[0] == self.s or last[int(self.trace.sequence[n])] == n]
        ranked = OrderedDict()
        for j in range(self.k + f.budget):
            for n in asked:
                e, score = int(p.experts_NLM[n, layer, j]), p.scores_NLM[n, layer, j]
                if e != ABSENT and (f.threshold is None or score >= f.threshold):
                    ranked.setdefault(e)
        return list(ranked)

    def empty(self):
        for held in self.groups.values():
            for key in list(held):
                self.evict(key)
        self.drop(lambda key, target: True)
