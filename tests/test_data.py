import builtins
import dataclasses
import functools
import io
import os
import sys
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meml_jax.config import DataConfig
from meml_jax.data import cache, datasets, download, listing, omniglot, readers, splits
from meml_jax.types import UserError


@pytest.fixture
def lines():
    return []


def png(colour=0, size=(12, 12), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def tree(root, classes=8, images=3):
    for c in range(classes):
        for i in range(images):
            write(root / f"c{c}" / f"{i}.png", png(10 * c + i))


def zip_of(root, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, prefix + file.relative_to(root).as_posix())


def config(tmp_path, **fields):
    fields = {"name": "folder", "image_size": 8, "channels": 1, "dir": str(tmp_path)} | fields
    return DataConfig(cache_dir=f"{tmp_path}.cache", **fields)


def load(tmp_path, lines=None, **fields):
    report = (lambda line: None) if lines is None else lines.append
    return datasets.load(config(tmp_path, **fields), report=report)


def everything(dataset):
    return [x for part in (dataset.train, dataset.validation, dataset.test) for x in part.ids]


def nasty(root):
    """The folder of T1: what people really have on disk."""
    good = root / "a"
    write(good / "grey.png", png(100))
    write(good / "wide.png", png(100, (40, 12)))
    write(good / "rgba.png", png((0, 0, 0, 0), mode="RGBA"))
    Image.new("RGB", (12, 12), (0, 0, 255)).quantize(4).save(root / "a" / "palette.png")
    Image.fromarray(np.full((12, 12), 65535, np.uint16)).save(root / "a" / "sixteen.png")
    Image.new("CMYK", (12, 12), (0, 0, 0, 255)).save(root / "a" / "cmyk.jpg")
    Image.new("1", (12, 12), 1).save(root / "a" / "bit.png")
    frames = [Image.new("L", (12, 12), value) for value in (30, 200)]
    frames[0].save(root / "a" / "moving.gif", save_all=True, append_images=frames[1:])
    turned = Image.new("L", (12, 12), 0)
    turned.paste(255, (0, 0, 12, 6))  # white above, to be turned to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(root / "a" / "turned.jpg", exif=exif, quality=95)
    write(root / "b" / "UPPER.PNG", png(7))
    for junk in (".DS_Store", "Thumbs.db", "._grey.png", "readme.txt"):
        write(good / junk, b"junk")
    write(root / "__MACOSX" / "a" / "grey.png", b"junk")
    write(root / ".hidden" / "x.png", b"junk")
    (root / "empty").mkdir()
    write(root / "b" / "zero.png", b"")
    write(root / "b" / "text.jpg", b"just some text")
    write(root / "b" / "page.png", b"<!DOCTYPE html><html>not found</html>")
    write(root / "b" / "cut.png", png(5, (64, 64), "RGB")[:60])


@pytest.mark.parametrize("zipped", [False, True])
def test_t1_reads_what_is_readable_and_names_the_rest(tmp_path, lines, zipped):
    root = tmp_path / "data"
    nasty(root)
    if zipped:
        zip_of(root, tmp_path / "data.zip", "data/")
        root = tmp_path / "data.zip"
    files = listing.list_images(root, report=lines.append)
    ids = [file.id.removeprefix("data/") for file in files]
    names = "bit.png cmyk.jpg grey.png moving.gif palette.png rgba.png sixteen.png turned.jpg"
    assert ids == [f"a/{name}" for name in (names + " wide.png").split()] + [
        f"b/{name}" for name in "UPPER.PNG cut.png page.png text.jpg zero.png".split()
    ]
    assert len(lines) == 1 and "empty" in lines[0] and "skipped 1" in lines[0]

    with pytest.raises(UserError) as error:
        readers.read_images(files, image_size=8, channels=1)
    message = str(error.value)
    assert "4 of 14" in message and "skip_bad" in message
    assert "b/zero.png (zero bytes)" in message
    assert "b/text.jpg (not an image" in message and "b'just some te" in message
    assert "b/page.png (not an image: an HTML page" in message
    assert "b/cut.png" in message

    done = []
    images, kept = readers.read_images(
        files, image_size=8, channels=1, skip_bad=True, report=lines.append,
        progress=lambda *count: done.append(count),
    )  # fmt: skip
    assert images.shape == (10, 8, 8, 1) and images.dtype == np.uint8
    assert list(kept) == list(range(10))
    assert "4 of 14" in lines[1] and done[-1] == (14, 14)
    value = dict(zip((i.rpartition("/")[2] for i in ids), images[..., 0], strict=False))
    for name, expected in {
        "bit.png": 255, "cmyk.jpg": 0, "grey.png": 100, "moving.gif": 30, "palette.png": 29,
        "rgba.png": 255, "sixteen.png": 255, "wide.png": 100, "UPPER.PNG": 7,
    }.items():  # fmt: skip
        np.testing.assert_allclose(value[name], expected, atol=2, err_msg=name)
    assert value["turned.jpg"][:, :3].max() < 10 and value["turned.jpg"][:, 5:].min() > 245
    colour, _ = readers.read_images(files[:9], image_size=8, channels=3)
    assert colour.shape == (9, 8, 8, 3)
    np.testing.assert_allclose(colour[4, 4, 4], (0, 0, 255), atol=2)


@pytest.mark.parametrize("where", ["progress", "work"])
def test_ctrl_c_stops_the_work_at_once(monkeypatch, where):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun, count = [], 200 * readers._CHUNK

    def do(i):
        begun.append(i)
        if where == "work" and i == 3:
            raise KeyboardInterrupt
        time.sleep(0.01)

    def progress(done, total):
        assert total == count
        if where == "progress":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        readers.for_each(do, count, progress=progress)
    # Two chunks had begun, and in one case were through; none was taken to its end after that.
    assert len(begun) < {"work": 1.0, "progress": 2.5}[where] * readers._CHUNK
    seen, done = [], []
    readers.for_each(seen.append, 100, progress=lambda *given: done.append(given))
    assert sorted(seen) == list(range(100)) and done == [(64, 100), (100, 100)]


def test_at_most_five_bad_files_are_named(tmp_path):
    for i in range(7):
        write(tmp_path / "a" / f"{i}.png", b"")
    with pytest.raises(UserError, match=r"7 of 7 .*a/4.png \(zero bytes\), \.\.\."):
        readers.read_images(listing.list_images(tmp_path), image_size=8, channels=1, skip_bad=True)


def test_sixteen_bit_is_scaled_and_the_centre_is_cut_out():
    wide = Image.fromarray(np.array([[0, 257, 32896, 65535]] * 4, np.uint16))
    assert readers.fit(wide, image_size=4, channels=1)[0, :, 0].tolist() == [0, 1, 128, 255]
    with pytest.raises(ValueError, match="32-bit"):
        readers.fit(Image.new("I", (4, 4), 70000), image_size=4, channels=1)
    with pytest.raises(ValueError, match="floating-point"):
        readers.fit(Image.new("F", (4, 4)), image_size=4, channels=1)
    strip = np.zeros((4, 12), np.uint8)
    strip[:, 4:8] = 255
    assert readers.fit(Image.fromarray(strip), image_size=2, channels=3).min() == 255


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"  <!doctype HTML><p>404", "HTML page"), (b"", "zero bytes"), (None, "cut off")],
)
def test_a_file_that_is_no_zip_is_named(tmp_path, content, said):
    if content is None:
        tree(tmp_path / "x", 2)
        zip_of(tmp_path / "x", tmp_path / "set.zip")
        content = (tmp_path / "set.zip").read_bytes()[:300]
    write(tmp_path / "set.zip", content)
    for root in (tmp_path, tmp_path / "set.zip"):
        with pytest.raises(UserError, match=rf"set\.zip: got .*{said}.*expected a complete zip"):
            listing.list_images(root)


