"""Models that are circuits."""

from typing import Any

from lutjax import circuits
from lutjax.circuits import Circuit, Format
from lutjax.circuits.columns import Columns


class WithCircuit:
    """Base of classifiers whose method ``_circuit`` says what their circuit is made of."""

    def circuit(
        self, *, inputs: str | Format | Columns = "bits", outputs: str | None = None, **options: Any
    ) -> Circuit:
        """Return the hard network as a circuit, outside of JAX. It does not follow later changes of this model.

        A tree becomes as many gates as it has at all places; `LogicTreeNetConfig.n_gates_at_places` counts them all before
        anything is built.

        Args:
          inputs: ``"bits"`` of the thermometer, those of images of a `LogicTreeNet` in the order channel, threshold, row, column; or numbers of
            a `lutjax.circuits.Format` such as ``"uint8"``, those of images in the order row, column, channel.
          outputs: ``"class"``, ``"votes"`` or the ``"bits"`` of the last layer. Default: the class; of regression, which has none, the votes, which
            are how many bits are 1: ``about`` has the scale and the offset that make a number of them.
          **options: simplify, merge, lut and about; see `lutjax.circuits.from_model`.

        Raises:
          ValueError: there is no exact circuit of such inputs or outputs.
        """
        return circuits.from_model(self, inputs=inputs, outputs=outputs, **options)
