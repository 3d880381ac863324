"""The published sets in the forms they come in, another set for the test, and a messy folder."""

import contextlib
import dataclasses
import functools
import io
import json
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meml_jax import choices, task_spec, tasks, types, workdir
from meml_jax import config as schema
from meml_jax.config import Config, DataConfig, TasksConfig
from meml_jax.data import arrays, datasets, download, overlap, sizes, sources
from meml_jax.settings import flatten, override
from meml_jax.types import UserError

PARTS = ("train", "validation", "test")


@pytest.fixture
def lines():
    return []


def picture(value, side=12, colour=True):
    """An image whose left half is darker than its right half, by no more than JPEG keeps."""
    pixels = np.full((side, side, 3), value, np.uint8)
    pixels[:, side // 2 :] += 20
    if colour:
        pixels[..., 2] //= 2
    return Image.fromarray(pixels)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def load(root, lines=None, *, test=None, **fields):
    fields = {"image_size": 12, "channels": 3, "dir": str(root)} | fields
    config = DataConfig(cache_dir=f"{root}.cache", **fields)
    report = (lambda line: None) if lines is None else lines.append
    return datasets.load(config, test=test, report=report)


def counts(data):
    parts = (getattr(data, part) for part in PARTS)
    return [(part.num_classes, len(part.ids)) for part in parts]


def everything(data):
    """{id: image} of all parts."""
    parts = [getattr(data, part) for part in PARTS]
    return {id_: image for part in parts for id_, image in zip(part.ids, part.images, strict=True)}


def zip_of(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder.parent).as_posix())


# A user's own folder.


def messy(root):
    """12 classes of 4 good images each; returns {id: grey value at the top left}, and bad ids."""
    kinds = {
        "png": ("L", {}), "jpg": ("RGB", {"quality": 95}), "JPEG": ("L", {"quality": 95}),
        "bmp": ("RGB", {}), "webp": ("RGB", {"lossless": True}), "tif": ("RGB", {}),
    }  # fmt: skip
    values, bad = {}, {}
    names = ["Ärger", "文字", "e\u0301te\u0301", *(f"class {i}" for i in range(9))]
    for c, name in enumerate(names):
        folder = root / ("nested/deeper" if c % 2 else "nested") / name
        for i, (suffix, (mode, options)) in enumerate(list(kinds.items())[:4]):
            value = 10 * c + 5 * i
            image = picture(value, side=40 + c, colour=False).convert(mode)
            save(folder / f"{i}.{suffix}", image, **options)
            values[folder / f"{i}.{suffix}"] = value
    first, second = root / "nested" / "Ärger", root / "nested/deeper" / "文字"
    for suffix in ("webp", "tif"):
        mode, options = kinds[suffix]
        save(first / f"more.{suffix}", picture(77, colour=False).convert(mode), **options)
        values[first / f"more.{suffix}"] = 77

    sixteen = np.asarray(picture(60, colour=False).convert("L")).astype(np.uint16) * 257
    save(first / "sixteen.png", Image.fromarray(sixteen))
    save(first / "palette.png", picture(60, colour=False).quantize(4))
    save(first / "cmyk.jpg", picture(60, colour=False).convert("CMYK"), quality=95)
    save(first / "alpha.png", Image.new("RGBA", (12, 12), (9, 9, 9, 0)))
    frames = [picture(value, colour=False).convert("L") for value in (60, 200)]
    save(first / "moving.gif", frames[0], save_all=True, append_images=frames[1:])
    values |= {first / f"{name}": 60 for name in ("sixteen.png", "palette.png", "cmyk.jpg")}
    values |= {first / "moving.gif": 60, first / "alpha.png": 255}
    for orientation in range(1, 9):  # however it is stored, it is shown as the others are
        upright = picture(60, colour=False).convert("L")
        back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's Transpose that undoes it
        stored = upright.transpose(back[orientation]) if orientation > 1 else upright
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(first / f"turned{orientation}.jpg", stored, exif=exif, quality=95)
        values[first / f"turned{orientation}.jpg"] = 60

    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(
        whole, "PNG"
    )
    bad = {
        "zero.png": (b"", "zero bytes"),
        "text.jpg": (b"just some text", "not an image"),
        "page.webp": (b"<!DOCTYPE html><html>", "HTML page"),
        "cut.png": (whole.getvalue()[:2000], "truncated"),
        "float.tif": (None, "floating-point"),
    }
    for name, (content, _) in bad.items():
        if content is None:
            save(second / name, Image.new("F", (12, 12)))
        else:
            (second / name).write_bytes(content)
    for hidden in (".DS_Store", "Thumbs.db", "._0.png", "notes.txt"):
        (second / hidden).write_bytes(b"junk")
    for junk in (root / "__MACOSX" / "0.png", root / ".git" / "0.png"):
        junk.parent.mkdir()
        junk.write_bytes(b"junk")
    (root / "nested" / "empty").mkdir()
    return values, {f"文字/{name}": reason for name, (_, reason) in bad.items()}