def test_a_damaged_member_of_a_zip_is_named(tmp_path):
    tree(tmp_path / "x", 2)
    zip_of(tmp_path / "x", tmp_path / "set.zip")
    data = bytearray((tmp_path / "set.zip").read_bytes())
    data[data.index(b"IDAT") + 5] ^= 255
    write(tmp_path / "set.zip", bytes(data))
    files = listing.list_images(tmp_path / "set.zip")
    with pytest.raises(UserError, match=r"1 of 6 .*set/c0/0.png \(Bad CRC-32"):
        readers.read_images(files, image_size=8, channels=1)


def test_missing_folder_and_folder_without_images(tmp_path):
    with pytest.raises(UserError, match=r"data\.dir: got .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"folder: no folder .* set --config\.data\.dir=DIR"):
        load(tmp_path, dir=None)
    with pytest.raises(UserError, match=r"no images \(\.png"):
        load(tmp_path)


def test_ids_do_not_depend_on_creation_order_or_on_zipping(tmp_path):
    names = ["z/ä.png", "a b/1.png", "a/10.png", "a/2.png", "文/字.png", "a-b/e\u0301.png"]
    for k, order in enumerate((names, names[::-1])):
        for name in order:
            write(tmp_path / str(k) / "set" / name, png(k))
    zip_of(tmp_path / "0" / "set", tmp_path / "set.zip")
    listed = [
        [file.id for file in listing.list_images(root)]
        for root in (tmp_path / "0", tmp_path / "1", tmp_path / "set.zip")
    ]
    assert listed[0] == listed[1] == listed[2]
    in_order = ["a/10.png", "a/2.png", "a b/1.png", "a-b/é.png", "z/ä.png", "文/字.png"]
    assert listed[0] == [f"set/{name}" for name in in_order]


def test_zip_beside_its_unpacked_folder_is_read_once_and_links_may_loop(tmp_path):
    tree(tmp_path / "set")
    zip_of(tmp_path / "set", tmp_path / "set.zip", "set/")
    os.symlink(tmp_path, tmp_path / "set" / "loop", target_is_directory=True)
    os.symlink(tmp_path / "nothing", tmp_path / "set" / "c0" / "dangling.png")
    ids = [file.id for file in listing.list_images(tmp_path)]
    assert len(ids) == len(set(ids)) == 24 and ids[0] == "set/c0/0.png"


def test_fractions_give_disjoint_contiguous_reported_parts(tmp_path, lines):
    tree(tmp_path, classes=10)
    data = load(tmp_path, lines, validation_fraction=0.2, test_fraction=0.3)
    assert lines == [
        "folder: train 5 classes 15 images, validation 2/6, test 3/9, 8x8x1, hash "
        + data.content_hash[:12]
    ]
    assert sorted(everything(data)) == [f"c{c}/{i}.png" for c in range(10) for i in range(3)]
    for part in (data.train, data.validation, data.test):
        assert part.labels.dtype == np.int32
        for image, label, id_ in zip(part.images, part.labels, part.ids, strict=True):
            name, _, rest = id_.partition("/")
            assert part.class_names[label] == name
            assert image.mean() == 10 * int(name[1:]) + int(rest[0])
    assert load(tmp_path).content_hash != load(tmp_path, split_seed=1).content_hash
    fields = [field.name for field in dataclasses.fields(data)]
    names = ["name", "train", "validation", "test", "content_hash", "test_hash", "note"]
    assert fields == names


def test_too_few_classes_or_images_say_needed_and_available(tmp_path):
    tree(tmp_path, classes=5)
    said = (
        "got 5 classes, needed at least 6: 2 for train, 2 for validation, 2 for test; add classes$"
    )
    with pytest.raises(UserError, match=said):
        load(tmp_path)
    with pytest.raises(UserError, match="4 for test; add classes, or lower data.validation_frac"):
        load(tmp_path, test_fraction=0.8)
    with pytest.raises(UserError, match="sum is below 1"):
        load(tmp_path, test_fraction=0.95)
    tree(tmp_path / "one", classes=8, images=1)
    with pytest.raises(
        UserError, match=r"the smallest \(c\d\) with 1 images; needed 2 classes of 2"
    ):
        load(tmp_path / "one")


@pytest.mark.parametrize("validation", ["val", "validation", None])
def test_parts_as_zips_or_folders(tmp_path, validation):
    for k, part in enumerate(filter(None, ["train", validation, "test"])):
        for c in range(4):
            for i in range(2):
                write(tmp_path / "x" / part / f"n{k}{c}" / f"{i}.png", png(c))
        zip_of(tmp_path / "x" / part, tmp_path / f"{part}.zip", f"{part}/" if k else "")
    zips = load(tmp_path, dir=str(tmp_path))
    unpacked = load(tmp_path / "x")
    assert zips.content_hash == unpacked.content_hash
    assert zips.test.class_names[0] == ("n20" if validation else "n10")
    assert zips.train.num_classes == (4 if validation else 2)
    assert zips.validation.num_classes == (4 if validation else 2)
    assert zips.train.ids[0].startswith("train/n0")


def test_too_few_classes_for_a_validation_part_say_how_to_get_one(tmp_path):
    for k, part in enumerate(("train", "test")):
        for c in range(2 + k):
            for i in range(2):
                write(tmp_path / part / f"n{k}{c}" / f"{i}.png", png(c))
    said = (
        r"got 2 classes, needed at least 4: 2 for train, 2 for validation; add classes, or a "
        r"validation part of its own \(validation/ or validation.npz\)$"
    )
    with pytest.raises(UserError, match=said):
        load(tmp_path)
    for path in [*(tmp_path / "train").glob("*/*")]:  # unlabelled: validation is from the test part
        path.rename(tmp_path / "train" / f"{path.parent.name}{path.name}")
    for path in [*(tmp_path / "train").glob("n??")]:
        path.rmdir()
    with pytest.raises(UserError, match="got 3 classes, .* 2 for test, 2 for validation; add"):
        load(tmp_path)


def test_unlabelled_flat_folder_with_labelled_test(tmp_path, lines):
    for i in range(5):
        write(tmp_path / f"{i}.png", png(i))
    with pytest.raises(UserError, match="images without folders"):
        load(tmp_path)
    tree(tmp_path / "test")
    data = load(tmp_path, lines)
    assert data.train.labels.tolist() == [-1] * 5 and data.train.num_classes == 0
    assert (data.validation.num_classes, data.test.num_classes) == (2, 6)
    assert "train unlabelled 5 images, validation 2/6, test 6/18" in lines[0]
    for i in range(5):
        os.renames(tmp_path / f"{i}.png", tmp_path / "train" / f"{i}.png")
    again = load(tmp_path)
    np.testing.assert_array_equal(again.train.images, data.train.images)
    write(tmp_path / "train" / "cat" / "1.png", png())
    with pytest.raises(UserError, match="train/0.png is outside of the class folders of train"):
        load(tmp_path)


def test_layouts_that_are_ambiguous_or_overlap(tmp_path, lines):
    layout = splits.folder_layout(["set/images/cat/1.png", "set/images/dog/1.png"])
    assert layout == {"all": {"set/images/cat/1.png": "cat", "set/images/dog/1.png": "dog"}}
    words = ["train/1.png", "bus/1.png", "car/x/1.png", "sheet.png"]
    layout = splits.folder_layout(words, report=lines.append)
    assert list(layout["all"].values()) == ["train", "bus", "car/x"]
    assert "left out 1 images outside of the layout: sheet.png" in lines[0]
    with pytest.raises(UserError, match="got train, val; expected"):
        splits.folder_layout(["train/a/1.png", "val/b/1.png"])
    with pytest.raises(UserError, match="test/1.png is outside of the class folders of test"):
        splits.folder_layout(["train/a/1.png", "test/1.png"])
    for part in ("train", "test"):
        tree(tmp_path / part)
    with pytest.raises(UserError, match="no class .* in common.*'c[0-9]'.*train and test"):
        load(tmp_path)


def test_skip_bad_is_reported_and_not_cached(tmp_path, lines):
    tree(tmp_path)
    write(tmp_path / "c0" / "bad.png", b"")
    with pytest.raises(UserError, match="1 of 25"):
        load(tmp_path)
    for _ in range(2):
        assert len(everything(load(tmp_path, lines, skip_bad=True))) == 24
    assert sum("left out (data.skip_bad)" in line for line in lines) == 2


def test_second_load_does_not_decode_and_changes_are_seen(tmp_path, monkeypatch, lines):
    calls = []
    decode = readers.decode
    monkeypatch.setattr(readers, "decode", lambda *a, **k: calls.append(1) or decode(*a, **k))
    root = tmp_path / "data"
    tree(root)
    first = load(root)
    assert len(calls) == 24
    assert load(root).content_hash == first.content_hash and len(calls) == 24
    assert load(root, channels=3).train.images.shape[-1] == 3 and len(calls) == 48
    write(root / "c0" / "0.png", png(99))
    os.utime(root / "c0" / "0.png", ns=(0, 12345))  # another time, perhaps the same size
    assert load(root).content_hash != first.content_hash and len(calls) == 72

    for file in Path(f"{root}.cache").iterdir():
        file.write_bytes(file.read_bytes()[:-200])
    changed = load(root, lines)
    assert len(calls) == 96 and "broken and will be made again" in lines[0]
    assert load(root).content_hash == changed.content_hash and len(calls) == 96
    assert not list(Path(f"{root}.cache").glob(".*"))


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, lines):
    tree(tmp_path / "data")
    write(tmp_path / "occupied", b"")
    fields = dataclasses.replace(config(tmp_path / "data"), cache_dir=str(tmp_path / "occupied"))
    assert len(everything(datasets.load(fields, report=lines.append))) == 24
    assert any("cannot write" in line and "data.cache_dir" in line for line in lines)


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("MEML_JAX_CACHE", "/somewhere")
    assert cache.folder("/mine") == Path("/mine") and cache.folder(None) == Path("/somewhere")
    monkeypatch.delenv("MEML_JAX_CACHE")
    assert cache.folder(None) == Path.home() / ".cache" / "meml_jax"


