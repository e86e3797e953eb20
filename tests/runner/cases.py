"""Test cases, as GoogleTest, ctest and the scripts here write them in XML: one form for all results."""
import dataclasses
import xml.etree.ElementTree as ElementTree


@dataclasses.dataclass
class Case:
    """One counted case. outcome: passed, failed, skipped, or unsteady (it failed beside others and passed alone)."""

    program: str  # what ran it: a test binary or a script
    name: str
    outcome: str
    text: str = ""  # what it printed, or where that is to be found


def outcome_of(one, ctest):
    skipped = one.find("skipped")
    if one.get("outcome"):  # written by write()
        return one.get("outcome")
    if one.find("failure") is not None or one.find("error") is not None or one.get("status") == "fail":
        return "failed"
    if ctest and one.get("status") != "run":  # a program that is missing was not skipped: nothing tested it
        return "skipped" if skipped is not None and "SKIP_RETURN_CODE" in skipped.get("message", "") else "failed"
    return "skipped" if skipped is not None or one.get("status") == "notrun" else "passed"


def read(path):
    """The cases in the file; an empty list when nobody can read it."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    ctest = root.tag == "testsuite"
    return [Case(one.get("classname") or "", one.get("name") or "", outcome_of(one, ctest),
                 one.findtext("system-out") or "") for one in root.iter("testcase")]


def write(path, cases):
    root = ElementTree.Element("testsuites")
    for case in cases:
        one = ElementTree.SubElement(root, "testcase", classname=case.program, name=case.name, outcome=case.outcome)
        if case.text:
            ElementTree.SubElement(one, "system-out").text = case.text
    ElementTree.ElementTree(root).write(path, encoding="unicode")
