"""Draw pictures as SVG text. The lanes are side by side, and time increases from top to bottom. A frame encloses each loop.

actor     env        two lanes
  |        |
[act]      |         a box
  |------->|         an arrow: the values above the line, their size below
  |      [step]
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from xml.sax.saxutils import escape

WIDTH = 1000
MARGIN = 28
Pixels: TypeAlias = int | float
INK, QUIET, LINE, PAPER = "#1f2933", "#616e7c", "#cbd2d9", "#ffffff"
ROLE_COLOURS = {"env": "#2f9e44", "actor": "#1971c2", "buffer": "#e8890c", "learner": "#c2255c"}
OTHER_COLOURS = ("#6741d9", "#0c8599", "#846358", "#5c940d", "#a61e4d")


@dataclass(frozen=True)
class Lane:
    """A column of the picture: a role or a group."""

    title: str
    lines: tuple[str, ...] = ()
    """Smaller text beneath the title."""
    roles: tuple[str, ...] = ()
    """The roles whose colours the lane shows. A lane without roles is grey."""
    replicas: int = 1
    """If there are several replicas, the head of the lane is drawn as a pile of cards."""


@dataclass(frozen=True)
class Box:
    """Work in a lane: a fragment, or a step of a plan."""

    lane: int
    """Position of the lane, from the left."""
    title: str
    lines: tuple[str, ...] = ()
    """Smaller text beneath the title."""
    roles: tuple[str, ...] = ()
    """The roles whose colours the box shows. A box without roles is grey."""


@dataclass(frozen=True)
class Arrow:
    """Values that go from one lane to another lane, or back into the same lane."""

    src: int
    """Position of the lane where the arrow begins."""
    dst: int
    """Position of the lane where the arrow ends."""
    what: str
    """Names and types of the values, above the line."""
    size: str
    """The size of the values, below the line."""
    dashed: bool = False
    """True if the values are read later: in the next round of a loop, or some updates later."""


@dataclass(frozen=True)
class LoopFrame:
    """A loop, drawn around its items."""

    title: str
    """How often the loop runs: `× 16`."""
    note: str
    """Smaller text beside the title."""
    items: "tuple[Item, ...]"


Item: TypeAlias = Box | Arrow | LoopFrame


def role_colour(role: str) -> str:
    """The colour of a role: the same in every picture."""
    return ROLE_COLOURS.get(role) or OTHER_COLOURS[zlib.crc32(role.encode()) % len(OTHER_COLOURS)]


def draw_lanes(
    title: str, subtitle: str, lanes: Sequence[Lane], items: Sequence[Item], footer: Sequence[str] = ()
) -> str:
    """The picture as SVG text, `WIDTH` pixels wide and as high as it needs to be."""
    return _Painter(lanes).paint(title, subtitle, items, footer)


TITLE_LINE, TEXT_LINE = 18, 15
HEADER_TOP = 78
FRAME_INSET = 10
CHARACTER = 0.6
"""Width of a character divided by the size of the font, for the widest of the usual fonts."""


class _Painter:
    def __init__(self, lanes: Sequence[Lane]):
        self.lanes = lanes
        self.pitch = (WIDTH - 2 * MARGIN) / len(lanes)
        self.card = min(self.pitch - 36, 250)
        self.parts: list[str] = []

    def x(self, lane: int) -> Pixels:
        return MARGIN + self.pitch * (lane + 0.5)

    def paint(self, title: str, subtitle: str, items: Sequence[Item], footer: Sequence[str]) -> str:
        self.text(MARGIN, 36, title, size=20, bold=True, room=WIDTH - 2 * MARGIN)
        self.text(MARGIN, 58, subtitle, size=13, colour=QUIET, room=WIDTH - 2 * MARGIN)
        height = max(30 + TEXT_LINE * len(lane.lines) + 6 * bool(lane.lines) for lane in self.lanes)
        bottom = max(self.header(i, height) for i in range(len(self.lanes)))
        behind = len(self.parts)
        end = self.items(items, bottom + 18, depth=0)
        top = HEADER_TOP + height
        lifelines = [
            self.line(self.x(i), top + self.pile(lane), self.x(i), end, LINE) for i, lane in enumerate(self.lanes)
        ]
        self.parts[behind:behind] = lifelines
        y = end + 26
        for line in footer:
            self.text(MARGIN, y, line, size=13, colour=QUIET, room=WIDTH - 2 * MARGIN)
            y += 19
        height = round(y + 4 if footer else end + 20)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            'font-family="Inter, Helvetica, Arial, sans-serif">'
        )
        defs = (
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="9" refY="4.5" orient="auto">'
            f'<path d="M0,0 L9,4.5 L0,9 z" fill="{INK}"/></marker></defs>'
        )
        paper = f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(title)}</title>", defs, paper, *self.parts, "</svg>"]) + "\n"

    def pile(self, lane: Lane) -> Pixels:
        """The distance, in pixels, of the last card of a pile from the first card. At most three cards are drawn."""
        return 5 * (min(lane.replicas, 3) - 1)

    def header(self, i: int, height: Pixels) -> Pixels:
        lane, left = self.lanes[i], self.x(i) - self.card / 2
        colours = [role_colour(role) for role in lane.roles] or [QUIET]
        edge = colours[0] if len(colours) == 1 else QUIET
        for behind in range(min(lane.replicas, 3) - 1, -1, -1):
            self.rect(left + 5 * behind, HEADER_TOP + 5 * behind, self.card, height, fill=PAPER, stroke=edge)
        stripe = self.card / len(colours)
        for k, colour in enumerate(colours):
            self.rect(left + stripe * k, HEADER_TOP, stripe, 5, fill=colour, round=0)
        self.text(self.x(i), HEADER_TOP + 24, lane.title, size=15, bold=True, middle=True, room=self.card - 16)
        for k, line in enumerate(lane.lines):
            y = HEADER_TOP + 41 + TEXT_LINE * k
            self.text(self.x(i), y, line, size=12, colour=QUIET, middle=True, room=self.card - 16)
        return HEADER_TOP + height + self.pile(lane)

    def items(self, items: Sequence[Item], y: Pixels, depth: int) -> Pixels:
        for item in items:
            if isinstance(item, Box):
                y = self.box(item, y)
            elif isinstance(item, Arrow):
                y = self.arrow(item, y)
            else:
                y = self.frame(item, y, depth)
        return y

    def box(self, box: Box, y: Pixels) -> Pixels:
        titles = fold(box.title, 14, self.card - 24)
        lines = [short for line in box.lines for short in fold(line, 11.5, self.card - 20)]
        height = 14 + TITLE_LINE * len(titles) + TEXT_LINE * len(lines)
        left, centre = self.x(box.lane) - self.card / 2, self.x(box.lane) + 3
        colours = [role_colour(role) for role in box.roles] or [QUIET]
        edge = colours[0] if len(colours) == 1 else QUIET
        self.rect(left, y, self.card, height, fill=PAPER, stroke=edge)
        self.rect(left, y, self.card, height, fill=edge, opacity=0.11)
        for k, colour in enumerate(colours):
            self.rect(left, y + height * k / len(colours), 6, height / len(colours), fill=colour, round=0)
        for k, line in enumerate(titles):
            self.text(centre, y + 21 + TITLE_LINE * k, line, size=14, bold=True, middle=True, room=self.card - 24)
        below = y + 19 + TITLE_LINE * len(titles)
        for k, line in enumerate(lines):
            at = below + TEXT_LINE * k
            self.text(centre, at, line, size=11.5, colour=QUIET, middle=True, room=self.card - 20)
        return y + height + 16

    def arrow(self, arrow: Arrow, y: Pixels) -> Pixels:
        if arrow.src == arrow.dst:
            return self.turn(arrow, y)
        here, there = self.x(arrow.src), self.x(arrow.dst)
        centre, room = (here + there) / 2, abs(there - here) - 24
        for line in fold(arrow.what, 12, room):
            self.text(centre, y + 12, line, size=12, middle=True, room=room, halo=True)
            y += TEXT_LINE
        y -= TEXT_LINE
        self.parts.append(self.line(here, y + 19, there, y + 19, INK, tip=True, dashed=arrow.dashed))
        self.text(centre, y + 33, arrow.size, size=11.5, colour=QUIET, middle=True, room=room, halo=True)
        return y + 50

    def turn(self, arrow: Arrow, y: Pixels) -> Pixels:
        """Draw an arrow that begins and ends in the same lane, on the side of the lane that has room for the text."""
        x, last = self.x(arrow.src), arrow.src == len(self.lanes) - 1
        side = -1 if last and len(self.lanes) > 1 else 1
        anchor, room = "start" if side > 0 else "end", self.pitch - 46
        what = fold(arrow.what, 12, room)
        down = 24 + TEXT_LINE * (len(what) - 1)
        style = f'fill="none" stroke="{INK}" stroke-width="1.3" marker-end="url(#tip)"'
        style += ' stroke-dasharray="5 4"' if arrow.dashed else ""
        self.parts.append(f'<path d="M{x:.0f},{y + 4:.0f} h{26 * side} v{down} h{-26 * side}" {style}/>')
        for line in what:
            self.text(x + 34 * side, y + 14, line, size=12, room=room, halo=True, anchor=anchor)
            y += TEXT_LINE
        y -= TEXT_LINE
        self.text(x + 34 * side, y + 29, arrow.size, size=11.5, colour=QUIET, room=room, halo=True, anchor=anchor)
        return y + 46

    def frame(self, frame: LoopFrame, y: Pixels, depth: int) -> Pixels:
        inset = FRAME_INSET * depth
        left, width = MARGIN - 14 + inset, WIDTH - 2 * (MARGIN - 14 + inset)
        behind = len(self.parts)
        tab = 22 + 8.5 * len(frame.title)
        end = self.items(frame.items, y + 40, depth + 1)
        inside, self.parts = self.parts[behind:], self.parts[:behind]
        self.rect(left, y, width, end - y, fill="#f1f3f5", stroke="#9aa5b1", opacity=0.55)
        self.rect(left, y, tab, 24, fill="#52606d")
        self.text(left + tab / 2, y + 17, frame.title, size=13, bold=True, colour=PAPER, middle=True, room=tab)
        self.text(left + tab + 10, y + 17, frame.note, size=12, colour=QUIET, room=width - tab - 20, halo=True)
        self.parts += inside
        return end + 18

    def rect(self, x, y, width, height, *, fill, stroke=None, opacity=1.0, round=4) -> None:
        edge = f' stroke="{stroke}" stroke-width="1.3"' if stroke else ""
        see = f' fill-opacity="{opacity}"' if opacity != 1 else ""
        where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round}"'
        self.parts.append(f'<rect {where} fill="{fill}"{see}{edge}/>')

    def line(self, x1, y1, x2, y2, colour, *, tip=False, dashed=False) -> str:
        more = (' marker-end="url(#tip)"' if tip else "") + (' stroke-dasharray="5 4"' if dashed else "")
        where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        return f'<line {where} stroke="{colour}" stroke-width="1.3"{more}/>'

    def text(
        self, x, y, words, *, size, room, colour=INK, bold=False, middle=False, anchor="start", halo=False
    ) -> None:
        shown = fit(words, size, room)
        anchor = "middle" if middle else anchor
        style = ' font-weight="600"' if bold else ""
        # A border in the colour of the paper keeps words legible where they cross a line.
        style += f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if halo else ""
        tip = f"<title>{escape(words)}</title>" if shown != words else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{style}>'
            f"{tip}{escape(shown)}</text>"
        )


def fold(words: str, size: Pixels, room: Pixels) -> list[str]:
    """Break a text into at most three lines of whole words. The last line may be too long; `fit` shortens it."""
    lines = [""]
    for word in words.split(" "):
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= room / (CHARACTER * size) or len(lines) == 3 or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def fit(words: str, size: Pixels, room: Pixels) -> str:
    """The words, shortened to fit into `room` pixels."""
    most = max(int(room / (CHARACTER * size)), 1)
    return words if len(words) <= most else words[: most - 1] + "…"