def test_a_messy_folder_gives_the_right_arrays_and_names_what_is_bad(tmp_path, lines):
    root = tmp_path / "mine"
    values, bad = messy(root)
    fields = {"name": "folder", "image_size": 0, "channels": 0}
    with pytest.raises(UserError) as error:
        load(root, **fields)
    assert f"{len(bad)} of {len(values) + len(bad)} images cannot be read" in str(error.value)
    for name, reason in bad.items():
        assert name in str(error.value) and reason in str(error.value)

    data = load(root, lines, skip_bad=True, **fields)
    assert any(f"left out (data.skip_bad): {len(bad)} of" in line for line in lines)
    assert any("skipped 1 folders without images: nested/empty" in line for line in lines)
    assert any("chose data.image_size=28, data.channels=1" in line for line in lines)
    assert sum(n for n, _ in counts(data)) == 12
    found = everything(data)
    names = {path: path.relative_to(root).as_posix() for path in values}
    composed = {k: v.replace("e\u0301", "é") for k, v in names.items()}  # as file systems differ
    assert set(found) == set(composed.values())
    for path, value in values.items():
        image = found[composed[path]]
        assert image.shape == (28, 28, 1) and image.dtype == np.uint8
        right = 255 if value == 255 else value + 20
        np.testing.assert_allclose(image[2:-2, 2:10, 0], value, atol=4, err_msg=str(path))
        np.testing.assert_allclose(image[2:-2, -10:-2, 0], right, atol=4, err_msg=str(path))
    classes = {name for part in PARTS for name in getattr(data, part).class_names}
    assert {name.rpartition("/")[2] for name in classes} >= {"Ärger", "文字", "été"}


@pytest.mark.parametrize(
    ("side", "colour", "size", "channels"),
    [(105, False, 28, 1), (32, True, 84, 3), (300, False, 84, 1), (300, True, 84, 3)],
)
def test_size_and_channels_suit_the_images(tmp_path, lines, side, colour, size, channels):
    for c in range(6):
        for i in range(2):
            save(tmp_path / "x" / f"c{c}" / f"{i}.png", picture(20 * c + i, side, colour))
    root = tmp_path / "x"
    data = load(root, lines, name="folder", image_size=0, channels=0)
    assert data.train.images.shape[1:] == (size, size, channels)
    assert f"chose data.image_size={size}, data.channels={channels}" in lines[0]
    assert lines[0].endswith("and with it the paper's layers for that size")
    assert load(root, name="folder", image_size=0).train.images.shape[1:] == (size, size, 3)
    fixed = load(root, name="folder", image_size=9, channels=0)
    assert fixed.train.images.shape[1:] == (9, 9, channels)


@pytest.mark.parametrize("count", [1, 200, 201, 399, 401])
def test_at_most_200_images_are_looked_at(monkeypatch, count):
    seen = []

    @contextlib.contextmanager
    def open_files(files):
        seen.extend(files)
        yield None

    monkeypatch.setattr(sizes.listing, "open_files", open_files)
    sizes._look_at_files([str(i) for i in range(count)])
    assert len(seen) == {1: 1, 200: 200, 201: 101, 399: 200, 401: 134}[count]


