"""The part of the model that stays in memory: embedding, attention with its key-value cache, norms, routers, head, predictors."""
# N tokens of a pass, B sequences, T tokens of one sequence so far, D model width, H heads, C head size, E experts, K chosen, V vocabulary

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import ConfigError, ModelConfig
from ..kernels import rotary
from ..checkpoint import dense_shapes
from ..model import Layer
from .layout import HEADS, RESIDENT, Manifest, check_file, head_shapes
from .storage import EngineError


class Resident:
    """Weights in float32 (the embedding as stored: only rows of it are used), and the operations of a pass between two sets of experts."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.config = config = manifest.model
        weights = _load(folder / RESIDENT, dense_shapes(config))
        self.embed, self.norm, self.head = weights["embed.weight"], weights["norm.weight"].float(), weights["head.weight"].float()

        def stacked(name: str) -> Tensor:   # float32 [L, .], each layer's weights given up once they are copied
            names = [f"layers.{i}.{name}.weight" for i in range(config.num_layers)]
            stack = torch.empty(len(names), *weights[names[0]].shape)
            for row, each in zip(stack, names):
                row.copy_(weights.pop(each))
            return stack

        self._stacks = {name.removeprefix("attention."): stacked(name) for name in ("attention_norm", "moe_norm", "router", "attention.qkv", "attention.out")}
        self._stacks["qk_norm"] = torch.stack([stacked(f"attention.{name}") for name in ("q_norm", "k_norm")], dim=1)
        self._attention_norm, self._moe_norm, self._router, self._qkv, self._out, self._qk_norm = (list(stack) for stack in self._stacks.values())
        self.routers = self._router   # the next layer's router is a predictor, too
        self._plain_embed = self.embed.numpy() if self.embed.dtype == torch.float32 else None   # bf16 has no twin in numpy
        head_size = config.hidden_size // config.num_heads
        self._cos, self._sin = rotary(config.context, 1, head_size, config.rope_theta)
        self._nothing = torch.zeros(1, 1, 1)
        self._half, self._scale = head_size // 2, head_size**-0.5
        self._hash = [Layer(config, i).hash_VK for i in range(config.num_layers)] if config.routing == "hash" else None

    def plain(self) -> dict[str, np.ndarray]:
        """The weights as `fused.Net` has them: views, each layer one row."""
        rows = {name: stack.flatten(1).numpy() for name, stack in self._stacks.items()}
        return rows | {"norm": self.norm[None].numpy(), "head": self.head.flatten()[None].numpy(), "cos": self._cos[:, 0].numpy(), "sin": self._sin[:, 0].numpy()}

    def row(self, token: int) -> np.ndarray:
        """`embedded` of one token (D,), without torch."""
        return self._plain_embed[token] if self._plain_embed is not None else self.embed[token].float().numpy()

    def embedded(self, tokens_N: Tensor) -> Tensor:
        return self.embed[tokens_N].float()

    def attend(self, layer: int, x_ND: Tensor, places: list[tuple[KeyValues, int]]) -> Tensor:
        """x + attention(norm(x)): `places` has each sequence's cache and how many of the pass's tokens are its own, in order."""
        N, D = x_ND.shape
        H = self.config.num_heads
        qkv_N3D = F.linear(_norm(x_ND, self._attention_norm[layer], self.config.rms_norm_eps), self._qkv[layer]).view(N, 3, D)
        qk = _norm(qkv_N3D[:, :2], self._qk_norm[layer], self.config.rms_norm_eps).view(N, 2 * H, D // H)
        v = qkv_N3D[:, 2].view(N, H, D // H)
        if len(places) == 1:
            y_ND = self._attend_one(layer, qk, v, places[0][0])
        else:
            sizes = [n for _, n in places]
            y_ND = torch.cat([self._attend_one(layer, *part, cache) for *part, (cache, _) in zip(qk.split(sizes), v.split(sizes), places)])
        return torch.addmm(x_ND, y_ND, self._out[layer].t())

    def _attend_one(self, layer: int, qk: Tensor, v: Tensor, cache: KeyValues) -> Tensor:
        """qk (n, 2H, C) and v (n, H, C) of one sequence's tokens; returns (n, D)."""
        n, H, C = v.shape
        first = cache.length
        # `kernels.rotate` without its backward pass, queries and keys at once
        qk = (qk * self._cos[first : first + n]).addcmul_(qk.roll(self._half, -1), self._sin[first : first + n])
        keys, values = cache.add(layer, qk[:, H:], v)
        if n > 1:   # a prompt, whose cache was empty
            y = F.scaled_dot_product_attention(qk[:, :H].transpose(0, 1), keys, values, is_causal=True)
            return y.transpose(0, 1).reshape(n, -1)
        scores_HT1 = torch.baddbmm(self._nothing, keys, qk[0, :H].unsqueeze(2), beta=0, alpha=self._scale)   # two products: cheaper than the fused kernel for one query
        return torch.bmm(scores_HT1.softmax(1).transpose(1, 2), values).view(1, H * C)

    def moe_input(self, layer: int, x_ND: Tensor) -> Tensor:
        return _norm(x_ND, self._moe_norm[layer], self.config.rms_norm_eps)

    def route(self, layer: int, source_ND: Tensor, tokens_N: Tensor) -> tuple[np.ndarray, Tensor]:
        """Chosen experts (N, K), best first, equal probabilities by lower id, and their gate weights. Raises EngineError where a router row is NaN."""
        config = self.config
        probs_NE = F.linear(source_ND, self._router[layer]).softmax(dim=1)
        if self._hash is not None:
            ids = self._hash[layer][tokens_N]
        else:
            ids = torch.from_numpy(best(probs_NE.numpy(), config.top_k, f"router of layer {layer}"))
        gates_NK = probs_NE.gather(1, ids)
        if config.norm_topk_prob:
            gates_NK = gates_NK / gates_NK.sum(dim=1, keepdim=True)
        return ids.numpy(), gates_NK

    def logits(self, x_ND: Tensor) -> Tensor:
        return F.linear(_norm(x_ND, self.norm, self.config.rms_norm_eps), self.head)


