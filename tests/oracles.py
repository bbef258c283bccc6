"""Oracles of the arithmetic: float64 NumPy loops over single tokens, without jax."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray


def entries(mask: Array) -> list[tuple[int, ...]]:
    """The index of every True entry."""
    return [tuple(int(i) for i in index) for index in np.argwhere(mask)]


def masked_mean(x: Array, mask: Array) -> float:
    total, count = 0.0, 0
    for index in entries(mask):
        total += float(x[index])
        count += 1
    return total / count if count else 0.0


def masked_var(x: Array, mask: Array, ddof: int = 0) -> float:
    mean = masked_mean(x, mask)
    total = sum((float(x[index]) - mean) ** 2 for index in entries(mask))
    return total / max(len(entries(mask)) - ddof, 1)


def masked_whiten(
    x: Array, mask: Array, shift_mean: bool = True, ddof: int = 0
) -> Array:
    mean, std = masked_mean(x, mask), math.sqrt(masked_var(x, mask, ddof) + 1e-8)
    whitened = np.zeros(x.shape)
    for index in entries(mask):
        whitened[index] = (float(x[index]) - mean) / std + (0.0 if shift_mean else mean)
    return whitened


def log_softmax(logits: Array, temperature: float = 1.0) -> list[float]:
    """log-softmax of one vector; a logit of -inf is an impossible token."""
    scaled = [float(logit) / temperature for logit in logits]
    largest = max(scaled)
    total = largest + math.log(sum(math.exp(z - largest) for z in scaled))
    return [z - total for z in scaled]


def token_logprobs(logits: Array, tokens: Array, temperature: float = 1.0) -> Array:
    logprobs = np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            logprobs[b, t] = log_softmax(logits[b, t - 1], temperature)[tokens[b, t]]
    return logprobs


def entropy(logits: Array, temperature: float = 1.0) -> Array:
    entropies = np.zeros(logits.shape[:-1])
    for index in np.ndindex(*entropies.shape):
        for logprob in log_softmax(logits[index], temperature):
            if logprob > -math.inf:
                entropies[index] -= math.exp(logprob) * logprob
    return entropies


def logits_from_hidden(hidden: Array, head: Array) -> Array:
    return np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    return np.asarray(logprobs, np.float64) - np.asarray(ref_logprobs, np.float64)


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    return k1(logprobs, ref_logprobs) ** 2 / 2


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    ratio = np.exp(-k1(logprobs, ref_logprobs))  # π_ref / π
    return ratio - 1 - np.log(ratio)


def exact_kl(logits: Array, ref_logits: Array, temperature: float = 1.0) -> Array:
    divergences = np.zeros(logits.shape[:-1])
    for index in np.ndindex(*divergences.shape):
        policy = log_softmax(logits[index], temperature)
        reference = log_softmax(ref_logits[index], temperature)
        for p, q in zip(policy, reference, strict=True):
            if p > -math.inf:
                divergences[index] += math.exp(p) * (p - q)
    return divergences


def jensen_shannon(
    policy: Array, reference: Array, beta: float, k: int | None = None
) -> float:
    """β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M) of log-probs f[V], where Q is the policy's.

    With k, over the policy's k likeliest outcomes and one bucket for the rest.
    """
    q, p = np.exp(np.asarray(policy)), np.exp(np.asarray(reference))
    if k is not None:
        order = np.argsort(-q, kind="stable")
        q, p = (np.append(x[order[:k]], x[order[k:]].sum()) for x in (q, p))
    total = 0.0
    for of_policy, of_reference in zip(q, p, strict=True):
        mixture = beta * of_reference + (1 - beta) * of_policy
        if of_reference > 0:
            total += beta * of_reference * math.log(of_reference / mixture)
        if of_policy > 0:
            total += (1 - beta) * of_policy * math.log(of_policy / mixture)
    return total


def adaptive_kl_coef(
    kl_coef: float, kl: float, num_episodes: int, target: float, horizon: int
) -> float:
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_episodes / horizon)


def token_rewards(
    scores: Array, kl: Array | None, mask: Array, kl_coef: float
) -> Array:
    rewards = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        columns = [t for t in range(mask.shape[1]) if mask[b, t]]
        for t in columns:
            rewards[b, t] = 0.0 if kl is None else -kl_coef * float(kl[b, t])
        if columns:
            rewards[b, columns[-1]] += float(scores[b])
    return rewards


def gae(
    rewards: Array, values: Array, mask: Array, gamma: float, lam: float
) -> tuple[Array, Array]:
    """GAE as the sum A_t = Σ_l (γλ)^l δ_{t+l} instead of the recursion."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        columns = [t for t in range(mask.shape[1]) if mask[b, t]]
        deltas = []
        for t in columns:
            following = float(values[b, t + 1]) if t != columns[-1] else 0.0
            deltas.append(
                float(rewards[b, t]) + gamma * following - float(values[b, t])
            )
        for i, t in enumerate(columns):
            advantages[b, t] = sum(
                (gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))
            )
            returns[b, t] = advantages[b, t] + float(values[b, t])
    return advantages, returns


