"""Image folders with one subfolder per class: training and predictions."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lutjax.training import datasets, pixels, raw
from lutjax.training.datasets import folders
from lutjax.training.samples import SamplesError

RNG = np.random.default_rng(0)
CLASSES = ("cat", "dog 2", "eel")


def save(path, array, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def write_folder(folder, n=5, size=(4, 6)):
    """Write gray images for each class, some in a nested folder; return them by class, sorted by name."""
    images = {}
    for number, name in enumerate(CLASSES):
        images[name] = (RNG.integers(0, 60, (n, *size)) + 90 * number).astype(np.uint8)
        for k, image in enumerate(images[name]):
            save(folder / name / ("0" if k == 0 else "1/b" if k == 1 else "") / f"{k}.png", image)
    return images


def load(folder, **options):
    data = datasets.load(folder, **options)
    return data.parts(stratified=data.test is None)


def test_classes_are_the_names_of_folders(tmp_path):
    images = write_folder(tmp_path)
    hidden = ".DS_Store cat/.DS_Store cat/Thumbs.db cat/._0.png .git/0.png __MACOSX/cat/0.png"
    for name in hidden.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    data = datasets.load(tmp_path)
    assert data.test is None
    assert data.train.classes == CLASSES
    assert data.train.shape == (4, 6)
    np.testing.assert_array_equal(data.train.y, np.repeat([0, 1, 2], 5))
    np.testing.assert_array_equal(
        data.train.x, np.concatenate(list(images.values())).reshape(15, -1)
    )
    assert data.train.x.dtype == np.uint8
    assert data.remarks == ('images: 15 of 4 x 6 pixels, gray; 3 classes: "cat", "dog 2", "eel".',)
    parts = [data.parts(stratified=True, split=split) for split in (3, 3, 4)]
    assert np.bincount(parts[0].test.y).tolist() == [1, 1, 1]
    assert [(part.test.x == parts[0].test.x).all() for part in parts] == [True, True, False]


def test_files_that_are_left_out_are_named(tmp_path):
    write_folder(tmp_path)
    for name in ("README.md", "eel/notes.txt", "stray.png", "eel/photo.heic"):
        (tmp_path / name).write_bytes(b"x")
    assert datasets.load(tmp_path).remarks[1] == (
        'warning: files that are no images of a class are left out, 4 in all: "README.md", "stray.png", "eel/notes.txt", ...'
    )


@pytest.mark.parametrize(("modes", "channels"), [
    (("L", "RGB", "P", "1"), 1),
    (("L", "color"), 3),
    (("L", "color", "clear"), 4),
    (("L", "LA", "RGBA"), 1),
])  # fmt: skip
def test_channels_are_those_that_all_images_need(modes, channels, tmp_path):
    gray = RNG.integers(0, 2, (12, 3, 4), np.uint8) * 255
    expected = np.repeat(gray[..., None], channels, -1)
    for k, image in enumerate(gray):
        mode = modes[k % len(modes)]
        path = tmp_path / f"{k % 2}" / f"{k:02}.png"
        if mode in ("color", "clear"):
            colors = np.stack([image, image, image, np.full_like(image, 255)], -1)
            colors[0, 0] = (1, 2, 3, 255)
            colors[0, 1, 3] = 255 if mode == "color" else 7
            save(path, colors, "RGB" if mode == "color" else None)
            expected[k] = colors[..., :channels]
        else:
            save(path, image, mode)
            if channels == 4:
                expected[k, ..., 3] = 255
    actual = datasets.load(tmp_path)
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    assert actual.train.shape == ((3, 4) if channels == 1 else (3, 4, channels))
    np.testing.assert_array_equal(actual.train.x, expected[order].reshape(12, -1))


def test_folders_of_parts(tmp_path):
    train, test = (
        write_folder(tmp_path / "data/v1/Train"),
        write_folder(tmp_path / "data/v1/test", 2),
    )
    write_folder(tmp_path / "data/v1/val", 1)
    result = load(tmp_path / "data")
    for part, images in ((result.train, train), (result.test, test)):
        np.testing.assert_array_equal(
            part.x, np.concatenate(list(images.values())).reshape(len(part.x), -1)
        )
    parts = tmp_path / "data/v1"
    assert result.remarks[1] == f"{parts}/val is left out: the test part is {parts}/test."
    # Test images without classes are no test part, and the folder of a class may have the name of one.
    write_folder(tmp_path / "other/train")
    save(tmp_path / "other/test/0.png", np.zeros((4, 6), np.uint8))
    result = load(tmp_path / "other")
    assert (len(result.train.x), len(result.test.x)) == (12, 3)
    assert f"{tmp_path}/other/test is left out: it has no folder for each class." in result.remarks
    write_folder(tmp_path / "classes")
    (tmp_path / "classes/dog 2").rename(tmp_path / "classes/train")
    assert load(tmp_path / "classes").train.classes == ("cat", "eel", "train")


def test_images_are_scaled(tmp_path):
    for k in range(12):
        h, w = (9 + k, 17 - k)
        save(tmp_path / f"{k % 2}/{k:02}.png", RNG.integers(0, 256, (h, w, 3), np.uint8))
    with pytest.raises(
        SamplesError, match=r"02\.png has 11 x 15 pixels, but .*00\.png has 9 x 17; .* 9x17"
    ):
        datasets.load(tmp_path)
    data = datasets.load(tmp_path, image_size=(4, 8))
    assert data.train.shape == (4, 8, 3)
    form = raw.Form.from_samples(data.train, 2, None, scaled=True)
    given = raw.read(tmp_path, form, target="folder")
    np.testing.assert_array_equal(given.numbers, data.train.x)
    assert given.labels.tolist() == ["0"] * 6 + ["1"] * 6
    assert list(given.ids["file"][:2]) == ["0/00.png", "0/02.png"]
    fixed = raw.Form.from_samples(data.train, 2, None)
    with pytest.raises(
        SamplesError, match=r"00\.png has 9 x 17 pixels; expected 4 x 8\. Scale it, or train"
    ):
        raw.read(tmp_path, fixed)


def remove(folder, *names):
    for name in names:
        shutil.rmtree(folder / name)


def part(folder, name, classes=CLASSES):
    for one in classes:
        save(folder / name / one / "0.png", np.zeros((4, 6), np.uint8))


def damage(folder, content):
    (folder / "cat/3.png").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "fox").mkdir() or (f / "fox/notes.txt").write_text("x"), r"fox is a class folder without images \(\.png, .*\); add some, or remove"),
        (lambda f: remove(f, "dog 2", "eel"), r"has images of one class, cat; expected at least two class folders"),
        (lambda f: (f / "cat/2.png").rename(f / "0.png") and remove(f, *CLASSES), r"has no class folders; put each class's images into a folder named like the class"),
        (lambda f: [save(f / name / "0.png", np.zeros((4, 6), np.uint8)) for name in ("train", "test")] and remove(f, *CLASSES), r"train has no class folders"),
        (lambda f: damage(f, b"GIF89b" * 9), r"3\.png is no image of a known format; they are PNG"),
        (lambda f: damage(f, b""), r"3\.png is no image of a known format"),
        (lambda f: damage(f, (f / "cat/3.png").read_bytes()[:-30]), r"cannot read the image .*3\.png: image file is truncated"),
        (lambda f: save(f / "fox/0.png", np.zeros((4, 6), np.uint8)), r"class fox has 1 of 16 samples, and 4 classes"),
        (lambda f: (part(f, "train"), part(f, "test", ("cat", "fox")), remove(f, *CLASSES)), r"test has the class fox, which is missing from .*train; it has cat, dog 2, eel"),
        (lambda f: remove(f, *CLASSES), r"no batches of CIFAR-10 .* and no images \(\.png, .*\) in one subfolder per class"),
        (lambda f: remove(f, "eel/1") or [path.unlink() for path in f.glob("*/[3-4].png")], r"there are 8 images; at least 10 are needed"),
        pytest.param(lambda f: remove(f, "eel") or (f / "eel").mkdir() or os.mkfifo(f / "eel/0.png"), r"eel is a class folder without images", marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_used(change, message, tmp_path):
    write_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(SamplesError, match=message):
        load(tmp_path)


def test_errors_of_reading_are_one_line(tmp_path, monkeypatch):
    """Raise the operating system's permission error, because root can read every file."""
    write_folder(tmp_path)
    real, iterdir = Path.read_bytes, Path.iterdir

    def refused(path, name):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", lambda path: refused(path, "3.png") or real(path))
    with pytest.raises(SamplesError, match=r"cannot read the image .*3\.png: Permission denied"):
        datasets.load(tmp_path)
    monkeypatch.setattr(Path, "iterdir", lambda path: refused(path, "eel") or iterdir(path))
    with pytest.raises(SamplesError, match=r"eel cannot be read: Permission denied"):
        datasets.load(tmp_path)


