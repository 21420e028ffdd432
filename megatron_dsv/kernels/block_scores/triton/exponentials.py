"""Powers of two at more than the rate of the special-function units.

A multiprocessor of Hopper starts 16 ``ex2`` a cycle and 128 fused multiply-adds, and a tile of rank-16 scores needs
little beside its exponentials. So three lanes of eight take a polynomial: x = n + f with n an integer and f in
[-0.5, 0.5]; a cubic gives 2^f, at most 7.5e-5 off; n is added to the exponent field.
"""

import triton
import triton.language as tl

SAFE_LOG2 = tl.constexpr(100.0)
"""Both ways are accurate for |x| up to here, and 2^27 such powers add up without an overflow."""


def _lane(lane: int, polynomial: bool) -> str:
    """Code of one lane: operand ``lane`` = 2 ** (operand ``lane + 8`` * operand ``lane + 16``)."""
    out, x, scale = f"${lane}", f"${lane + 8}", f"${lane + 16}"
    if not polynomial:
        return f"mul.f32 t, {x}, {scale}; ex2.approx.ftz.f32 {out}, t;"
    # Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    return (f"fma.rn.f32 y, {x}, {scale}, 0f4B400000; sub.f32 t, 0f4B400000, y; fma.rn.f32 t, {x}, {scale}, t;"
            "fma.rn.f32 p, t, 0f3D61FB34, 0f3E786ED3; fma.rn.f32 p, p, t, 0f3F31798D; fma.rn.f32 p, p, t, 0f3F7FFB4A;"
            f"mov.b32 e, y; mov.b32 m, p; shl.b32 e, e, 23; add.s32 m, m, e; mov.b32 {out}, m;")


def _code(polynomial_lanes: frozenset[int]) -> str:
    lanes = " ".join(_lane(i, i in polynomial_lanes) for i in range(8))
    return "{ .reg .f32 t, y, p; .reg .b32 e, m; " + lanes + " }"


_MIXED = tl.constexpr(_code(frozenset({1, 4, 6})))
_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 8 + ["f"] * 16))


@triton.jit
def log2_fast(x, MIXED: tl.constexpr):
    """log2 of fp32 within 2^-21 of max(1, |log2|); ``tl.log2`` takes forty instructions."""
    if MIXED:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                           pack=1)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def exp2_scaled(x, scale, MIXED: tl.constexpr):
    """2 ** (x * scale) in fp32; MIXED is for |x * scale| up to SAFE_LOG2, and not for the interpreter."""
    if MIXED:
        power = tl.inline_asm_elementwise(_MIXED, _CONSTRAINTS, [x, scale], dtype=tl.float32, is_pure=True, pack=8)
    else:
        power = tl.exp2(x * scale)
    return power