def omniglot_names():
    return [
        f"{part}/alphabet{c // 30:02d}/character{c:03d}"
        for part, n in omniglot.ARCHIVES.items()
        for c in range(n)
    ]


@pytest.mark.parametrize(("split", "sizes"), [("random", (1100, 100, 423)),
                                              ("official", (864, 100, 659))])  # fmt: skip
def test_omniglot_split_at_full_size(split, sizes):
    names = omniglot_names()
    parts = omniglot.split_characters(names, split, 0)
    assert tuple(map(len, parts)) == sizes
    assert sorted(np.concatenate(parts)) == list(range(1623))
    again = omniglot.split_characters(names, split, 0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not np.array_equal(parts[1], omniglot.split_characters(names, split, 1)[1])
    if split == "official":
        assert parts[2].min() == 964
    else:  # frozen: results are compared across versions
        assert parts[2][:3].tolist() == [698, 1048, 1390]


def test_omniglot_split_refuses_other_counts_and_names():
    with pytest.raises(UserError, match="963 characters in images_background, expected 964"):
        omniglot.split_characters(omniglot_names()[1:], "random", 0)
    with pytest.raises(UserError, match="data.split: got 'lake', expected random or official"):
        omniglot.split_characters(omniglot_names(), "lake", 0)


def test_omniglot_of_wrong_counts_is_refused_before_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "decode", None)
    for part in omniglot.ARCHIVES:
        for i in range(19):
            write(tmp_path / part / "Greek" / "character01" / f"0001_{i:02d}.png", b"")
    with pytest.raises(UserError) as error:
        load(tmp_path, name="omniglot")
    message = str(error.value)
    assert "1 characters in images_background, expected 964 with 20 images each" in message
    assert "19 in images_background/Greek/character01" in message
    assert "images_background.zip" in message