def test_links_to_folders_are_followed_once(tmp_path):
    write_folder(tmp_path / "data")
    with contextlib.suppress(OSError):  # Windows may forbid links
        (tmp_path / "data/cat/around").symlink_to(tmp_path / "data/cat")
        (tmp_path / "data/eel/none.png").symlink_to(tmp_path / "nowhere.png")
    data = datasets.load(tmp_path / "data")
    assert len(data) == 15


def test_an_image_size_is_for_folders_of_images(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    for path in (None, tmp_path / "a.npz"):
        with pytest.raises(
            SamplesError, match=r"--image-size is 3x4, but it is for folders of images"
        ):
            datasets.load(path, image_size=(3, 4))
    for text in ("0", "3x", "5000", "3x4x5", "-3", "a"):
        with pytest.raises(ValueError, match=r"the image size is .*; expected HEIGHTxWIDTH"):
            pixels.parse_size(text)


def test_sixteen_bits_keep_the_upper_eight(tmp_path):
    """Pillow clips these values at 255: all but the darkest pixels were white."""
    image = np.linspace(0, 65535, 12).astype(np.uint16).reshape(3, 4)
    for end in ("png", "tif", "pgm"):
        path = save(tmp_path / f"i.{end}", image)
        for mode in ("L", None):
            np.testing.assert_array_equal(pixels.read(path, mode, (3, 4)), image >> 8)
    save(tmp_path / "f.tif", image.astype(np.float32))
    with pytest.raises(
        ValueError, match=r"f\.tif: it has numbers of 32 bits; save it with 8 or 16"
    ):
        pixels.read(tmp_path / "f.tif", "L", (3, 4))


def test_palettes_with_transparency(tmp_path):
    """Pillow warns about these images; the warning was once an error and blocked predictions."""
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) * 20).convert("P")
    image.save(tmp_path / "opaque.png", transparency=bytes([255] * 256))
    image.save(tmp_path / "clear.png", transparency=bytes([9] * 256))
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels.read(tmp_path / "opaque.png", "RGB", (3, 4)), expected)
    actual = pixels.read(tmp_path / "clear.png", None, (3, 4))
    np.testing.assert_array_equal(actual[..., :3], expected)
    assert (actual[..., 3] == 9).all()
    for mode in ("L", "RGB"):
        with pytest.raises(ValueError, match=r"clear\.png: it has transparent pixels"):
            pixels.read(tmp_path / "clear.png", mode, (3, 4))


