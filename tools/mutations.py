"""Faults that the tests have to find; `tools/mutate.py` applies them."""

X, R, L = "lutjax/kernels/_xla/", "lutjax/reference.py", "lutjax/layers/"

MUTATIONS = [
    # The reference.
    (R, "slope = 0.5 * sign / jnp.square(1 + jnp.abs(margin))", "slope = 0.5 * sign / (1 + jnp.abs(margin))", "lookup"),
    (R, "sign = jnp.where(margin > 0, 1, -1)", "sign = jnp.where(margin >= 0, 1, -1)", "lookup"),
    (R, "query_is_closer = jnp.abs(q.margin) < jnp.abs(k.margin)", "query_is_closer = jnp.abs(q.margin) <= jnp.abs(k.margin)", "attention"),
    (R, "bit = is_above_zero(delta) & ~(jnp.abs(delta) < epsilon)", "bit = is_above_zero(delta) & ~(jnp.abs(delta) <= epsilon)", "detect"),
    (R, "        counts &= distance < window\n", "        counts &= distance <= window\n", "attention"),
    (R, "0.5 * 0.75 ** (n - 1), dtype)", "0.5 * 0.75 ** n, dtype)", "binary_lut"),
    (R, "    return _weighted(c, rows, reads), tangents[0] * rows + of_rows", "    return _weighted(c, rows, reads), jnp.where(reads, tangents[0], 0) * rows + of_rows", "weighted_lookup"),
    (R, "better = exists & ((value > best)", "better = exists & ((value >= best)", "trees or LogicConv"),
    # Plain JAX.
    (X + "lookup.py", "main_and_flipped = index, index ^ d.flip.T", "main_and_flipped = index, index | d.flip.T", "lookup"),
    (X + "_row_gathers.py", "return jnp.where(margin > 0, 0.5, -0.5)", "return jnp.where(margin >= 0, 0.5, -0.5)", "lookup or lut"),
    (X + "lookup_attention.py", "        if need_query:\n            totals[\"query\"] = tile.add_to_queries(totals[\"query\"], jnp.where(query_is_closer, cotangent, 0))", "        if need_query:\n            totals[\"query\"] = tile.add_to_queries(totals[\"query\"], cotangent)", "attention"),
    (X + "weighted_lookup.py", "found[\"weights\"] = add_ways(zeros, ways[: call.valued], dy,", "found[\"weights\"] = add_ways(zeros, ways, dy,", "weighted_lookup"),
    (X + "detect.py", "        closer = (jnp.abs(delta) < jnp.abs(margin)) | (jnp.isnan(delta) & ~jnp.isnan(margin))", "        closer = jnp.abs(delta) < jnp.abs(margin)", "detect"),
    (X + "detect.py", "            bit &= ~(jnp.abs(delta) < epsilon)", "            bit &= ~(jnp.abs(delta) > epsilon)", "detect or lut"),
    (X + "detect.py", "    return {\"x\": add(dx, (sample, pair[..., 1]), -d_margin)}", "    return {\"x\": add(dx, (sample, pair[..., 1]), d_margin)}", "detect or lut"),
    (X + "bilinear_gates.py", "[dy * (c1 + c3 * b), dy * (c2 + c3 * a)]", "[dy * (c1 + c3 * a), dy * (c2 + c3 * b)]", "gates"),
    (X + "binary_lut.py", "softened = [jnp.where(a > 0, 0.75, 0.25)", "softened = [jnp.where(a >= 0, 0.75, 0.25)", "binary_lut or BinaryLUT"),
    (X + "sparse_lookup.py", "difference = slots.change(weights, t, row, other, dy, accumulate)", "difference = slots.change(weights, t, other, row, dy, accumulate)", "sparse"),
    # Layers.
    (L + "_tables.py", "            n_seen = jnp.maximum(jnp.sum(counts, -1), 1)", "            n_seen = jnp.maximum(jnp.sum(counts, -1), 2)", "Attention"),
    (L + "_projection.py", "        return drawn.astype(dtype) / jnp.asarray(kept, dtype)", "        return drawn.astype(dtype) * jnp.asarray(kept, dtype)", "ProjectionLUT or SpatialLUT"),
    (L + "_logic.py", "            scores = jnp.asarray(scores) / jnp.asarray(self.temperature, scores.dtype)", "            scores = jnp.asarray(scores) * jnp.asarray(self.temperature, scores.dtype)", "LogicGates or SoftLUT or BinaryLUT"),
    (L + "_logic.py", "            soft = jax.nn.sigmoid((x - t) / width).astype(dtype)", "            soft = jax.nn.sigmoid((x - t) * width).astype(dtype)", "Thermometer"),
    (L + "_memory.py", "        value = (jax.nn.sigmoid(score) * value", "        value = (jax.nn.sigmoid(-score) * value", "NgramMemory"),
    (L + "_images.py", "        return jnp.mean(blocks, (-4, -2), accumulator(y.dtype))", "        return jnp.mean(blocks, (-4, -3), accumulator(y.dtype))", "ConvLUT"),
    # Reads.
    ("lutjax/reads.py", "    return straight_through(jnp.abs(u), jnp.where(is_above_zero(u), u, -u))", "    return straight_through(jnp.abs(u), jnp.where(u >= 0, u, -u))", "scored or read or slope or ProjectionLUT or conv"),
    ("lutjax/reads.py", "    v = jax.nn.sigmoid(-2 * closest * jnp.exp(-scalars[\"log_tau\"]))", "    v = jax.nn.sigmoid(-2 * closest * jnp.exp(scalars[\"log_tau\"]))", "scored or read or ProjectionLUT"),
    ("lutjax/reads.py", "        reads = k >= of.lowest", "        reads = k > of.lowest", "scored or read or powers or ConvLUT or integers"),
    # Dispatch and tables.
    ("lutjax/dispatch/_batching.py", "                return a.reshape(*a.shape[:axis], size * a.shape[axis + 1], *a.shape[axis + 2 :])", "                return a.swapaxes(axis, axis + 1).reshape(*a.shape[:axis], size * a.shape[axis + 1], *a.shape[axis + 2 :])", "lookup or lut or earlier or pullback or LUT"),
    ("lutjax/dispatch/_gradient.py", "    return tuple(bool(bits >> i & 1) for i in range(n))", "    return tuple(bool(bits >> i & 1) or i == 0 for i in range(n)) if bits else (False,) * n", "lookup or lut or earlier or pullback"),
    ("lutjax/tables/_row_rules.py", "            direction = direction + jnp.asarray(self.weight_decay, rows.dtype) * rows", "            direction = direction - jnp.asarray(self.weight_decay, rows.dtype) * rows", "rule or decay or update or steps"),
]  # fmt: skip