def test_size_of_published_sets_and_of_arrays(tmp_path):
    for name, (size, channels) in sizes.PUBLISHED.items():
        config = DataConfig(name=name, image_size=0, channels=0)
        chosen = sizes.resolve(config, report=lambda line: None)
        assert (chosen.image_size, chosen.channels) == (size, channels)
    x = np.random.default_rng(0).integers(0, 256, (36, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "all.npz", X=x, Y=np.arange(36) % 12)
    data = load(tmp_path, name="npz", image_size=0, channels=0)
    assert data.train.images.shape[1:] == (84, 84, 3)
    with pytest.raises(UserError, match="or 0 for what suits the data"):
        load(tmp_path, name="npz", channels=2)


def test_every_file_of_arrays_is_looked_at(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (24, 32, 32), np.uint8)
    colour = np.repeat(grey[..., None], 3, axis=-1)

    def chosen():
        config = DataConfig(name="npz", dir=str(tmp_path), image_size=0, channels=0)
        found = sizes.resolve(config, report=lambda line: None)
        return found.image_size, found.channels

    for part in ("test", "train"):
        np.savez(tmp_path / f"{part}.npz", X=grey, Y=np.arange(24) % 12)
    np.savez(tmp_path / "more.npz", X=255 - colour // [1, 2, 3])  # not of the set
    assert chosen() == (28, 1)
    np.savez(tmp_path / "train.npz", X=colour, Y=np.arange(24) % 12)  # grey saved as colour
    assert chosen() == (28, 1)
    few = colour.copy()
    few[-4:, ..., 2] //= 2
    np.savez(tmp_path / "train.npz", X=few, Y=np.arange(24) % 12)
    assert chosen() == (84, 3)
    many = np.concatenate([colour] * 10 + [255 - few])  # the first 200 are grey
    np.savez(tmp_path / "train.npz", X=many, Y=np.arange(len(many)) % 12)
    assert chosen() == (84, 3)


def test_what_is_left_open_is_chosen_and_said(lines):
    def part(images, classes):
        labels = np.arange(images, dtype=np.int32) % classes
        names = tuple(map(str, range(classes)))
        return types.Split(np.zeros((images, 84, 84, 3), np.uint8), labels, labels, names)

    data = types.Dataset("mine", part(200, 5), part(4, 2), part(24, 12), "hash")
    open_ = override(
        Config(),
        {"data.image_size": 0, "data.channels": 0, "clustering.num_clusters": 0,
         "test.num_classes": ()},
    )  # fmt: skip
    chosen = choices.complete(open_, data, lines.append)
    assert (chosen.data.image_size, chosen.data.channels) == (84, 3)
    assert chosen.clustering.num_clusters == 10 and chosen.test.num_classes == (2, 5, 10, 12)
    assert len(lines) == 2 and "clustering.num_clusters=10" in lines[0]
    assert choices.complete(chosen, data, lines.append) == chosen and len(lines) == 2
    assert all(flatten(chosen)[name] for name in choices.OPEN)


def test_a_workdir_compares_a_field_once_it_is_chosen(tmp_path):
    def config(size):
        return override(Config(), {"data.image_size": size})

    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config(28))))
    for size in (0, 28):  # open at the start of a run, then what was chosen
        workdir.record_config(tmp_path, config(size))
    with pytest.raises(UserError, match="data.image_size is 28 there, 30 now"):
        workdir.record_config(tmp_path, config(30))
    other = override(config(28), {"test_data.name": "cub", "test_data.dir": "x"})
    workdir.record_config(tmp_path, other)  # training does not depend on the set for the test


# Mini-ImageNet.


def mini_folders(root, classes=(6, 2, 3)):
    for part, number in zip(("train", "val", "test"), classes, strict=True):
        for c in range(number):
            for i in range(3):
                name = f"n{part}{c}"
                save(root / part / name / f"{name}{i}.jpg", picture(20 * c + i), quality=95)


def test_mini_imagenet_is_the_same_from_folders_zips_and_lists(tmp_path, lines):
    folders = tmp_path / "folders"
    mini_folders(folders)
    data = load(folders, lines, name="mini_imagenet")
    assert counts(data) == [(6, 18), (2, 6), (3, 9)]
    assert data.train.ids[0] == "train/ntrain0/ntrain00.jpg"
    note = "PART of mini_imagenet: 11 of 100 classes, 33 of 60000 images"
    assert data.note == note and lines[-1].startswith(note)

    zips, lists = tmp_path / "zips", tmp_path / "lists"
    zips.mkdir()
    for part in ("train", "val", "test"):
        zip_of(folders / part, zips / f"{part}.zip")
    (lists / "images").mkdir(parents=True)
    for part in ("train", "val", "test"):
        files = sorted((folders / part).rglob("*.jpg"))
        rows = [f"{file.name},{file.parent.name}" for file in files]
        (lists / f"{part}.csv").write_text("\n".join(["filename,label", *rows]) + "\n")
        for file in files:
            shutil.copy(file, lists / "images")
    for root in (zips, lists):
        assert load(root, name="mini_imagenet").content_hash == data.content_hash
    wrapped = tmp_path / "wrapped" / "miniImageNet"
    shutil.copytree(folders, wrapped)
    assert counts(load(wrapped.parent, name="mini_imagenet")) == counts(data)

    (lists / "images" / "ntrain00.jpg").unlink()
    assert counts(load(lists, lines, name="mini_imagenet"))[0] == (6, 17)
    assert any("1 of the 18 files of train.csv are not in" in line for line in lines)
    (lists / "val.csv").write_text("file,class\n")
    with pytest.raises(UserError, match=r"val\.csv: got columns \['file', 'class'\], expected"):
        load(lists, name="mini_imagenet")
    (lists / "val.csv").write_text("filename,label\nnowhere.jpg,n1\n")
    with pytest.raises(UserError, match=r"none of its 1 files .* images/nowhere\.jpg"):
        load(lists, name="mini_imagenet")


def lists_of(root, rows):
    for part, named in rows.items():
        (root / f"{part}.csv").write_text("\n".join(["filename,label", *named]) + "\n")