def test_omniglot_of_full_size_has_ink_255_on_0(tmp_path, monkeypatch):
    def draw(data, *, image_size, channels):
        image = np.full((image_size, image_size, channels), 255, np.uint8)
        image[0, 0] = 0
        return image

    monkeypatch.setattr(readers, "decode", draw)
    for part in omniglot.ARCHIVES:
        write(tmp_path / f"{part}.zip", b"x")
    some = tmp_path / "images_background.zip"  # one file stands for all images
    files = [
        listing.ImageFile(f"{name}/{i:02d}.png", some, None, "stamp")
        for name in omniglot_names()
        for i in range(20)
    ]
    monkeypatch.setattr(listing, "list_images", lambda root, **options: files)
    data = load(tmp_path, name="omniglot")
    assert [p.num_classes for p in (data.train, data.validation, data.test)] == [1100, 100, 423]
    assert data.test.images[:, 0, 0].min() == 255 and data.test.images.sum() == 255 * 423 * 20
    assert len(set(everything(data))) == 32460


def test_omniglot_offline_without_tfds(tmp_path, monkeypatch):
    real = builtins.__import__

    def no_tfds(name, *args, **kwargs):
        if name.startswith(("requests", "tensorflow")):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tfds)
    with pytest.raises(UserError) as error:
        load(tmp_path, name="omniglot")
    for part in ("images_background.zip and images_evaluation.zip", str(tmp_path),
                 "pip install 'meml_jax[tfds]'", "by hand", omniglot.URL):  # fmt: skip
        assert part in str(error.value)


