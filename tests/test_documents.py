"""The documents: where their links lead."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

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