@pytest.mark.parametrize("form", ["{i}.png,{c}", "{c}/{i}.png,{c}", "images\\{c}\\{i}.png,{c}"])
def test_lists_of_files_that_share_their_names(tmp_path, lines, form):
    """Each row gets the image of its own class."""
    classes = {"train": "abcd", "val": "ef", "test": "gh"}
    values = {c: 20 * k for k, c in enumerate("abcdefgh")}
    for c, value in values.items():
        for i in range(2):
            save(tmp_path / "images" / c / f"{i}.png", picture(value + i))
    lists_of(tmp_path, {part: [form.format(i=i, c=c) for c in own for i in range(2)]
                        for part, own in classes.items()})  # fmt: skip
    data = load(tmp_path, name="mini_imagenet")
    assert data.train.class_names == tuple("abcd") and data.test.class_names == tuple("gh")
    for part in PARTS:
        own = getattr(data, part)
        for id_, label, image in zip(own.ids, own.labels, own.images, strict=True):
            i = int(id_.removesuffix(".png")[-1])
            assert image[0, 0, 0] == values[own.class_names[label]] + i, id_
    (tmp_path / "images" / "a" / "1.png").unlink()  # a part of the set: no other 1.png is taken
    assert len(load(tmp_path, lines, name="mini_imagenet").train.ids) == 7
    assert any("1 of the 8 files of train.csv are not in" in line for line in lines)


def test_lists_that_do_not_tell_the_files_apart(tmp_path):
    for folder in ("x", "y"):
        save(tmp_path / "images" / folder / "0.png", picture(0))
    save(tmp_path / "images" / "x" / "1.png", picture(0))
    lists_of(tmp_path, {"train": ["0.png,a"], "test": ["1.png,b"]})
    with pytest.raises(UserError, match=r"row 1 of train.csv \(0.png,a\) got 2 files, images/x/0"
                                        r".*expected one file a row.* images/a/0.png"):  # fmt: skip
        load(tmp_path, name="mini_imagenet")
    lists_of(tmp_path, {"train": ["x/0.png,a"], "test": ["x/0.png,b"]})
    with pytest.raises(UserError, match="got images/x/0.png, the file of row 1 of test.csv"):
        load(tmp_path, name="mini_imagenet")
    lists_of(tmp_path, {"train": ["x/0.png,a", "x/0.png,a"], "test": ["x/1.png,b"]})
    with pytest.raises(UserError, match="got images/x/0.png, the file of row 1 of train.csv"):
        load(tmp_path, name="mini_imagenet")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("filename,label\nä.png,a\n".encode("latin1"), "expected a csv list, saved as UTF-8"),
        ("filename,label\n0.png,a\n".encode("utf-16"), "expected a csv list, saved as UTF-8"),
        (b"filename,label\n0.png\n", "the filename '0.png' and the label None in row 1"),
        (b"filename,label\n", "got no rows"),
        (b"", r"got columns \[\]"),
    ],
)
def test_a_broken_csv_list_is_named(tmp_path, content, said):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"train\.csv: .*{said}"):
        load(tmp_path, name="mini_imagenet")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"class_dict": [1, 2]}, "got class_dict list, expected a dict"),
        ({"class_dict": {"a": ["x", "y"]}}, "class_dict: got .*expected a list of integers"),
        ({"class_dict": {"a": [0.5, 1.0]}}, "class_dict: got .*expected a list of integers"),
        ({"class_dict": {"a": 5}}, "class_dict: got .*expected a list of integers"),
        ({"class_dict": {"a": [0, 0]}}, "has not each of the 2 images once"),
        (
            {"image_data": np.zeros((2, 9), np.uint8)},
            r"uint8 \[2, 9\], expected uint8 \[N, H, W",
        ),
        ({"image_data": np.array(3, np.uint8)}, r"got image_data uint8 \[\], expected"),
    ],
)
def test_a_cached_pickle_of_wrong_content_is_named(tmp_path, changes, said):
    content = {"image_data": np.zeros((2, 4, 4, 3), np.uint8), "class_dict": {"a": [0, 1]}}
    path = tmp_path / "mini-imagenet-cache-train.pkl"
    path.write_bytes(pickle.dumps(content | changes))
    with pytest.raises(UserError, match=rf"cache-train\.pkl: .*{said}"):
        load(tmp_path, name="mini_imagenet")