def fake_tfds(monkeypatch, get, manager):
    """Put modules in place that stand for `requests` and the download manager of TFDS."""
    modules = {"requests": types.SimpleNamespace(get=get)}
    for name in ("tensorflow_datasets", "tensorflow_datasets.core"):
        modules[name] = types.ModuleType(name)
    modules["tensorflow_datasets.core.download"] = types.SimpleNamespace(
        download_manager=types.SimpleNamespace(DownloadManager=manager)
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class Answer:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def raise_for_status(self):
        pass


def test_omniglot_download_without_network(tmp_path, monkeypatch, lines):
    seen = []

    def get(url, **options):
        seen.append((url, options["timeout"]))
        raise ConnectionError("Name or service not known")

    fake_tfds(monkeypatch, get, None)
    (tmp_path / "images_background").mkdir()
    with pytest.raises(UserError) as error:
        load(tmp_path, lines, name="omniglot", download_timeout=3.0)
    assert seen == [(omniglot.URL + "images_evaluation.zip", 3.0)]
    assert "images_evaluation.zip" in lines[0]
    for part in ("download of images_evaluation.zip to", str(tmp_path), "service not known",
                 "by hand", omniglot.URL):  # fmt: skip
        assert part in str(error.value)


def test_omniglot_download_puts_checked_files_in_place(tmp_path, monkeypatch):
    class Manager:
        def __init__(self, *, download_dir, force_checksums_validation):
            assert force_checksums_validation
            self.folder = Path(download_dir)

        def download(self, url):
            if "evaluation" in url:
                raise RuntimeError("has wrong checksum:\n* Expected: 1\n* Got: 2")
            write(self.folder / "odd name", b"bytes")
            return self.folder / "odd name"

    fake_tfds(monkeypatch, lambda url, **options: Answer(), Manager)
    urls = {f"{name}.zip": f"{omniglot.URL}{name}.zip" for name in omniglot.ARCHIVES}
    background, evaluation = ({file: url} for file, url in urls.items())
    fetch = functools.partial(download.fetch, "omniglot", tmp_path, timeout=1, report=print)
    fetch(background)
    assert (tmp_path / "images_background.zip").read_bytes() == b"bytes"
    with pytest.raises(UserError, match=r"wrong checksum: \* Expected: 1 \* Got: 2"):
        fetch(evaluation)
    assert [path.name for path in tmp_path.iterdir()] == ["images_background.zip"]


def arrays(n=24, size=8, **changes):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, size, size), dtype=np.uint8)
    return {"X": x, "Y": np.arange(n) % 8, "Z": rng.normal(size=(n, 5))} | changes


