"""Links and paths in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

import megatron_dsv
from megatron_dsv import presets

REPOSITORY = Path(megatron_dsv.__file__).parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request):
    return request.param


def anchors(path: Path) -> set[str]:
    """The anchors that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_relative_links_resolve(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_paths_in_code_spans_exist(page):
    """`megatron_dsv/...` and the like; patterns and placeholders are left alone."""
    folders = {"megatron_dsv", "configs", "scripts", "docs", "tests", "benchmarks", "constraints", ".ci"}
    missing = []
    for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        for word in span.split():
            word = word.rstrip(".,;:")
            if word.partition("/")[0] in folders and not re.search(r"[*<{]", word) and "/" in word \
                    and not (REPOSITORY / word).exists():
                missing.append(word)
    assert missing == []


def test_presets_that_are_named_exist(page):
    groups = {preset.partition("/")[0] for preset in presets.names()}
    named = re.findall(rf"--config ((?:{'|'.join(sorted(groups))})/[\w.-]+)", page.read_text(encoding="utf-8"))
    assert sorted(set(named) - set(presets.names())) == []
