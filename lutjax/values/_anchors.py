"""Anchor sampling and validation of concrete ids."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax import _compat
from lutjax._typing import Array
from lutjax.arguments import require_integer, require_key

F = TypeVar("F", bound=Callable[..., Any])


class RepeatedInputsWarning(UserWarning):
    """Warning about a detector or gate with more comparisons or wires than distinct inputs.

    Repeated comparisons give equal bits, as do repeated gate inputs, so most rows of such a table
    are unreachable.
    """


def warn_of_repeats(where: str, name: str, size: int, most: int, what: str) -> None:
    """Warn if a detector or gate must repeat a pair or an input, as `size` exceeds `most`."""
    if size > most:
        warnings.warn(
            f"{where}: {name} is {size}, but {what}, so some repeat and most rows of a table "
            f"are never read. Use at most {name}={most}, or more inputs.",
            RepeatedInputsWarning,
            stacklevel=3,
        )


def sample_anchors(
    key: Array,
    n_inputs: int,
    n_detectors: int,
    n_anchors: int,
    *,
    candidates: Int[Array, "#detectors candidates"] | None = None,
    distinct: bool = False,
    groups: int | None = None,
) -> Int[jax.Array, "{n_detectors} {n_anchors} 2"]:
    """Draw the anchor pairs of detectors.

    Each pair is drawn uniformly from the ``n * (n - 1)`` ordered pairs of distinct candidate
    inputs, independently and with replacement: a detector can hold a pair twice. With `distinct`
    the ``n * (n - 1) / 2`` pairs ``a < b`` are drawn without replacement, detector after detector:
    every pair is drawn once before any pair repeats. A detector holds a pair twice only if it has
    more slots than pairs exist.

    Args:
      key: a key of `jax.random`.
      n_inputs: number of inputs, at least 2.
      n_detectors: number of detectors, ``T``.
      n_anchors: pairs per detector, ``C``.
      candidates: int32 ``[T or 1, W]``, the inputs each detector may compare; -1 is an unused slot.
        Default: all inputs. Must be concrete, because it is validated.
      distinct: draw without replacement; detectors with the same candidates share a pool of pairs.
        Allocates memory for all pairs of inputs.
      groups: number of consecutive detector groups, ``G``, each with its own pool; only used with
        `distinct`.

    Returns:
      int32 ``[T, C, 2]``, for `lutjax.detect`.

    Warns:
      RepeatedInputsWarning: a detector has more than ``n * (n - 1) / 2`` pairs.

    Raises:
      ValueError: a size is negative, a detector has fewer than two candidates, a candidate is not
        an input, groups do not divide the detectors, or `key` holds several keys.
      TypeError: `key` is not a key.

    Source: docs/semantics.md, section 10.

    Example:
      >>> import jax, lutjax
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=4, n_detectors=2, n_anchors=3)
      >>> anchors.shape
      (2, 3, 2)
      >>> bool((anchors[..., 0] != anchors[..., 1]).all())
      True
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), 4, 2, 3, distinct=True)
      >>> sorted(anchors.reshape(-1, 2).tolist())
      [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    return draw_anchors(
        key, n_inputs, n_detectors, n_anchors, candidates, distinct=distinct, groups=groups
    )


def draw_anchors(
    key: Array,
    n_inputs: int,
    n_detectors: int,
    n_anchors: int,
    candidates: Any = None,
    *,
    distinct: bool = False,
    groups: int | None = None,
    where: str = "sample_anchors",
    name_of_pairs: str = "n_anchors",
) -> jax.Array:
    """Implement `sample_anchors`, with warnings in terms of a layer and its argument."""
    require_key("sample_anchors", key)
    sizes = {"n_inputs": n_inputs, "n_detectors": n_detectors, "n_anchors": n_anchors}
    for name, size in sizes.items():
        sizes[name] = require_integer("sample_anchors", name, size)
        if not 0 <= sizes[name] < 2**31:
            rule = "it must not be negative" if sizes[name] < 0 else "it must be less than 2**31"
            raise ValueError(f"sample_anchors: {name} is {sizes[name]}; {rule}.")
    n_inputs, n_detectors, n_anchors = sizes.values()
    if candidates is None:
        if n_inputs < 2:
            raise ValueError(
                f"sample_anchors: n_inputs is {n_inputs}; "
                "every detector compares two different inputs, so there must be at least 2."
            )
        ids, count = None, np.full((n_detectors, 1), n_inputs, np.int32)
    else:
        ids, count = _pack_candidates(np.asarray(candidates), n_inputs, n_detectors)
    # The detector with the fewest candidates decides whether pairs must repeat.
    fewest = int(count.min(initial=n_inputs))
    n_pairs = fewest * (fewest - 1) // 2
    pairs = f"{fewest} inputs have {n_pairs} pair{'s' if n_pairs != 1 else ''}"
    warn_of_repeats(where, name_of_pairs, n_anchors if n_detectors else 0, n_pairs, pairs)
    n_groups = 1 if groups is None else require_integer("sample_anchors", "groups", groups)
    if n_groups < 1 or n_detectors % n_groups:
        raise ValueError(
            f"sample_anchors: groups is {groups}; it must divide the number of detectors, "
            f"{n_detectors}."
        )
    if distinct:
        rows = np.arange(n_inputs)[None] if candidates is None else np.asarray(candidates)
        return _distinct(key, n_detectors, n_anchors, rows, n_groups)
    return _sample_pairs(key, ids, count, n_anchors)


def _program(*static: int) -> Callable[[F], F]:
    """Return a decorator that compiles a function as one program."""

    # Without it, each small operation compiles separately for every size. A program that draws
    # integers once is not worth optimizing: without optimizations the CPU compiles it in less than
    # half the time, with equal values. Inside other programs it is a part of them, and compiler
    # options are not allowed.
    def decorate(function: F) -> F:
        inner = jax.jit(function, static_argnums=static)
        outer = jax.jit(
            function, static_argnums=static, compiler_options={"xla_backend_optimization_level": 0}
        )

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            alone = _compat.is_alone() and jax.default_backend() == "cpu"
            return (outer if alone else inner)(*arguments)

        return cast("F", call)

    return decorate


@_program(3)
def _sample_pairs(key: Array, ids: Array | None, count: Array, n_anchors: int) -> jax.Array:
    """Return pairs with replacement from the first `count` ids per detector: ``[T, C, 2]``."""

    def ids_below(key_and_count: tuple[Array, Array]) -> jax.Array:
        key, count = key_and_count
        return jax.random.randint(key, (len(count), n_anchors), 0, count)

    # A loop, because sampling dominates compile time.
    a, b = jax.lax.map(ids_below, (jax.random.split(key), jnp.stack([count, count - 1])))
    pairs = jnp.stack([a, b + (b >= a).astype(b.dtype)], -1)
    if ids is None:
        return pairs
    return jnp.take_along_axis(ids, pairs.reshape(len(count), -1), -1).reshape(pairs.shape)


def _distinct(
    key: Array, n_detectors: int, n_anchors: int, candidates: np.ndarray, groups: int
) -> jax.Array:
    """Return pairs without replacement, from one pool per group and candidate set."""
    sets = [np.unique(row[row >= 0]) for row in candidates]
    for t, ids in enumerate(sets):
        if len(ids) < 2:
            raise ValueError(
                f"sample_anchors: detector {t} has {len(ids)} different candidate input; "
                "it compares two different inputs, so it needs at least 2."
            )
    # Detectors of a group with equal candidates share a pool of pairs. Pools with the same numbers
    # of candidates and detectors are sampled by one batched call, so the number of compilations
    # depends on the number of sizes.
    pools: dict[tuple[int, bytes], list[int]] = {}
    for t in range(n_detectors if n_anchors else 0):
        group = t * groups // n_detectors
        pools.setdefault((group, sets[t % len(sets)].tobytes()), []).append(t)
    alike: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for pool, detectors in enumerate(pools.values()):
        size = len(sets[detectors[0] % len(sets)])
        alike.setdefault((size, len(detectors)), []).append((pool, detectors))
    pairs = jnp.asarray(np.zeros((n_detectors, n_anchors, 2), np.int32))
    for (_, tables), members in alike.items():
        pool_ids = np.asarray([pool for pool, _ in members], np.int32)
        ids = np.stack([sets[detectors[0] % len(sets)] for _, detectors in members])
        detector_ids = np.concatenate([detectors for _, detectors in members]).astype(np.int32)
        pairs = _with_pools(
            pairs, key, len(pools), pool_ids, ids.astype(np.int32), detector_ids, tables
        )
    return pairs


@_program(2, 6)
def _with_pools(
    pairs: jax.Array,
    key: Array,
    n_pools: int,
    pools: Array,
    ids: Array,
    detectors: Array,
    n_detectors: int,
) -> jax.Array:
    """Return pairs with some pools sampled, each for the same number of detectors."""
    n_anchors = pairs.shape[1]
    # A key for each pool of the layer: a pool's pairs do not depend on how pools are batched.
    keys = jax.random.split(key, n_pools)[pools]
    drawn = _permuted_pairs(keys, ids.shape[1], n_detectors, n_anchors)
    named = jnp.take_along_axis(ids, drawn.reshape(len(ids), -1), 1)
    return pairs.at[detectors].set(named.reshape(-1, n_anchors, 2))


def _permuted_pairs(keys: Array, n_inputs: int, n_detectors: int, n_anchors: int) -> jax.Array:
    """Return pairs ``a < b`` per key, ``[keys, T, C, 2]``: successive permutations of all pairs.

    Each key's detectors read one stream of permutations, `n_anchors` pairs per detector.
    """
    n_pairs = n_inputs * (n_inputs - 1) // 2
    n_permutations = -(-n_detectors * n_anchors // n_pairs)
    starts = n_pairs * np.arange(n_permutations + 1)
    # A detector across the start of a permutation already has pairs of the permutation before. Its
    # missing pairs must differ from them, so they are drawn first. With more anchors than pairs,
    # repeats are unavoidable.
    n_taken = starts % n_anchors if n_anchors <= n_pairs else np.zeros_like(starts)
    n_missing = np.where(n_taken > 0, n_anchors - n_taken, 0)
    positions = jnp.arange(n_pairs)

    def permute(taken: jax.Array, step: tuple[Array, Array, Array]) -> tuple[jax.Array, jax.Array]:
        """Return the pairs taken from this permutation's end, bool ``[pairs]``, and its order."""
        key, n_missing, n_taken_at_end = step
        first, rest = jax.random.uniform(key, (2, n_pairs))
        # Pairs that are not taken have the first ranks, in random order.
        rank = jnp.zeros_like(positions).at[jnp.lexsort((first, taken))].set(positions)
        order = jnp.lexsort((rest, jnp.where(rank < n_missing, rank, n_pairs)))
        at_end = positions >= n_pairs - n_taken_at_end
        return jnp.zeros_like(taken).at[order].set(at_end), order

    def sample_pairs_for_key(key: Array) -> jax.Array:
        keys = jax.random.split(key, n_permutations)
        if n_missing[:-1].any():
            steps = (keys, jnp.asarray(n_missing[:-1]), jnp.asarray(n_taken[1:]))
            _, orders = jax.lax.scan(permute, jnp.zeros((n_pairs,), bool), steps)
        else:  # no detector reads two permutations, so they are independent
            orders = jax.vmap(lambda key: jax.random.permutation(key, n_pairs))(keys)
        p = orders.reshape(-1)[: n_detectors * n_anchors].astype(jnp.int32)
        # Inputs lie on a circle. Pair ids count the pairs of neighbors first, then the pairs two
        # apart, and so on, each pair once, so a pair is computed from its id without a table.
        a, b = p % n_inputs, (p % n_inputs + p // n_inputs + 1) % n_inputs
        pairs = jnp.stack([jnp.minimum(a, b), jnp.maximum(a, b)], -1)
        return pairs.reshape(n_detectors, n_anchors, 2)

    return jax.vmap(sample_pairs_for_key)(keys)


def _pack_candidates(
    candidates: np.ndarray, n_inputs: int, n_detectors: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return candidates with unused slots last, and the candidate count per detector."""
    if candidates.ndim != 2 or candidates.shape[0] not in (1, n_detectors):
        raise ValueError(
            f"sample_anchors: candidates has shape {candidates.shape}; "
            f"expected [{n_detectors} or 1, candidates per detector]."
        )
    if candidates.size and (candidates.min() < -1 or candidates.max() >= n_inputs):
        raise ValueError(
            f"sample_anchors: candidates holds ids from {candidates.min()} to {candidates.max()}; "
            f"inputs are 0 to {n_inputs - 1}, and -1 marks an unused slot."
        )
    used = candidates >= 0
    count = used.sum(1)
    if (count < 2).any():
        t = int(np.argmax(count < 2))
        raise ValueError(
            f"sample_anchors: detector {t} has {count[t]} candidate inputs; "
            "it compares two different inputs, so it needs at least 2."
        )
    packed = np.take_along_axis(candidates, np.argsort(~used, axis=1, kind="stable"), 1)
    packed = np.broadcast_to(packed, (n_detectors, packed.shape[1]))
    count = np.broadcast_to(count[:, None], (n_detectors, 1))
    return packed.astype(np.int32), count.astype(np.int32)


def check_anchors(anchors: Int[Array, "detectors bits 2"], n_inputs: int, *, where: str) -> None:
    """Raise if an anchor pair repeats an input or names a missing input.

    The ids of a traced array are unknown, so ops clamp them instead. Layers call this check at
    construction and after checkpoint loading.
    """
    ids = np.asarray(anchors)
    if ids.ndim != 3 or ids.shape[-1] != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{where}: anchors is {ids.dtype}{list(ids.shape)}; "
            "expected int32 [detectors, pairs, 2]."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= n_inputs):
        raise ValueError(
            f"{where}: anchors holds ids from {ids.min()} to {ids.max()}; "
            f"inputs are 0 to {n_inputs - 1}."
        )
    same = ids[..., 0] == ids[..., 1]
    if same.any():
        t, r = np.argwhere(same)[0]
        raise ValueError(
            f"{where}: anchor pair {r} of detector {t} compares input {ids[t, r, 0]} with itself; "
            "the two inputs of a pair must differ."
        )


def check_targets(
    targets: Int[Array, "#detectors #rows slots"], n_outputs: int, *, where: str
) -> None:
    """Raise if a target is neither an output nor -1 (an unused slot)."""
    ids = np.asarray(targets)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{where}: targets is {ids.dtype}{list(ids.shape)}; "
            "expected int32 [detectors or 1, rows or 1, slots]."
        )
    if ids.size and (ids.min() < -1 or ids.max() >= n_outputs):
        raise ValueError(
            f"{where}: targets holds ids from {ids.min()} to {ids.max()}; "
            f"outputs are 0 to {n_outputs - 1}, and -1 marks an unused slot."
        )
