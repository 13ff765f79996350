"""`lutjax.scored_lut` in Triton: margins, scores and weighted rows in one kernel per pass.

Formula for sample ``b``, group ``g``, table ``t`` of the group, its margins ``u``, and the
coefficients ``c[k]`` that the read computes from ``u`` and ``scalars`` for its ways ``k``::

    i[0] = sum over comparisons j of 2**j where u[j] > 0
    i[1] = i[0] ^ 2**(number of the smallest |u|)
    y[b, g] = sum over t and k of keep[b, t] * c[k] * weights[t, i[k]]
    dc[k] = keep[b, t] * <dy[b, g], weights[t, i[k]]>, passed on to u and scalars
    dx[b, g, first end] += du;   dx[b, g, second end] -= du
    dweights[t, i[k]] += keep[b, t] * c[k] * dy[b, g]

Work: a program computes 32 samples and up to 128 outputs, and loops over a table block of one
group. The grid is one-dimensional: sample blocks change fastest, then output blocks, table blocks,
and groups. The backward pass recomputes all coefficients and saves nothing.

Layout: inputs are transposed to ``[H, I, B]`` and ``keep`` to ``[T, B]``, so the 32 samples of a
program are contiguous. Table rows are contiguous in outputs, and concurrent programs read the same
tables, which stay in the L2 cache. Kernels that read no rows keep inputs in shared memory.

Numerics: sums are float32, in table order within a program, then over table blocks in a fixed
order. A coefficient of 0 hides a row with infinities. Table and input gradients use float atomics,
so their last bits differ between runs, except where `_owned_columns` sums tables. Scalar gradients
are partial sums of programs. Integer tables are read as int8 and scaled by powers of two; without
``keep`` their sums are int32.

Custom reads, float64 and fixed point run margins and the read in plain JAX, and the rows in
`_weighted_rows`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import reads
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import (
    _gate_tiles,
    _owned_columns,
    _owned_ptx,
    _row_additions,
    _row_tiles,
    _weighted_rows,
    detect,
)
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import few_additions, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla import scored_lut as plain
from lutjax.ops.scored_lut import ScoredLut
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values import _quantized
from lutjax.values._row_rules import RowState

# Stands for a NaN among integer sums. `_quantized.MOST_ADDENDS` keeps every sum above this value.
_UNKNOWN = -(2**31)


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, ScoredLut)
    return unsupported_arguments(request, "int8") or few_additions(
        request, call.x.shape[0] * call.weights.shape[0]
    )


SPEC = Declaration(
    _supports,
    launches=(
        "scored_lut.forward",
        "scored_lut.backward",
        "scored_lut.update",
        "scored_lut.rows",
        "scored_lut.inputs",
    ),
)


def forward(call: ScoredLut, *, device: Device) -> jax.Array:
    if not _is_fused(call):
        return plain.forward_by(_weighted_rows, call, device=device)
    tile = _Tile.create("forward", _forward_rule, call, device)
    in_integers = tile.in_integers
    dtype = jnp.dtype(jnp.float32) if call.weights.dtype == jnp.int8 else call.weights.dtype
    # A single program rounds its float32 sum once, to the dtype of the outputs. Partial sums stay
    # in float32 until they are added.
    part = dtype if tile.n_blocks == 1 and not call.sum_groups else jnp.dtype(jnp.float32)
    # Partial integer sums are scaled after their addition: the total may exceed int32, and a scaled
    # part would be rounded.
    in_parts = in_integers and tile.n_blocks > 1
    shape = (tile.n_blocks, len(call.x), call.groups, call.weights.shape[2])
    (sums,) = launch(
        _sum_rows,
        *_inputs(tile),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32 if in_parts else part)],
        **tile.arguments,
        IN_PARTS=in_parts,
    )
    y = _finish_sums(sums, call) if in_parts else _row_tiles.sum_of_parts(sums)
    return (jnp.sum(y, 1, keepdims=True, dtype=y.dtype) if call.sum_groups else y).astype(dtype)


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if not _is_fused(call) or call.weights.dtype == jnp.int8:
        return plain.backward_by(_weighted_rows, call, cotangent, needs, device=device)
    # Owned sums store the rows and factors of all samples first; the samples are split so that
    # these arrays stay below a fixed size.
    n_parts = _owned_columns.count_parts(
        call.weights.shape, call.groups, _count_ways(call), len(call.x)
    )
    if "weights" not in needs or n_parts <= 1:
        return _pulled_back(call, cotangent, needs, "weights" in needs and n_parts == 1, device)

    def run_part(part: ScoredLut, dy: jax.Array) -> dict[str, jax.Array]:
        return _pulled_back(part, dy, needs, True, device)

    return run_parts(call, n_parts, run_part, cotangent)


def run_parts(
    call: ScoredLut, n_parts: int, of_part: Callable[..., dict[str, jax.Array]], *arrays: jax.Array
) -> dict[str, jax.Array]:
    """Run a call in parts of its samples, one after the other, and combine the results by name.

    Args:
      of_part: computes outputs or gradients of a call with some of the samples, from the same
        samples of `arrays`. Results `y`, `x` and `keep` are concatenated, all others are added.
      *arrays: arrays with a sample axis in front.
    """
    if n_parts <= 1:
        return of_part(call, *arrays)
    keeps = [None] * n_parts if call.keep is None else jnp.array_split(call.keep, n_parts)
    xs, *others = (jnp.array_split(a, n_parts) for a in (call.x, *arrays))
    found: dict[str, list[jax.Array]] = {}
    for x, keep, *more in zip(xs, keeps, *others, strict=True):
        # Without the barrier XLA could run parts at the same time, and would then keep the
        # intermediate arrays of all parts in memory.
        x, found = jax.lax.optimization_barrier((x, found))
        for name, a in of_part(call.replace(x=x, keep=keep), *more).items():
            before = found.get(name, [])
            of_samples = name in ("y", "x", "keep") or not before
            found[name] = [*before, a] if of_samples else [before[0] + a]
    return {name: jnp.concatenate(of_parts) for name, of_parts in found.items()}


def _pulled_back(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], owned: bool, device: Device
) -> dict[str, jax.Array]:
    """Return gradients; with `owned`, `_owned_columns` sums the table gradients."""
    tile = _Tile.create("backward", _backward_rule, call, device, _PIECE)
    n, n_inputs_of, n_inputs = call.x.shape
    tables, n_scalars = call.weights.shape, len(call.scalars)
    # A kernel always has the same parameters; an output that is not needed has one element.
    nothing = jax.ShapeDtypeStruct((1,), "float32")

    def output_shape(needed: bool, *shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype) if needed else nothing

    d_scalars, d_keep, rows, factors, dx, d_weights = launch(
        _differentiate,
        *_inputs(tile),
        cotangent,
        outputs=[
            output_shape("scalars" in needs, max(n_scalars, 1), tile.programs),
            # Each output block holds a part of the inner product that is the gradient of
            # `keep`.
            output_shape("keep" in needs, tile.output_blocks, tables[0], n),
            # The kernel writes rows and factors for `_owned_columns` in place of adding to the
            # tables.
            output_shape(owned, tables[0], n, dtype="int32"),
            output_shape(owned, _count_ways(call), tables[0], n),
        ],
        zeroed=[
            # Atomics add to these arrays, so they start at zero.
            output_shape("x" in needs, n_inputs_of, n_inputs, n),
            output_shape("weights" in needs and not owned, *tables),
        ],
        **tile.arguments,
        OF_X="x" in needs,
        OF_WEIGHTS="weights" in needs and not owned,
        OF_ROWS=owned,
        OF_SCALARS="scalars" in needs,
        OF_KEEP="keep" in needs,
    )

    def table_gradient() -> jax.Array:
        if not owned:
            return d_weights
        return _owned_columns.sums(rows, factors, cotangent, tables, call.groups, device)

    found: dict[str, Callable[[], jax.Array]] = {
        "x": lambda: dx.transpose(2, 0, 1),
        "weights": table_gradient,
        "scalars": lambda: jnp.sum(d_scalars, 1)[:n_scalars],
        "keep": lambda: _row_tiles.sum_of_parts(d_keep).T,
    }
    return {name: cotangent() for name, cotangent in found.items() if name in needs}


def rows_and_factors(call: ScoredLut, device: Device) -> tuple[jax.Array, jax.Array]:
    """Return the read rows and their factors.

    Returns:
      Rows, int32 ``[T, B]``, as `_owned_columns.places` packs them, and factors ``[K, T, B]`` of
      the ways with values.
    """
    tile = _Tile.create("rows", _rows_rule, call, device)
    shape = len(call.weights), len(call.x)
    inputs, options = _staged_inputs(tile, 1)
    rows, factors = launch(
        _find_rows,
        *inputs,
        outputs=[
            jax.ShapeDtypeStruct(shape, "int32"),
            jax.ShapeDtypeStruct((_count_ways(call), *shape), "float32"),
        ],
        **options,
    )
    return rows, factors


def sums_of_rows(
    call: ScoredLut, rows: jax.Array, factors: jax.Array, cotangent: jax.Array, device: Device
) -> jax.Array:
    """Return the table gradient from the results of `rows_and_factors`."""
    if not _owned_columns.fits(call.weights.shape, call.groups, len(call.x)):
        return _pulled_back(call, cotangent, frozenset({"weights"}), False, device)["weights"]
    return _owned_columns.sums(rows, factors, cotangent, call.weights.shape, call.groups, device)


def recompute_nonfinite(
    call: ScoredLut, y: jax.Array, strange: jax.Array, samples: int, device: Device
) -> jax.Array:
    """Recompute non-finite outputs without the rows whose coefficient is 0.

    A row with infinities and a coefficient of 0 contributes nothing, but their product is NaN.

    Args:
      y: outputs ``[B, G, O]``.
      strange: int32 ``[G, B / samples, 32]``, nonzero if some outputs of these samples are not
      finite. samples: number of samples that share flags.
    """
    tile = _Tile.create("mended", _whole_rule, call, device)
    x, weights, ends, scalars, keep, _ = _inputs(tile)
    (y,) = launch(
        _mend,
        x,
        weights,
        ends,
        scalars,
        keep,
        strange,
        in_place=[y],
        **tile.arguments,
        SAMPLES=samples,
    )
    return y


def pull_back_products(
    call: ScoredLut, products: jax.Array, needs: frozenset[str], device: Device
) -> dict[str, jax.Array]:
    """Return all gradients except that of the tables.

    Args:
      products: inner products of the row of each way and the output gradient, ``[K, T, B]``.
    """
    tile = _Tile.create("inputs", _rows_rule, call, device)
    n, n_inputs_of, n_inputs = call.x.shape
    n_scalars, nothing = len(call.scalars), jax.ShapeDtypeStruct((1,), "float32")

    def output_shape(needed: bool, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32") if needed else nothing

    # A column holds the gradient sums, and the inputs as well if there is room.
    inputs, options = _staged_inputs(tile, 2 if "x" in needs else 1)
    # Programs with the same inputs write separate parts, which are added in a fixed order.
    of_x, of_input = (tile.n_blocks, call.groups, n_inputs, n), (n_inputs_of, n_inputs, n)
    d_scalars, d_keep, dx = launch(
        _pull_back,
        *inputs,
        products,
        outputs=[
            output_shape("scalars" in needs, max(n_scalars, 1), tile.programs),
            output_shape("keep" in needs, len(call.weights), n),
            output_shape("x" in needs, *of_x),
        ],
        **options,
        OF_X="x" in needs,
        OF_SCALARS="scalars" in needs,
        OF_KEEP="keep" in needs,
        CLEAR=_owned_ptx.CLEAR,
        ADD=_owned_ptx.ADD,
        READ=_owned_ptx.READ,
    )
    found = {
        "x": lambda: _row_tiles.sum_of_parts(dx.reshape(-1, *of_input)).transpose(2, 0, 1),
        "scalars": lambda: jnp.sum(d_scalars, 1)[:n_scalars],
        "keep": lambda: d_keep.T,
    }
    return {name: cotangent() for name, cotangent in found.items() if name in needs}


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    adds = step.rule.additive and not step.differs_by_row and call.weights.dtype == jnp.float32
    if call.read.valued == 0:
        return plain.update(call, cotangent, step, device=device)
    if not (adds and _is_fused(call)):
        return _row_additions.update(
            call, step, functools.partial(_add_ways, call, cotangent, device), device=device
        )
    tile = _Tile.create("update", _backward_rule, call, device)
    rate = step.rate.astype(jnp.float32)
    factor = -rate if step.factor is None else -rate * step.factor.astype(jnp.float32)
    # An addition does not read rows, so tables need no conversion to int8.
    x, _, ends, scalars, keep, _ = _inputs(tile, reads_tables=False)
    (weights,) = launch(
        _add_rows,
        x,
        ends,
        scalars,
        keep,
        cotangent,
        factor.reshape(1),
        in_place=[call.weights],
        **tile.arguments,
    )
    return weights, step.state


def _add_ways(
    call: ScoredLut, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    rows = _weighted_rows.Reads.from_ways(plain.ways_of(call), call.groups)
    dy = plain.broadcast_to_groups(call, dy)
    return _weighted_rows.weighted_add(call.weights, addition, rows, dy, device, call.accumulate)


# ------------------------------------------------------------------------------------- calls
@dataclasses.dataclass(frozen=True)
class _Formula:
    """Description of a read for kernels.

    Attributes:
      family: family of its coefficients.
      ways: number of coefficients.
      hard: whether the second coefficient is 0 and only has a gradient.
      rounding: constants of a read whose coefficients are powers of two.
    """

    family: str
    ways: int = 2
    hard: bool = False
    rounding: reads.Rounding | None = None

    @property
    def valued(self) -> int:
        """Number of ways that have values."""
        return 1 if self.hard else self.ways


def _formula(read: reads.Read) -> _Formula | None:
    """Return the formula of a built-in read; None for other reads, also subclasses."""
    if type(read) in (reads.Hard, reads.Blend):
        return _Formula("blend", hard=type(read) is reads.Hard)
    if type(read) is reads.SoftSign:
        return _Formula("soft_sign", hard=read.hard)
    if type(read) is reads.Confidence:
        return _Formula("confidence", read.ways)
    if type(read) is reads.PowersOfTwo:
        return _Formula("powers", read.ways, rounding=read.rounding)
    return None


def all_ways(call: ScoredLut) -> int:
    """Return the number of rows per table that a built-in read accesses for values or gradients."""
    formula = _formula(call.read)
    assert formula is not None
    return formula.ways


def _count_ways(call: ScoredLut) -> int:
    """Return the number of ways with values in a built-in read."""
    formula = _formula(call.read)
    assert formula is not None
    return formula.valued


def _is_fused(call: ScoredLut) -> bool:
    """Return True if one kernel computes a call: a built-in read in at most float32."""
    wide = any(a is not None and a.dtype == jnp.float64 for a in (call.x, call.weights, call.keep))
    return _formula(call.read) is not None and call.accumulate is None and not wide


def _inputs(tile: "_Tile", reads_tables: bool = True) -> tuple[jax.Array, ...]:
    """Return the arrays that every kernel reads; a placeholder stands for a missing one."""
    call = tile.call
    n_groups, weights, nothing = call.groups, call.weights, jnp.zeros((1,), jnp.int32)
    if reads_tables and call.exponents is not None and weights.dtype != jnp.int8:
        weights = _quantized.round_to_scale(weights, call.exponents).astype(jnp.int8)
    n_inputs_of, n_inputs = call.x.shape[1:]
    # Ids are clamped once here, not by every program.
    ends = jnp.clip(call.anchors, 0, max(n_inputs - 1, 0))
    # Ids of groups with their own inputs become ids in the flattened ``[H * I]``, so kernels need
    # no group to find an input.
    if n_inputs_of > 1:
        group = jnp.arange(len(ends), dtype=jnp.int32) // max(len(ends) // n_groups, 1)
        ends += n_inputs * group.reshape(-1, *(1,) * (ends.ndim - 1))
    # Offsets of inputs in place of ids save a multiplication for every comparison in the kernel.
    if tile.in_int32:
        ends *= len(call.x)
    return (
        call.x.transpose(1, 2, 0),
        weights,
        ends,
        call.scalars if len(call.scalars) else nothing.astype(jnp.float32),
        nothing if call.keep is None else call.keep.T,
        nothing if call.exponents is None else call.exponents,
    )


def _staged_inputs(tile: "_Tile", columns: int) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Return the arrays and constants of kernels that copy inputs to shared memory.

    Args:
      columns: elements in shared memory per input and sample: the input, and its gradient sum.
    """
    x, _, _, scalars, keep, _ = _inputs(tile, reads_tables=False)
    n_inputs_of, n_inputs = tile.call.x.shape[1:]
    # Bytes between two inputs in shared memory: the float32 elements of all samples of a program.
    each = 4 * tile.rows.config.rows
    # Larger inputs are read through the caches; shared memory then holds at most the gradient sums.
    staged = columns * each * n_inputs <= _MOST_STAGED
    # Ends are byte offsets into a column of shared memory, or ids.
    ends = jnp.clip(tile.call.anchors, 0, max(n_inputs - 1, 0)) * (each if staged else 1)
    options = {
        **tile.arguments,
        "SCALED": False,
        "STAGED": staged,
        "SHARED_INPUT": n_inputs_of == 1,
        "n_inputs": n_inputs,
        "BASE": _owned_ptx.base(
            "lutjax_inputs", max((columns if staged else columns - 1) * each * n_inputs, each)
        ),
        "STORE": _owned_ptx.STORE,
        "LOAD": _owned_ptx.LOAD,
    }
    return (x, ends, scalars, keep), options