def test_an_indexed_image_without_its_palette_names_the_file(tmp_path):
    Image.new("P", (4, 3)).save(tmp_path / "p.png")
    content = (tmp_path / "p.png").read_bytes()
    at = content.index(b"PLTE")
    n_bytes = int.from_bytes(content[at - 4 : at])
    (tmp_path / "p.png").write_bytes(content[: at - 4] + content[at + 8 + n_bytes :])
    with pytest.raises(ValueError, match=r"p\.png: its pixels index a palette, which it lacks"):
        pixels.read(tmp_path / "p.png", "RGB", (3, 4))


@pytest.mark.parametrize("end", ["png", "jpg", "webp", "tif"])
def test_photos_are_turned_upright(end, tmp_path):
    """Test every Exif orientation; the expected size is the upright image's size."""
    image = np.arange(256, dtype=np.uint8).reshape(8, 32)
    stored = pixels.read(save(tmp_path / f"stored.{end}", image), "L", (8, 32))
    path = tmp_path / f"i.{end}"
    upright = [
        *(stored, stored[:, ::-1], stored[::-1, ::-1], stored[::-1]),
        *(stored.T, np.rot90(stored, -1), stored[::-1, ::-1].T, np.rot90(stored)),
    ]
    for orientation, expected in enumerate(upright, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(path, image, exif=exif)
        np.testing.assert_array_equal(pixels.read(path, "L", expected.shape), expected)
        with pytest.raises(pixels.SizeError):
            pixels.read(path, "L", expected.shape[::-1])


def test_images_of_unknown_size_are_bounded(tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "i.png")
    for size, scaled in ((None, False), ((8, 8), True)):
        with pytest.raises(
            ValueError, match=r"i\.png has [0-9,]+ bytes, which unpack to 9000 x 9000 pixels"
        ):
            pixels.read(tmp_path / "i.png", "L", size, scaled=scaled)


def test_images_of_a_folder_are_bounded(tmp_path, monkeypatch):
    for k in range(12):
        save(tmp_path / f"{k % 2}/{k}.png", np.zeros((300, 200), np.uint8))
    assert len(datasets.load(tmp_path)) == 12
    monkeypatch.setattr(folders, "ALWAYS", 1000)

    monkeypatch.setattr(pixels, "read", None)  # no pixels are decoded
    with pytest.raises(
        SamplesError, match=r"12 images with 300 x 200 pixels take 720,000 bytes or more; .*--im"
    ):
        datasets.load(tmp_path)