def test_mini_imagenet_without_parts_is_refused(tmp_path):
    with pytest.raises(UserError, match="got 0 images, but no train and test part"):
        (tmp_path / "none").mkdir()
        load(tmp_path / "none", name="mini_imagenet")
    for c in range(8):
        save(tmp_path / "all" / f"n{c}" / "0.jpg", picture(c))
    with pytest.raises(UserError, match="got 8 images, but no train and test part"):
        load(tmp_path / "all", name="mini_imagenet")


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_mini_imagenet_from_cached_pickles(tmp_path, protocol):
    rng = np.random.default_rng(0)
    images = {}
    for part, number in {"train": 6, "val": 2, "test": 3}.items():
        x = rng.integers(0, 256, (3 * number, 12, 12, 3), np.uint8)
        order = rng.permutation(3 * number)
        owned = {f"n{part}{c}": order[3 * c : 3 * c + 3].tolist() for c in range(number)}
        content = {"image_data": x, "class_dict": owned}
        path = tmp_path / f"mini-imagenet-cache-{part}.pkl"
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        images |= {(name, i): x[i] for name, rows in owned.items() for i in rows}
    data = load(tmp_path, name="mini_imagenet")
    assert counts(data) == [(6, 18), (2, 6), (3, 9)]
    found = everything(data)
    for (name, i), image in images.items():
        (id_,) = [key for key in found if key.endswith(f"/{name}/{i:05d}")]
        np.testing.assert_array_equal(found[id_], image)
    few = load(tmp_path, name="mini_imagenet", max_per_class=2, image_size=8)
    assert counts(few) == [(6, 12), (2, 4), (3, 6)] and few.test.images.shape[1] == 8


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "mini-imagenet-cache-train.pkl"
    path.write_bytes(pickle.dumps({"image_data": Malice(tmp_path / "ran")}))
    with pytest.raises(UserError, match=r"cache-train\.pkl: cannot be read: got .*can run code"):
        load(tmp_path, name="mini_imagenet")
    assert not (tmp_path / "ran").exists()
    path.write_bytes(pickle.dumps({"image_data": np.zeros(3)})[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        arrays.read_pickle(path)
    for content, said in (([], "got list"), ({"image_data": 1}, r"got \['image_data'\]")):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(UserError, match=said):
            load(tmp_path, name="mini_imagenet")
    path.write_bytes(pickle.dumps({"image_data": np.zeros((2, 4, 4, 3)), "class_dict": {}}))
    with pytest.raises(UserError, match=r"got image_data float64 \[2, 4, 4, 3\], expected"):
        load(tmp_path, name="mini_imagenet")


# SlimageNet64.


def test_slimagenet64_has_800_and_200_classes(tmp_path, monkeypatch):
    image = io.BytesIO()
    picture(50, side=64).save(image, "PNG")
    with zipfile.ZipFile(tmp_path / "slimagenet64.zip", "w") as archive:
        for c in range(1000):
            for i in range(2):
                archive.writestr(f"slimagenet64/n{c:08d}/{i}.png", image.getvalue())
    monkeypatch.setattr(
        datasets.sources.readers, "decode", lambda data, **_: np.zeros((64, 64, 3), np.uint8)
    )
    data = load(tmp_path, name="slimagenet64", image_size=0, channels=0)
    assert counts(data) == [(720, 1440), (80, 160), (200, 400)]
    assert "2000 of 200000 images" in data.note
    assert data.test.class_names[:3] == ("n00000009", "n00000011", "n00000019")  # frozen


def test_slimagenet64_of_given_parts(tmp_path):
    for part, number in {"train": 20, "test": 5}.items():
        for c in range(number):
            for i in range(2):
                save(tmp_path / part / f"{part}{c}" / f"{i}.png", picture(5 * c, side=64))
    data = load(tmp_path, name="slimagenet64", image_size=64)
    assert counts(data) == [(18, 36), (2, 4), (5, 10)]
    with pytest.raises(UserError, match="has no images"):
        (tmp_path / "none").mkdir()
        load(tmp_path / "none", name="slimagenet64")


# CIFAR-100 and CUB.

CLASSES = [f"thing_{c}" for c in range(12)]


def cifar_files(root):
    """Write CIFAR-100 of 12 classes in three forms; returns {(part, class, row): image}."""
    rng = np.random.default_rng(0)
    images = {}
    python, binary = root / "cifar-100-python", root / "cifar-100-binary"
    python.mkdir(parents=True), binary.mkdir()
    for part, per_class in {"train": 4, "test": 2}.items():
        labels = rng.permutation(np.repeat(np.arange(12), per_class))
        x = rng.integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
        content = {b"data": x.reshape(len(x), -1), b"fine_labels": labels.tolist()}
        (python / part).write_bytes(pickle.dumps(content, protocol=2))
        records = [bytes([0, y]) + row.tobytes() for y, row in zip(labels, x, strict=True)]
        (binary / f"{part}.bin").write_bytes(b"".join(records))
        for i, (label, image) in enumerate(zip(labels, x.transpose(0, 2, 3, 1), strict=True)):
            images[part, CLASSES[label], i] = image
            path = root / "folders" / part / CLASSES[label] / f"{i:05d}.png"
            save(path, Image.fromarray(image))
    (python / "meta").write_bytes(pickle.dumps({"fine_label_names": CLASSES}))
    (binary / "fine_label_names.txt").write_text("\n".join(CLASSES) + "\n")
    return images


def test_cifar100_is_the_same_from_every_form(tmp_path, lines):
    images = cifar_files(tmp_path / "all")
    forms = {}
    for form in ("cifar-100-python", "cifar-100-binary"):
        source = tmp_path / "all" / form
        forms[form] = load(source, name="cifar100", image_size=32)
        above = tmp_path / f"above {form}"
        shutil.copytree(source, above / form)
        assert load(above, name="cifar100", image_size=32).content_hash == forms[form].content_hash
        packed = tmp_path / f"packed {form}"
        packed.mkdir()
        with tarfile.open(packed / f"{form}.tar.gz", "w:gz") as tar:
            tar.add(source, form)
        for _ in range(2):  # unpacked once
            again = load(packed, lines, name="cifar100", image_size=32)
            assert again.content_hash == forms[form].content_hash
    assert sum("unpacking" in line for line in lines) == 2
    forms["folders"] = load(tmp_path / "all" / "folders", name="cifar100", image_size=32)
    for data in forms.values():
        assert [n for n, _ in counts(data)] == [6, 2, 4]
        found = {id_.removesuffix(".png"): image for id_, image in everything(data).items()}
        assert len(found) == len(images)
        for (part, name, i), image in images.items():
            np.testing.assert_array_equal(found[f"{part}/{name}/{i:05d}"], image)
    hashes = {data.content_hash for form, data in forms.items() if form != "folders"}
    assert len(hashes) == 1

    for form in ("cifar-100-python", "folders"):  # the test images come first
        few = load(tmp_path / "all" / form, name="cifar100", max_per_class=2, image_size=84)
        assert set(k.split("/")[0] for k in everything(few)) == {"test"}
        assert few.train.images.shape[1:] == (84, 84, 3)
    with pytest.raises(UserError, match="max_per_class: got 0"):
        load(tmp_path / "all" / "folders", name="cifar100", max_per_class=0)


def test_cifar100_of_wrong_content_is_named(tmp_path):
    cifar_files(tmp_path)
    names = tmp_path / "cifar-100-binary" / "fine_label_names.txt"
    names.write_text("only one")
    with pytest.raises(UserError, match="24 images, 24 labels from 0 to 11, and 2 class names"):
        load(tmp_path / "cifar-100-binary", name="cifar100")
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"test\.bin: got 3 bytes, expected 3074 an image"):
        load(tmp_path / "cifar-100-binary", name="cifar100")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "cifar-100-python.tar.gz").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"python\.tar\.gz: got .*expected a complete archive"):
        load(broken, name="cifar100")
    assert [path.name for path in broken.iterdir()] == ["cifar-100-python.tar.gz"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": np.zeros((24, 100), np.uint8)}, r"uint8 \[24, 100\], expected uint8 \[N, 3072\]"),
        ({"data": np.zeros((24, 3072))}, r"got data float64 \[24, 3072\]"),
        ({"fine_labels": ["a"] * 24}, "fine_labels list of <U1, 1 axes; expected a list of int"),
        ({"fine_labels": 5}, "fine_labels int of int64, 0 axes"),
        ({"fine_labels": [[1], [2, 3]]}, "expected a list of integers"),
        ({"fine_labels": [-1] + [0] * 23}, "24 labels from -1 to 0, and 12 class names"),
        ({"fine_labels": [12] + [0] * 23}, "24 labels from 0 to 12, and 12 class names"),
        ({"fine_labels": [0] * 23}, "24 images, 23 labels"),
    ],
)  # fmt: skip
def test_a_cifar_pickle_of_wrong_content_is_named(tmp_path, changes, said):
    cifar_files(tmp_path)
    root = tmp_path / "cifar-100-python"
    content = pickle.loads((root / "test").read_bytes())
    content = {key.decode(): value for key, value in content.items()} | changes
    (root / "test").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=rf"cifar-100-python/test: .*{said}"):
        load(root, name="cifar100")