def test_npz_with_fractions_keeps_rows_together(tmp_path):
    content = arrays(Y=np.arange(24) % 12)
    np.savez(tmp_path / "all.npz", **content)
    for path in (tmp_path, tmp_path / "all.npz"):
        data = load(tmp_path, name="npz", dir=str(path))
        assert (data.train.num_classes, data.validation.num_classes) == (6, 2)
        for part in (data.train, data.validation, data.test):
            for row, id_ in enumerate(part.ids):
                i = int(id_.removeprefix("all.npz/"))
                np.testing.assert_array_equal(part.images[row, ..., 0], content["X"][i])
                np.testing.assert_allclose(part.embeddings[row], content["Z"][i], rtol=1e-6)
                assert part.class_names[part.labels[row]] == f"all/{content['Y'][i]:06d}"
            assert part.embeddings.dtype == np.float32


def test_npz_parts_labels_optional_in_train(tmp_path):
    without = {key: value for key, value in arrays(size=16).items() if key != "Y"}
    np.savez(tmp_path / "train.npz", **without)
    np.savez(tmp_path / "test.npz", **{k: v for k, v in arrays().items() if k != "Z"})
    data = load(tmp_path, name="npz", channels=3)
    assert data.train.images.shape == (24, 8, 8, 3) and set(data.train.labels) == {-1}
    assert data.train.embeddings is not None and data.test.embeddings is None
    assert (data.validation.num_classes, data.test.num_classes) == (2, 6)
    np.savez(tmp_path / "validation.npz", **arrays())
    assert load(tmp_path, name="npz").validation.num_classes == 8
    np.savez(tmp_path / "test.npz", **without)
    with pytest.raises(UserError, match=r"test\.npz: got no labels Y"):
        load(tmp_path, name="npz")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"X": np.zeros((24, 8, 8, 1))}, r"got X float64 \[24, 8, 8, 1\], expected uint8"),
        ({"X": np.zeros((24, 8), np.uint8)}, r"got X uint8 \[24, 8\]"),
        ({"X": np.zeros((24, 8, 8, 2), np.uint8)}, r"got X uint8 \[24, 8, 8, 2\]"),
        ({"Y": np.arange(23)}, r"got Y int64 \[23\], expected integers \[24\]"),
        ({"Y": np.arange(24) - 1}, r"from 0 to 2\^63 - 1"),
        ({"Y": np.full(24, 2**63, np.uint64)}, r"from 0 to 2\^63 - 1"),
        ({"Z": np.zeros(24)}, r"got Z float64 \[24\], expected floats \[24, D\]"),
        ({"X": np.array([None] * 24)}, "expected arrays X, Y, Z"),
    ],
)
def test_npz_of_wrong_content_names_the_array(tmp_path, changes, said):
    np.savez(tmp_path / "all.npz", **arrays(**changes))
    with pytest.raises(UserError, match=rf"all\.npz: .*{said}"):
        load(tmp_path, name="npz")


