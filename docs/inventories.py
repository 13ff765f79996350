"""Names of other projects that pages and docstrings link, and where these projects describe them.

The site is built without a network, so `docs/conf.py` writes the inventories that intersphinx reads from this list. Each name has a page of
its own there, by a rule of the project.
"""

import zlib
from pathlib import Path

JAX = (
    "jax.Array jax.jit jax.grad jax.value_and_grad jax.vmap jax.checkpoint jax.shard_map jax.eval_shape jax.custom_vjp jax.debug_nans "
    "jax.lax.scan jax.lax.stop_gradient jax.numpy.ndarray jax.nn.initializers jax.random.key jax.random.split jax.random.bits "
    "jax.tree.map jax.export.export jax.sharding.Mesh jax.sharding.PartitionSpec jax.sharding.NamedSharding jax.ShapeDtypeStruct"
)
OPTAX = "optax.adam optax.adamw optax.sgd optax.chain optax.global_norm optax.clip_by_global_norm optax.apply_updates"
FLAX = "flax.nnx.Module flax.nnx.Param flax.nnx.Rngs flax.nnx.Optimizer flax.nnx.jit flax.nnx.value_and_grad flax.nnx.Linear flax.nnx.Cache"
PAGES = {
    "jax": ("https://docs.jax.dev/en/latest/", JAX, lambda name: f"_autosummary/{name}.html"),
    "optax": (
        "https://optax.readthedocs.io/en/latest/",
        OPTAX,
        lambda name: (
            "api/"
            + ("optimizers" if name.split(".")[1] in ("adam", "adamw", "sgd") else "transformations")
            + ".html"
        ),
    ),
    "flax": (
        "https://flax.readthedocs.io/en/latest/",
        FLAX,
        lambda name: (
            "api_reference/flax.nnx/"
            + {
                "Module": "module",
                "Param": "variables",
                "Cache": "variables",
                "Rngs": "rnglib",
                "Optimizer": "training/optimizer",
                "Linear": "nn/linear",
            }.get(name.split(".")[-1], "transforms")
            + ".html"
        ),
    ),
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each project; return what ``intersphinx_mapping`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (address, names, page) in PAGES.items():
        lines = "".join(f"{name} py:function 1 {page(name)}#{name} -\n" for name in names.split())
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress(lines.encode()))
        mapping[project] = (address, str(path))
    return mapping