def best(scores_NE: np.ndarray, k: int, what: str) -> np.ndarray:
    """Ids of the k largest scores of each row, largest first, equal scores by lower id. Raises EngineError where a score is NaN."""
    if np.isnan(scores_NE).any():
        raise EngineError(f"{what}: token {int(np.isnan(scores_NE).any(1).argmax())} of the pass has NaN scores, so no expert can be chosen")
    return np.argsort(-scores_NE, axis=1, kind="stable")[:, :k]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: `kernels.rms_norm` without its backward pass (torch's own is a composite of more operations)."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * weight).mul_(scale)


class KeyValues:
    """Keys and values of one sequence, for every layer, with room for `capacity` tokens."""

    def __init__(self, config: ModelConfig, capacity: int):
        both = torch.empty(2, config.num_layers, capacity, config.num_heads, config.hidden_size // config.num_heads)
        self._keys, self._values = (list(stack) for stack in both)
        self.plain = {"keys": both[0].numpy(), "values": both[1].numpy()}   # as `fused.Net` has them
        self.length = 0   # tokens of the passes that are over

    def add(self, layer: int, k_nHC: Tensor, v_nHC: Tensor) -> tuple[Tensor, Tensor]:
        """Write the tokens of this pass; returns all keys and values of the layer, (H, T, C)."""
        keys, values, end = self._keys[layer], self._values[layer], self.length + k_nHC.shape[0]
        keys[self.length : end] = k_nHC
        values[self.length : end] = v_nHC
        return keys[:end].transpose(0, 1), values[:end].transpose(0, 1)


FLOATS = ("F64", "F32", "F16", "BF16")   # dtypes of the resident weights and of predictors, as safetensors names them


def check_tensors(folder: Path, manifest: Manifest, *, heads: bool, sums: bool) -> None:
    """Raise ConfigError where the resident weights, or with `heads` the predictors, are not those of the manifest: by name, shape and type, with `sums` by every byte."""
    expected = {RESIDENT: dense_shapes(manifest.model)}
    if heads:
        expected[HEADS] = {f"{kind}/{name}": shape for kind, horizons in manifest.heads.items() for name, shape in head_shapes(kind, horizons, manifest.model).items()}
    for file, shapes in expected.items():
        path, again = folder / file, "export the checkpoint again"
        try:
            with safe_open(path, "pt") as opened:
                found = {name: opened.get_slice(name) for name in opened.keys()}
                found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in found.items()}
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged: {error}; {again}") from None
        if missing := [name for name in shapes if name not in found]:
            raise ConfigError(f"{path} lacks {missing[0]}; {again}")
        if surplus := [name for name in found if name not in shapes]:
            raise ConfigError(f"{path} holds {surplus[0]}, which this model has not; {again}")
        for name, (shape, dtype) in found.items():
            if shape != shapes[name]:
                raise ConfigError(f"{path}: {name} is {shape}, the manifest says {shapes[name]}; {again}")
            if dtype not in FLOATS:
                raise ConfigError(f"{path}: {name} holds {dtype}, not one of {', '.join(FLOATS)}; {again}")
        if sums:
            check_file(folder, manifest, file)


def _load(path: Path, names) -> dict[str, Tensor]:
    """Of a file that `check_tensors` has seen."""
    found = {}
    for name in names:
        with safe_open(path, "pt") as opened:   # anew for each: a mapped file's pages count as this process's memory
            found[name] = opened.get_tensor(name).clone()
    return found


class Guesser:
    """Scores of the experts `horizon` layers ahead, from a layer's MoE input: trained heads, or that layer's own router."""

    def __init__(self, folder: Path, manifest: Manifest, resident: Resident, source: str, horizons: tuple[int, ...]):
        self.num_layers = manifest.model.num_layers
        for h in horizons:
            if h >= self.num_layers:
                raise ConfigError(f"horizon {h} is beyond the last layer: the model has {self.num_layers} MoE layers, so at most {self.num_layers - 1}")
        self._routers = resident.routers if source == "next_router" else None
        if self._routers is None:
            held = manifest.heads.get(source)
            known = ", ".join(["none", "next_router", *manifest.heads, "oracle"])
            if held is None:
                raise ConfigError(f"the export has no predictor {source!r}; it has {known}" + ("" if manifest.heads else "; fitted ones come with a run that a notebook or `predmoe plan --train` has measured, or with --heads"))
            if missing := sorted(set(horizons) - set(held)):
                raise ConfigError(f"the {source} predictor has no horizon {missing[0]}; it has {', '.join(map(str, held))}")
            depth = 2 if source == "ranking" else 1
            names = [f"{source}/{part}.{h}_{i}" for h in horizons for i in range(depth) for part in ("weights", "biases")]
            held = _load(folder / HEADS, names)
            # one stack of all horizons' layers for each depth, of which the heads are views
            self._stacks = [[torch.cat([held[f"{source}/{part}.{h}_{i}"].float() for h in horizons]) for part in ("weights", "biases")] for i in range(depth)]
            self._heads, sizes = {h: [] for h in horizons}, [self.num_layers - h for h in horizons]
            for weights, biases in self._stacks:
                for h, *pair in zip(horizons, weights.split(sizes), biases[:, 0].split(sizes)):
                    self._heads[h].append(tuple(pair))
        self.source, self.horizons = source, horizons

    def plain(self) -> dict[str, np.ndarray]:
        """The predictor as `fused.Net` has it: views, and which row is for which horizon and layer."""
        L, at, rows = self.num_layers, 0, np.full((len(self.horizons), self.num_layers), -1, np.int64)
        for row, h in zip(rows, self.horizons):
            row[: L - h] = np.arange(h, L) if self._routers is not None else np.arange(at, at + L - h)
            at += L - h
        found = {"guesser": rows, "ahead": np.array(self.horizons, np.int64)}
        for (weights, biases), names in zip(() if self._routers is not None else self._stacks, (("first", "first_bias"), ("second", "second_bias"))):
            found |= {names[0]: weights.flatten(1).numpy(), names[1]: biases[:, 0].numpy()}
        return found

    def scores(self, layer: int, horizon: int, hidden_ND: Tensor) -> Tensor | None:
        """(N, E) scores of layer + horizon, or None past the last layer."""
        if layer + horizon >= self.num_layers:
            return None
        if self._routers is not None:
            return F.linear(hidden_ND, self._routers[layer + horizon])
        x = hidden_ND
        for i, (weights, biases) in enumerate(self._heads[horizon]):
            x = F.linear(F.gelu(x) if i else x, weights[layer], biases[layer])
        return x