def _finish_sums(sums: jax.Array, call: ScoredLut) -> jax.Array:
    """Return the outputs for partial integer sums."""
    total, unknown = _quantized.WideSum.from_parts(sums), jnp.any(sums == _UNKNOWN, (0, 3))
    return plain.in_floats(call.replace(sum_groups=False), total, unknown, jnp.float32)


# ------------------------------------------------------------------------------------- launches
@dataclasses.dataclass(frozen=True)
class _Tile:
    """Programs of a call: tiles of samples and outputs, and a table block of a group.

    Attributes:
      rows: tiles of one group.
      piece: size of the equal output tiles of a program; 0 for one or two tiles.
    """

    call: ScoredLut
    rows: _row_tiles.RowTile
    piece: int

    @classmethod
    def create(
        cls,
        kernel: str,
        rule: Callable[[Sizes], Launch],
        call: ScoredLut,
        device: Device,
        piece: int = 0,
    ) -> "_Tile":
        n_tables, _, n_outputs = call.weights.shape
        n, each = len(call.x), n_tables // call.groups
        formula = _formula(call.read)
        assert formula is not None
        sizes = _row_tiles.sizes(
            call.weights, samples=n, detectors=each, groups=call.groups, ways=formula.valued
        )
        how = launch_of(f"scored_lut.{kernel}", sizes, device, rule)
        # Equal tiles let `_product` add the products of all tiles before it reduces over lanes.
        divided = piece and n_outputs % piece == 0 and n_outputs <= _OUTPUTS
        tile = cls(
            call, _row_tiles.RowTile(how, n, n_outputs, each, device), piece if divided else 0
        )
        # More tables per program could overflow an int32 sum.
        most = _quantized.MOST_ADDENDS // formula.ways
        if not tile.in_integers or tile.rows.detectors <= most:
            return tile
        rows = dataclasses.replace(tile.rows, config=dataclasses.replace(how, detectors=most))
        return dataclasses.replace(tile, rows=rows)

    @property
    def n_blocks(self) -> int:
        """Number of table blocks of a group."""
        return self.rows.detector_blocks

    @property
    def pieces(self) -> tuple[int, ...]:
        """Sizes of the output tiles of a program: equal, or one or two, the second one smaller."""
        first, n_outputs = self.rows.outputs, self.rows.n_outputs
        if self.piece:
            return (self.piece,) * (n_outputs // self.piece)
        # Triton tiles are powers of two. Tiles of 32 and 16 hold 48 outputs without the unused
        # lanes of one tile of 64.
        rest = triton.next_power_of_2(max(n_outputs - first, 1))
        return (first, rest) if first < n_outputs and rest < first else (first,)

    @property
    def output_blocks(self) -> int:
        return 1 if len(self.pieces) > 1 else triton.cdiv(self.rows.n_outputs, self.pieces[0])

    @property
    def programs(self) -> int:
        return (
            triton.cdiv(self.rows.n_reads, self.rows.config.rows)
            * self.output_blocks
            * self.n_blocks
            * self.call.groups
        )

    @property
    def in_int32(self) -> bool:
        """True if int32 can index every array."""
        call, n = self.call, len(self.call.x)
        n_tables, _, n_outputs = call.weights.shape
        # Largest arrays of a sample: `d_keep` of all output blocks, outputs of all groups, and
        # inputs. Smaller offsets need fewer registers and instructions.
        of_sample = max(
            self.output_blocks * n_tables, call.groups * max(n_outputs, call.x.shape[2])
        )
        return self.n_blocks * max(call.weights.size, n * of_sample) < 2**31

    @property
    def in_integers(self) -> bool:
        """True if sums are integers; `keep` is a float and makes them floats."""
        return self.call.exponents is not None and self.call.keep is None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `launch` and constants of kernels."""
        call, formula = self.call, _formula(self.call.read)
        assert formula is not None
        n_tables, n_rows, n_outputs = call.weights.shape
        return {
            "programs": self.programs if call.weights.size else 0,
            "device": self.rows.device,
            "warps": self.rows.config.warps,
            "n_samples": len(call.x),
            "n_groups": call.groups,
            "n_tables": n_tables,
            "n_each": n_tables // call.groups,
            "n_rows": n_rows,
            "n_outputs": n_outputs,
            "n_comparisons": call.anchors.shape[1],
            "n_ends": 2 if call.anchors.ndim == 3 else 1,
            "n_scalars": len(call.scalars),
            "n_programs": self.programs,
            # Also for fewer than 32 samples: in a smaller tile several threads would compute the
            # same sample.
            "ROWS": self.rows.config.rows,
            "FIRST": self.pieces[0],
            # All tiles but the last one are as large as the first.
            "LAST": self.pieces[-1],
            "PIECES": len(self.pieces),
            "EQUAL": len(set(self.pieces)) == 1,
            # Without a remainder, loads and additions need no mask over outputs.
            "WHOLE": self.output_blocks == 1 and sum(self.pieces) == n_outputs,
            "BLOCKS": self.output_blocks,
            "DETECTORS": self.rows.detectors,
            "PARTS": self.n_blocks,
            "FAMILY": formula.family,
            "SCORED": formula.family in ("confidence", "powers"),
            "WAYS": formula.ways,
            "HARD": formula.hard,
            "KEEP": call.keep is not None,
            "ROUNDED": call.exponents is not None,
            "INTEGERS": self.in_integers,
            # See `_table`: rotation pays off only with two additions to a table.
            "ROTATED": formula.valued == 2,
            "SUM": tl.int32 if self.in_integers else tl.float32,
            "SHIFT": -_quantized.SHIFT,
            "UNKNOWN": _UNKNOWN,
            "BEYOND_SCALES": _quantized.BEYOND_SCALES,
            "SUM_GROUPS": call.sum_groups,
            "INDEX": tl.int32 if self.in_int32 else tl.int64,
            "SCALED": self.in_int32,
            "STAGED": False,
            **_constants(formula.rounding),
        }


def _constants(of: reads.Rounding | None) -> dict[str, Any]:
    """Return the rounding constants in the types in which kernels compare them."""
    if of is None:
        return {}
    return {
        "LOWEST": float(of.lowest),
        "HIGHEST": float(of.highest),
        "MOST_SHIFT": float(of.most_shift),
        "LEAST_EXACT": of.least_exact,
        "MOST_RATIO": of.most_ratio,
        "FARTHEST": of.farthest,
        "NEGLIGIBLE": of.negligible,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    # Two tiles have fewer unused lanes than one.
    return _rule(sizes, _select_tile_size(sizes["outputs"]), enough=4096, most=sizes["detectors"])


def _backward_rule(sizes: Sizes) -> Launch:
    # One tile adds to a row with fewer instructions. With a single addition per table, reads
    # dominate and two tiles are better.
    outputs = triton.next_power_of_2(max(sizes["outputs"], 1))
    if sizes["ways"] == 1:
        outputs = _select_tile_size(sizes["outputs"])
    return _rule(sizes, outputs, enough=8192, most=32)


def _select_tile_size(n: int) -> int:
    """Return the first of two tile sizes that hold `n`, or the size of one tile.

    Two powers of two hold ``3/4`` of the next power of two. Up to 8 outputs one tile suffices.
    """
    whole = triton.next_power_of_2(max(n, 1))
    return whole // 2 if 8 < n <= whole * 3 // 4 else whole


def _whole_rule(sizes: Sizes) -> Launch:
    """Return tiles whose programs process all tables of a group."""
    rule = _forward_rule(sizes)
    return dataclasses.replace(rule, detectors=sizes["detectors"])


def _rows_rule(sizes: Sizes) -> Launch:
    # These kernels read no rows: one block covers all outputs, and outputs do not add programs.
    rule = _rule({**sizes, "outputs": 1}, 1, enough=8192, most=sizes["detectors"])
    return dataclasses.replace(rule, outputs=triton.next_power_of_2(max(sizes["outputs"], 1)))


# Bytes of shared memory for the inputs of a program. Larger ones would leave too few concurrent
# programs.
_MOST_STAGED = 2**13
_OUTPUTS = 128  # most outputs of a program
# Outputs of an equal tile, see `_product`.
_PIECE = 16


def _rule(sizes: Sizes, outputs: int, enough: int, most: int) -> Launch:
    """Return tiles of 32 samples, and table blocks for enough programs."""
    # 32 samples are one warp, and each thread owns a sample in everything that precedes the rows.
    # Blocks of tables are chosen so that there are about `enough` programs.
    outputs = min(outputs, _OUTPUTS)
    programs = (
        triton.cdiv(sizes["samples"], 32) * sizes["groups"] * max(sizes["outputs"] // outputs, 1)
    )
    detectors = _row_tiles.split(programs, sizes["detectors"], enough)
    return Launch(32, outputs, min(detectors, most), warps=max(outputs // 64, 1))


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(x, weights, ends, scalars, keep, exponents, parts, c: tl.constexpr):
    sample, exists, block, part, group, first, last = _locate_program(c)
    s = _scalars(scalars, c)
    outputs = _outputs(block, c)
    totals, unknown = _sums(
        x, weights, ends, keep, first, last, sample, exists, outputs, s, c.HARD, c
    )
    if not (c.INTEGERS or c.HARD):
        # The first pass reads rows without a mask on coefficients, which is faster, but turns 0 *
        # infinity into NaN. If a sum of the program is not finite, the second pass skips rows with
        # coefficient 0. The comparison is false for NaN, so it finds NaN and infinities.
        strange = tl.zeros((c.ROWS,), tl.int32)
        for p in tl.static_range(c.PIECES):
            strange += tl.sum(((tl.abs(totals[p]) < float("inf")) == 0).to(tl.int32), 1)
        if tl.sum(strange, 0) != 0:
            totals, unknown = _sums(
                x, weights, ends, keep, first, last, sample, exists, outputs, s, True, c
            )
    # Parts are ``[table blocks, B, G, O]``.
    to = ((part * c.n_samples + sample) * c.n_groups + group) * c.n_outputs
    for p in tl.static_range(c.PIECES):
        total = totals[p]
        # The units of integer coefficients are ``2**-SHIFT``, which joins the scale of the table.
        if c.INTEGERS and not c.IN_PARTS:
            total = (
                total.to(tl.float32) * _scales(exponents, group, outputs[p], c.SHIFT, c)[None, :]
            )
        elif c.ROUNDED and not c.INTEGERS:
            total *= _scales(exponents, group, outputs[p], 0, c)[None, :]
        # An integer sum cannot hold NaN, so a flag replaces it by NaN, or by `UNKNOWN` in a partial
        # sum.
        if c.INTEGERS:
            total = tl.where(
                unknown[:, None] != 0, c.UNKNOWN if c.IN_PARTS else float("nan"), total
            )
        mask = exists[:, None] & (outputs[p] < c.n_outputs)[None, :]
        tl.store(
            parts + to[:, None] + outputs[p][None, :], total.to(parts.dtype.element_ty), mask=mask
        )


@kernel
def _mend(x, weights, ends, scalars, keep, strange, unused, y, c: tl.constexpr):
    sample, exists, block, _part, group, first, last = _locate_program(c)
    outputs = _outputs(block, c)
    to = y + (sample * c.n_groups + group)[:, None] * c.n_outputs
    # Flags exist per `SAMPLES` samples and 32 lanes of the kernel that wrote them. No program spans
    # two sets of flags.
    of_samples = tl.program_id(0) % (c.n_samples // c.ROWS) * c.ROWS // c.SAMPLES
    flags = tl.load(
        strange + (group * (c.n_samples // c.SAMPLES) + of_samples) * 32 + tl.arange(0, 32)
    )
    # Most programs end here, without reading inputs.
    if tl.sum(flags, 0) != 0:
        s = _scalars(scalars, c)
        totals, _unknown = _sums(
            x, weights, ends, keep, first, last, sample, exists, outputs, s, True, c
        )
        for p in tl.static_range(c.PIECES):
            mask = exists[:, None] & (outputs[p] < c.n_outputs)[None, :]
            tl.store(to + outputs[p][None, :], totals[p], mask=mask)


@kernel
def _sums(
    x,
    weights,
    ends,
    keep,
    first,
    last,
    sample,
    exists,
    outputs,
    s,
    SKIP: tl.constexpr,
    c: tl.constexpr,
):
    """Sum weighted rows, and flag integer sums with a NaN coefficient.

    With `SKIP`, rows with coefficient 0 are not read.
    """
    totals = _gate_tiles.empty_tuple()
    for p in tl.static_range(c.PIECES):
        totals += (tl.zeros((c.ROWS, c.FIRST if p < c.PIECES - 1 else c.LAST), c.SUM),)
    unknown = tl.zeros((c.ROWS,), tl.int32)
    for t in range(first, last):
        u = _margins(x, ends, t, sample, exists, c)
        index, flip, closest = _address(u, c)
        factors = _apply_keep(_coefficients(u, closest, s, c), keep, t, sample, exists, c)
        if c.INTEGERS:
            unknown |= (factors[0] != factors[0]).to(tl.int32)
        row, factor = index, factors[0]
        # A loop at run time keeps only the registers of one way alive.
        for _way in range(1 if c.HARD else c.WAYS):
            totals = _plus_row(totals, weights, _start(t, row, c), factor, outputs, SKIP, c)
            row, factor = index ^ flip, factors[1]
    return totals, unknown


@kernel
def _differentiate(
    x,
    weights,
    ends,
    scalars,
    keep,
    exponents,
    dy,
    d_scalars,
    d_keep,
    rows,
    row_factors,
    dx,
    d_weights,
    c: tl.constexpr,
):
    sample, exists, block, _, group, first, last = _locate_program(c)
    s = _scalars(scalars, c)
    outputs = _outputs(block, c)
    cotangents = _cotangents(dy, sample, exists, group, outputs, c)
    nothing = tl.zeros((c.ROWS,), tl.float32)
    of_scalars = (nothing, nothing, nothing)
    for i in range(first, last):
        t = _table(i, first, last, c.ROTATED)
        u = _margins(x, ends, t, sample, exists, c)
        index, flip, closest = _address(u, c)
        found = _coefficients(u, closest, s, c)
        factors = _apply_keep(found, keep, t, sample, exists, c)
        # All output blocks compute the same rows; the first one writes them.
        if c.OF_ROWS:
            _write_rows(
                rows, row_factors, index, flip, factors, t, sample, exists & (block == 0), c
            )
        # A run-time loop over ways reuses the registers of one way for the next. Triton treats a
        # variable as loop-invariant if it ends the loop with the value of another variable, so
        # `main` and `other` start as separate tensors.
        row, factor = index, factors[0]
        main, other = tl.zeros((c.ROWS,), tl.float32), tl.zeros((c.ROWS,), tl.float32)
        for way in range(c.WAYS):
            start = _start(t, row, c)
            if c.OF_X or c.OF_SCALARS or c.OF_KEEP:
                other = _product(weights, start, exponents, group, cotangents, outputs, c)
                # After the loop, `main` holds the product of the first way and `other` that of the
                # last one.
                main = tl.where(way == 0, other, main)
            if c.OF_WEIGHTS:
                # The second row of a hard read affects margins but has no coefficient in the
                # output.
                if c.HARD:
                    factor = tl.where(way == 0, factor, 0.0)
                _add(d_weights, start, factor, exists, cotangents, outputs, c)
            row, factor = index ^ flip, factors[1]
        if c.OF_X or c.OF_SCALARS or c.OF_KEEP:
            # Output blocks write separate parts of the gradient of `keep`.
            to = d_keep + block * c.n_tables * c.n_samples
            of_scalars = _plus(
                of_scalars,
                _pull_table(
                    u,
                    flip,
                    closest,
                    found,
                    (main, other),
                    keep,
                    to,
                    dx,
                    ends,
                    t,
                    sample,
                    exists,
                    s,
                    False,
                    c,
                ),
            )
    _write_scalars(d_scalars, of_scalars, exists, c)


@kernel
def _pull_table(
    u,
    flip,
    closest,
    found,
    products,
    keep,
    d_keep,
    dx,
    ends,
    t,
    sample,
    exists,
    s,
    HERE: tl.constexpr,
    c: tl.constexpr,
):
    """Add the contribution of a table to the gradients, and return that of the scalars.

    Args:
      products: inner products of the rows and the output gradient.
      HERE: whether `dx` is a column of shared memory.
    """
    here = t.to(c.INDEX) * c.n_samples + sample
    # The gradient of `keep` uses the products before `keep` scales them.
    if c.OF_KEEP:
        of_keep = found[0] * products[0]
        if c.WAYS == 2:
            of_keep += found[1] * products[1]
        tl.store(d_keep + here, of_keep, mask=exists)
    if c.KEEP:
        factor = tl.load(keep + here, mask=exists, other=0).to(tl.float32)
        products = (products[0] * factor, products[1] * factor)
    of_closest, of_total, of_logs, of_each = _pull(u, closest, found, products, s, c)
    if c.OF_X:
        _add_to_inputs(
            dx, u, flip, of_closest, of_total, of_logs, ends, t, sample, exists, s, HERE, c
        )
    return of_each


@kernel
def _write_scalars(d_scalars, of_scalars, exists, c: tl.constexpr):
    if c.OF_SCALARS:
        # One partial sum per program and scalar, without atomics: the sum over programs has a fixed
        # order. Samples beyond the end hold coefficients of zero inputs and are masked.
        for n in tl.static_range(c.n_scalars):
            value = tl.sum(tl.where(exists, of_scalars[n], 0.0), 0)
            tl.store(d_scalars + n * c.n_programs + tl.program_id(0), value)


@kernel
def _find_rows(x, ends, scalars, keep, rows, factors, c: tl.constexpr):
    sample, exists, _block, _part, group, first, last = _locate_program(c)
    s = _scalars(scalars, c)
    # Each input is read by many comparisons, so it is copied to shared memory once.
    x = _stage_inputs(x, group, sample, exists, _column(c), c)
    for t in range(first, last):
        u = _margins(x, ends, t, sample, exists, c)
        index, flip, closest = _address(u, c)
        found = _apply_keep(_coefficients(u, closest, s, c), keep, t, sample, exists, c)
        _write_rows(rows, factors, index, flip, found, t, sample, exists, c)


@kernel
def _column(c: tl.constexpr):
    """Return the address of each sample's column in shared memory."""
    # Element ``i`` of sample ``s`` is at ``start + 4 * (ROWS * i + s)``. With 32 samples and one
    # warp, thread ``s`` alone uses column ``s``, which is bank ``s``: no conflicts, and no
    # barriers.
    return tl.inline_asm_elementwise(
        c.BASE, "=r,r", [tl.arange(0, c.ROWS)], dtype=tl.int32, is_pure=False, pack=1
    )


@kernel
def _stage_inputs(x, group, sample, exists, column, c: tl.constexpr):
    """Copy the inputs of a group to columns of shared memory, if they fit."""
    if not c.SHARED_INPUT:
        x += group * c.n_inputs * c.n_samples
    if c.STAGED:
        for i in range(c.n_inputs):
            value = tl.load(x + sample + i * c.n_samples, mask=exists, other=0).to(tl.float32)
            # The store returns the column. Loads take their address from it, so the compiler cannot
            # move them before the store.
            column = tl.inline_asm_elementwise(
                c.STORE,
                "=r,r,f,r",
                [column + 4 * c.ROWS * i, value, column],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        return column
    else:
        return x


@kernel
def _write_rows(rows, factors, index, flip, found, t, sample, exists, c: tl.constexpr):
    here = t.to(c.INDEX) * c.n_samples + sample
    # Both row ids share one int32, which halves their traffic.
    tl.store(rows + here, _owned_columns.pack_offsets(index, index ^ flip), mask=exists)
    tl.store(factors + here, found[0], mask=exists)
    if c.WAYS == 2 and not c.HARD:
        tl.store(factors + c.n_tables * c.n_samples + here, found[1], mask=exists)


@kernel
def _pull_back(x, ends, scalars, keep, products, d_scalars, d_keep, dx, c: tl.constexpr):
    sample, exists, _block, part, group, first, last = _locate_program(c)
    s = _scalars(scalars, c)
    nothing = tl.zeros((c.ROWS,), tl.float32)
    of_scalars = (nothing, nothing, nothing)
    # Gradient sums come first in a column, the staged inputs follow.
    column = _column(c)
    x = _stage_inputs(
        x, group, sample, exists, column + (4 * c.ROWS * c.n_inputs if c.OF_X else 0), c
    )
    if c.OF_X:
        # Sums of inputs are cleared, added to and read by the same thread, with volatile accesses
        # in program order.
        for i in range(c.n_inputs):
            tl.inline_asm_elementwise(
                c.CLEAR, "=r,r", [column + 4 * c.ROWS * i], dtype=tl.int32, is_pure=False, pack=1
            )
    for t in range(first, last):
        u = _margins(x, ends, t, sample, exists, c)
        _index, flip, closest = _address(u, c)
        found = _coefficients(u, closest, s, c)
        here = t.to(c.INDEX) * c.n_samples + sample
        main, other = tl.load(products + here, mask=exists, other=0), nothing
        if c.WAYS == 2:
            other = tl.load(products + c.n_tables * c.n_samples + here, mask=exists, other=0)
        both = (main, other)
        of_scalars = _plus(
            of_scalars,
            _pull_table(
                u,
                flip,
                closest,
                found,
                both,
                keep,
                d_keep,
                column,
                ends,
                t,
                sample,
                exists,
                s,
                True,
                c,
            ),
        )
    _write_scalars(d_scalars, of_scalars, exists, c)
    if c.OF_X:
        # Programs with different tables write separate parts ``[table blocks, G, I, B]``.
        to = dx + (part * c.n_groups + group) * (c.n_inputs * c.n_samples) + sample
        for i in range(c.n_inputs):
            total = tl.inline_asm_elementwise(
                c.READ, "=f,r", [column + 4 * c.ROWS * i], dtype=tl.float32, is_pure=False, pack=1
            )
            tl.store(to + i * c.n_samples, total, mask=exists)


@kernel
def _add_rows(x, ends, scalars, keep, dy, step, unused, total, c: tl.constexpr):
    sample, exists, block, _, group, first, last = _locate_program(c)
    s = _scalars(scalars, c)
    outputs = _outputs(block, c)
    cotangents = _cotangents(dy, sample, exists, group, outputs, c)
    # `step` is the negative learning rate, so an addition updates rows in place.
    rate = tl.load(step)
    for i in range(first, last):
        t = _table(i, first, last, c.ROTATED)
        u = _margins(x, ends, t, sample, exists, c)
        index, flip, closest = _address(u, c)
        factors = _apply_keep(_coefficients(u, closest, s, c), keep, t, sample, exists, c)
        row, factor = index, factors[0]
        for _way in range(1 if c.HARD else c.WAYS):
            _add(total, _start(t, row, c), rate * factor, exists, cotangents, outputs, c)
            row, factor = index ^ flip, factors[1]


# ------------------------------------------------------------------------------------- places
@kernel
def _locate_program(c: tl.constexpr):
    """Locate this program.

    Returns:
      Samples, whether they exist, output block, table block, group, and the first table and
      the end of the tables of this program.
    """
    sample_blocks: tl.constexpr = (c.n_samples + c.ROWS - 1) // c.ROWS
    # Blocks of samples change fastest: concurrent programs then read the same few tables, which
    # stay in the caches.
    program = tl.program_id(0)
    sample, exists = _row_tiles.block(c.ROWS, c.n_samples, program % sample_blocks)
    rest = program // sample_blocks
    block = (rest % c.BLOCKS).to(c.INDEX)
    rest = rest // c.BLOCKS
    part, group = (rest % c.PARTS).to(c.INDEX), (rest // c.PARTS).to(c.INDEX)
    first = (rest // c.PARTS) * c.n_each + (rest % c.PARTS) * c.DETECTORS
    last = tl.minimum(first + c.DETECTORS, (rest // c.PARTS + 1) * c.n_each)
    return sample.to(c.INDEX), exists, block, part, group, first, last


@kernel
def _table(i, first, last, ROTATED: tl.constexpr):
    """Return the tables in order, or rotated by the number of the program.

    With rotation, concurrent programs do not add to the same rows at the same time. They do not
    read the same rows either, which costs more than it saves with a single addition per table.
    """
    if ROTATED:
        return first + (i - first + tl.program_id(0)) % (last - first)
    else:
        return i


@kernel
def _outputs(block, c: tl.constexpr):
    """Return the output ids of this program, tile by tile."""
    first = block.to(tl.int32) * c.FIRST
    found = _gate_tiles.empty_tuple()
    for p in tl.static_range(c.PIECES):
        found += (first + p * c.FIRST + tl.arange(0, c.FIRST if p < c.PIECES - 1 else c.LAST),)
    return found


@kernel
def _start(t, row, c: tl.constexpr):
    return (t.to(c.INDEX) * c.n_rows + row) * c.n_outputs


# ------------------------------------------------------------------------- reading and adding
@kernel
def _read(weights, start, output, c: tl.constexpr):
    """Read a tile of rows, all of which exist."""
    # Addresses come from comparisons, so they are below ``2**n`` and need no clamp. Rows of missing
    # samples are valid too: their inputs are 0.
    at = weights + (start[:, None] + output[None, :])
    if c.WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(output < c.n_outputs)[None, :], other=0)


@kernel
def _read_some(weights, start, reads, output, c: tl.constexpr):
    """Read a tile of rows; unread rows are 0."""
    mask = reads[:, None] & (output < c.n_outputs)[None, :]
    return tl.load(weights + (start[:, None] + output[None, :]), mask=mask, other=0)


@kernel
def _plus_row(totals, weights, start, factor, outputs, SKIP: tl.constexpr, c: tl.constexpr):
    sums = _gate_tiles.empty_tuple()
    for p in tl.static_range(c.PIECES):
        if c.INTEGERS:
            # Integer products are exact. Rows with coefficient 0 are not read.
            units = _in_units(factor, c)
            sums += (
                totals[p] + units[:, None] * _read_some(weights, start, units != 0, outputs[p], c),
            )
        elif SKIP:
            # The mask keeps 0 * infinity out of the sum.
            value = _read_some(weights, start, factor != 0, outputs[p], c).to(tl.float32)
            sums += (totals[p] + factor[:, None] * value,)
        else:
            sums += (
                totals[p] + factor[:, None] * _read(weights, start, outputs[p], c).to(tl.float32),
            )
    return sums


@kernel
def _in_units(coefficient, c: tl.constexpr):
    """Convert a power of two to a multiple of the least one; NaN becomes 0."""
    # Conversion of NaN to int32 is undefined; `_sums` flags NaN separately.
    return tl.where(coefficient == coefficient, coefficient * (1 << -c.SHIFT), 0.0).to(tl.int32)


@kernel
def _product(weights, start, exponents, group, cotangents, outputs, c: tl.constexpr):
    """Return inner products of rows with the output gradient."""
    total = tl.zeros((c.ROWS,), tl.float32)
    # Equal tiles add their products elementwise first, so one reduction over lanes serves all
    # tiles.
    products = tl.zeros((c.ROWS, c.FIRST), tl.float32)
    for p in tl.static_range(c.PIECES):
        value = _read(weights, start, outputs[p], c).to(tl.float32)
        if c.ROUNDED:
            value *= _scales(exponents, group, outputs[p], 0, c)[None, :]
        if c.EQUAL:
            products += value * cotangents[p]
        else:
            total += tl.sum(value * cotangents[p], 1)
    if c.EQUAL:
        total = tl.sum(products, 1)
    # A reduction leaves its result in the layout of the tile: several samples per thread, each in
    # several threads. The gather moves one sample to each thread, as in all other vectors.
    return tl.gather(total, tl.arange(0, c.ROWS), 0)


@kernel
def _cotangents(dy, sample, exists, group, outputs, c: tl.constexpr):
    # The gradient of a sum over groups is ``[B, 1, O]`` and serves every group.
    start = (sample if c.SUM_GROUPS else sample * c.n_groups + group) * c.n_outputs
    found = _gate_tiles.empty_tuple()
    for p in tl.static_range(c.PIECES):
        found += (_read_some(dy, start, exists, outputs[p], c).to(tl.float32),)
    return found


@kernel
def _add(total, start, factor, exists, cotangents, outputs, c: tl.constexpr):
    """Add a multiple of the output gradient to rows; a factor of 0 adds nothing."""
    # Skipping factors of 0 saves atomics, and keeps 0 * infinity out of the tables.
    adds = exists & (factor != 0)
    for p in tl.static_range(c.PIECES):
        to = total + (start[:, None] + outputs[p][None, :])
        mask = adds[:, None]
        if not c.WHOLE:
            mask = mask & (outputs[p] < c.n_outputs)[None, :]
        # Relaxed order suffices: nothing reads the tables before the kernel ends.
        tl.atomic_add(to, factor[:, None] * cotangents[p], mask=mask, sem="relaxed")


@kernel
def _scales(exponents, group, output, shift: tl.constexpr, c: tl.constexpr):
    """Return the scale of each output of a group, times a power of two.

    The scale is NaN if an entry of the group's tables is not finite.
    """
    mask = output < c.n_outputs
    exponent = tl.load(exponents + group * c.n_outputs + output, mask=mask, other=0) + shift
    return tl.where(exponent < c.BEYOND_SCALES, _power(exponent), float("nan"))


@kernel
def _power(exponent):
    """Return ``2**exponent`` for normal results, from the bits of a float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@kernel
def _add_to_inputs(
    dx,
    u,
    flip,
    of_closest,
    of_total,
    of_logs,
    ends,
    t,
    sample,
    exists,
    s,
    HERE: tl.constexpr,
    c: tl.constexpr,
):
    """Add the gradient of each margin to the compared inputs.

    Args:
      dx: array in global memory, or with `HERE` the columns of shared memory.
    """
    of_samples = dx if HERE else dx + sample
    for j in tl.static_range(c.n_comparisons):
        # The smallest distance affects the share of the neighbor, and only its own comparison
        # receives that gradient.
        du = tl.where(flip == (1 << j), of_closest, 0.0)
        if c.SCORED:
            m = tl.abs(u[j])
            # ``e / (1 + e)`` is the derivative of ``-log(1 + exp(-beta m)) / beta``.
            e = _decay(m, s)
            du += of_total + of_logs * s[0] * (e / (1 + e))
        # The derivative of ``|u|`` is the sign that the address bit uses.
        du = tl.where(detect.is_above_zero(u[j]), du, -du)
        for side in tl.static_range(c.n_ends):
            end = ends + (t * c.n_comparisons + j) * c.n_ends + side
            value = du if side == 0 else -du
            if HERE:
                # Staged ends are byte offsets already.
                to = dx + (tl.load(end) if c.STAGED else 4 * c.ROWS * tl.load(end))
                # No atomics: the column belongs to one thread, and both ends may be the same input.
                tl.inline_asm_elementwise(
                    c.ADD, "=r,r,f", [to, value], dtype=tl.int32, is_pure=False, pack=1
                )
            else:
                # Programs of other tables and output blocks add to the same inputs.
                tl.atomic_add(of_samples + _offset(end, c), value, mask=exists, sem="relaxed")


# ------------------------------------------------------------------- margins and coefficients
@kernel
def _scalars(scalars, c: tl.constexpr):
    """Return the exponentials of the learned scalars; always three, unused ones are 1."""
    one = tl.full((), 1.0, tl.float32)
    if c.FAMILY == "soft_sign":
        return tl.exp(tl.load(scalars)), tl.exp(-tl.load(scalars + 1)), one
    elif c.SCORED:
        rate = one
        if c.WAYS == 2:
            rate = tl.exp(-tl.load(scalars + 2))
        return tl.exp(tl.load(scalars)), tl.exp(tl.load(scalars + 1)), rate
    else:
        return one, one, one


@kernel
def _margins(x, ends, t, sample, exists, c: tl.constexpr):
    found = _gate_tiles.empty_tuple()
    for j in tl.static_range(c.n_comparisons):
        end = ends + (t * c.n_comparisons + j) * c.n_ends
        margin = _input(x, end, sample, exists, c)
        if c.n_ends == 2:
            margin -= _input(x, end + 1, sample, exists, c)
        found += (margin,)
    return found


@kernel
def _input(x, end, sample, exists, c: tl.constexpr):
    if c.STAGED:
        at = x + tl.load(end)
        # Pure, because nothing overwrites staged inputs: the compiler may reuse or reorder these
        # loads.
        return tl.inline_asm_elementwise(
            c.LOAD, "=f,r", [at], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(x + sample + _offset(end, c), mask=exists, other=0).to(tl.float32)


@kernel
def _offset(end, c: tl.constexpr):
    """Return the offset of an input, whose samples are contiguous."""
    if c.SCALED:
        return tl.load(end)
    else:
        return tl.load(end).to(c.INDEX) * c.n_samples


@kernel
def _address(u, c: tl.constexpr):
    """Return the row, the bit of the closest comparison, and its distance.

    The first of several equal distances counts. The first NaN counts as closer than any number.
    """
    index, flip, closest = (
        detect.is_above_zero(u[0]).to(tl.int32),
        tl.full((c.ROWS,), 1, tl.int32),
        tl.abs(u[0]),
    )
    for j in tl.static_range(1, c.n_comparisons):
        index |= detect.is_above_zero(u[j]).to(tl.int32) << j
        distance = tl.abs(u[j])
        # ``not (distance >= closest)`` is also true for NaN. The second condition keeps the first
        # NaN.
        closer = ((distance >= closest) == 0) & (closest == closest)
        closest = tl.where(closer, distance, closest)
        flip = tl.where(closer, 1 << j, flip)
    return index, flip, closest


@kernel
def _apply_keep(found, keep, t, sample, exists, c: tl.constexpr):
    """Multiply both coefficients by the table's factor."""
    if c.KEEP:
        factor = tl.load(keep + t.to(c.INDEX) * c.n_samples + sample, mask=exists, other=0).to(
            tl.float32
        )
        return found[0] * factor, found[1] * factor
    else:
        return found[0], found[1]


@kernel
def _exp(a):
    """Compute an exponential; results below the normal numbers are 0."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return _exp2(a * LOG2E)


@kernel
def _decay(m, s):
    """Compute ``exp(-beta m)``."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return _exp2(m * (-LOG2E * s[0]))


@kernel
def _exp2(a):
    # One instruction. Without .ftz the GPU adds a scaling and a multiplication for subnormal
    # results.
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )


@kernel
def _coefficients(u, closest, s, c: tl.constexpr):
    """Return both coefficients, and the values that their derivatives need.

    Returns:
      The two coefficients and the share of the neighbor; for scored reads also the score, the sum
      of the logarithms, and the score divided by the sum of distances; for powers of two also the
      ratios of the rounded to the exact coefficients.
    """
    zero = tl.zeros((c.ROWS,), tl.float32)
    if c.SCORED:
        # One logarithm serves all comparisons: the sum of ``log(1 + e)`` is the logarithm of the
        # product. `excess` is the product minus 1, so small terms keep the digits that 1 would
        # absorb.
        total, excess = tl.abs(u[0]), _decay(tl.abs(u[0]), s)
        for j in tl.static_range(1, c.n_comparisons):
            e = _decay(tl.abs(u[j]), s)
            total += tl.abs(u[j])
            excess += e + excess * e
        # Scores of infinite distances, or of a sum that overflows, are NaN by definition.
        total = tl.where(total < float("inf"), total, float("nan"))
        product = 1 + excess
        # ``log(1 + x)`` without cancellation: the factor ``x / ((1 + x) - 1)`` corrects the
        # rounding of ``1 + x``.
        logs = -tl.where(product == 1, excess, tl.log(product) * (excess / (product - 1)))
        discount = _exp(s[1] * logs)
        score = total * discount
        share, a, b = zero, score, zero
        if c.WAYS == 2:
            share = 1 / (1 + _exp(2 * closest * s[2]))
            a, b = score * (1 - share), score * share
        if c.FAMILY == "powers":
            return _powers(a, b, share, closest, total, score, logs, discount, s, c)
        else:
            return a, b, share, score, logs, discount, zero, zero
    else:
        if c.FAMILY == "blend":
            share = 0.5 / (1 + closest)
        else:
            share = 1 / (1 + _exp(2 * (closest / (s[0] + closest)) * s[1]))
        a, b = 1 - share, share
        if c.HARD:
            # The row of a hard read has coefficient 1, but a NaN margin still makes it NaN.
            a, b = tl.where(share == share, 1.0, share), zero
        return a, b, share, zero, zero, zero, zero, zero


@kernel
def _powers(a, b, share, closest, total, score, logs, discount, s, c: tl.constexpr):
    """Round coefficients to powers of two, as `lutjax.reads.PowersOfTwo` defines."""
    LN2: tl.constexpr = 0.6931471805599453
    exponent = tl.log2(total) + s[1] * logs / LN2
    q = tl.zeros((c.ROWS,), tl.int32)
    if c.WAYS == 2:
        # Rounding is half up on every platform; round-to-even instructions would differ.
        rounded = tl.floor(2 * closest * s[2] / LN2 + 0.5)
        # A NaN exponent becomes shift 0 before the conversion to int32, which is undefined for NaN.
        # The coefficient is replaced by NaN below.
        most = tl.where(rounded == rounded, c.MOST_SHIFT, 0.0)
        q = tl.where(rounded < c.MOST_SHIFT, rounded, most).to(tl.int32)
        exponent -= tl.where(q < c.NEGLIGIBLE, tl.log2(1 + _power(-q)), 0.0)
    k = tl.floor(exponent + 0.5)
    # False for NaN, so the conversion below sees a number.
    exists = k >= c.LOWEST
    k = tl.where(exists, tl.minimum(k, c.HIGHEST), c.LOWEST).to(tl.int32)
    main, other = _power(k), _power(k - q)
    # Straight-through gradients multiply by rounded over exact coefficient, bounded where the exact
    # one is small.
    of_main = tl.minimum(main / tl.maximum(a, c.LEAST_EXACT), c.MOST_RATIO)
    of_other = tl.minimum(other / tl.maximum(b, c.LEAST_EXACT), c.MOST_RATIO)
    # NaN and infinite exact coefficients make the rounded ones NaN: their gradient is undefined.
    known = (a < float("inf")) & (b < float("inf"))
    nan = float("nan")
    main = tl.where(known, tl.where(exists, main, 0.0), nan)
    other = tl.where(known, tl.where(exists & (q <= c.FARTHEST), other, 0.0), nan)
    return main, other, share, score, logs, discount, of_main, of_other


@kernel
def _pull(u, closest, found, products, s, c: tl.constexpr):
    """Return the gradients of the smallest distance, both sums, and the scalars.

    Args:
      found: results of `_coefficients`.
      products: gradients of the coefficients.
    """
    share, score, logs, discount = found[2], found[3], found[4], found[5]
    zero = tl.zeros((c.ROWS,), tl.float32)
    if c.FAMILY == "blend":
        distance = 1 + closest
        return (
            (products[0] - products[1]) * 0.5 / (distance * distance),
            zero,
            zero,
            (zero, zero, zero),
        )
    elif c.FAMILY == "soft_sign":
        distance = s[0] + closest
        of_ratio = (products[1] - products[0]) * 2 * share * (1 - share) * s[1]
        slope = of_ratio * s[0] / (distance * distance)
        return -slope, zero, zero, (slope * closest, of_ratio * (closest / distance), zero)
    else:
        main, other = products[0], zero
        if c.WAYS == 2:
            other = products[1]
        if c.FAMILY == "powers":
            main *= found[6]
            if c.WAYS == 2:
                other *= found[7]
        of_score, of_closest, of_tau = main, zero, zero
        if c.WAYS == 2:
            of_score = main + share * (other - main)
            slope = score * (other - main) * share * (1 - share) * 2 * s[2]
            of_closest, of_tau = -slope, slope * closest
        of_logs = of_score * score * s[1]
        by_beta = zero
        for j in tl.static_range(c.n_comparisons):
            m = tl.abs(u[j])
            e = _decay(m, s)
            by_beta += m * (e / (1 + e))
        return (
            of_closest,
            of_score * discount,
            of_logs,
            (of_logs * s[0] * by_beta, of_logs * logs, of_tau),
        )


@kernel
def _plus(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