def group_relative(scores: Array, group_size: int, normalise: bool) -> Array:
    advantages = np.zeros(len(scores))
    for i, score in enumerate(scores):
        first = i // group_size * group_size
        group = [
            float(score_of_row) for score_of_row in scores[first : first + group_size]
        ]
        mean = sum(group) / group_size
        advantages[i] = float(score) - mean
        if normalise:
            squares = sum((score_of_row - mean) ** 2 for score_of_row in group)
            advantages[i] /= math.sqrt(squares / (group_size - 1)) + 1e-6
    return advantages


def leave_one_out(scores: Array, group_size: int) -> Array:
    advantages = np.zeros(len(scores))
    for i, score in enumerate(scores):
        first = i // group_size * group_size
        others = [float(scores[j]) for j in range(first, first + group_size) if j != i]
        advantages[i] = float(score) - sum(others) / len(others)
    return advantages


def length_weighted(
    scores: Array, lengths: Array, group_size: int, kept: Array | None = None
) -> Array:
    """s_i - Σ l·s / Σ l over the kept responses of its group."""
    advantages = np.zeros(len(scores))
    for i, score in enumerate(scores):
        first = i // group_size * group_size
        rows = range(first, first + group_size)
        group = [j for j in rows if kept is None or kept[j]]
        tokens = sum(float(lengths[j]) for j in group)
        total = sum(float(lengths[j]) * float(scores[j]) for j in group)
        if i in group:
            advantages[i] = float(score) - total / tokens
    return advantages


def oai_truncated(responses: Array, stop: int, after: int) -> Array:
    """`get_mask` of lm_tasks.py in lm-human-preferences; True for cut tokens."""
    mask = (responses == stop).astype(np.int32)
    mask = np.concatenate([np.zeros_like(mask)[:, :after], mask[:, after:]], axis=1)
    return (np.cumsum(mask, axis=1) - mask).astype(bool)


def oai_valid(responses: Array, stop: int, after: int) -> Array:
    """`filter` of lm_tasks.py in lm-human-preferences; invalid rows score -1."""
    return (responses[:, after:] == stop).any(axis=-1)


def n_plus(
    kl: Array,
    scores: Array,
    values: Array,
    last: Array,
    *,
    kl_coef: float,
    lam: float,
    whiten_rewards: bool = False,
) -> tuple[Array, Array, Array]:
    """ppo.py of summarize_from_feedback_details, steps 4 to 6, on response columns.

    `last` is its sequence_lengths, the index of the last token; later columns are not
    read. Returns whitened advantages, returns, and the mask of values.
    """
    columns = np.arange(kl.shape[1])[None, :]
    padding_mask = columns > last[:, None]
    padding_mask_p1 = columns > last[:, None] + 1
    kl = np.where(padding_mask, 0.0, kl)  # both log-probs are INVALID_LOGPROB there
    values = np.where(padding_mask_p1, 0.0, values)
    rewards = -kl_coef * kl
    end = np.where(last + 1 < kl.shape[1], last + 1, last)
    rewards[np.arange(len(kl)), end] += scores
    if whiten_rewards:
        rewards = masked_whiten(rewards, ~padding_mask_p1, shift_mean=False)
    reversed_advantages, advantage = [], 0.0
    for t in reversed(range(kl.shape[1])):
        following = values[:, t + 1] if t < kl.shape[1] - 1 else 0.0
        delta = rewards[:, t] + following - values[:, t]
        advantage = delta + lam * advantage
        reversed_advantages.append(advantage)
    advantages = np.stack(reversed_advantages[::-1], axis=1)
    returns = advantages + values
    return masked_whiten(advantages, ~padding_mask), returns, ~padding_mask_p1


