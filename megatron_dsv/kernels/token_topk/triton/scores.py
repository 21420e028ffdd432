"""Scores of single keys as integers of the same order: device functions that every pass repeats bit by bit.

No pass stores a score, so all of them must compute the same: products and sums appear in one form only.

Dims: m query groups of a program (BLOCK_M), n keys of a tile (BLOCK_N), r predictor rank, P proxies per query group.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-2147483648)
"""Below every key: padding, and forced keys, which take no part in the search."""
BEST_RANK = tl.constexpr(0x7F7FFFFF)
"""That of the largest fp32; the worst is its negative."""


@triton.jit
def load_proxies(q_ptr, stride_qs, group, valid, PROXIES: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tuple of P tiles [m, BLOCK_R], the proxies of the groups."""
    lane = tl.arange(0, BLOCK_R)
    tiles: tl.tuple = ()
    for proxy in tl.static_range(PROXIES):
        row = group.to(tl.int64) * PROXIES + proxy
        tile = tl.load(q_ptr + (row * stride_qs)[:, None] + lane[None, :],
                       mask=valid[:, None] & (lane < RANK)[None, :], other=0.0)
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def load_lse(lse_ptr, span_stride, spans, group, valid, PROXIES: tl.constexpr, REDUCTION: tl.constexpr):
    """A tuple of P vectors [m]: log-sum-exp of each proxy in units of log 2, which only ``mass`` reads.

    lse_ptr [spans, ...] holds those of parts of the keys; a proxy without any finite logit gets 0.
    """
    tiles: tl.tuple = ()
    for proxy in tl.static_range(PROXIES):
        if REDUCTION == "mass":
            most = tl.full(group.shape, float("-inf"), tl.float32)
            total = tl.zeros(group.shape, tl.float32)
            for span in range(spans):
                place = (tl.zeros((), tl.int64) + span) * span_stride + group * PROXIES + proxy
                part = tl.load(lse_ptr + place, mask=valid, other=float("-inf"))
                larger = tl.maximum(most, part)
                reference = tl.where(larger == float("-inf"), 0.0, larger)
                total = total * tl.exp2(most - reference) + tl.exp2(part - reference)
                most = larger
            none = most == float("-inf")
            tiles = tiles + (tl.where(none, 0.0, most + tl.log2(tl.where(none, 1.0, total))),)  # noqa: RUF005
        else:
            tiles = tiles + (0.0,)  # noqa: RUF005
    return tiles


@triton.jit
def load_keys(k_ptr, stride_ks, token, length, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Tile [n, BLOCK_R] of low-rank keys; 0 for padding, whatever it holds."""
    lane = tl.arange(0, BLOCK_R)
    return tl.load(k_ptr + (token.to(tl.int64) * stride_ks)[:, None] + lane[None, :],
                   mask=(token < length)[:, None] & (lane < RANK)[None, :], other=0.0)


@triton.jit
def scores(proxies, lse, k, scale_log2, PROXIES: tl.constexpr, REDUCTION: tl.constexpr):
    """fp32 [m, n] that rank like the scores; NaN and infinities as they come."""
    k_t = tl.trans(k)
    score = tl.dot(proxies[0], k_t, input_precision="ieee")
    if REDUCTION == "mass":
        score = tl.exp2(tl.fma(score, scale_log2, -lse[0][:, None]))
        for proxy in tl.static_range(1, PROXIES):
            logits = tl.dot(proxies[proxy], k_t, input_precision="ieee")
            score += tl.exp2(tl.fma(logits, scale_log2, -lse[proxy][:, None]))
    elif REDUCTION == "max":
        for proxy in tl.static_range(1, PROXIES):
            logits = tl.dot(proxies[proxy], k_t, input_precision="ieee")
            score = tl.where((score > logits) | (score != score), score, logits)
    else:
        total = tl.full(score.shape, 1.0, tl.float32)
        for proxy in tl.static_range(1, PROXIES):
            logits = tl.dot(proxies[proxy], k_t, input_precision="ieee")
            larger = tl.maximum(score, logits)
            total = tl.fma(total, tl.exp2((score - larger) * scale_log2), tl.exp2((logits - larger) * scale_log2))
            score = larger
        score = tl.fma(score, scale_log2, tl.log2(total))
    return score


@triton.jit
def ranks(proxies, lse, k, scale_log2, PROXIES: tl.constexpr, REDUCTION: tl.constexpr):
    """int32 [m, n] in the order of the scores: NaN and -inf come last, +0 and -0 are one. All above ``NOTHING``."""
    score = scores(proxies, lse, k, scale_log2, PROXIES, REDUCTION)
    score = tl.where(score == score, score, -3.4028234663852886e38)
    score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, (bits ^ 0x7FFFFFFF) + 1, bits)


@triton.jit
def score_of_rank(rank):
    """fp32: the score with this rank, which must be that of a finite number."""
    return tl.where(rank < 0, (rank - 1) ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def own_tokens(group_ids_ptr, group, valid, KEEP_OWN: tl.constexpr, Q_BLOCK: tl.constexpr):
    """(begin, end) int32 [m]: the group's own tokens, none unless ``KEEP_OWN``."""
    number = tl.load(group_ids_ptr + group, mask=valid, other=0).to(tl.int32)
    begin = number * Q_BLOCK if KEEP_OWN else number * 0
    end = begin + Q_BLOCK if KEEP_OWN else begin
    return tl.where(valid, begin, 0), tl.where(valid, end, 0)


@triton.jit
def own_span(begin, end):
    """(first, last): all own tokens of the groups lie in first..last - 1."""
    some = end > begin
    return tl.min(tl.where(some, begin, 2147483647), 0), tl.max(tl.where(some, end, 0), 0)


@triton.jit
def needs_care(first, length, prefix, own_first, own_last, BLOCK_N: tl.constexpr):
    """Whether the tile of keys from ``first`` on may hold padding or a forced key of any group."""
    return (first < prefix) | (first + BLOCK_N > length) | ((first < own_last) & (first + BLOCK_N > own_first))


@triton.jit
def forced(token, length, prefix, begin, end):
    """bool [m, n]: keys that stay whatever their score."""
    own = (token[None, :] >= begin[:, None]) & (token[None, :] < end[:, None])
    return ((token < prefix)[None, :] | own) & (token < length)[None, :]