def test_cifar_class_names_of_wrong_content_are_named(tmp_path):
    cifar_files(tmp_path)
    (tmp_path / "cifar-100-python" / "meta").write_bytes(pickle.dumps({"fine_label_names": 3}))
    with pytest.raises(UserError, match="meta: got fine_label_names int, expected a list"):
        load(tmp_path / "cifar-100-python", name="cifar100")
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"fine_label_names\.txt: got .*expected names in UTF-8"):
        load(tmp_path / "cifar-100-binary", name="cifar100")


def test_cub_is_the_same_from_every_form(tmp_path):
    official = tmp_path / "official"
    for c in range(10):
        for i in range(2):
            name = f"{c + 1:03d}.Bird_{c}"
            save(official / "CUB_200_2011/images" / name / f"Bird_{i}.jpg", picture(9 * c, 40))
            save(official / "segmentations" / name / f"Bird_{i}.png", picture(0, 40))
    images = official / "CUB_200_2011" / "images"
    zipped, packed = tmp_path / "zipped", tmp_path / "packed"
    zipped.mkdir(), packed.mkdir()
    zip_of(images, zipped / "images.zip")
    with tarfile.open(packed / "CUB_200_2011.tgz", "w:gz") as tar:
        tar.add(images.parent, "CUB_200_2011")
    loaded = [load(root, name="cub") for root in (official, images, zipped, packed, packed)]
    assert len({data.content_hash for data in loaded}) == 1
    assert counts(loaded[0]) == [(5, 10), (2, 4), (3, 6)]
    assert "001.Bird_0/Bird_0.jpg" in everything(loaded[0])
    assert loaded[0].note == "PART of cub: 10 of 200 classes, 20 of 11788 images"


