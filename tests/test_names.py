"""No two classes outside of `algos` share a name, the glossary agrees with the code, and the package has few top-level modules."""

import collections
import re

from code_names import PACKAGE, ROOT, classes_in, defined_in, short, sources, where_defined

GLOSSARY = ROOT / "docs" / "glossary.md"
MOST_MODULES = 14


def test_no_two_classes_outside_of_algos_share_a_name():
    """In `algos`, every algorithm has its own `Train`."""
    files = collections.defaultdict(list)
    for path in sources():
        if path.relative_to(PACKAGE).parts[0] != "algos":
            for name in classes_in(path):
                files[name].append(short(path))
    twice = [f"`{name}` is in {' and in '.join(found)}" for name, found in files.items() if len(found) > 1]
    assert not twice, f"Rename all but one: {'; '.join(twice)}"


def test_the_top_level_holds_few_modules():
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= MOST_MODULES, f"Move some into a subpackage: {', '.join(modules)}"


def test_every_word_of_the_glossary_is_defined_in_the_file_of_its_row():
    wrong = []
    for word, file in glossary():
        name, path = word.strip("`"), PACKAGE / file
        elsewhere = f"; the name is in {', '.join(where_defined(name)) or 'no file'}" if is_code(word) else ""
        if not path.exists():
            wrong.append(f"{word}: there is no file {file}{elsewhere}")
        elif is_code(word) and name not in defined_in(path):
            wrong.append(f"{word}: not in {file}{elsewhere}")
    assert not wrong, "docs/glossary.md:\n" + "\n".join(wrong)


def test_every_name_in_the_glossary_is_in_the_code():
    cells = " ".join(line for line in GLOSSARY.read_text().splitlines() if line.startswith("| "))
    names = re.findall(r"`(\w+)(?:=[^`]*)?`", cells)
    assert len(names) > 50
    assert not [name for name in names if not where_defined(name)]


def test_the_glossary_has_each_word_only_once():
    words = [word.strip("`").lower() for word, _ in glossary()]
    assert not [word for word, times in collections.Counter(words).items() if times > 1]


def glossary() -> list[tuple[str, str]]:
    """(word, file) of each row."""
    rows = [line.strip("| ").split(" | ") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [(row[0], row[-1].strip("`")) for row in rows if row[0] not in ("word", "---")]


def is_code(word: str) -> bool:
    return word.startswith("`")
