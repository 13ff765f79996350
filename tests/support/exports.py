"""Export folders written by tests without a run."""

import json

import numpy as np
from example_circuits import life_circuit

from lutjax.circuits import deployment
from lutjax.circuits.deployment import MANIFEST, Options, Request, Vectors


def write(folder, name="life", formats=("json", "dot"), *, circuit=None, **options):
    """Write a bit circuit's export, by default the Game of Life, and return its folder."""
    circuit = life_circuit() if circuit is None else circuit
    x = np.random.default_rng(0).integers(0, 2, (8, circuit.n_inputs), dtype=np.uint8)
    vectors = Vectors({"x": x}, deployment.evaluate_ports(circuit, [x]), "some by hand")
    request = Request(circuit, vectors, Options(formats, name, **options))
    files = deployment.files_of(request)
    manifest = deployment.manifest_of("circuit", files, deployment.facts_of(request), None)
    deployment.write(folder, files, manifest)
    return folder


def state(folder, *without, **fields):
    """Change manifest fields and remove others."""
    manifest = {**json.loads((folder / MANIFEST).read_bytes()), **fields}
    kept = {name: value for name, value in manifest.items() if name not in without}
    (folder / MANIFEST).write_text(json.dumps(kept))


def put(folder, name, content):
    """Write an export file and update its manifest entry."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    changed = deployment.manifest_of("circuit", {name: (files[name]["format"], content)}, {}, None)[
        "files"
    ]
    state(folder, files={**files, **changed})
