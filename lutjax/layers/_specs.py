"""All layer specifications."""

from lutjax.layers import (
    _images,
    _logic,
    _logic_images,
    _memory,
    _ngram_embedding,
    _product_keys,
    _projection,
    _tables,
)
from lutjax.layers._spec import Spec, layer_name

_MODULES = (
    _tables,
    _projection,
    _images,
    _logic,
    _logic_images,
    _memory,
    _ngram_embedding,
    _product_keys,
)


def specs() -> dict[str, type[Spec]]:
    """Return all specs by layer name; only specs with an example are layers."""
    return {
        layer_name(spec): spec
        for module in _MODULES
        for spec in vars(module).values()
        if isinstance(spec, type) and issubclass(spec, Spec) and "example" in vars(spec)
    }
