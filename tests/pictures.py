"""Functions that read SVG pictures, so that tests can check the contents of a picture."""

import itertools
import re
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """The visible texts of a picture."""
    return [_words(text) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def arrows(svg: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.get("marker-end")]


def check_legible(svg: str) -> None:
    """Check that all texts lie within the picture and do not overlap."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [_box(text) for text in root.iter(f"{SVG}text") if _words(text)]
    for words, left, top, right, bottom in boxes:
        assert 0 <= left and right <= width and 0 <= top and bottom <= height, f"{words!r} is not inside the picture"
    for (a, *first), (b, *second) in itertools.combinations(boxes, 2):
        apart = first[2] <= second[0] or second[2] <= first[0] or first[3] <= second[1] or second[3] <= first[1]
        assert apart, f"{a!r} overlaps {b!r}"


def _words(text: ElementTree.Element) -> str:
    """The visible words of a text. A `<title>` in the text is a tooltip, and the visible words follow it."""
    tip = text.find(f"{SVG}title")
    return (text.text or "") if tip is None else (tip.tail or "")


def _box(text: ElementTree.Element) -> tuple[str, float, float, float, float]:
    words, size, x, y = _words(text), *(float(text.attrib[name]) for name in ("font-size", "x", "y"))
    # For a common font, a letter is about 0.55 `size` wide, and extends 0.75 `size` above and 0.2 `size` below the baseline.
    width = 0.55 * size * len(re.sub(r"\s+", " ", words))
    left = {"start": x, "middle": x - width / 2, "end": x - width}[text.attrib["text-anchor"]]
    return words, left, y - 0.75 * size, left + width, y + 0.2 * size