def test_npz_that_is_none(tmp_path):
    with pytest.raises(UserError, match="expected one npz, or train.npz"):
        load(tmp_path, name="npz")
    np.savez(tmp_path / "all.npz", Y=np.arange(3))
    with pytest.raises(UserError, match="got no array X"):
        load(tmp_path, name="npz")
    write(tmp_path / "all.npz", b"<html>")
    with pytest.raises(UserError, match="all.npz: got an HTML page"):
        load(tmp_path, name="npz")


def test_glyphs(tmp_path, monkeypatch, lines):
    told = []
    fields = {"name": "glyphs", "num_classes": 40, "per_class": 4}
    data = datasets.load(
        config(tmp_path, **fields), report=lines.append, progress=lambda *at: told.append(at)
    )
    assert told[0] == (4, 160) and told[-1] == (160, 160)  # images, not classes
    assert [p.num_classes for p in (data.train, data.validation, data.test)] == [28, 2, 10]
    assert data.train.ids[0].count("/") == 2 and len(set(everything(data))) == 160
    assert 0 < data.train.images.mean() < 127
    monkeypatch.setattr(datasets.glyphs, "generate", None)  # the second time comes from the cache
    again = load(tmp_path, name="glyphs", num_classes=40, per_class=4, channels=3)
    np.testing.assert_array_equal(again.test.images[..., 2:], data.test.images)
    other = load(tmp_path, name="glyphs", num_classes=40, per_class=4, split_seed=1)
    assert set(other.test.class_names) != set(data.test.class_names)
    assert splits.split_sizes(1623, {"validation": 100 / 1623, "test": 423 / 1623}) == [
        1100,
        100,
        423,
    ]


def test_glyphs_of_impossible_size(tmp_path):
    with pytest.raises(UserError, match="image_size"):
        load(tmp_path, name="glyphs", num_classes=10, image_size=3)


def test_unknown_name_and_values(tmp_path):
    with pytest.raises(UserError, match="got 'omniglott', expected .* did you mean 'omniglot'"):
        load(tmp_path, name="omniglott")
    with pytest.raises(UserError, match="data.channels"):
        load(tmp_path, channels=4)


