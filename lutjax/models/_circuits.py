"""Circuit export for classifiers."""

from typing import Any

from lutjax import circuits
from lutjax.circuits import Circuit, Format
from lutjax.circuits.columns import Columns

Inputs = str | Format | Columns


class WithCircuit:
    """Base class for classifiers whose ``_circuit`` method builds their circuit."""

    def circuit(
        self, *, inputs: Inputs = "bits", outputs: str | None = None, **options: Any
    ) -> Circuit:
        """Return the hard network as a circuit, independent of JAX and later model changes.

        A tree becomes separate gates at every position; `LogicTreeNetConfig.n_gates_at_places`
        returns their number in advance.

        Args:
          inputs: ``"bits"`` from the thermometer, for images of a `LogicTreeNet` in the order
            channel, threshold, row, column; or values in a `lutjax.circuits.Format` such as
            ``"uint8"``, for images in the order row, column, channel.
          outputs: ``"class"``, ``"votes"`` or the ``"bits"`` of the last layer. Default: the class;
            for regression the votes, a count of set bits, which ``about`` converts to a value by
            its scale and offset.
          **options: simplify, merge, lut and about; see `lutjax.circuits.from_model`.

        Raises:
          ValueError: no exact circuit exists for these inputs or outputs.
        """
        return circuits.from_model(self, inputs=inputs, outputs=outputs, **options)
