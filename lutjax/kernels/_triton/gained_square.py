"""`lutjax.gained_square` in Triton: ``y[b, i] = gain[i] x[b, i]**2``; ``dx = 2 gain x dy``.

Programs own blocks of elements, in the order of memory. Sums over samples, the cotangent of `gain`, are those of plain JAX.
"""

import jax

from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla import gained_square as plain
from lutjax.ops.gained_square import GainedSquare
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator

SPEC = Declaration(unsupported_arguments, launches=("gained_square.forward", "gained_square.backward"))


def forward(call: GainedSquare, *, device: Device) -> jax.Array:
    return _launch("forward", _square, call, device, call.x, call.gain)


def backward(
    call: GainedSquare, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    found = plain.backward(call, cotangent, needs - {"x"}, device=device)
    if "x" in needs:
        found["x"] = _launch("backward", _pull, call, device, call.x, call.gain, cotangent)
    return found


def _launch(name, function, call, device, *arrays):
    x = call.x
    how = launch_of(f"gained_square.{name}", {"elements": x.size}, device, _rule)
    dtype = x.dtype if name == "forward" else accumulator(x.dtype)
    (y,) = launch(
        function,
        *arrays,
        outputs=[jax.ShapeDtypeStruct(x.shape, dtype)],
        programs=triton.cdiv(x.size, how.rows),
        device=device,
        warps=how.warps,
        n=x.size,
        n_inputs=x.shape[1],
        ROWS=how.rows,
        ACC=getattr(tl, accumulator(x.dtype).name),
    )
    return y


def _rule(sizes: Sizes) -> Launch:
    return Launch(rows=512, outputs=1, warps=4)


@kernel
def _square(x, gain, y, c: tl.constexpr):
    at = tl.program_id(0) * c.ROWS + tl.arange(0, c.ROWS)
    value = tl.load(x + at, mask=at < c.n, other=0).to(c.ACC)
    factor = tl.load(gain + at % c.n_inputs).to(c.ACC)
    tl.store(y + at, factor * value * value, mask=at < c.n)


@kernel
def _pull(x, gain, dy, dx, c: tl.constexpr):
    at = tl.program_id(0) * c.ROWS + tl.arange(0, c.ROWS)
    value = tl.load(x + at, mask=at < c.n, other=0).to(c.ACC)
    factor = tl.load(gain + at % c.n_inputs).to(c.ACC)
    cotangent = tl.load(dy + at, mask=at < c.n, other=0).to(c.ACC)
    tl.store(dx + at, 2 * factor * value * cotangent, mask=at < c.n)