def test_a_data_set_of_ones_own(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(datasets, "REGISTRY", dict(datasets.REGISTRY))

    @datasets.register("mine")
    def mine(config, *, report, progress):
        images = np.zeros((30, config.image_size, config.image_size, config.channels), np.uint8)
        ids = [f"mine/{i:06d}" for i in range(30)]
        return {"all": splits.table(images, ids=ids, classes=[f"class{i % 10}" for i in range(30)])}

    fractions = {"validation_fraction": 0.2, "test_fraction": 0.3}
    assert load(tmp_path, lines, name="mine", **fractions).test.num_classes == 3
    assert "mine: train 5 classes" in lines[0]

    @datasets.register("wrong")
    def wrong(config, *, report, progress):
        whole = mine(config, report=report, progress=progress)["all"]
        parts = splits.partition(whole, 0.2, 0.3, config.split_seed)
        test = parts["test"]
        return parts | {"test": dataclasses.replace(test, labels=test.labels + 1)}

    with pytest.raises(UserError, match=r"wrong, test part: got int32 labels \[1 2 3\]"):
        load(tmp_path, name="wrong")


def test_every_loader_keeps_the_first_images_of_each_class(tmp_path, monkeypatch):
    content = arrays(48, Y=np.arange(48) % 12)
    np.savez(tmp_path / "all.npz", **content)
    data = load(tmp_path, name="npz", max_per_class=3)
    assert sorted(everything(data)) == [f"all.npz/{i:07d}" for i in range(36)]
    for id_, image, z in zip(data.test.ids, data.test.images, data.test.embeddings, strict=True):
        row = int(id_.removeprefix("all.npz/"))
        np.testing.assert_array_equal(image[..., 0], content["X"][row])
        np.testing.assert_allclose(z, content["Z"][row], rtol=1e-6)
    assert load(tmp_path, name="npz", max_per_class=4).content_hash == (
        load(tmp_path, name="npz").content_hash
    )
    glyphs = load(tmp_path, name="glyphs", num_classes=40, per_class=4, max_per_class=2)
    assert sorted({id_.rpartition("/")[2] for id_ in everything(glyphs)}) == ["00", "01"]
    assert len(everything(glyphs)) == 80

    monkeypatch.setattr(datasets, "REGISTRY", dict(datasets.REGISTRY))

    @datasets.register("mine")
    def mine(config, *, report, progress):
        images = np.zeros((30, config.image_size, config.image_size, config.channels), np.uint8)
        ids = [f"{i:02d}" for i in range(30)]
        names = [f"class{i % 10}" for i in range(20)]
        test = splits.table(images[:20], ids=ids[:20], classes=names)
        return {"train": splits.table(images[20:], ids=ids[20:], classes=None), "test": test}

    config_ = config(tmp_path, name="mine", max_per_class=1)
    with pytest.raises(UserError, match="with 1 images; needed 2 classes of 2"):
        datasets.load(config_, report=lambda line: None)
    other = datasets._load_tables(config_, report=print, progress=None)[1]
    assert len(other["train"].ids) == 10  # unlabelled images have no class to count
    assert list(other["test"].ids) == [f"{i:02d}" for i in range(10)]
    with pytest.raises(UserError, match="data.max_per_class: got 0, expected at least 1"):
        load(tmp_path, name="npz", max_per_class=0)


@pytest.mark.parametrize(
    ("name", "classes", "limit", "least", "said"),
    [
        ("cifar100", 100, None, 600, ""),
        ("cifar100", 100, 600, 600, ""),
        ("cifar100", 100, 5, 5, "cifar100 limited by max_per_class=5: 100 of 100 classes, 500 of"),
        ("cifar100", 100, 5, 4, "PART of cifar100: 100 of 100 classes, 400 of 60000 images"),
        ("cifar100", 99, 5, 5, "PART of cifar100: 99 of 100 classes, 495 of 60000 images"),
        ("cifar100", 100, None, 5, "PART of cifar100: 100 of 100 classes, 500 of 60000 images"),
        ("cub", 200, 50, 41, "cub limited by max_per_class=50: 200 of 200 classes, 8200 of 11788"),
        ("cub", 200, 40, 39, "PART of cub"),
        ("folder", 2, 5, 5, ""),
    ],
)
def test_a_set_limited_by_the_settings_is_no_part(lines, name, classes, limit, least, said):
    labels = np.repeat(np.arange(classes), least)
    names = [str(label) for label in labels]
    whole = splits.table(np.zeros((len(labels), 1, 1, 1), np.uint8), ids=names, classes=names)
    parts = splits.partition(whole, 0.1, 0.3, 0) if classes > 9 else {"all": whole}
    settings = DataConfig(name=name, max_per_class=limit)
    note = datasets._report_part(settings, parts, lines.append)
    assert note.startswith(said) and bool(note) == bool(said)
    assert [line.startswith(said) for line in lines] == [True] * bool(said)
    assert any("not comparable" in line for line in lines) == said.startswith("PART")
