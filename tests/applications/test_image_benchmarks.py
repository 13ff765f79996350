"""The benchmarks of images split, write and count as their page says."""

import json

import numpy as np
import pytest
from folders import ROOT

from lutjax.training import datasets
from lutjax.training.samples import load_samples


@pytest.fixture(scope="module")
def commands():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import image_pictures
        import images
        import published

        yield {"images": images, "published": published, "pictures": image_pictures}


@pytest.fixture
def few(tmp_path):
    """Ten classes of images, each a bright square at a place of its own."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = rng.integers(0, 40, (120, 28, 28))
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 4)
        image[4 + 8 * row : 9 + 8 * row, 2 + 6 * column : 7 + 6 * column] += 200
    path = tmp_path / "few.npz"
    np.savez(path, x=x.astype(np.uint8), y=y)
    return path


def test_images_of_a_split(commands, few):
    whole = load_samples(few)
    tested = []
    for split in (*range(5), None):
        train, test = commands["images"].parts(whole, split)
        assert sorted([*train, *test]) == list(range(120))
        tested.append(set(test))
        if split is not None:
            counts = np.bincount(whole.y[test])
            assert counts.sum() == 24
            assert set(counts) <= {2, 3}
    assert tested[5]
    assert not tested[5] & set.union(*tested[:5])


def test_few_images_as_the_files_of_mnist(commands, few, tmp_path):
    commands["published"].write_idx(few, tmp_path / "mnist")
    loaded = datasets.load(tmp_path / "mnist")
    whole = load_samples(few)
    train, test = commands["images"].parts(whole, 0)
    for found, ids in ((loaded.train, train), (loaded.test, test)):
        assert found.shape == (28, 28)
        np.testing.assert_array_equal(found.x, whole.x[ids])
        np.testing.assert_array_equal(found.y, whole.y[ids])


def test_what_a_tree_reads(commands):
    wires = np.array([[0, 1], [3, 4], [1, 1], [2, 2], [9, 10], [11, 12], [13, 14]])
    truth = np.zeros((7, 4), bool)
    truth[0, 3] = truth[1, 3] = True  # 0 and 1; 3 and 4
    truth[4, 1:] = True  # or
    truth[6] = [False, True, False, False]  # the first, and not the second, which is never 1
    found = commands["pictures"].influence(wires, truth, 0, 1, 9)
    # One of the two pairs decides where the other one is not full: in three of four cases, if its partner is 1.
    np.testing.assert_allclose(found, [0.375, 0.375, 0, 0.375, 0.375, 0, 0, 0, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("without_typechecking")
def test_figures_of_networks(commands, few, tmp_path, monkeypatch):
    images = commands["images"]
    # In so few steps, at a rate that warm-up holds down, networks learn from images as they are.
    still = {"strength": 0.0, "shift": 0.0, "bend": 0.0, "average": 0.9}

    def network(build, **rates):
        return images.Network(build=build, rates=images.Rates(**still, **rates), batch=32)

    small = {
        "CNN": network(images._cnn(4), rate=0.1),
        "convolutions of tables": network(images._tables(4, n_detectors=8, n_anchors=3), rate=0.1),
        "logic trees": network(images._trees(2, 1), rate=0.1, tau=2.0),
    }
    monkeypatch.setattr(images, "NETWORKS", small)
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    page.write_text(f"before\n{images.MARKS[0]}\nold\n{images.MARKS[1]}\nafter\n")
    options = ["--rows", str(rows), "--only", *small, "--splits", "0", "--steps", "60", "--page", str(page)]
    images.main(["--data", str(few), *options])
    found = {row["learner"]: row["right"] for row in map(json.loads, rows.read_text().splitlines())}
    assert set(found) == set(small)
    assert found["CNN"] > 50
    assert found["convolutions of tables"] > 50
    assert all(name in page.read_text() for name in ("before", "after", *small))