def policy_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> dict[str, list[float]]:
    """The loss and each statistic, one number per response token."""
    terms: dict[str, list[float]] = {
        "loss": [],
        "approxkl": [],
        "clipped": [],
        "dual_clipped": [],
        "ratio": [],
    }
    highest = 1 + (clip if clip_high is None else clip_high)
    for index in entries(mask):
        log_ratio = float(logprobs[index]) - float(old_logprobs[index])
        ratio, advantage = math.exp(log_ratio), float(advantages[index])
        free = ratio * advantage
        bound = min(max(ratio, 1 - clip), highest) * advantage
        objective = min(free, bound)
        ruled = False
        if dual_clip is not None and advantage < 0:
            ruled = objective < dual_clip * advantage
            objective = max(objective, dual_clip * advantage)
        terms["loss"].append(-objective)
        terms["approxkl"].append(log_ratio**2 / 2)
        terms["clipped"].append(float(bound < free))
        terms["dual_clipped"].append(float(ruled))
        terms["ratio"].append(ratio)
    return terms


def aggregate(
    terms: list[float], mask: Array, aggregation: str, scale: float | None = None
) -> float:
    """The mean over tokens, or over rows of their mean or of their sum / `scale`."""
    rows: dict[int, list[float]] = {}
    for index, term in zip(entries(mask), terms, strict=True):
        rows.setdefault(index[0], []).append(term)
    if aggregation == "token_mean":
        return sum(terms) / len(terms)
    if aggregation == "constant":
        return sum(terms) / (len(rows) * scale)
    return sum(sum(row) / len(row) for row in rows.values()) / len(rows)


def value_terms(
    values: Array, old_values: Array, returns: Array, mask: Array, clip: float | None
) -> dict[str, list[float]]:
    """The loss and the clipped fraction, one number per response token."""
    terms: dict[str, list[float]] = {"loss": [], "clipped": []}
    for index in entries(mask):
        value, target = float(values[index]), float(returns[index])
        free = (value - target) ** 2
        bound = free
        if clip is not None:
            old = float(old_values[index])
            bound = (min(max(value, old - clip), old + clip) - target) ** 2
        terms["loss"].append(max(free, bound) / 2)
        terms["clipped"].append(float(bound > free))
    return terms


def explained_variance(values: Array, returns: Array, mask: Array) -> float:
    error = np.asarray(returns, np.float64) - np.asarray(values, np.float64)
    return 1 - masked_var(error, mask) / masked_var(returns, mask)


def pairwise_losses(chosen: Array, rejected: Array, margin: Array) -> list[float]:
    return [
        -math.log(1 / (1 + math.exp(-(float(c) - float(r) - float(m)))))
        for c, r, m in zip(chosen, rejected, margin, strict=True)
    ]


def language_model_loss(logprobs: Array, mask: Array) -> float:
    return -masked_mean(logprobs, mask)


def numerical_gradient(
    function: Callable[[Array], float], x: Array, step: float = 1e-6
) -> Array:
    """Central differences in float64."""
    x = np.array(x, np.float64)
    gradient = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        middle = x[index]
        x[index] = middle + step
        above = function(x)
        x[index] = middle - step
        below = function(x)
        x[index] = middle
        gradient[index] = (above - below) / (2 * step)
    return gradient


def poison(x: Array, mask: Array) -> Array:
    """x with NaN, inf, -inf and a huge number in turn wherever the mask is False."""
    poisoned = np.array(x)
    outside = np.argwhere(~np.asarray(mask))
    for i, index in enumerate(outside):
        poisoned[tuple(index)] = (np.nan, np.inf, -np.inf, 3e38)[i % 4]
    return poisoned


