"""The documents: where their links lead, and how several processes write one."""

import re
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

from meml_jax import documents, files
from meml_jax.types import UserError

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?:<([^>]*)>|([^)\s]*))\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading):
    """What a heading is linked by on the usual hosts."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for match in LINK.finditer(document.read_text()):
        target, _, heading = unquote(match[1] or match[2]).partition("#")
        if ":" in target:
            continue  # of the web
        path = document.parent / target if target else document
        assert path.exists(), match[0]
        if heading:
            assert heading in map(anchor, HEADING.findall(path.read_text())), match[0]


def test_a_document_stays_the_file_that_it_was(tmp_path):
    place, path = tmp_path / "elsewhere.md", tmp_path / "doc.md"
    place.write_bytes(b"# Own\r\n")
    place.chmod(0o640)
    path.symlink_to(place)
    for text in ("1", "2"):
        documents.write_block(path, "block", text)
        expected = documents.insert("# Own\n", "block", text).replace("\n", "\r\n")
        assert path.is_symlink() and place.read_bytes() == expected.encode()
    assert place.stat().st_mode & 0o777 == 0o640
    place.write_bytes(own := b"a\r\nb\nc\rd\ne\n")
    documents.write_block(path, "block", "1")
    assert place.read_bytes().startswith(own + b"\n<!-- begin block (generated) -->\n")


def test_what_is_refused_leaves_no_folder(tmp_path):
    path = tmp_path / "doc.md"
    path.write_text(documents.insert("", "block", "1"))
    with pytest.raises(UserError, match="holds no results; delete the block"):
        documents.check(path, "block", tmp_path / "doc" / "block")
    assert [p.name for p in tmp_path.iterdir()] == ["doc.md"]


def test_processes_with_other_caches_keep_each_other_from_a_document(tmp_path, monkeypatch):
    path, done = tmp_path / "doc.md", threading.Event()

    def other():
        with documents.locked(path):
            documents.write_block(path, "second", "2")
        done.set()

    with documents.locked(path):
        text = documents.insert("", "first", "1")
        monkeypatch.setenv("MEML_JAX_CACHE", str(tmp_path / "other"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        thread = threading.Thread(target=other)
        thread.start()
        assert not done.wait(0.3)
        files.write_atomic(path, text)
    thread.join(30)
    assert path.read_text() == documents.insert(text, "second", "2")
    assert [p.name for p in tmp_path.iterdir() if p != path] == [".doc.md.lock"]


def test_a_lock_that_cannot_be_made_is_said_before_the_work(tmp_path):
    path = tmp_path / "doc.md"
    (tmp_path / ".doc.md.lock").mkdir()  # in the way, whoever runs the tests
    with pytest.raises(UserError) as error:
        documents.check(path, "block", tmp_path / "doc")
    assert str(error.value).startswith(f"cannot write {tmp_path / '.doc.md.lock'} (Is a directory)")
    assert not path.exists()