@pytest.mark.parametrize(("name", "file"), [("cifar100", "cifar-100-binary.tar.gz"),
                                            ("cub", "CUB_200_2011.tgz")])  # fmt: skip
def test_what_is_not_there_is_fetched(tmp_path, monkeypatch, name, file):
    asked = []

    def fetch(*args, timeout, report):
        asked.append((args, timeout))
        raise UserError("no network")

    monkeypatch.setattr(download, "fetch", fetch)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no network"):
        load(tmp_path / "empty", name=name, download_timeout=3.0)
    with pytest.raises(UserError, match="no network"):
        load(tmp_path / "mine", name=name, dir=None)
    (args, timeout), (in_cache, _) = asked
    assert args[:2] == (name, tmp_path / "empty") and list(args[2]) == [file] and timeout == 3.0
    assert in_cache[:2] == (name, Path(f"{tmp_path / 'mine'}.cache") / name)


@pytest.mark.parametrize("name", ["omniglot", "cifar100", "cub"])
def test_nothing_is_fetched_into_a_folder_that_may_be_mistyped(tmp_path, monkeypatch, name):
    monkeypatch.setattr(download, "fetch", None)
    with pytest.raises(UserError, match=rf"data.dir: got .*mistyped, which does not.*{name}: corr"):
        load(tmp_path / "mistyped", name=name)
    own, _ = own_and_other(tmp_path)
    test = schema.TestDataConfig(name=name, dir=str(tmp_path / "mistyped"))
    with pytest.raises(UserError, match=rf"test_data \({name}\): test_data.dir: got .*mistyped"):
        load(own, test=test, name="folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "own", "own.cache"]


def test_what_another_process_unpacks_meanwhile_is_taken(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").write_text("whole")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        tar.add(tmp_path / "set", "set")
    shutil.rmtree(tmp_path / "set")
    extract = tarfile.TarFile.extractall

    def slowly(tar, path, **options):
        extract(tar, path, **options)
        shutil.copytree(Path(path, "set"), tmp_path / "set")

    monkeypatch.setattr(tarfile.TarFile, "extractall", slowly)
    unpack = functools.partial(download.unpack, tmp_path / "set.tar", "set", report=print)
    folder = unpack()
    assert folder == tmp_path / "set" and [path.name for path in folder.iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.tar"]
    monkeypatch.undo()
    with pytest.raises(UserError, match="expected a complete archive with set/, and a folder"):
        unpack()  # what was there before is not the archive's: it would have been read


def test_nothing_is_fetched_into_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="data.dir: got .*file, which is a file; expected a folder"):
        download.fetch("cub", tmp_path / "file", {"a.tgz": "https://x"}, timeout=1)


# Another set for the test.


def own_and_other(tmp_path):
    for c in range(8):
        for i in range(3):
            save(tmp_path / "own" / f"c{c}" / f"{i}.png", picture(20 * c + i, colour=False))
            save(tmp_path / "other" / f"c{c}" / f"{i}.png", picture(20 * c + i, side=30))
    return tmp_path / "own", tmp_path / "other"


def test_another_set_takes_the_place_of_the_test_part_only(tmp_path, lines):
    own, other = own_and_other(tmp_path)
    plain = load(own, name="folder", channels=1)
    test = schema.TestDataConfig(name="folder", dir=str(other))
    data = load(own, lines, test=test, name="folder", channels=1)
    assert data.content_hash == plain.content_hash and data.name == "folder_folder"
    assert counts(data) == [*counts(plain)[:2], (8, 24)]
    np.testing.assert_array_equal(data.validation.images, plain.validation.images)
    assert data.test.ids[0] == "folder/c0/0.png" and data.test.class_names[0] == "folder/c0"
    assert data.test.images.shape[1:] == (12, 12, 1)  # grey and as small as the training set
    with Image.open(other / "c3" / "0.png") as image:
        grey = np.asarray(image.convert("L").resize((12, 12), Image.Resampling.LANCZOS))
    row = list(data.test.ids).index("folder/c3/0.png")
    np.testing.assert_array_equal(data.test.images[row, ..., 0], grey)
    assert any("test on folder: all 8 classes, 24 images, brought to 12x12" in s for s in lines)
    assert data.test_hash is not None and data.test_hash[:12] in lines[-1]
    few = load(own, test=dataclasses.replace(test, max_per_class=2), name="folder")
    assert counts(few)[2] == (8, 16) and few.test_hash != data.test_hash


def test_another_set_that_cannot_serve_is_refused(tmp_path):
    own, other = own_and_other(tmp_path)
    with pytest.raises(UserError, match="got the training set, folder in"):
        load(own, test=schema.TestDataConfig(name="folder", dir=str(own)), name="folder")
    with pytest.raises(
        UserError, match=r"\(cubs\): test_data.name: got 'cubs', expected .* did you mean 'cub'"
    ):
        load(own, test=schema.TestDataConfig(name="cubs"), name="folder")
    (other / "c0" / "0.png").write_bytes(b"")
    test = schema.TestDataConfig(name="folder", dir=str(other))
    with pytest.raises(UserError, match=r"\(folder\): 1 of 24 .*config.test_data.skip_bad=true"):
        load(own, test=test, name="folder")


@pytest.mark.parametrize("form", ["{own}/", "own", "{own}/../own", "{link}", "~/own"])
def test_the_training_set_by_another_path_is_no_other_set(tmp_path, monkeypatch, form):
    own, _ = own_and_other(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(own)
    path = form.format(own=own, link=tmp_path / "link")
    with pytest.raises(UserError, match="got the training set, folder in"):
        load(own, test=schema.TestDataConfig(name="folder", dir=path), name="folder")


def test_the_cache_folder_is_where_a_set_without_a_folder_is(tmp_path):
    config = DataConfig(name="cub", cache_dir=str(tmp_path), image_size=12, channels=3)
    here = dataclasses.replace(config, dir=str(tmp_path / "cub"))
    assert sources.same_place(config, here) and sources.same_place(here, config)
    assert not sources.same_place(config, dataclasses.replace(here, name="folder"))
    assert not sources.same_place(config, dataclasses.replace(here, dir=str(tmp_path)))


def test_a_copy_of_the_training_set_is_no_other_set(tmp_path, lines, monkeypatch):
    own, other = own_and_other(tmp_path)
    shutil.copytree(own, tmp_path / "copy")
    test = schema.TestDataConfig(name="folder", dir=str(tmp_path / "copy"))
    seen = r"of 24 images of folder, such as folder/c\d/\d.png, are training or validation images"
    with pytest.raises(UserError, match=rf"got \d+ {seen} of folder; expected another"):
        load(own, test=test, name="folder")
    # What two sets have in common by chance is no reason.
    data = load(own, name="folder")
    shutil.copy(own / str(data.train.ids[0]), other / "c0" / "0.png")
    test = dataclasses.replace(test, dir=str(other))
    monkeypatch.setattr(overlap, "SEEN", 1 / 24)
    assert counts(load(own, lines, test=test, name="folder"))[2] == (8, 24)
    found = "1 of 24 images of folder, such as folder/c0/0.png, are training or validation images"
    assert f"WARNING: {found} of folder" in lines
    monkeypatch.undo()
    with pytest.raises(UserError, match=found):
        load(own, test=test, name="folder")


@pytest.mark.parametrize("parts", [False, True])
def test_another_set_needs_two_classes_only(tmp_path, parts):
    """They are not split, so three parts of two each are not asked for."""
    own, other = own_and_other(tmp_path)
    for c in range(2, 8):
        shutil.rmtree(other / f"c{c}")
    if parts:
        for name, c in (("train", 0), ("test", 1)):
            (other / name).mkdir()
            (other / f"c{c}").rename(other / name / f"c{c}")
    test = schema.TestDataConfig(name="folder", dir=str(other))
    data = load(own, test=test, name="folder")
    assert counts(data)[2] == (2, 6) and data.test.class_names == ("folder/c0", "folder/c1")
    shutil.rmtree(other / "test" / "c1" if parts else other / "c1")
    with pytest.raises(UserError, match="2 classes of 2 images|expected class folders"):
        load(own, test=test, name="folder")


# From each cluster between min_used and max_size images, in proportion to its size.


def test_images_used_grow_with_the_cluster():
    size = np.array([4, 9, 10, 40, 100, 150, 200, 400])
    table, kept = tasks.table_from_labels(np.repeat(np.arange(8), size), min_size=2)
    config = TasksConfig(min_used=10, max_size=30)
    spec = task_spec.make_spec(config, table, kept)
    support, own = task_spec.task_counts(size, spec)
    share = 20 / size.mean()
    expected = np.minimum(size, np.clip(np.floor(share * size), 10, 30))
    np.testing.assert_array_equal(support + own, expected)
    assert tasks.bucket_bounds(table, spec, num_buckets=3).max() == 30
    off = task_spec.make_spec(TasksConfig(max_size=30), table, kept)
    np.testing.assert_array_equal(sum(task_spec.task_counts(size, off)), np.minimum(size, 30))
    for bad in (
        {"min_used": 10},
        {"min_used": 1, "max_size": 30},
        {"min_used": 31, "max_size": 30},
    ):
        with pytest.raises(UserError, match="2 <= min_used <= max_size"):
            task_spec.make_spec(TasksConfig(**bad), table, kept)