def decoder_logits(
    params: dict, model, tokens: list[int], experts: Array | None = None
) -> Array:
    """Logits after every token of one text without padding, [S, V].

    Args:
      params: the decoder's tree, its leaves NumPy arrays.
      model: anything with the fields of a ModelConfig.
      experts: [S, L, k], for a mixture: the experts of every token.
    """
    tree = _float64(params)
    states = [np.array(tree["embed"]["tokens"][token]) for token in tokens]
    if model.positions == "learned":
        for t in range(len(tokens)):
            states[t] += tree["embed"]["positions"][t]
    for layer in range(model.num_layers):
        weights = _layer(tree["layers"], layer)
        attended = _attention(
            [_norm(x, weights["attention_norm"], model) for x in states],
            weights["attention"],
            model,
        )
        states = [x + y for x, y in zip(states, attended, strict=True)]
        for t, x in enumerate(states):
            y = _norm(x, weights["mlp_norm"], model)
            if experts is None:
                states[t] = x + _mlp(y, weights["mlp"], model)
            else:
                states[t] = x + _mixture(
                    y, weights["experts"], experts[t, layer].tolist(), model
                )
    head = tree["embed"]["tokens"] if model.tied_head else tree["head"]["kernel"]
    final = [_norm(x, tree["final_norm"], model) for x in states]
    return np.array(final) @ head[: model.vocab_size].T


def _float64(tree):
    if isinstance(tree, dict):
        return {name: _float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree, np.float64)


def _layer(tree, layer: int):
    if isinstance(tree, dict):
        return {name: _layer(leaf, layer) for name, leaf in tree.items()}
    return tree[layer]


def _linear(x: Array, weights: dict) -> Array:
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def _norm(x: Array, weights: dict, model) -> Array:
    if model.norm == "layernorm":
        x = x - sum(x) / len(x)
    size = math.sqrt(sum(x**2) / len(x) + model.norm_eps)
    return x / size * weights["scale"] + weights.get("bias", 0.0)


def _attention(states: list[Array], weights: dict, model) -> list[Array]:
    hd, group = model.head_dim, model.num_heads // model.num_kv_heads
    out = []
    queries, keys, values = (
        [_linear(x, weights[name]) for x in states]
        for name in ("query", "key", "value")
    )
    for t in range(len(states)):
        heads = []
        for head in range(model.num_heads):
            mine = slice(head * hd, head * hd + hd)
            shared = slice(head // group * hd, head // group * hd + hd)
            query = _rotate(queries[t][mine], t, model)
            scores = [
                float(query @ _rotate(keys[s][shared], s, model)) / math.sqrt(hd)
                for s in range(t + 1)
            ]
            weight = np.exp(log_softmax(np.array(scores)))
            heads.append(sum(weight[s] * values[s][shared] for s in range(t + 1)))
        out.append(_linear(np.concatenate(heads), weights["output"]))
    return out


def _rotate(x: Array, position: int, model) -> Array:
    """Pairs (x[i], x[i + half]) as complex numbers, turned by position · frequency."""
    if model.positions != "rope":
        return x
    half = len(x) // 2
    turned = [
        complex(x[i], x[i + half])
        * complex(math.cos(position * frequency), math.sin(position * frequency))
        for i, frequency in enumerate(rope_frequencies(model))
    ]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def rope_frequencies(model) -> list[float]:
    """Case by case, as in the code released with Llama 3.1."""
    frequencies = []
    for i in range(model.head_dim // 2):
        frequency = model.rope_theta ** (-2 * i / model.head_dim)
        scaling = model.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / frequency
            longest = scaling.original_max_positions / scaling.low_freq_factor
            shortest = scaling.original_max_positions / scaling.high_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength >= shortest:
                smooth = (
                    scaling.original_max_positions / wavelength
                    - scaling.low_freq_factor
                ) / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency *= (1 - smooth) / scaling.factor + smooth
        frequencies.append(frequency)
    return frequencies


def _mlp(x: Array, weights: dict, model) -> Array:
    activation = {
        "silu": lambda z: z / (1 + math.exp(-z)),
        "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
        "gelu_tanh": lambda z: (
            z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
        ),
    }[model.activation]
    up = _linear(x, weights["up"])
    if model.gated_mlp:
        gate = _linear(x, weights["gate"])
        return _linear(np.array([activation(z) for z in gate]) * up, weights["down"])
    return _linear(np.array([activation(z) for z in up]), weights["down"])


def _mixture(x: Array, weights: dict, chosen: list[int], model) -> Array:
    """The sum over the given experts, by the router's probabilities among them."""
    routed = x @ weights["router"]["weight"]
    shares = np.exp(log_softmax(routed[chosen]))
    of_experts = {name: weights[name] for name in ("up", "gate", "down")}
    return sum(
        share * _mlp(x, _layer(of_experts, expert), model)
        for expert, share in zip(chosen, shares, strict=True)
    )


def kept_tokens(
    logits: Array, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[bool]:
    """Which tokens of one vector survive top-k, then top-p, then min-p; no ties."""
    tokens = [t for t in range(len(logits)) if logits[t] > -math.inf]
    tokens.sort(key=lambda t: -logits[t])

    def probs() -> list[float]:
        return [math.exp(z) for z in log_softmax(logits[tokens])]

    if top_k is not None:
        tokens = tokens[:top_k]
    if top_p is not None:
        total, count = 0.0, 0
        for p in probs():
            if total < top_p:
                total, count = total + p, count + 1
        tokens = tokens[:count]
    if min_p is not None:
        largest = max(probs())
        tokens = [
            t for t, p in zip(tokens, probs(), strict=True) if p >= min_p * largest
        ]
    return [t in tokens for t in range(len(logits))]


def digest(leaf: Array, path: str) -> tuple[int, int]:
    """Both words of a leaf's digest, an element at a time in Python's integers."""
    identity = f"{path}|{leaf.shape}|{leaf.dtype}".encode()
    seeds = hashlib.sha256(identity).digest()[:8]
    words = []
    for start in (0, 4):
        total = 0
        for index in np.ndindex(*leaf.shape):
            place = int.from_bytes(seeds[start : start + 4], "little")
            for i in index:
                place = _murmur(place ^ i)
            bits = int.from_bytes(leaf[index].tobytes(), "little")
            total += _murmur(bits ^ place)
        words.append(total % 2**32)
    return words[0], words[1]


def _murmur(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def dpo_pairs(
    leads: Array, beta: float, kind: str, smoothing: Array
) -> tuple[list[float], list[float]]:
    """The loss of each pair by its lead h, nats, and its slope in h."""
    losses, slopes = [], []
    for h, eps in zip(leads, smoothing, strict=True):
        right = 1 / (1 + math.exp(-beta * h))  # σ(βh)
        wrong = 1 / (1 + math.exp(beta * h))
        if kind == "sigmoid":
            losses.append(-(1 - eps) * math.log(right) - eps * math.log(wrong))
            slopes.append(beta * (eps * right - (1 - eps) * wrong))
        elif kind == "robust":
            scale = 1 / (1 - 2 * eps)
            losses.append(scale * (eps * math.log(wrong) - (1 - eps) * math.log(right)))
            slopes.append(-beta * scale * (eps * right + (1 - eps) * wrong))
        elif kind == "ipo":
            losses.append((h - 1 / (2 * beta)) ** 2)
            slopes.append(2 * (h - 1 / (2 * beta)))
        elif kind == "hinge":
            losses.append(max(0.0, 1 - beta * h))
            slopes.append(-beta if beta * h < 1 else 0.0)
    return losses, slopes


def simpo_pairs(chosen: Array, rejected: Array, beta: float, gamma: float) -> Array:
    """The loss of each pair by the mean log-probs of its responses."""
    return np.array(
        [
            math.log(1 + math.exp(gamma - beta * (c - r)))
            for c, r in zip(chosen, rejected, strict=True)
        ]
    )


def orpo_pairs(chosen: Array, rejected: Array, weight: float) -> Array:
    """The same for ORPO, by probabilities: σ(log x) is x / (1 + x)."""
    losses = []
    for c, r in zip(np.exp(chosen), np.exp(rejected), strict=True):
        odds = (c / (1 - c)) / (r / (1 - r))
        losses.append(-math.log(c) - weight * math.log(odds / (1 + odds)))
    return np.array(losses)


def kto_texts(
    ratios: Array,
    desirable: Array,
    others: Array,
    beta: float,
    weights: tuple[float, float],
) -> tuple[Array, Array, float]:
    """(losses, slopes in the log-ratio, z0) of texts, and of mismatched ones."""
    z0 = max(0.0, sum(others) / len(others))
    losses, slopes = [], []
    for u, good in zip(ratios, desirable, strict=True):
        sign, weight = (1, weights[0]) if good else (-1, weights[1])
        value = 1 / (1 + math.exp(-sign * beta * (u - z0)))
        losses.append(weight - weight * value)
        slopes.append(-weight * sign * beta * value * (1 - value))
    return np.array(losses), np.array(slopes), z0


def attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Array,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    gradient: Array,
    prefixes: Array | None = None,
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Attention token by token, and the gradients of Σ gradient · output.

    Args:
      query: [B, H, T, d], of the last T columns; padded queries attend to nothing.
      key, value: [B, K, S, d].
      segments: [B, S], 0 at padding.
      prefixes: [B, S], a segment that a column sees beside its own, or 0.
      gradient: [B, H, T, d].

    Returns:
      [B, H, T, d], 0 at padding, and the gradients of query, key and value.
    """
    query, key, value = (np.array(x, np.float64) for x in (query, key, value))
    rows, heads, queries, _ = query.shape
    group, first = heads // key.shape[1], key.shape[2] - queries
    out = np.zeros(query.shape)
    of_q, of_k, of_v = (np.zeros(x.shape) for x in (query, key, value))
    if prefixes is None:
        prefixes = np.zeros_like(segments)
    for row, head, t in np.ndindex(rows, heads, queries):
        column, shared = first + t, head // group
        texts = {segments[row, column], prefixes[row, column]} - {0}
        visible = [
            s
            for s in range(column + 1)
            if segments[row, s] in texts and (window is None or column - s < window)
        ]
        if not visible:
            continue
        q, k, v = (
            query[row, head, t],
            key[row, shared, visible],
            value[row, shared, visible],
        )
        raw = scale * (k @ q)
        capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
        slope = 1.0 if softcap is None else 1 - np.tanh(raw / softcap) ** 2
        weight = np.exp(log_softmax(capped))
        out[row, head, t] = weight @ v
        above = np.array(gradient[row, head, t], np.float64)
        of_weight = v @ above
        of_raw = weight * (of_weight - weight @ of_weight) * slope * scale
        of_q[row, head, t] = of_raw @ k
        for place, s in enumerate(visible):
            of_k[row, shared, s] += of_raw[place] * q
            of_v[row, shared, s] += weight[place] * above
    return out, (of_q, of_k, of_v)


def importance_weights(
    log_ratio: Array, mask: Array, correction: str, cap: float, floor: float | None
) -> tuple[Array, Array]:
    """(weights, kept) of `importance.importance_weights`, token by token."""
    weights, mask_left = np.ones(mask.shape), mask.copy()
    level, what = correction.rsplit("_", 1)
    for b in range(mask.shape[0]):
        columns = [t for t in range(mask.shape[1]) if mask[b, t]]
        whole = math.fsum(float(log_ratio[b, t]) for t in columns)
        for t in columns:
            own = {
                "token": float(log_ratio[b, t]),
                "sequence": whole,
                "geometric": whole / len(columns),
            }[level]
            beyond = own > math.log(cap)
            beyond |= floor is not None and own < math.log(floor)
            if what == "truncate":
                weights[b, t] = min(math.exp(min(own, 700)), cap)
            elif what == "mask":
                weights[b, t] = 0.0 if beyond else math.exp(own)
            else:
                weights[b, t] = 0.0 if beyond else 1.0
                mask_left[b, t] = not beyond
    return weights, mask_left


def delta_rule(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    memory: Array,
    *,
    texts: Array,
) -> tuple[Array, Array]:
    """Outputs [T, H, V] of one row token by token, and the memory [H, K, V] at its end.

    A token of another text than the one before starts from 0; text 0 from `memory`.
    """
    heads = value.shape[1]
    outputs = np.zeros(value.shape)
    memory, before = np.array(memory, np.float64), 0
    for t, text in enumerate(texts):
        if text != before:
            memory, before = np.zeros(memory.shape), text
        for head in range(heads):
            own = head * key.shape[1] // heads
            k, q = np.float64(key[t, own]), np.float64(query[t, own])
            memory[head] *= math.exp(log_decay[t, head])
            change = float(beta[t, head]) * (value[t, head] - memory[head].T @ k)
            memory[head] += np.outer(k, change)
            outputs[t, head] = memory[head].T @ q
    return outputs, memory


def effective_share(weights: Array) -> float:
    """Kish's effective sample size over the number of weights."""
    values = [float(w) for w in weights]
    return math.fsum(values) ** 2 / math.fsum(w * w for w in values) / len(values)
